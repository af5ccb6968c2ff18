"""`shared-kv-spec`: base blocks become visible when a verification has proven them, and never a proposed token.

The first part drives a batch by its coordinator calls, with lengths chosen at will; the second plays whole requests
with the toy driver, which compares every token and every byte of state with a run alone.
Numbers are those of the behaviours that the coordinator's specification lists.
"""

from __future__ import annotations

import pytest

from edgellm.cache.types import (
    BaseStateKind,
    ContextCacheBatchAdmission,
    ContextCacheCommitPolicy,
    ContextCacheCoordinatorStatus,
    ContextCacheDeploymentProfile,
    ContextCacheSequenceAdvance,
    SpecReuseContract,
)
from edgellm.plugins import load_plugins
from edgellm.session.types import ResidentRef
from edgellm.testing.conformance import PolicyConformance
from edgellm.testing.toy_drafter import ScriptedDrafter
from edgellm.testing.toy_driver import DECODE, ToyDriver
from edgellm.testing.toy_model import solo_run
from edgellm_shared_kv import SharedKvSpecPolicy
from edgellm_shared_kv import policy as plugin

OK, POISONED = ContextCacheCoordinatorStatus.OK, ContextCacheCoordinatorStatus.POISONED
SHARED_KV = ContextCacheDeploymentProfile(spec_reuse_contract=SpecReuseContract(False, 0))
PROMPT = tuple(range(100, 109))  # 9 tokens: 2 pages of 4 and one token


class TestSharedKvConformance(PolicyConformance):
    policy = SharedKvSpecPolicy
    profile = SHARED_KV
    speculative = True


def make_driver(**options):
    policies = load_plugins(extra=[("shared-kv", plugin)], autoload=False, strict=True).policies
    return ToyDriver(SHARED_KV, policies=policies, **options)


@pytest.fixture
def driver():
    made = make_driver()
    yield made
    made.close()


class Batch:
    """A batch request, called step by step; its tokens and lengths are what the test says."""

    def __init__(self, driver, *prompts, **options):
        self.driver, self.coordinator = driver, driver.coordinator
        sequences = [
            driver.admission(prompt, ResidentRef(slot, 1000 + slot), **options) for slot, prompt in enumerate(prompts)
        ]
        admission = ContextCacheBatchAdmission(sequences=sequences, speculative_request=True)
        result = self.coordinator.begin_request(admission, driver.headroom, driver.machine.device.stream)
        assert result.status is OK
        self.handle = result.admission.request
        assert self.coordinator.prepare_prefill(self.handle) is OK

    @property
    def impl(self):
        return self.handle.impl

    def finalize(self, common=None):
        advances = [ContextCacheSequenceAdvance([7], sequence.num_tokens) for sequence in self.impl.sequences]
        return self.coordinator.finalize_prefill_publication(self.handle, advances, common)

    def step(self, *accepted, common=None, completed=()):
        """One verification; `accepted` are token lists."""
        assert self.coordinator.prepare_decode_step(self.handle, self.driver.headroom) is OK
        committed = [sequence.committed_state_length for sequence in self.impl.sequences]
        advances = [
            ContextCacheSequenceAdvance(tokens, before + len(tokens))
            for tokens, before in zip(accepted, committed, strict=True)
        ]
        return self.coordinator.complete_decode_step(self.handle, advances, completed, common)

    def frozen(self):
        return [sequence.frozen_spec_prefill_length for sequence in self.impl.sequences]


def published_blocks(driver):
    return driver.coordinator.metrics().published_blocks


# --- a batch ---------------------------------------------------------------------------------------------------


def test_147_common_lengths_are_derived_from_the_committed_ones(driver):
    batch = Batch(driver, PROMPT)
    assert batch.finalize() is OK
    assert batch.frozen() == [9]
    assert published_blocks(driver) == 0
    assert batch.step([1, 2, 3]) is OK
    assert published_blocks(driver) == 3  # the prompt's two, and the one that the accepted tokens completed
    assert driver.coordinator.metrics().spec_pair_publications == 0
    assert batch.impl.leases[0].num_draft_pages == 0
    assert driver.coordinator.metrics().draft_kv_pages.capacity == 0
    assert driver.coordinator.finish(batch.handle) is OK


def test_147_common_lengths_that_the_runtime_reports_are_taken(driver):
    batch = Batch(driver, PROMPT, PROMPT[::-1])
    assert batch.finalize([7, 9]) is OK
    assert [sequence.common_state_length for sequence in batch.impl.sequences] == [7, 9]
    assert batch.frozen() == [7, 9]
    assert batch.step([1, 2, 3], [4], common=[8, -1]) is OK
    assert [sequence.common_state_length for sequence in batch.impl.sequences] == [8, 9]
    assert published_blocks(driver) == 4  # two blocks of either; the third of the first is not common yet
    assert driver.coordinator.metrics().policy_failures == 0
    assert driver.coordinator.finish(batch.handle) is OK


def test_142_a_request_that_ends_on_its_prefill_token_publishes_its_frozen_prompt(driver):
    batch = Batch(driver, PROMPT)
    batch.finalize()
    assert driver.coordinator.finish(batch.handle) is OK
    assert driver.sync.calls == 2
    assert published_blocks(driver) == 2


def test_143_an_abandoned_request_is_drained_and_publishes_nothing(driver):
    free = driver.coordinator.manager.available_pages
    batch = Batch(driver, PROMPT)
    batch.finalize()
    batch.handle.abandon()
    assert driver.sync.calls == 1
    assert published_blocks(driver) == 0
    assert driver.coordinator.manager.available_pages == free


def test_148_compaction_terminalizes_first(driver):
    batch = Batch(driver, PROMPT, tuple(range(50, 55)))
    batch.finalize()
    assert driver.coordinator.begin_batch_compaction(batch.handle, [-1, 0], 1) is OK
    assert (driver.sync.calls, published_blocks(driver)) == (1, 3)
    assert driver.coordinator.compact_batch(batch.handle) is OK
    assert batch.step([9]) is OK
    calls = driver.sync.calls
    assert driver.coordinator.begin_batch_compaction(batch.handle, [-1], 0) is OK
    assert driver.sync.calls == calls  # nothing awaits a proof any more
    assert driver.coordinator.compact_batch(batch.handle) is OK
    assert driver.coordinator.finish(batch.handle) is OK


def test_a_failed_wait_at_the_end_poisons_and_publishes_nothing(driver):
    batch = Batch(driver, PROMPT)
    batch.finalize()
    driver.sync.failing = True
    assert driver.coordinator.finish(batch.handle) is POISONED
    driver.sync.failing = False
    assert driver.coordinator.recover()
    assert published_blocks(driver) == 0


def test_prefill_state_only_publishes_the_prompt_and_nothing_generated(driver):
    batch = Batch(driver, PROMPT, commit=ContextCacheCommitPolicy.PREFILL_STATE_ONLY)
    batch.finalize()
    assert batch.step([1, 2, 3, 4], completed=[0]) is OK
    assert published_blocks(driver) == 2
    assert driver.coordinator.finish(batch.handle) is OK


# --- a running container ---------------------------------------------------------------------------------------


def test_chunks_publish_the_blocks_they_complete(driver):
    sequence = driver.admit(PROMPT)
    driver.prefill_chunk(sequence, 5)
    assert published_blocks(driver) == 1
    driver.prefill_chunk(sequence, 4)
    assert published_blocks(driver) == 2
    assert driver.request.sequence(0).frozen_spec_prefill_length == 9


def test_each_joiner_is_frozen_until_it_takes_part_in_a_step(driver):
    first = driver.admit(PROMPT)
    driver.prefill(first)
    second = driver.admit(tuple(range(50, 59)))
    driver.mixed_step([(first, DECODE), (second, 9)])
    frozen = [sequence.frozen_spec_prefill_length for sequence in driver.request.impl.sequences]
    assert frozen == [None, 9]
    driver.step([first])
    assert driver.request.sequence(1).frozen_spec_prefill_length == 9
    driver.step([second])
    assert driver.request.sequence(1).frozen_spec_prefill_length is None


def test_a_joiner_that_leaves_before_its_first_step_publishes_its_prompt(driver):
    sequence = driver.admit(PROMPT)
    driver.prefill(sequence)
    driver.cancel(sequence)
    assert driver.admit(PROMPT).reuse.reused_tokens == 8


def test_rejected_proposals_are_never_published():
    driver = make_driver(drafter=ScriptedDrafter(default=0))
    sequence = driver.admit(PROMPT)
    driver.prefill(sequence)
    for _ in range(9):
        driver.step()
    assert sequence.rounds == [1] * 9
    assert driver.coordinator.manager.index.size == sequence.committed // 4
    driver.cancel(sequence)
    driver.close()


def test_a_warm_turn_reuses_everything_committed_and_says_the_same(driver):
    first = driver.admit(PROMPT)
    driver.prefill(first)
    while len(first.generated) < 11:
        driver.step()
    committed = first.committed
    driver.finish(first)
    turn = [*first.tokens[:committed], 1, 2, 3]
    second = driver.admit(turn)
    assert second.reuse.reused_tokens == committed  # no look-ahead to replay
    driver.prefill(second)
    driver.step()
    assert second.generated == solo_run(turn, len(second.generated))


def test_it_serves_drafters_without_paged_state_on_attention_only_models():
    eagle = ContextCacheDeploymentProfile(spec_reuse_contract=SpecReuseContract(True, 1))
    recurrent = ContextCacheDeploymentProfile(BaseStateKind.PURE_RECURRENT, SpecReuseContract(False, 0))
    plain = ContextCacheDeploymentProfile()
    cases = [(SHARED_KV, True), (SHARED_KV, False), (eagle, True), (recurrent, True), (plain, True)]
    assert [plugin.serves(profile, speculative) for profile, speculative in cases] == [True, False, False, False, False]
