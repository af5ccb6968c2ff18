"""Faults that reading the coordinator, its policies and the snapshot storage brought up, each held by one test."""

from __future__ import annotations

import pytest
import torch
from coordinator_rig import OK, Clock, Rig, all_policies

from edgellm._core.block_hash import TokenChain
from edgellm.builtin.base_endpoint import BaseEndpointPolicy
from edgellm.cache.advances import OneTokenAdvances
from edgellm.cache.types import (
    ContextCacheCommitPolicy,
    ContextCacheConfig,
    ContextCacheLookupPolicy,
    ContextCacheSequenceAdvance,
    PublicationPoint,
    Retention,
)
from edgellm.errors import ContractViolation, InvalidArgumentError
from edgellm.plugins import PolicyRegistration
from edgellm.runtime.snapshot_storage import HybridSnapshotStorage
from edgellm.testing.toy_driver import DECODE, FLAVOURS, ToyDriver
from edgellm.testing.toy_model import HIDDEN_WIDTH

all_policies()  # puts the plugins beside this checkout on the path

from edgellm_hybrid.policy import HybridMtpPolicy, HybridSnapshotPolicy  # noqa: E402

NO_LADDER = ContextCacheConfig(policy_deadline_seconds=None, checkpoint_interval_tokens=None)
PROMPT = list(range(1, 8))
ENDING = [90, 91, 92]


def driver(flavour="attention", policy=None, **options):
    registered = all_policies() if policy is None else [PolicyRegistration("p", policy, lambda *_: True, 0, "tests")]
    return ToyDriver(FLAVOURS[flavour], policies=registered, **options)


def failures(toy):
    return toy.coordinator.metrics().policy_failures


def prefill_and_step(toy, sequence, **options):
    """Runs the prompt and one step; the driver compares the text with its twin and the state with a solo run."""
    toy.prefill(sequence)
    toy.step([sequence], **options)


# --- snapshot storage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "live",
    [
        pytest.param(lambda: torch.randn(4, 2, 8)[:, 0], id="rows apart, float32"),
        pytest.param(lambda: torch.randn(4, 2, 8, dtype=torch.float64)[:, 0], id="rows apart, float64"),
        pytest.param(lambda: torch.randn(33)[1:].view(4, 8), id="not on a word"),
    ],
)
def test_a_slab_that_cannot_be_read_as_words_is_copied_by_value(live):
    slab = live()
    storage = HybridSnapshotStorage([slab], recurrent_budget_bytes=4096, partial_budget_bytes=0, page_size=4)
    before = slab[1].clone()
    storage.capture_recurrent(0, 1)
    slab[1].zero_()
    storage.restore_recurrent(0, 1)
    assert torch.equal(slab[1], before)


# --- retention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [1e10, 1e300, 10**400])
def test_a_time_to_live_beyond_64_bits_of_nanoseconds_never_comes(seconds):
    rig = Rig()
    request = rig.container()
    assert rig.join(request, PROMPT, 0, retention=Retention(ttl_seconds=seconds)).status is OK
    rig.chunk(request, 0, len(PROMPT))
    rig.retire(request, 0)
    rig.clock.seconds = 9e9
    assert rig.join(request, PROMPT, 0).prefill_start > 0
    assert rig.coordinator.finish(request) is OK


def test_an_expired_checkpoint_is_the_first_to_give_up_its_snapshot():
    toy = driver("hybrid", recurrent_slots=2, partial_slots=2, look_again=False)
    toy.coordinator.clock = clock = Clock()
    other, third, prompt_only = [20, *PROMPT], [40, *PROMPT], ContextCacheCommitPolicy.PREFILL_STATE_ONLY
    older = toy.admit(PROMPT, commit=prompt_only)
    prefill_and_step(toy, older, finish=[older])
    expiring = toy.admit(other, commit=prompt_only, retention=Retention(ttl_seconds=5))
    prefill_and_step(toy, expiring, finish=[expiring])
    newest = toy.admit(third, commit=prompt_only)
    clock.seconds = 100
    toy.prefill(newest)  # its checkpoint needs one of the two slots
    assert (_reusable(toy, [*PROMPT, *ENDING]), _reusable(toy, [*other, *ENDING])) == (len(PROMPT), 0)
    toy.close()


def _reusable(toy, tokens):
    chain = TokenChain(toy.deployment.page_size)
    chain.extend(tokens)
    return toy.coordinator.manager.plan(chain, ContextCacheLookupPolicy.USE_CACHE).reuse_token_length


# --- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [4, 10])
def test_a_batchs_replay_tail_may_be_longer_than_one_of_its_prompts(tail):
    rig = Rig()
    request = rig.begun(rig.admission([1, 2, 3], 0), replay_tail_length=tail)
    assert request.sequence(0).replay_tail_length == 3
    assert rig.coordinator.finish(request) is OK


def test_a_negative_replay_tail_of_a_batch_is_refused():
    with pytest.raises(InvalidArgumentError, match="replay_tail_length is -1"):
        Rig().begin(replay_tail_length=-1)


def test_captures_of_prompt_ends_leave_complete_prompts_alone():
    toy = driver("hybrid")
    complete, joiner = toy.admit(PROMPT), None
    toy.prefill(complete)
    joiner = toy.admit([20, *PROMPT])
    coordinator, request = toy.coordinator, toy.request
    assert coordinator.prepare_decode_step(request, toy.headroom, []) is OK
    assert coordinator.enqueue_prefill_captures(request) is OK
    staged = [sequence.staged_hybrid_publication for sequence in request.impl.sequences]
    assert staged[0] is None
    assert staged[1].checkpoint.exact_length == len(joiner.prompt)
    request.abandon()


def test_an_mtp_boundary_is_not_beyond_the_state_of_a_complete_prompt():
    toy = driver("mtp")
    toy.prefill(toy.admit([*PROMPT, *ENDING, 93]))
    assert toy.coordinator.prepare_decode_step(toy.request, toy.headroom, []) is OK
    rows = torch.zeros((1, 1, HIDDEN_WIDTH), dtype=torch.int64)
    with pytest.raises(InvalidArgumentError, match="beyond its 11 tokens"):
        toy.coordinator.publish_hybrid_mtp_endpoint(toy.request, 0, 12, rows, 0)
    toy.request.abandon()


# --- phases ------------------------------------------------------------------------------------------------------


def test_a_containers_prompts_do_not_end_as_a_batch():
    toy = driver("eagle")
    toy.admit(PROMPT)
    assert toy.coordinator.prepare_decode_step(toy.request, toy.headroom, []) is OK
    with pytest.raises(ContractViolation, match="one by one"):
        toy.coordinator.finalize_prefill_publication(toy.request, [ContextCacheSequenceAdvance([3], 7)], [7])
    toy.coordinator.check_invariants()
    toy.request.abandon()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda c, r: c.complete_decode_step(r, OneTokenAdvances([-1, -1])), id="complete_decode_step"),
        pytest.param(lambda c, r: c.advance_prefill(r, 1, 2), id="advance_prefill"),
        pytest.param(lambda c, r: c.enqueue_prefill_captures(r), id="enqueue_prefill_captures"),
        pytest.param(
            lambda c, r: c.finalize_sequence_admission(r, 1, ContextCacheSequenceAdvance([3], 6)),
            id="finalize_sequence_admission",
        ),
    ],
)
def test_between_begin_and_compact_nothing_else_moves_the_request(call):
    rig = Rig()
    request = rig.container()
    for slot in range(2):
        assert rig.join(request, [slot + 1, 2, 3, 4, 5, 6], slot).status is OK
    rig.chunk(request, 0, 6)
    assert rig.coordinator.begin_batch_compaction(request, [-1, 0], 1) is OK
    with pytest.raises(ContractViolation, match="compaction is outstanding"):
        call(rig.coordinator, request)
    assert rig.coordinator.compact_batch(request) is OK
    rig.coordinator.check_invariants()
    assert rig.coordinator.finish(request) is OK


def test_a_joiner_that_a_compaction_names_is_not_retracted():
    rig = Rig()
    request = rig.container()
    assert rig.join(request, PROMPT, 0).status is OK
    assert rig.coordinator.begin_batch_compaction(request, [-1], 0) is OK
    assert rig.coordinator.retract_sequence_admission(request) is False
    assert rig.coordinator.poisoned
    assert rig.coordinator.compact_batch(request) is OK
    assert rig.coordinator.finish(request) is OK


def test_abandoning_waits_for_the_copies_of_a_joiner_that_never_ran():
    toy = driver()
    producer = toy.admit(PROMPT)
    prefill_and_step(toy, producer, finish=[producer])
    calls = toy.sync.calls
    toy.admit(PROMPT)
    assert toy.coordinator.metrics().tail_copies == 1
    toy.request.abandon()
    assert toy.sync.calls == calls + 1


def test_copies_of_a_joiner_that_cannot_be_waited_for_keep_their_pages():
    toy = driver()
    producer = toy.admit(PROMPT)
    prefill_and_step(toy, producer, finish=[producer])
    toy.admit(PROMPT)
    toy.sync.failing = True
    toy.request.abandon()
    assert toy.coordinator.poisoned
    assert toy.coordinator.metrics().quarantined_requests == 1
    toy.sync.failing = False
    assert toy.coordinator.shutdown() is OK


# --- policies that must not harm others --------------------------------------------------------------------------


class ResolvesInAChunk(BaseEndpointPolicy):
    def on_prefill_chunk(self, request, slot):
        super().on_prefill_chunk(request, slot)
        self.mark_resolved(request)


class CapturesInAChunk(HybridSnapshotPolicy):
    def on_prefill_chunk(self, request, slot):
        assert self.capture_staged(request) is OK
        super().on_prefill_chunk(request, slot)


@pytest.mark.parametrize(("flavour", "policy"), [("attention", ResolvesInAChunk), ("hybrid", CapturesInAChunk)])
def test_a_hook_about_one_sequence_does_not_end_the_step_of_all(flavour, policy):
    toy = driver(flavour, policy)
    first, second = toy.admit(PROMPT), toy.admit([20, *PROMPT])
    toy.prefill(first, 4)
    toy.mixed_step([(first, DECODE), (second, 4)])
    assert len(toy.text(first)) == 2
    assert failures(toy) == 0
    toy.close()


class ArmsInAStep(BaseEndpointPolicy):
    def on_decode_completed(self, request, *arguments):
        self.begin_draft_init(request)
        return super().on_decode_completed(request, *arguments)


def test_arming_a_draft_that_does_not_exist_is_a_fault():
    toy = driver("attention", ArmsInAStep)
    sequence = toy.admit(PROMPT)
    prefill_and_step(toy, sequence)
    assert not toy.request.impl.awaiting_first_spec_completion()
    assert failures(toy) > 0
    toy.close()


class ReservesBeforeItApplies(HybridSnapshotPolicy):
    def on_decode_completed(self, request, advances, completed, common_state_lengths):
        for slot in completed:
            committed = request.sequence(slot).committed_state_length
            self.reserve_hybrid_capture(request, slot, committed, PublicationPoint.DECODE_END)
        self.apply(request, advances)
        status = self.capture_staged(request)
        for slot in completed:
            self.publish_staged(request, slot)
        return status


def test_a_checkpoint_of_a_state_that_moved_on_is_never_taken():
    """The device is one token further than the ledger until the advances are applied."""
    toy = driver("hybrid", ReservesBeforeItApplies, stop_at_boundaries=False, config=NO_LADDER)
    sequence = toy.admit(PROMPT)
    prefill_and_step(toy, sequence)
    toy.step(finish=[sequence])
    assert failures(toy) == 1
    later = toy.admit([*sequence.tokens[:-1], *ENDING])
    prefill_and_step(toy, later)
    toy.close()


class CapturesTheOthers(HybridSnapshotPolicy):
    def on_prefill_chunk(self, request, slot):
        super().on_prefill_chunk(request, slot)
        for other in range(request.num_sequences):
            sequence = request.sequence(other)
            committed = sequence.committed_state_length
            if other != slot and sequence.finalized and committed > sequence.published_exact_length:
                self.reserve_hybrid_capture(request, other, committed, PublicationPoint.DECODE_END)
                self.capture_staged(request)
                self.publish_staged(request, other)


def test_a_hook_about_one_sequence_takes_no_checkpoint_of_another():
    """In the middle of a step the others' states are ahead of their ledgers."""
    toy = driver("hybrid", CapturesTheOthers, config=NO_LADDER)
    first = toy.admit(PROMPT)
    prefill_and_step(toy, first)
    committed = first.committed
    bait = toy.admit([*range(40, 60)])
    toy.mixed_step([(first, DECODE), (bait, 4)])
    assert failures(toy) == 1
    later = toy.admit([*first.tokens[:committed], *ENDING])
    prefill_and_step(toy, later)
    toy.close()


class ShiftsTheBoundary(HybridMtpPolicy):
    def publish_mtp_boundary(self, request, slot, resident_state_length, base_hidden_states, boundary_hidden_row):
        return self.publish_boundary(request, slot, resident_state_length - 1, base_hidden_states, boundary_hidden_row)


class PublishesTwice(HybridMtpPolicy):
    """Keeps the hidden rows, and publishes once more when an answer grows."""

    kept = None

    def publish_mtp_boundary(self, request, slot, resident_state_length, base_hidden_states, boundary_hidden_row):
        self.kept = base_hidden_states, boundary_hidden_row
        return super().publish_mtp_boundary(
            request, slot, resident_state_length, base_hidden_states, boundary_hidden_row
        )

    def on_decode_completed(self, request, *arguments):
        status = super().on_decode_completed(request, *arguments)
        if self.kept is not None:
            self.publish_boundary(request, 0, request.sequence(0).committed_state_length, *self.kept)
        return status


@pytest.mark.parametrize("policy", [ShiftsTheBoundary, PublishesTwice])
def test_a_policy_publishes_no_other_mtp_boundary_than_the_runtime_asked_for(policy):
    toy = driver("mtp", policy)
    sequence = toy.admit(PROMPT)
    prefill_and_step(toy, sequence)
    assert failures(toy) == 1
    later = toy.admit([*sequence.tokens[:-1], *ENDING])
    prefill_and_step(toy, later)
    toy.close()


class UnpinsInsteadOfRestoring(HybridMtpPolicy):
    def restore_mtp_boundary(self, request, slot, base_hidden_states, destination_row):
        self.release_restored(request, slot)
        return OK


class RestoresAnotherRow(HybridMtpPolicy):
    def restore_mtp_boundary(self, request, slot, base_hidden_states, destination_row):
        return self.restore_boundary(request, slot, base_hidden_states.clone(), destination_row)


@pytest.mark.parametrize("policy", [UnpinsInsteadOfRestoring, RestoresAnotherRow])
def test_the_hidden_row_is_restored_whatever_the_policy_does(policy):
    toy = driver("mtp", policy)
    prefill_and_step(toy, toy.admit([*PROMPT, *ENDING]))
    later = toy.admit([*PROMPT, *ENDING, 50, 51])
    assert later.reuse.reused_tokens == len(PROMPT) + len(ENDING)
    prefill_and_step(toy, later)
    toy.close()


class AppendsToTheChain(BaseEndpointPolicy):
    """Puts a token that nobody accepted between those of the sequence, once."""

    def on_decode_completed(self, request, *arguments):
        status = super().on_decode_completed(request, *arguments)
        sequence = request.sequence(0)
        if sequence.num_tokens == len(PROMPT) + 2:
            sequence.chain.append(5)
        return status


def test_a_token_that_nobody_accepted_leaves_the_chain_again():
    """Blocks behind it would be found under other tokens than their state is of."""
    toy = driver("attention", AppendsToTheChain, check=False)
    sequence = toy.admit(PROMPT)
    prefill_and_step(toy, sequence)
    for _ in range(8):
        toy.step()
    assert toy.request.sequence(0).token_ids.tolist() == sequence.tokens
    assert failures(toy) == 1
    toy.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("checkpoint_interval_tokens", 0),
        ("checkpoint_interval_tokens", -4),
        ("checkpoint_interval_tokens", 2.5),
        ("policy_deadline_seconds", 0),
    ],
)
def test_a_config_that_policies_cannot_count_with_is_refused(field, value):
    with pytest.raises(InvalidArgumentError, match=f"{field} is {value}"):
        Rig(**{field: value})


def test_a_capture_that_raises_leaves_nothing_reserved(monkeypatch):
    toy = driver("hybrid")
    sequence = toy.admit(PROMPT)
    coordinator, request, free = toy.coordinator, toy.request, toy.coordinator.manager.pools.recurrent.free_count
    assert coordinator.prepare_decode_step(request, toy.headroom, []) is OK
    with monkeypatch.context() as patched:
        patched.setattr(toy.machine.storage, "capture_recurrent", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            coordinator.enqueue_prefill_captures(request)
    assert request.sequence(0).staged_hybrid_publication is None
    assert coordinator.manager.pools.recurrent.free_count == free
    assert coordinator.enqueue_prefill_captures(request) is OK
    assert request.sequence(0).staged_hybrid_publication.checkpoint.exact_length == len(sequence.prompt)
    request.abandon()
