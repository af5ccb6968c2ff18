"""`eagle-spec`: pairs of base and draft blocks become visible when both are proven complete, and not before.

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
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    Hash128,
    SpecReuseContract,
)
from edgellm.errors import InvalidArgumentError
from edgellm.plugins import load_plugins
from edgellm.session.types import ResidentRef
from edgellm.testing.conformance import PolicyConformance
from edgellm.testing.toy_drafter import ScriptedDrafter
from edgellm.testing.toy_driver import DECODE, ToyDriver
from edgellm.testing.toy_model import solo_run
from edgellm_eagle import EagleSpecPolicy
from edgellm_eagle import policy as plugin

OK, POISONED = ContextCacheCoordinatorStatus.OK, ContextCacheCoordinatorStatus.POISONED
EAGLE = ContextCacheDeploymentProfile(spec_reuse_contract=SpecReuseContract(True, 1))
DFLASH = ContextCacheDeploymentProfile(spec_reuse_contract=SpecReuseContract(True, 0))
PROMPT = tuple(range(100, 109))  # 9 tokens: 2 pages of 4 and one token
HOLD = ContextCacheSequenceAdvance()


class TestEagleConformance(PolicyConformance):
    policy = EagleSpecPolicy
    profile = EAGLE
    speculative = True


class TestDFlashConformance(PolicyConformance):
    policy = EagleSpecPolicy
    profile = DFLASH
    speculative = True


def make_driver(**options):
    options.setdefault("profile", EAGLE)
    policies = load_plugins(extra=[("eagle", plugin)], autoload=False, strict=True).policies
    return ToyDriver(options.pop("profile"), policies=policies, **options)


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
        lengths = [sequence.num_tokens for sequence in self.impl.sequences]
        advances = [ContextCacheSequenceAdvance([7], length) for length in lengths]
        return self.coordinator.finalize_prefill_publication(self.handle, advances, common or lengths)

    def step(self, *accepted, common, completed=()):
        """One verification; `accepted` are token lists, or None to hold."""
        assert self.coordinator.prepare_decode_step(self.handle, self.driver.headroom) is OK
        committed = [sequence.committed_state_length for sequence in self.impl.sequences]
        advances = [
            HOLD if tokens is None else ContextCacheSequenceAdvance(tokens, before + len(tokens))
            for tokens, before in zip(accepted, committed, strict=True)
        ]
        return self.coordinator.complete_decode_step(self.handle, advances, completed, common)

    def frozen(self):
        return [sequence.frozen_spec_prefill_length for sequence in self.impl.sequences]


def published(driver):
    metrics = driver.coordinator.metrics()
    return metrics.published_blocks, metrics.spec_pair_publications


# --- a batch ---------------------------------------------------------------------------------------------------


def test_139_nothing_is_published_before_the_first_verification(driver):
    batch = Batch(driver, PROMPT)
    assert batch.finalize() is OK
    assert published(driver) == (0, 0)
    assert batch.frozen() == [9]
    assert (batch.impl.has_pending_device_work(), batch.impl.awaiting_first_spec_completion()) == (True, True)
    assert batch.step([11], common=[9]) is OK
    assert published(driver) == (2, 1)
    assert batch.frozen() == [None]
    assert (batch.impl.has_pending_device_work(), batch.impl.awaiting_first_spec_completion()) == (False, False)
    assert driver.sync.calls == 0  # the verification waited
    assert driver.coordinator.finish(batch.handle) is OK


def test_141_only_the_common_length_is_published(driver):
    batch = Batch(driver, PROMPT[:4])
    assert batch.finalize() is OK
    assert batch.step([1, 2, 3, 4, 5], common=[5], completed=[0]) is OK
    assert batch.impl.sequences[0].committed_state_length == 9
    assert driver.coordinator.manager.index.size == 2  # one block, and the tail of token 5
    assert published(driver)[0] == 1
    assert driver.coordinator.finish(batch.handle) is OK


@pytest.mark.parametrize("common", [[3], [6]])
def test_141_a_common_length_that_goes_back_or_beyond_committed_is_refused(driver, common):
    batch = Batch(driver, PROMPT[:4])
    assert batch.finalize() is OK
    with pytest.raises(InvalidArgumentError):
        batch.step([1], common=common)
    assert published(driver) == (0, 0)
    batch.handle.abandon()


def test_generated_blocks_wait_for_the_draft(driver):
    batch = Batch(driver, PROMPT)
    batch.finalize()
    assert batch.step([1, 2, 3], common=[9]) is OK  # committed 12: the third block lacks its draft entries
    assert published(driver)[0] == 2
    assert batch.step([4], common=[12]) is OK
    assert published(driver)[0] == 3
    assert driver.coordinator.finish(batch.handle) is OK


def test_142_a_request_that_ends_on_its_prefill_token_publishes_its_frozen_prompt(driver):
    batch = Batch(driver, PROMPT)
    batch.finalize()
    assert driver.coordinator.finish(batch.handle) is OK
    assert driver.sync.calls == 2  # one proves the draft pass, one is finish's own
    assert published(driver) == (2, 1)


def test_143_an_abandoned_request_is_drained_and_publishes_nothing(driver):
    free = driver.coordinator.manager.available_pages
    batch = Batch(driver, PROMPT)
    batch.finalize()
    batch.handle.abandon()
    assert driver.sync.calls == 1
    assert published(driver) == (0, 0)
    assert driver.coordinator.manager.available_pages == free


def test_147_common_lengths_are_required(driver):
    batch = Batch(driver, PROMPT)
    advances = [ContextCacheSequenceAdvance([7], 9)]
    with pytest.raises(InvalidArgumentError):
        driver.coordinator.finalize_prefill_publication(batch.handle, advances, None)
    assert batch.finalize() is OK
    batch.handle.abandon()


def test_148_compaction_terminalizes_first(driver):
    batch = Batch(driver, PROMPT, tuple(range(50, 55)))
    batch.finalize()
    assert driver.coordinator.begin_batch_compaction(batch.handle, [-1, 0], 1) is OK
    assert driver.sync.calls == 1
    assert published(driver) == (3, 2)
    assert driver.coordinator.compact_batch(batch.handle) is OK
    assert batch.step([9], common=[5]) is OK  # the survivor goes on
    assert driver.coordinator.finish(batch.handle) is OK


def test_a_settled_request_costs_no_wait_at_compaction(driver):
    batch = Batch(driver, PROMPT, tuple(range(50, 55)))
    batch.finalize()
    batch.step([1], [2], common=[9, 5])
    calls = driver.sync.calls
    assert driver.coordinator.begin_batch_compaction(batch.handle, [-1, 0], 1) is OK
    assert driver.sync.calls == calls
    assert driver.coordinator.compact_batch(batch.handle) is OK
    assert driver.coordinator.finish(batch.handle) is OK


@pytest.mark.parametrize("raises", [False, True])
def test_a_failed_wait_at_the_end_poisons_and_publishes_nothing(driver, raises):
    batch = Batch(driver, PROMPT)
    batch.finalize()
    driver.sync.failing, driver.sync.raises = True, raises
    assert driver.coordinator.finish(batch.handle) is POISONED
    assert published(driver) == (0, 0)
    driver.sync.failing = False
    assert driver.coordinator.recover()
    assert published(driver) == (0, 0)


def test_a_bypassed_request_freezes_and_publishes_nothing(driver):
    batch = Batch(driver, PROMPT, lookup=ContextCacheLookupPolicy.BYPASS)
    batch.finalize()
    assert batch.frozen() == [None]
    assert batch.step([1, 2, 3], common=[9], completed=[0]) is OK
    assert published(driver) == (0, 0)
    assert driver.coordinator.finish(batch.handle) is OK


def test_prefill_state_only_publishes_the_prompt_and_nothing_generated(driver):
    batch = Batch(driver, PROMPT, commit=ContextCacheCommitPolicy.PREFILL_STATE_ONLY)
    batch.finalize()
    assert batch.step([1, 2, 3, 4], common=[9]) is OK
    assert batch.step([5], common=[13], completed=[0]) is OK
    assert published(driver)[0] == 2
    assert driver.coordinator.finish(batch.handle) is OK


def test_a_batch_is_proven_as_a_whole_by_its_first_step(driver):
    batch = Batch(driver, PROMPT, tuple(range(50, 55)))
    batch.finalize()
    assert batch.step([1], None, common=[9, -1]) is OK
    assert batch.frozen() == [None, None]
    assert published(driver) == (3, 2)
    assert driver.coordinator.finish(batch.handle) is OK


def test_144_one_sequence_with_media_bypasses_the_whole_batch(driver):
    plain = driver.admission(PROMPT, ResidentRef(0, 1000))
    shown = driver.admission(PROMPT, ResidentRef(1, 1001), media=[None] * 8 + [Hash128(1, 2)])
    admission = ContextCacheBatchAdmission(sequences=[plain, shown], speculative_request=True)
    handle = driver.coordinator.begin_request(
        admission, driver.headroom, driver.machine.device.stream
    ).admission.request
    assert [sequence.lookup_policy for sequence in handle.impl.sequences] == [ContextCacheLookupPolicy.BYPASS] * 2
    handle.abandon()


def test_146_base_and_draft_pages_follow_their_own_headroom():
    driver = make_driver(page_size=128, max_kv_capacity=512)
    admission = ContextCacheBatchAdmission(
        [driver.admission(range(127), ResidentRef(0, 1000))], speculative_request=True
    )
    headroom = DecodingKvHeadroom(2, 130)
    handle = driver.coordinator.begin_request(admission, headroom, driver.machine.device.stream).admission.request
    lease = handle.impl.leases[0]
    assert (lease.num_base_pages, lease.num_draft_pages) == (2, 3)
    handle.abandon()
    driver.close()


def test_a_step_in_which_everybody_holds_needs_no_common_lengths(driver):
    sequence = driver.admit(PROMPT)
    driver.prefill(sequence)
    assert driver.coordinator.prepare_decode_step(driver.request, driver.headroom, []) is OK
    assert driver.coordinator.complete_decode_step(driver.request, [HOLD], (), None) is OK
    assert driver.request.sequence(0).common_state_length == 9


# --- a running container ---------------------------------------------------------------------------------------


def test_chunks_publish_what_base_and_draft_both_hold(driver):
    sequence = driver.admit(PROMPT)
    driver.prefill_chunk(sequence, 5)
    # 5 tokens of base state; the draft entry of the fifth needs the sixth token, which the prompt names.
    assert published(driver)[0] == 1
    driver.prefill_chunk(sequence, 4)
    assert driver.request.sequence(0).frozen_spec_prefill_length is not None
    before = published(driver)[0]
    driver.step()
    assert driver.request.sequence(0).frozen_spec_prefill_length is None
    assert (before, published(driver)[0]) == (2, 2)


def test_each_joiner_is_frozen_until_it_takes_part_in_a_step(driver):
    first = driver.admit(PROMPT)
    driver.prefill(first)
    second = driver.admit(tuple(range(50, 59)))
    driver.mixed_step([(first, DECODE), (second, 9)])
    frozen = [sequence.frozen_spec_prefill_length for sequence in driver.request.impl.sequences]
    assert frozen[0] is None
    assert frozen[1] is not None
    driver.step([first])  # the second holds
    assert driver.request.sequence(1).frozen_spec_prefill_length == frozen[1]
    driver.step([second])
    assert driver.request.sequence(1).frozen_spec_prefill_length is None


def test_a_joiner_that_ends_on_its_first_token_is_proven_at_compaction(driver):
    sequence = driver.admit(PROMPT[:8])
    driver.prefill(sequence)
    assert published(driver)[0] == 1  # the draft entry of the last token waits for the token after it
    coordinator, request = driver.coordinator, driver.request
    assert coordinator.prepare_decode_step(request, driver.headroom, []) is OK
    assert coordinator.complete_decode_step(request, [HOLD], [0], [8]) is OK
    assert published(driver)[0] == 1  # ended, and its draft pass may still be queued
    assert coordinator.begin_batch_compaction(request, [-1], 0) is OK
    assert published(driver)[0] == 2
    assert coordinator.compact_batch(request) is OK
    driver.live.clear()


def test_a_joiner_that_leaves_before_its_first_step_publishes_its_prompt(driver):
    sequence = driver.admit(PROMPT)
    driver.prefill(sequence)
    calls = driver.sync.calls
    driver.cancel(sequence)
    assert driver.sync.calls == calls + 2  # the proof, and the compaction's own wait
    assert driver.admit(PROMPT).reuse.matched_tokens >= 8


@pytest.mark.parametrize("profile", [EAGLE, DFLASH], ids=["eagle", "dflash"])
def test_a_warm_request_reuses_pairs_and_says_the_same(profile):
    driver = make_driver(profile=profile)
    first = driver.admit(PROMPT)
    driver.prefill(first)
    while len(first.generated) < 12:
        driver.step()
    driver.finish(first)
    again = driver.admit(PROMPT)
    assert again.reuse.reused_tokens == 8
    driver.prefill(again)
    while len(again.generated) < 12:
        driver.step()
    assert again.generated[:12] == first.generated[:12] == solo_run(PROMPT, 12)
    driver.close()


def test_the_next_turn_reuses_up_to_the_common_length(driver):
    first = driver.admit(PROMPT)
    driver.prefill(first)
    while len(first.generated) < 11:
        driver.step()
    common = first.drafted
    driver.finish(first)
    turn = [*first.tokens[:common], 1, 2, 3]
    second = driver.admit(turn)
    # The draft entry at the last common token was computed with another successor: it is computed again.
    assert second.reuse.reused_tokens == common - 1
    driver.prefill(second)
    driver.step()
    assert second.generated == solo_run(turn, len(second.generated))


@pytest.mark.parametrize(("successor", "reused"), [(256, 256), (7, 255)], ids=["same", "another"])
def test_140_only_the_look_ahead_is_replayed(successor, reused):
    driver = make_driver(page_size=128, max_kv_capacity=512)
    first = driver.admit(range(257))
    driver.prefill(first)
    driver.step()
    again = driver.admit([*range(256), successor])
    assert (again.reuse.matched_tokens, again.reuse.reused_tokens) == (256, reused)
    driver.close()


def test_145_a_plain_request_on_this_deployment_shares_base_blocks_alone(driver):
    first = driver.admit(PROMPT)
    driver.prefill(first)
    driver.step()
    admission = ContextCacheBatchAdmission([driver.admission(PROMPT, ResidentRef(0, 1000))])
    result = driver.coordinator.begin_request(admission, DecodingKvHeadroom(1, 0), driver.machine.device.stream)
    request = result.admission.request
    assert result.admission.prefill_starts == [8]
    assert request.impl.leases[0].base_pages[:2].tolist() == driver.request.impl.leases[0].base_pages[:2].tolist()
    assert driver.coordinator.prepare_prefill(request) is OK
    assert set(driver.machine.draft_row(0)) == {-1}
    request.abandon()


def test_rejected_proposals_are_never_published():
    driver = make_driver(drafter=ScriptedDrafter(default=0))
    sequence = driver.admit(PROMPT)
    driver.prefill(sequence)
    for _ in range(9):
        driver.step()
    assert sequence.rounds == [1] * 9
    index = driver.coordinator.manager.index
    assert index.size == sequence.drafted // 4
    driver.cancel(sequence)
    driver.close()


def test_it_serves_owned_draft_state_on_attention_only_models():
    shared = ContextCacheDeploymentProfile(spec_reuse_contract=SpecReuseContract(False, 0))
    hybrid = ContextCacheDeploymentProfile(BaseStateKind.HYBRID, SpecReuseContract(True, 1))
    cases = [(EAGLE, True), (EAGLE, False), (DFLASH, True), (shared, True), (hybrid, True)]
    assert [plugin.serves(profile, speculative) for profile, speculative in cases] == [True, False, True, False, False]
