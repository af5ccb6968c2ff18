"""`hybrid-snapshot` and `hybrid-mtp`: checkpoints become visible once captured and complete, and not before.

The toy driver plays whole requests and compares every token, every byte of state and every capture with a run alone.
Numbers are those of the behaviours that the coordinator's specification lists.
"""

from __future__ import annotations

import functools
import types

import pytest
import torch

from edgellm.cache.types import (
    BaseStateKind,
    ContextCacheBatchAdmission,
    ContextCacheCommitPolicy,
    ContextCacheConfig,
    ContextCacheCoordinatorStatus,
    ContextCacheDeploymentProfile,
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdvance,
    ReuseStopReason,
    SpecReuseContract,
)
from edgellm.errors import CallerError
from edgellm.hookspecs import hookimpl
from edgellm.plugins import load_plugins
from edgellm.session.types import ResidentRef
from edgellm.testing.conformance import PolicyConformance
from edgellm.testing.toy_driver import ToyDriver
from edgellm.testing.toy_model import HIDDEN_WIDTH, SoloRun
from edgellm_hybrid import HybridMtpPolicy, HybridSnapshotPolicy
from edgellm_hybrid import policy as plugin

OK, POISONED = ContextCacheCoordinatorStatus.OK, ContextCacheCoordinatorStatus.POISONED
HYBRID = ContextCacheDeploymentProfile(BaseStateKind.HYBRID)
RECURRENT = ContextCacheDeploymentProfile(BaseStateKind.PURE_RECURRENT)
MTP = ContextCacheDeploymentProfile(BaseStateKind.HYBRID, SpecReuseContract(True, 1))
LOOKUP = ContextCacheDeploymentProfile(BaseStateKind.HYBRID, SpecReuseContract(False, 0))
SPARSE = ContextCacheConfig(checkpoint_interval_tokens=None, policy_deadline_seconds=None)
PROMPT = tuple(range(100, 110))  # 10 tokens: 2 pages of 4 and two tokens
CHECKPOINTED = pytest.mark.parametrize("profile", [HYBRID, RECURRENT], ids=["hybrid", "recurrent"])


class TestHybridConformance(PolicyConformance):
    policy = HybridSnapshotPolicy
    profile = HYBRID
    speculative = False


class TestRecurrentConformance(PolicyConformance):
    policy = HybridSnapshotPolicy
    profile = RECURRENT
    speculative = False


class TestLookupConformance(PolicyConformance):
    """Runs of several tokens, and no draft state beside them."""

    policy = HybridSnapshotPolicy
    profile = LOOKUP
    speculative = True


class TestMtpConformance(PolicyConformance):
    policy = HybridMtpPolicy
    profile = MTP
    speculative = True
    publishes_generated = False  # the runtime asks for the checkpoint of an answer; the suite's driver does not


def make_driver(profile, **options):
    policies = load_plugins(extra=[("hybrid", plugin)], autoload=False, strict=True).policies
    return ToyDriver(profile, policies=policies, **{"config": SPARSE, **options})


@pytest.fixture
def driver():
    made = make_driver(HYBRID)
    yield made
    made.close()


@pytest.fixture
def mtp():
    made = make_driver(MTP)
    yield made
    made.close()


def metrics(driver):
    return driver.coordinator.metrics()


def expected_text(driver, prompt, num_tokens):
    return SoloRun(driver.model, prompt).continuation(num_tokens)


def run(driver, prompt, num_tokens, **options):
    """One request from admission to its normal end; its `ToySequence`."""
    sequence = driver.admit(prompt, **options)
    driver.prefill(sequence)
    while len(sequence.generated) < num_tokens - 1:
        driver.step()
    driver.step(finish=[sequence])
    return sequence


# --- a batch ---------------------------------------------------------------------------------------------------


def begin(driver, *prompts, **options):
    sequences = [
        driver.admission(prompt, ResidentRef(slot, 1000 + slot), **options) for slot, prompt in enumerate(prompts)
    ]
    admission = ContextCacheBatchAdmission(sequences=sequences, speculative_request=driver.speculative)
    result = driver.coordinator.begin_request(admission, driver.headroom, driver.machine.device.stream)
    assert result.status is OK
    assert driver.coordinator.prepare_prefill(result.admission.request) is OK
    return result.admission.request


def finalize(driver, request):
    advances = [ContextCacheSequenceAdvance([7], sequence.num_tokens) for sequence in request.impl.sequences]
    return driver.coordinator.finalize_prefill_publication(request, advances)


def decode(driver, request, completed=()):
    assert driver.coordinator.prepare_decode_step(request, driver.headroom) is OK
    advances = [
        ContextCacheSequenceAdvance([9], sequence.committed_state_length + 1) for sequence in request.impl.sequences
    ]
    return driver.coordinator.complete_decode_step(request, advances, completed)


@CHECKPOINTED
def test_130_the_prefill_capture_is_published_without_another_wait(profile):
    driver = make_driver(profile)
    request = begin(driver, PROMPT)
    assert driver.coordinator.enqueue_prefill_captures(request) is OK
    assert metrics(driver).current_records == 0
    assert finalize(driver, request) is OK
    assert (metrics(driver).current_records, driver.sync.calls) == (1, 0)
    assert metrics(driver).hybrid_capture_synchronizations == 0
    assert request.sequence(0).published_exact_length == 10
    assert driver.coordinator.finish(request) is OK
    driver.close()


@CHECKPOINTED
def test_131_two_completed_slots_are_captured_with_one_wait(profile):
    driver = make_driver(profile)
    request = begin(driver, PROMPT, tuple(range(50, 55)))
    finalize(driver, request)
    assert decode(driver, request) is OK
    assert (driver.sync.calls, metrics(driver).current_records) == (0, 0)
    assert decode(driver, request, completed=[0, 1]) is OK
    assert (driver.sync.calls, metrics(driver).current_records) == (1, 2)
    assert metrics(driver).hybrid_capture_synchronizations == 1
    assert [sequence.published_exact_length for sequence in request.impl.sequences] == [12, 7]
    assert driver.coordinator.finish(request) is OK
    driver.close()


def test_132_a_busy_snapshot_pool_skips_the_capture_and_nothing_else():
    driver = make_driver(HYBRID, recurrent_slots=1, partial_slots=1)
    request = begin(driver, PROMPT, tuple(range(50, 60)))
    assert driver.coordinator.enqueue_prefill_captures(request) is OK  # the only slot is staged for the first
    assert metrics(driver).hybrid_snapshot_pressure_skips == 1
    assert finalize(driver, request) is OK
    assert [sequence.published_exact_length for sequence in request.impl.sequences] == [10, 0]
    assert metrics(driver).current_records == 1
    assert driver.coordinator.finish(request) is OK
    driver.close()


def test_133_a_failed_wait_of_a_decode_end_capture_poisons(driver):
    request = begin(driver, PROMPT)
    finalize(driver, request)
    driver.sync.failing = True
    assert decode(driver, request, completed=[0]) is POISONED
    assert metrics(driver).current_records == 0
    request.abandon()
    assert metrics(driver).quarantined_requests == 1
    driver.sync.failing = False
    assert driver.coordinator.recover()
    assert metrics(driver).current_records == 0


def test_137_no_plain_capture_is_staged_for_an_mtp_request(mtp):
    request = begin(mtp, PROMPT)
    assert mtp.coordinator.enqueue_prefill_captures(request) is OK
    assert request.sequence(0).staged_hybrid_publication is None
    assert finalize(mtp, request) is OK
    assert metrics(mtp).current_records == 0
    assert mtp.coordinator.finish(request) is OK


@pytest.mark.parametrize(
    "options",
    [{"lookup": ContextCacheLookupPolicy.BYPASS}, {"commit": ContextCacheCommitPolicy.PREFILL_STATE_ONLY}],
    ids=["bypass", "prefill-only"],
)
def test_what_the_policies_of_a_sequence_forbid_is_not_captured(driver, options):
    request = begin(driver, PROMPT, **options)
    driver.coordinator.enqueue_prefill_captures(request)
    finalize(driver, request)
    assert decode(driver, request, completed=[0]) is OK
    expected = 0 if "lookup" in options else 1
    assert (metrics(driver).current_records, driver.sync.calls) == (expected, 0)
    assert driver.coordinator.finish(request) is OK


# --- whole requests --------------------------------------------------------------------------------------------


@CHECKPOINTED
def test_129_a_cold_request_starts_from_zeros_and_a_hit_is_restored(profile):
    driver = make_driver(profile)
    cold = run(driver, PROMPT, 6)
    again = run(driver, PROMPT, 6)  # its only checkpoint is at its end, which leaves nothing to compute
    assert (cold.reuse.reused_tokens, again.reuse.reused_tokens, metrics(driver).hybrid_restores) == (0, 0, 0)
    assert (again.reuse.stop_reason, again.reuse.stop_position) == (ReuseStopReason.NO_CHECKPOINT, len(PROMPT))
    warm = run(driver, PROMPT, 6)
    assert (warm.reuse.reused_tokens, metrics(driver).hybrid_restores) == (8, 1)
    assert (warm.reuse.stop_reason, warm.reuse.stop_position) == (ReuseStopReason.NO_CHECKPOINT, len(PROMPT))
    assert warm.generated == again.generated == cold.generated == expected_text(driver, PROMPT, 6)
    driver.close()


@CHECKPOINTED
def test_the_next_turn_starts_where_the_answer_ended(profile):
    driver = make_driver(profile)
    first = run(driver, PROMPT, 6)
    turn = [*first.tokens[: first.committed], 1, 2, 3]
    second = run(driver, turn, 4)
    assert second.reuse.reused_tokens == first.committed == 15
    assert second.generated == expected_text(driver, turn, 4)
    driver.close()


def test_a_prompt_that_continues_another_starts_at_its_end(driver):
    run(driver, PROMPT, 3, commit=ContextCacheCommitPolicy.PREFILL_STATE_ONLY)
    longer = (*PROMPT, 5, 6, 7)
    second = run(driver, longer, 3)
    assert second.reuse.reused_tokens == 10  # unaligned: the partial page came from the snapshot
    assert second.generated == expected_text(driver, longer, 3)


def config(interval):
    return ContextCacheConfig(checkpoint_interval_tokens=interval, policy_deadline_seconds=None)


def test_chunks_end_at_the_checkpoints_of_the_policy():
    driver = make_driver(HYBRID, config=config(8))
    sequence = driver.admit(range(200, 222), checkpoint_boundaries=(5,))
    assert sequence.boundaries == (5, 16)
    assert driver.prefill(sequence) == 3
    assert metrics(driver).current_records == 2
    driver.cancel(sequence)
    parted = driver.admit([*range(200, 218), 1, 2, 3])
    assert parted.reuse.reused_tokens == 16
    driver.close()


def test_a_dense_policy_takes_every_multiple():
    @hookimpl
    def edgellm_register_publication_policies(register):
        register("dense", functools.partial(HybridSnapshotPolicy, dense=True), plugin.serves_snapshots, 10)

    dense = types.ModuleType("dense")
    dense.EDGELLM_API = plugin.EDGELLM_API
    dense.edgellm_register_publication_policies = edgellm_register_publication_policies
    policies = load_plugins(extra=[("hybrid", plugin), ("dense", dense)], autoload=False, strict=True).policies
    driver = ToyDriver(HYBRID, policies=policies, config=config(4))
    shared = tuple(range(500, 512))
    first = driver.admit((*shared, 1, 1, 1, 1, 1, 1, 1, 1))
    assert first.boundaries == (4, 8, 12, 16)
    driver.prefill(first)
    assert driver.admit((*shared, 2, 2, 2, 2, 2, 2, 2, 2)).reuse.reused_tokens == 12
    driver.close()


def test_under_pressure_the_ladder_carries_a_long_prompt_and_ends_are_not_kept():
    driver = make_driver(HYBRID, config=config(8), recurrent_slots=2, partial_slots=2)
    run(driver, range(200, 222), 2)  # takes both slots
    waits = metrics(driver).hybrid_capture_synchronizations
    sequence = driver.admit(range(300, 322))
    assert sequence.boundaries == (16,)
    driver.prefill(sequence)
    driver.step()
    driver.step(finish=[sequence])
    assert metrics(driver).hybrid_capture_synchronizations == waits
    assert driver.admit([*range(300, 322), 1]).reuse.reused_tokens == 16
    driver.close()


def test_under_pressure_a_long_answer_keeps_its_end():
    driver = make_driver(HYBRID, config=config(8), recurrent_slots=2, partial_slots=2)
    run(driver, range(200, 222), 2)
    sequence = run(driver, range(300, 322), 12)
    assert sequence.committed == 33  # two intervals and one token past the last rung, 16
    assert driver.admit([*sequence.tokens[:33], 1]).reuse.reused_tokens == 33
    driver.close()


def test_the_third_prompt_starts_where_the_second_parted(driver):
    shared = tuple(range(300, 313))
    run(driver, (*shared, 1, 1, 1, 1, 1, 1, 1), 2)
    second = driver.admit((*shared, 2, 2, 2, 2, 2, 2, 2))
    assert (second.reuse.reused_tokens, second.reuse.stop_reason) == (0, ReuseStopReason.NO_CHECKPOINT)
    assert 12 in second.boundaries
    driver.prefill(second)
    third = driver.admit((*shared, 3, 3, 3, 3, 3, 3, 3))
    assert third.reuse.reused_tokens == 12


def test_blocks_are_held_once_though_reuse_begins_at_checkpoints(driver):
    first = driver.admit(range(400, 417))
    driver.prefill(first)
    second = driver.admit([*range(400, 416), 1])
    driver.prefill(second)
    assert first.live
    assert second.live
    leases = driver.request.impl.leases
    assert leases[0].base_pages[:4].tolist() == leases[1].base_pages[:4].tolist()


# --- MTP -------------------------------------------------------------------------------------------------------


def test_134_an_mtp_checkpoint_is_restored_with_its_draft_and_hidden_row(mtp):
    cold = run(mtp, PROMPT, 6)
    assert mtp.coordinator.metrics().current_records >= 1
    calls = mtp.sync.calls
    warm = mtp.admit((*PROMPT, 4, 4))  # the driver compares the restored hidden row and draft entries
    assert warm.reuse.reused_tokens == 10
    assert mtp.sync.calls == calls
    mtp.prefill(warm)
    mtp.step()
    assert warm.generated == expected_text(mtp, (*PROMPT, 4, 4), len(warm.generated))
    assert cold.generated[:6] == expected_text(mtp, PROMPT, 6)


def test_the_mtp_checkpoint_stands_before_the_volatile_tail(mtp):
    sequence = mtp.admit(PROMPT, replay_tail_length=3)
    assert sequence.boundaries == (7,)
    mtp.prefill(sequence)
    mtp.cancel(sequence)
    other = mtp.admit([*PROMPT[:7], 1, 2, 3], replay_tail_length=3)
    assert other.reuse.reused_tokens == 7


def test_135_an_mtp_boundary_that_says_nothing_new_is_skipped(mtp):
    request = begin(mtp, PROMPT)
    rows = torch.zeros((1, 10, HIDDEN_WIDTH), dtype=torch.int64)

    def publish(length, row=0):
        return mtp.coordinator.publish_hybrid_mtp_endpoint(request, 0, length, rows, row)

    assert publish(0) is OK
    assert metrics(mtp).hybrid_capture_synchronizations == 0
    with pytest.raises(CallerError):
        publish(11)
    with pytest.raises(CallerError):
        publish(8, row=-1)
    assert metrics(mtp).current_records == 0
    request.abandon()


@pytest.mark.parametrize("commit_policy", ContextCacheCommitPolicy)
def test_135_a_boundary_in_an_answer_is_published_where_generated_tokens_are(mtp, commit_policy):
    sequence = mtp.admit(PROMPT, commit=commit_policy)
    mtp.prefill(sequence)
    before = metrics(mtp)
    mtp.step()
    committed = mtp.request.sequence(0).committed_state_length
    rows = torch.zeros((1, 1, HIDDEN_WIDTH), dtype=torch.int64)
    assert committed > len(PROMPT)
    assert mtp.coordinator.publish_hybrid_mtp_endpoint(mtp.request, 0, committed, rows, 0) is OK
    published = metrics(mtp).committed_publications - before.committed_publications
    assert published == (commit_policy is ContextCacheCommitPolicy.INCLUDING_GENERATED_TOKENS)
    assert metrics(mtp).hybrid_capture_synchronizations - before.hybrid_capture_synchronizations == published


@pytest.mark.parametrize(("length", "kept"), [(10, True), (12, False), (26, True)])
def test_the_end_of_an_mtp_answer_is_kept_where_it_will_be_asked_for(monkeypatch, length, kept):
    """The prompt's own boundaries always; of an answer those that a plain one would have."""
    published = []
    monkeypatch.setattr(
        HybridMtpPolicy, "publish_boundary", lambda policy, request, slot, length, *rest: published.append(length) or OK
    )
    sequence = types.SimpleNamespace(
        wanted_checkpoints=(4,),
        template_boundaries=(),
        replay_tail_length=0,
        committed_state_length=length,
        lengths=types.SimpleNamespace(prompt=[10]),
    )
    policy = HybridMtpPolicy(types.SimpleNamespace(config=types.SimpleNamespace(checkpoint_interval_tokens=8)))
    request = types.SimpleNamespace(sequence=lambda slot: sequence)
    assert policy.publish_mtp_boundary(request, 0, length, None, 0) is OK
    assert published == [length] * kept


def test_135_a_plain_deployment_has_no_mtp_boundary(driver):
    request = begin(driver, PROMPT)
    with pytest.raises(Exception, match="hybrid MTP"):
        driver.coordinator.publish_hybrid_mtp_endpoint(request, 0, 8, torch.zeros(1, 1, 2), 0)
    request.abandon()


def test_136_a_boundary_is_restored_only_where_one_is_bound(mtp):
    request = begin(mtp, PROMPT)
    with pytest.raises(CallerError):
        mtp.coordinator.restore_hybrid_mtp_boundary_hidden(request, 0, torch.zeros(1, 1, 2, dtype=torch.int64), 0)
    request.abandon()


def test_mtp_serves_several_sequences_at_once(mtp):
    run(mtp, PROMPT, 3)
    prompts = [(*PROMPT, token, token) for token in (1, 2, 3)]
    sequences = [mtp.admit(prompt) for prompt in prompts]
    assert [sequence.reuse.reused_tokens for sequence in sequences] == [10, 10, 10]
    for sequence in sequences:
        mtp.prefill(sequence)
    for _ in range(4):
        mtp.step()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.generated == expected_text(mtp, prompt, len(sequence.generated))


def test_a_plain_request_may_use_an_mtp_checkpoint():
    policies = load_plugins(extra=[("hybrid", plugin)], autoload=False, strict=True).policies
    driver = ToyDriver(MTP, policies=policies, config=SPARSE, speculative=False)
    run(driver, PROMPT, 3)
    assert driver.admit((*PROMPT, 1, 2)).reuse.reused_tokens == 10
    driver.close()


def test_what_each_policy_serves():
    recurrent_spec = ContextCacheDeploymentProfile(BaseStateKind.PURE_RECURRENT, SpecReuseContract(True, 1))
    attention = ContextCacheDeploymentProfile()
    cases = [(HYBRID, False), (RECURRENT, False), (MTP, False), (MTP, True), (LOOKUP, True), (recurrent_spec, True)]
    cases.append((attention, False))
    snapshots = [plugin.serves_snapshots(profile, speculative) for profile, speculative in cases]
    assert snapshots == [True, True, True, False, True, False, False]
    assert [plugin.serves_mtp(*case) for case in cases] == [False, False, False, True, False, False, False]


# --- which ends are kept ---------------------------------------------------------------------------------------


def wants_end(*, prompt, committed, wanted=(), boundaries=(), tail=0, interval=None):
    sequence = types.SimpleNamespace(
        wanted_checkpoints=wanted,
        template_boundaries=boundaries,
        replay_tail_length=tail,
        committed_state_length=committed,
        lengths=types.SimpleNamespace(prompt=[0, prompt]),
    )
    policy = HybridSnapshotPolicy.__new__(HybridSnapshotPolicy)
    policy.coordinator = types.SimpleNamespace(config=types.SimpleNamespace(checkpoint_interval_tokens=interval))
    return policy._wants_end(types.SimpleNamespace(sequence=lambda slot: sequence), 1)


@pytest.mark.parametrize(
    ("case", "kept"),
    [
        ({"prompt": 10, "committed": 12}, False),
        ({"prompt": 10, "committed": 12, "boundaries": (4,)}, True),  # a conversation
        ({"prompt": 10, "committed": 12, "wanted": (4, 9)}, False),
        ({"prompt": 10, "committed": 12, "wanted": (10, 4)}, True),  # the prompt's end is the last thing kept
        ({"prompt": 10, "committed": 12, "wanted": (8,), "tail": 2}, True),  # the end of its stable part
        ({"prompt": 10, "committed": 12, "wanted": (7,), "tail": 2}, False),
        ({"prompt": 10, "committed": 20, "wanted": (4,), "interval": 8}, True),  # two intervals behind
        ({"prompt": 10, "committed": 19, "wanted": (4,), "interval": 8}, False),
        ({"prompt": 10, "committed": 16, "interval": 8}, True),
        ({"prompt": 10, "committed": 15, "interval": 8}, False),
        ({"prompt": 1, "committed": 3}, False),  # nothing was wanted, not even at 1
    ],
)
def test_the_end_of_an_answer_is_kept_where_it_will_be_asked_for(case, kept):
    assert wants_end(**case) is kept
