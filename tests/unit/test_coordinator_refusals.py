"""What the coordinator and its helpers for policies refuse: with which words, and that nothing moved."""

from __future__ import annotations

import time

import pytest
import torch
from coordinator_rig import HEADROOM, OK, Rig, all_policies

from edgellm._core.page_table import KVPageTable
from edgellm.builtin.base_endpoint import BaseEndpointPolicy
from edgellm.cache import acquire, endpoints, joining, snapshots, spec_endpoints
from edgellm.cache.advances import HOLD_TOKEN, OneTokenAdvances, participants, took_part
from edgellm.cache.binding import RowBinder, Rows
from edgellm.cache.boundary import check_boundary
from edgellm.cache.coordinator import ContextCacheCoordinator
from edgellm.cache.policy_calls import charge_time, name_of
from edgellm.cache.request import RequestHandle
from edgellm.cache.types import (
    AcquireStatus,
    ContextCacheCommitPolicy,
    ContextCacheConfig,
    ContextCacheCoordinatorStatus,
    ContextCacheLookupPolicy,
    ContextCachePhysicalResources,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    Hash128,
    PublicationPoint,
    Retention,
    ReuseStopReason,
)
from edgellm.errors import ContractViolation, InvalidArgumentError, InvariantError, PluginError
from edgellm.plugins import PolicyRegistration
from edgellm.session.types import ResidentRef
from edgellm.testing.recount import recount
from edgellm.testing.toy_batch_driver import ToyBatchDriver
from edgellm.testing.toy_driver import FLAVOURS, ToyDriver
from edgellm.testing.toy_model import HIDDEN_WIDTH

Advance = ContextCacheSequenceAdvance


def prompt(length, seed=1):
    return [(seed * 31 + 7 * i * i + i) % 50 for i in range(length)]


def driver_for(flavour, **options):
    config = ContextCacheConfig(policy_deadline_seconds=None)
    return ToyDriver(FLAVOURS[flavour], policies=all_policies(), config=config, **options)


def joined(rig, length=6):
    """A container with one sequence whose prompt is complete."""
    handle = rig.container()
    rig.join(handle, prompt(length), 0)
    rig.chunk(handle, 0, length)
    return handle


# --- advances ------------------------------------------------------------------------------------------------


def test_a_vanilla_step_accepts_exactly_one_token():
    rig = Rig()
    handle = joined(rig)
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM) is OK
    with pytest.raises(InvalidArgumentError, match=r"^slot 0 accepted 2 tokens; a vanilla step accepts exactly 1$"):
        rig.coordinator.complete_decode_step(handle, [Advance([1, 2], 8)])
    assert handle.sequence(0).committed_state_length == 6
    assert rig.coordinator.complete_decode_step(handle, [Advance([1], 7)]) is OK


def test_a_sequence_without_its_look_ahead_token_cannot_decode():
    rig = Rig()
    handle = joined(rig)
    rig.join(handle, prompt(5, 2), 1)
    rig.chunk(handle, 1, 3)  # two prompt tokens are still to be computed
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM, [0]) is OK
    with pytest.raises(InvalidArgumentError, match=r"^slot 1 has 5 tokens and 3 committed, it is not at a"):
        rig.coordinator.complete_decode_step(handle, [Advance([1], 7), Advance([2], 4)])
    assert rig.coordinator.complete_decode_step(handle, OneTokenAdvances([1, HOLD_TOKEN])) is OK
    recount(rig.coordinator)


# --- chunks and prompts --------------------------------------------------------------------------------------


def test_a_complete_prompt_is_neither_advanced_nor_finalized_again():
    rig = Rig()
    handle = joined(rig)
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM, []) is OK
    with pytest.raises(
        ContractViolation, match=r"^the prompt of slot 0 is complete; advance_prefill serves incomplete"
    ):
        rig.coordinator.advance_prefill(handle, 0, 6)
    with pytest.raises(ContractViolation, match=r"^slot 0 was finalized before; a prompt ends once$"):
        rig.coordinator.finalize_sequence_admission(handle, 0, Advance([1], 6))
    assert rig.coordinator.complete_decode_step(handle, OneTokenAdvances([HOLD_TOKEN])) is OK


def test_captures_of_a_complete_prompt_are_refused():
    driver = driver_for("hybrid")
    driver.prefill(driver.admit(prompt(6)))
    assert driver.coordinator.prepare_decode_step(driver.request, driver.headroom, []) is OK
    with pytest.raises(
        ContractViolation, match=r"^the prompt of slot 0 is complete; its state is captured when it ends$"
    ):
        driver.coordinator.enqueue_prefill_captures(driver.request, [0], [6])
    driver.coordinator.complete_decode_step(driver.request, [Advance()])
    driver.close()


def test_a_common_length_of_a_prompt_never_goes_back_or_beyond_what_is_committed():
    driver = driver_for("eagle")
    driver.admit(prompt(9))
    advance = driver.coordinator.advance_prefill
    assert driver.coordinator.prepare_decode_step(driver.request, driver.headroom, []) is OK
    assert advance(driver.request, 0, 6, 5) is OK
    assert driver.request.sequence(0).common_state_length == 5
    for common in (4, 8):
        message = rf"^slot 0: common length {common} must be from 5 \(it never goes back\) to 7 \(committed\)$"
        with pytest.raises(InvalidArgumentError, match=message):
            advance(driver.request, 0, 7, common)
        assert driver.request.sequence(0).committed_state_length == 6
    assert advance(driver.request, 0, 7) is OK  # a draft with pages of its own does not follow by itself
    assert driver.request.sequence(0).common_state_length == 5
    assert advance(driver.request, 0, 7, 7) is OK


def test_a_common_length_needs_draft_state():
    rig = Rig()
    handle = rig.container()
    rig.join(handle, prompt(6), 0)
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM, []) is OK
    with pytest.raises(InvalidArgumentError, match=r"^common_state_length is given for a request without draft state"):
        rig.coordinator.advance_prefill(handle, 0, 3, 3)
    assert handle.sequence(0).committed_state_length == 0


def test_a_borrowing_draft_has_in_common_what_is_committed_unless_told():
    driver = driver_for("shared-kv")
    driver.admit(prompt(9))
    assert driver.coordinator.prepare_decode_step(driver.request, driver.headroom, []) is OK
    assert driver.coordinator.advance_prefill(driver.request, 0, 4) is OK
    assert driver.request.sequence(0).common_state_length == 4
    assert driver.coordinator.advance_prefill(driver.request, 0, 8, 6) is OK
    assert driver.request.sequence(0).common_state_length == 6


def test_a_joiner_that_no_pool_can_ever_hold_is_not_told_to_wait():
    rig = Rig(num_pages=3, capacity=32)
    handle = rig.container()
    assert rig.join(handle, prompt(8), 0).status is OK
    assert rig.join(handle, prompt(11, 2), 1).insufficient_capacity  # with one of headroom just the three pages
    assert not rig.join(handle, prompt(12, 2), 1).insufficient_capacity
    small = driver_for("eagle", num_pages=8, num_draft_pages=4)  # four tokens of headroom in either pool
    assert small.admit(prompt(6)) is not None
    assert small.admit(prompt(12, 2)) is None
    assert small.last_admission.insufficient_capacity
    assert small.admit(prompt(13, 2)) is None
    assert not small.last_admission.insufficient_capacity
    admission = small.admission(prompt(16, 2), ResidentRef(0, 99))
    one_each = DecodingKvHeadroom(1, 1)  # 17 positions, and four draft pages hold 16
    assert not small.coordinator.admit_sequence(small.request, admission, one_each).insufficient_capacity


# --- helpers for policies ------------------------------------------------------------------------------------


def test_draft_state_is_published_by_its_own_helper():
    driver = driver_for("eagle")
    driver.prefill(driver.admit(prompt(6)))
    impl = driver.request.impl
    with pytest.raises(ContractViolation, match=r"^slot 0 has draft state; publish it with publish_spec_endpoint$"):
        endpoints.publish_ready_endpoint(driver.coordinator, impl, 0, PublicationPoint.PREFILL_END)
    with pytest.raises(ContractViolation, match=r"^slot 1 is out of range"):
        endpoints.publish_ready_endpoint(driver.coordinator, impl, 1, PublicationPoint.PREFILL_END)
    driver.close()


def test_generated_blocks_of_a_prompt_only_sequence_stay_private():
    rig = Rig()
    handle = rig.container()
    rig.join(handle, prompt(6), 0, commit=ContextCacheCommitPolicy.PREFILL_STATE_ONLY)
    rig.chunk(handle, 0, 6)
    for _ in range(4):
        rig.decode(handle)
    impl = handle.impl
    assert int(impl.lengths.common[0]) == 10
    assert rig.manager.index.size == 1
    endpoints.publish_ready_endpoint(rig.coordinator, impl, 0, PublicationPoint.DECODE_BLOCK)
    assert (rig.manager.index.size, impl.sequences[0].published_full_block_count) == (1, 1)


def test_a_checkpoint_is_staged_once_at_the_length_of_the_state_and_only_for_plain_requests():
    driver = driver_for("hybrid")
    driver.admit(prompt(9))
    coordinator, impl = driver.coordinator, driver.request.impl
    stage = snapshots.reserve_capture
    for length in (0, 10):
        if length:
            with pytest.raises(InvalidArgumentError, match=r"^slot 0: a checkpoint at 10 must be from 0 to 9$"):
                stage(coordinator, impl, 0, length, PublicationPoint.PREFILL_END)
        else:
            assert stage(coordinator, impl, 0, length, PublicationPoint.PREFILL_END) is False
    assert coordinator.manager.pools.recurrent.free_count == 8
    assert stage(coordinator, impl, 0, 4, PublicationPoint.PREFILL_CHUNK) is True
    with pytest.raises(ContractViolation, match=r"^slot 0 has an unpublished checkpoint; publish it before capturing"):
        stage(coordinator, impl, 0, 8, PublicationPoint.PREFILL_CHUNK)
    with pytest.raises(
        ContractViolation, match=r"^slot 0: the checkpoint at 4 is not complete \(captured: False, committed: 0\)"
    ):
        snapshots.publish_staged(coordinator, impl, 0)
    assert coordinator.manager.pools.recurrent.free_count == 7
    mtp = driver_for("mtp")
    mtp.admit(prompt(9))
    with pytest.raises(ContractViolation, match=r"^slot 0 takes no plain checkpoint; its lease is hybrid_mtp$"):
        stage(mtp.coordinator, mtp.request.impl, 0, 4, PublicationPoint.PREFILL_CHUNK)


def test_only_checkpoint_deployments_have_a_snapshot_storage():
    rig = Rig()
    with pytest.raises(ContractViolation, match=r"^this deployment keeps no recurrent checkpoints; deploy a hybrid"):
        snapshots.storage_of(rig.coordinator)


def test_a_spec_endpoint_lies_between_what_is_published_and_what_is_common():
    driver = driver_for("eagle")
    driver.prefill(driver.admit(prompt(9)))
    driver.step()
    impl, publish = driver.request.impl, spec_endpoints.publish_spec_endpoint
    low, high = int(impl.lengths.offered_blocks[0]) * 4, int(impl.lengths.common[0])
    assert (low, high) == (8, 9)  # the draft has yet to follow what was accepted
    for common in (low - 1, high + 1):
        message = rf"^slot 0: common length {common} must be from 8 \(published\) to {high} \(materialised\)"
        with pytest.raises(InvalidArgumentError, match=message):
            publish(driver.coordinator, impl, 0, common, PublicationPoint.DECODE_BLOCK)
    driver.close()


def test_boundaries_belong_to_mtp_leases():
    rig = Rig()
    handle = joined(rig)
    with pytest.raises(
        ContractViolation, match=r"^slot 0 is no MTP sequence; begin its request with speculative_request"
    ):
        check_boundary(handle.impl, 0, 6, 0)
    driver = driver_for("mtp")
    driver.admit(prompt(9))
    impl = driver.request.impl
    check_boundary(impl, 0, 9, 0)
    with pytest.raises(InvalidArgumentError, match=r"^slot 0: a boundary at 10 is beyond its 9 tokens$"):
        check_boundary(impl, 0, 10, 0)
    with pytest.raises(InvalidArgumentError, match=r"^boundary_hidden_row is -1; rows start at 0$"):
        check_boundary(impl, 0, 9, -1)


def boundary_step(driver, length):
    """Commit `length` prompt tokens of slot 0 in a step of its own, up to the publication of its boundary."""
    coordinator = driver.coordinator
    assert coordinator.prepare_decode_step(driver.request, driver.headroom, []) is OK
    rows = torch.zeros((1, 1, HIDDEN_WIDTH), dtype=torch.int64)
    return lambda: coordinator.publish_hybrid_mtp_endpoint(driver.request, 0, length, rows, 0)


def test_a_boundary_without_a_free_snapshot_is_skipped_and_counted():
    driver = driver_for("mtp", recurrent_slots=1, partial_slots=1)
    driver.admit(prompt(9))
    publish = boundary_step(driver, 8)
    manager, impl = driver.coordinator._manager, driver.request.impl
    held = manager.reserve_hybrid_snapshots(impl.leases[0], True)
    assert publish() is OK
    assert driver.coordinator.metrics().hybrid_snapshot_pressure_skips == 1
    assert impl.sequences[0].published_exact_length == 0
    manager.retire_hybrid_snapshot_reservation(impl.leases[0], held)
    assert publish() is OK
    assert impl.sequences[0].published_exact_length == 8
    assert impl.has_pending_device_work()  # the step goes on


def test_a_boundary_that_cannot_be_captured_gives_its_snapshots_back(monkeypatch):
    driver = driver_for("mtp")
    driver.admit(prompt(9))
    publish = boundary_step(driver, 8)
    free = driver.coordinator.manager.pools.recurrent.free_count
    storage = driver.coordinator.resources.snapshot_storage

    def full(*_arguments):
        raise MemoryError("no room for the hidden row")

    with monkeypatch.context() as patch:
        patch.setattr(type(storage), "capture_boundary_hidden", full)
        publish()
    pools = driver.coordinator.manager.pools
    assert (pools.recurrent.free_count, pools.partial.free_count) == (free, 8)
    assert driver.request.sequence(0).published_exact_length == 0


# --- rows ----------------------------------------------------------------------------------------------------


def test_a_recurrent_deployment_has_no_page_table():
    with pytest.raises(InvariantError, match=r"^a pure recurrent deployment has no page table$"):
        _ = Rows(None, None).table
    rig = Rig()
    assert rig.coordinator.rows.table is rig.table
    assert Rows(RowBinder(rig.table), None).table is rig.table


def test_a_row_that_cannot_be_rewritten_after_its_pages_moved_is_an_invariant():
    rig = Rig()
    handle = joined(rig)
    sequence, rows = handle.sequence(0), rig.coordinator.rows
    now = (sequence.lease.rebound_page_count, sequence.lease.rebound_draft_page_count)
    assert rows.rebind_moved(sequence, *now) is False
    assert rows.rebind_moved(sequence, now[0] - 1, now[1]) is True
    assert rows.rebind_moved(sequence, now[0], now[1] - 1) is True
    rig.table.mark_dirty([0])
    rig.mirror.failures = 1
    message = r"^the row of slot 0 could not be rewritten after its pages moved: upload failed$"
    with pytest.raises(InvariantError, match=message):
        rows.rebind_moved(sequence, now[0] - 1, now[1])


def test_a_row_that_cannot_be_cleared_at_the_end_poisons_and_still_gives_the_pages_back(monkeypatch, caplog):
    rig = Rig()
    handle = joined(rig)

    def broken(*_arguments):
        raise OSError("table lost")

    with monkeypatch.context() as patch:
        patch.setattr(rig.coordinator.rows, "clear", broken)
        rig.coordinator.finish(handle)
    assert "rows of an ended request could not be cleared" in caplog.text
    assert rig.coordinator.poisoned
    assert (rig.coordinator.active_requests, rig.manager.num_live_leases) == (0, 0)


# --- compaction and ends -------------------------------------------------------------------------------------


def test_compaction_needs_a_settled_request_and_one_mapping_at_a_time():
    rig = Rig()
    handle = joined(rig)
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM) is OK
    with pytest.raises(ContractViolation, match=r"^begin_batch_compaction needs a settled request; complete the step"):
        rig.coordinator.begin_batch_compaction(handle, [0], 1)
    assert rig.coordinator.complete_decode_step(handle, [Advance([1], 7)]) is OK
    with pytest.raises(ContractViolation, match="compact_batch"):
        rig.coordinator.compact_batch(handle)
    assert rig.coordinator.begin_batch_compaction(handle, [0], 1) is OK
    with pytest.raises(ContractViolation):
        rig.coordinator.begin_batch_compaction(handle, [0], 1)
    assert rig.coordinator.compact_batch(handle) is OK
    assert handle.num_sequences == 1


# --- the request and its handle ------------------------------------------------------------------------------


def test_an_empty_handle_and_a_slot_out_of_range_are_refused():
    handle = RequestHandle()
    assert not handle.valid()
    for call in (lambda: handle.impl, lambda: handle.num_sequences, lambda: handle.sequence(0), handle.take):
        with pytest.raises(
            ContractViolation, match=r"^the request handle is empty: it was finished, abandoned or moved"
        ):
            call()
    rig = Rig()
    begun = joined(rig)
    for slot in (-1, 1):
        with pytest.raises(ContractViolation, match=rf"^slot {slot} is out of range; the request has 1 sequences$"):
            begun.sequence(slot)


def test_transitions_name_the_phase_they_need():
    rig = Rig()
    impl = joined(rig).impl
    with pytest.raises(
        ContractViolation, match=r"^begin_prefill needs a request that is admitted; this one is executing$"
    ):
        impl.begin_prefill()
    with pytest.raises(
        ContractViolation, match=r"^open_container needs a request that is admitted; this one is executing"
    ):
        impl.open_container()
    with pytest.raises(
        ContractViolation, match=r"^begin_spec_draft_init needs pending device work; call prepare_prefill"
    ):
        impl.begin_spec_draft_init()
    assert not impl.awaiting_first_spec_completion()
    impl.publication_policy = None
    with pytest.raises(InvariantError, match=r"^the request has no publication policy; begin_request chooses one$"):
        _ = impl.policy


def test_a_sequence_outside_a_request_has_no_lengths():
    rig = Rig()
    handle = rig.container()
    rig.join(handle, prompt(6), 0)
    sequence = handle.sequence(0)
    sequence._lengths = None
    with pytest.raises(InvariantError, match=r"^the sequence is not part of a request; append it with Impl.append_seq"):
        _ = sequence.num_tokens


def test_a_policy_without_mtp_says_so():
    rig = Rig()
    handle = joined(rig)
    policy = BaseEndpointPolicy(rig.coordinator)
    message = r"^policy '.*' has no MTP boundary; hybrid MTP needs edgellm-hybrid$"
    with pytest.raises(PluginError, match=message):
        policy.publish_mtp_boundary(handle, 0, 6, None, 0)
    with pytest.raises(PluginError, match=message):
        policy.restore_mtp_boundary(handle, 0, None, 0)


class Nameless(BaseEndpointPolicy):
    @property
    def name(self):
        raise KeyError("no name")


def test_a_policy_whose_name_raises_is_called_by_its_class():
    rig = Rig()
    assert name_of(BaseEndpointPolicy(rig.coordinator)) == repr(BaseEndpointPolicy(rig.coordinator).name)
    assert name_of(Nameless(rig.coordinator)) == "Nameless"


def test_a_boundary_whose_wait_fails_keeps_its_snapshots_until_the_drain():
    driver = driver_for("mtp")
    driver.admit(prompt(9))
    publish = boundary_step(driver, 8)
    pools = driver.coordinator.manager.pools
    driver.sync.failing = True
    assert publish() is ContextCacheCoordinatorStatus.POISONED
    assert driver.coordinator.poisoned
    assert (pools.recurrent.free_count, pools.partial.free_count) == (7, 7)  # the device may still write there
    assert driver.request.sequence(0).published_exact_length == 0
    assert driver.coordinator.metrics().current_records == 0
    driver.request.abandon()
    driver.sync.failing = False
    assert driver.coordinator.shutdown() is OK
    assert (pools.recurrent.free_count, pools.partial.free_count) == (8, 8)


def test_a_boundary_may_stand_at_the_first_token():
    driver = driver_for("mtp")
    driver.admit(prompt(9))
    publish = boundary_step(driver, 1)
    assert publish() is OK
    assert driver.request.sequence(0).published_exact_length == 1


def test_token_zero_is_a_token():
    rig = Rig()
    handle = joined(rig)
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM) is OK
    assert rig.coordinator.complete_decode_step(handle, OneTokenAdvances([0]), [0]) is OK
    assert handle.sequence(0).token_ids.tolist()[-1] == 0
    assert (handle.sequence(0).num_tokens, handle.sequence(0).committed_state_length) == (8, 7)


def test_a_prompts_common_length_is_checked_and_taken_when_it_is_finalized():
    driver = driver_for("eagle")
    driver.admit(prompt(9))
    finalize, advance = driver.coordinator.finalize_sequence_admission, Advance([3], 9)
    assert driver.coordinator.prepare_decode_step(driver.request, driver.headroom, []) is OK
    assert driver.coordinator.advance_prefill(driver.request, 0, 9, 6) is OK
    for common in (5, 10):
        message = rf"^slot 0: common length {common} must be from 6 \(it never goes back\) to 9 \(committed\)$"
        with pytest.raises(InvalidArgumentError, match=message):
            finalize(driver.request, 0, advance, common)
        assert not driver.request.sequence(0).finalized
    assert finalize(driver.request, 0, advance, 8) is OK
    state = driver.request.sequence(0)
    assert (state.common_state_length, state.committed_state_length) == (8, 9)
    assert (state.frozen_spec_prefill_length, int(driver.request.impl.lengths.proven[0])) == (8, 8)
    assert bool(driver.request.impl.lengths.draft_unproven[0]) is True


def test_captures_name_sequences_that_exist():
    driver = driver_for("hybrid")
    driver.admit(prompt(9))
    assert driver.coordinator.prepare_decode_step(driver.request, driver.headroom, []) is OK
    for slot in (-1, 1):
        with pytest.raises(ContractViolation, match=rf"^slot {slot} is out of range; the request has 1 sequences$"):
            driver.coordinator.enqueue_prefill_captures(driver.request, [slot], [4])


@pytest.mark.parametrize(("length", "point"), [(4, PublicationPoint.PREFILL_CHUNK), (9, PublicationPoint.PREFILL_END)])
def test_a_capture_knows_whether_it_is_of_the_prompts_end(length, point):
    driver = driver_for("hybrid")
    driver.admit(prompt(9))
    assert driver.coordinator.prepare_decode_step(driver.request, driver.headroom, []) is OK
    assert driver.coordinator.enqueue_prefill_captures(driver.request, [0], [length]) is OK
    staged = driver.request.sequence(0).staged_hybrid_publication
    assert (staged.point, staged.captured, staged.checkpoint.exact_length) == (point, True, length)


class Interrupt(BaseException):
    """Like KeyboardInterrupt, which would end the test run where a test lets it through."""


@pytest.mark.parametrize("call", ["finish", "compact", "abandon"])
def test_an_interrupted_wait_proves_nothing_and_quarantines(call):
    rig = Rig()
    handle = joined(rig)
    coordinator = rig.coordinator
    if call == "compact":
        assert coordinator.begin_batch_compaction(handle, [-1], 0) is OK
    else:
        assert coordinator.prepare_decode_step(handle, HEADROOM) is OK
    rig.sync.failing, rig.sync.raises = True, Interrupt
    ends = {
        "finish": lambda: coordinator.finish(handle),
        "compact": lambda: coordinator.compact_batch(handle),
        "abandon": handle.abandon,
    }
    with pytest.raises(Interrupt):
        ends[call]()
    assert not handle.valid()
    assert (coordinator.active_requests, coordinator.metrics().quarantined_requests) == (1, 1)
    assert rig.manager.num_live_leases == 1  # the device may still write to its pages
    rig.sync.failing = False
    assert coordinator.shutdown() is OK
    assert (coordinator.active_requests, rig.manager.num_live_leases) == (0, 0)


@pytest.mark.parametrize(
    ("token", "good"), [(-1, False), (0, True), (2**31 - 1, True), (2**31, False), (2**32 - 1, False)]
)
def test_token_ids_are_non_negative_and_32_bit(token, good):
    rig = Rig()
    handle = joined(rig)
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM) is OK
    advances = [Advance([token], 7)]
    if good:
        assert rig.coordinator.complete_decode_step(handle, advances) is OK
        assert handle.sequence(0).token_ids.tolist()[-1] == token
        return
    with pytest.raises(
        InvalidArgumentError, match=rf"^slot 0 accepted token id {token}; ids are from 0 to 2147483647$"
    ):
        rig.coordinator.complete_decode_step(handle, advances)
    assert handle.sequence(0).num_tokens == 7


def test_admissions_are_counted_by_what_became_of_them():
    rig = Rig(num_pages=64)
    rig.run(prompt(9), 1)
    before = rig.coordinator.metrics()
    media = [None, Hash128(1, 2), Hash128(0, 0), *[None] * 6]
    request = rig.begun(
        rig.admission(prompt(9), 0),
        rig.admission([prompt(9)[0], 77, 78], 1),
        rig.admission(prompt(9, 4), 2, per_position_media_hash=media),
        rig.admission(prompt(9, 5), 3, lookup=ContextCacheLookupPolicy.BYPASS),
    )
    request.abandon()
    request = rig.begun(
        rig.admission(prompt(9, 6), 0, per_position_media_hash=[Hash128(0, 0), *[None] * 8]),
        rig.admission(prompt(9, 7), 1, per_position_media_hash=media),
        rig.admission(prompt(9, 8), 2, lookup=ContextCacheLookupPolicy.BYPASS),
    )
    request.abandon()
    after = rig.coordinator.metrics()
    gained = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("admitted_sequences", "hit_sequences", "media_aware_sequences", "lookup_bypass_sequences")
    }
    assert gained == {
        "admitted_sequences": 7,
        "hit_sequences": 2,  # the whole prompt, and one token of it
        "media_aware_sequences": 2,
        "lookup_bypass_sequences": 2,
    }
    assert after.planning_nanoseconds > before.planning_nanoseconds > 0


def test_a_request_takes_as_many_sequences_as_the_deployment_says():
    rig = Rig(batch=2)
    handle = rig.container()
    for slot in (0, 1):
        assert rig.join(handle, prompt(5, slot + 1), slot).status is OK
    with pytest.raises(ContractViolation, match=r"^the request has 2 sequences, the limit is 2; retire one first$"):
        rig.join(handle, prompt(5, 9), 1)


def test_equal_tokens_with_other_media_are_other_context():
    rig = Rig()
    image, other = [None, Hash128(1, 2), *[None] * 7], [None, Hash128(1, 3), *[None] * 7]
    rig.run(prompt(9), 1, per_position_media_hash=image)
    for media, reused in ((image, 8), (other, 0), ((), 0)):
        request = rig.begun(rig.admission(prompt(9), 0, per_position_media_hash=media))
        assert request.sequence(0).reuse_token_length == reused, media
        request.abandon()


def test_reports_and_counters_add_up_over_admissions():
    rig = Rig()
    rig.run(prompt(9), 1)
    for count in (1, 2):
        request = rig.begun(
            rig.admission(prompt(9), 0), rig.admission(prompt(9), 1, lookup=ContextCacheLookupPolicy.BYPASS)
        )
        assert [s.reuse_report.stop_reason for s in request.impl.sequences] == [
            ReuseStopReason.FULL,
            ReuseStopReason.BYPASS,
        ]
        request.abandon()
        counted = rig.coordinator.metrics()
        assert (counted.reused_tokens, counted.matched_tokens) == (8 * count, 8 * count)
        assert counted.lookup_bypass_sequences == count


def test_replayed_tokens_are_counted_where_the_draft_looked_ahead():
    driver = driver_for("eagle")
    driver.prefill(driver.admit(prompt(9)))
    driver.step()
    for count in (1, 2):
        driver.admit([*prompt(8), 40 + count, 41, 42])
        counted = driver.coordinator.metrics()
        assert (counted.spec_replays, counted.spec_replayed_tokens) == (count, count)


def test_a_coordinator_is_closed_once_and_says_why_it_admits_nothing(caplog):
    rig = Rig()
    handle = joined(rig)
    assert rig.coordinator._quarantine.failed_waits == 0
    rig.sync.failing = True
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM) is OK
    assert rig.coordinator.finish(handle) is ContextCacheCoordinatorStatus.POISONED
    assert rig.coordinator._quarantine.failed_waits == 1
    said = [record.getMessage() for record in caplog.records if "admits nothing more" in record.message]
    assert said == ["the context cache admits nothing more: a stream could not be drained; recover() or shutdown() it"]
    rig.coordinator._quarantine.poison("again")
    assert len([record for record in caplog.records if "admits nothing more" in record.message]) == 1  # said once
    rig.sync.failing = False
    assert rig.coordinator.shutdown() is OK
    assert rig.coordinator._quarantine.failed_waits == 1
    rig.coordinator.close()
    rig.coordinator._active_requests = 1  # a closed coordinator looks at nothing any more
    rig.coordinator.close()
    rig.coordinator._active_requests = 0


def test_every_call_names_itself_when_it_comes_out_of_order():
    rig = Rig()
    coordinator, batch = rig.coordinator, rig.begun(rig.admission(prompt(6), 0))
    calls = {
        "enqueue_prefill_captures": lambda: coordinator.enqueue_prefill_captures(batch),
        "finalize_prefill_publication": lambda: coordinator.finalize_prefill_publication(batch, [Advance([1], 6)]),
        "prepare_decode_step": lambda: coordinator.prepare_decode_step(batch, HEADROOM),
        "complete_decode_step": lambda: coordinator.complete_decode_step(batch, [Advance([1], 7)]),
        "begin_batch_compaction": lambda: coordinator.begin_batch_compaction(batch, [0], 1),
        "compact_batch": lambda: coordinator.compact_batch(batch),
        "advance_prefill": lambda: coordinator.advance_prefill(batch, 0, 3),
    }
    for name, call in calls.items():
        with pytest.raises(ContractViolation, match=rf"^{name} needs an executing request; this one is admitted$"):
            call()
    rig = Rig()
    coordinator, settled = rig.coordinator, joined(rig)
    pending = {
        "enqueue_prefill_captures": lambda: coordinator.enqueue_prefill_captures(settled),
        "finalize_prefill_publication": lambda: coordinator.finalize_prefill_publication(settled, [Advance([1], 6)]),
        "complete_decode_step": lambda: coordinator.complete_decode_step(settled, [Advance([1], 7)]),
    }
    for name, call in pending.items():
        with pytest.raises(ContractViolation, match=rf"^{name} completes enqueued work, and none is pending"):
            call()
    for flavour, kind in (("eagle", "speculative"), ("hybrid", "not speculative")):
        other = driver_for(flavour)
        other.prefill(other.admit(prompt(6)))
        for name, call in (
            (
                "publish_hybrid_mtp_endpoint",
                lambda o=other: o.coordinator.publish_hybrid_mtp_endpoint(o.request, 0, 6, None, 0),
            ),
            (
                "restore_hybrid_mtp_boundary_hidden",
                lambda o=other: o.coordinator.restore_hybrid_mtp_boundary_hidden(o.request, 0, None, 0),
            ),
        ):
            with pytest.raises((ContractViolation, PluginError)) as refused:
                call()
            if isinstance(refused.value, ContractViolation):
                assert name in str(refused.value)
                assert kind in str(refused.value)


def test_what_a_batch_begins_with_is_told_by_sequence():
    rig = Rig()
    rig.run(prompt(9), 1)
    result = rig.begin(rig.admission(prompt(9), 0), rig.admission([96, 95, 94], 1))
    assert result.admission.prefill_starts == [8, 0]
    assert [report.reused_tokens for report in result.admission.reuse] == [8, 0]
    result.admission.request.abandon()


def test_only_paired_sequences_have_draft_rows():
    driver = driver_for("eagle")
    plain = driver.beside(speculative=False)
    sequence = plain.admit(prompt(9))
    assert driver.machine.draft_table.row_length(sequence.slot) == 0
    assert driver.machine.base_table.row_length(sequence.slot) == 3
    plain.cancel(sequence)
    plain.close()
    driver.close()


def test_a_prompt_is_prepared_once():
    rig = Rig()
    request = rig.begun(rig.admission(prompt(6), 0))
    assert rig.coordinator.prepare_prefill(request) is OK
    with pytest.raises(ContractViolation, match="prepare_prefill"):
        rig.coordinator.prepare_prefill(request)


def test_boundaries_that_were_reached_are_named_no_more():
    config = ContextCacheConfig(policy_deadline_seconds=None, checkpoint_interval_tokens=4)
    driver = ToyDriver(FLAVOURS["hybrid"], policies=all_policies(), config=config)
    sequence = driver.admit(prompt(19), checkpoint_boundaries=[5, 10])
    wanted = driver.coordinator.checkpoint_boundaries(driver.request, 0)
    assert wanted[:2] == (5, 10)
    driver.prefill_chunk(sequence, 5)
    assert driver.request.sequence(0).committed_state_length == 5
    assert driver.coordinator.checkpoint_boundaries(driver.request, 0) == wanted[1:]


def test_copied_tails_are_counted_one_by_one():
    rig = Rig()
    rig.run(prompt(9), 1)
    handle = rig.container()
    for slot, tail in ((0, [90, 91]), (1, [92, 93])):
        assert rig.join(handle, [*prompt(7), *tail], slot).prefill_start == 7
    counted = rig.coordinator.metrics()
    assert (counted.tail_copies, counted.tail_copied_tokens) == (2, 6)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"lookup_policy": "use"}, "lookup_policy"),
        ({"commit_policy": None}, "commit_policy"),
        ({"token_state_contract": 1}, "token_state_contract"),
    ],
)
def test_a_batch_names_the_field_that_is_no_member_of_its_enumeration(fields, name):
    rig = Rig()
    with pytest.raises(InvalidArgumentError, match=rf"^{name} is .*; pass a "):
        rig.begin(rig.admission(prompt(6), 0), **fields)
    assert rig.coordinator.active_requests == 0


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("lookup", "use", "lookup_policy"),
        ("commit", 3, "commit_policy"),
        ("retention", 5, "retention"),
        ("retention", Retention(priority="high"), "retention.priority"),
        ("retention", Retention(ttl_seconds=float("inf")), "ttl_seconds"),
        ("retention", Retention(ttl_seconds=0), "ttl_seconds"),
    ],
)
def test_an_admission_names_the_field_that_is_wrong(field, value, name):
    rig = Rig()
    handle = rig.container()
    with pytest.raises(InvalidArgumentError, match=rf"^{name} is "):
        rig.join(handle, prompt(6), 0, **{field: value})
    assert handle.num_sequences == 0


@pytest.mark.parametrize("reserve", [-1, 1.0, True, "2"])
def test_reserved_pages_are_a_count(reserve):
    rig = Rig()
    handle = rig.container()
    with pytest.raises(InvalidArgumentError, match=r"reserve_pages is .*; pass an integer of 0 or more"):
        rig.coordinator.admit_sequence(handle, rig.admission(prompt(6), 0), HEADROOM, reserve_pages=reserve)
    assert (handle.num_sequences, rig.free()) == (0, 16)


def test_who_took_part_accepted_a_token_and_zero_is_one():
    advances = OneTokenAdvances([0, HOLD_TOKEN, 1, 2])
    assert [took_part(advances, slot) for slot in range(4)] == [True, False, True, True]
    assert participants(advances) == [0, 2, 3]


def test_a_recurrent_deployment_can_hold_any_prompt():
    driver = driver_for("recurrent")
    assert joining._may_ever_fit(driver.coordinator, 10**6, HEADROOM) is True
    assert joining._may_ever_fit(Rig().coordinator, 10**6, HEADROOM) is False


def test_a_speculative_joiner_with_media_reuses_and_publishes_nothing():
    media = [Hash128(7, place) for place in range(9)]
    for flavour, reused, publishes in (("eagle", 0, False), ("attention", 8, True)):
        driver = driver_for(flavour)
        for _ in range(2):
            sequence = driver.admit(prompt(9), media=media)
            assert bool(driver.request.impl.lengths.publishes[driver.index(sequence)]) is publishes
            driver.prefill(sequence)
        assert sequence.reuse.reused_tokens == reused
        driver.close()


def test_a_joiner_with_a_time_to_live_can_be_retracted():
    rig = Rig()
    handle = rig.container()
    assert rig.join(handle, prompt(6), 0, retention=Retention(ttl_seconds=5.0)).status is OK
    assert rig.coordinator.retract_sequence_admission(handle) is True
    assert (handle.num_sequences, rig.free(), rig.coordinator.poisoned) == (0, 16, False)
    recount(rig.coordinator)


def test_pages_are_copied_by_32_bit_numbers():
    rig = Rig()
    rig.run(prompt(9), 1)
    handle = rig.container()
    copy_pages, dtypes = rig.executor.kv_cache.copy_pages, []

    def record(sources, targets):
        dtypes.append((sources.dtype.name, targets.dtype.name))
        copy_pages(sources, targets)

    rig.executor.kv_cache.copy_pages = record
    assert rig.join(handle, [*prompt(7), 40, 41], 0).prefill_start == 7
    assert dtypes == [("int32", "int32")]


def test_plans_are_counted_by_kind():
    rig = Rig(num_pages=64)
    kinds = ("no_reusable_prefix_plans", "standard_plans", "full_input_rewind_plans")
    counted = []
    for tokens in (prompt(8), [*prompt(8), 41], prompt(8), [*prompt(8), 42], prompt(8), prompt(8, 4), prompt(8, 5)):
        rig.run(tokens, 1)
        counted.append(tuple(getattr(rig.coordinator.metrics(), kind) for kind in kinds))
    assert counted == [(1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 2), (3, 2, 2)]


def test_planning_is_timed():
    rig = Rig()
    before = time.perf_counter_ns()
    rig.run(prompt(9), 1)
    assert 0 < rig.coordinator.metrics().planning_nanoseconds < time.perf_counter_ns() - before


def test_an_expiry_is_a_time_of_the_coordinators_clock():
    rig = Rig()
    assert rig.coordinator.expiry_in_use is False
    assert acquire.expiry_of(rig.coordinator, Retention()) == 0
    assert rig.coordinator.expiry_in_use is False
    assert acquire.expiry_of(rig.coordinator, Retention(ttl_seconds=5)) == 5_000_000_000
    assert rig.coordinator.expiry_in_use is True
    assert acquire.expiry_of(rig.coordinator, Retention(ttl_seconds=1e-12)) == 1  # 0 is never
    rig.clock.seconds = 2.5
    assert acquire.expiry_of(rig.coordinator, Retention(ttl_seconds=0.25)) == 2_750_000_000


def test_the_draft_headroom_of_one_token_is_leased():
    driver = driver_for("eagle")
    admission = driver.admission(prompt(8), ResidentRef(0, 1))
    headroom = DecodingKvHeadroom(1, 1)
    assert driver.coordinator.admit_sequence(driver.request, admission, headroom).status is OK
    lease = driver.request.impl.leases[0]
    assert (lease.num_base_pages, lease.num_draft_pages) == (3, 3)


def test_a_recurrent_sequence_is_covered_to_the_end_of_its_row():
    driver = driver_for("recurrent")
    driver.admit(prompt(8))
    lengths = driver.request.impl.lengths
    assert (int(lengths.coverage[0]), int(lengths.draft_coverage[0])) == (driver.coordinator.row_capacity_tokens, 0)


def test_a_lease_that_is_gone_is_let_go_of_in_silence():
    rig = Rig()
    handle = rig.container()
    rig.join(handle, prompt(6), 0, retention=Retention(ttl_seconds=5.0))
    sequence = handle.impl.sequences[0]
    sequence.lease.release()
    acquire.let_go(rig.coordinator, sequence)
    assert rig.free() == 16


def test_the_first_and_the_last_length_of_a_prompt_are_boundaries_and_its_whole_length_a_tail():
    rig = Rig()
    handle = rig.container()
    fields = {"replay_tail_length": 6, "checkpoint_boundaries": [1, 6]}
    assert rig.join(handle, prompt(6), 0, **fields).status is OK
    for fields in ({"replay_tail_length": 7}, {"checkpoint_boundaries": [0]}, {"checkpoint_boundaries": [7]}):
        with pytest.raises(InvalidArgumentError):
            rig.join(handle, prompt(6), 1, **fields)
    with pytest.raises(InvalidArgumentError, match=r"slot 4 is not in \[0, 4\)"):
        rig.join(handle, prompt(6), 4)
    for seconds in (True, False, "5", 0, -1.0):
        with pytest.raises(InvalidArgumentError, match="ttl_seconds"):
            rig.join(handle, prompt(6), 1, retention=Retention(ttl_seconds=seconds))
    assert handle.num_sequences == 1


def test_a_bypass_says_so_in_its_report():
    rig = Rig()
    rig.run(prompt(9), 1)
    report = rig.run(prompt(9), 1, lookup=ContextCacheLookupPolicy.BYPASS)[1]
    assert (report.reused_tokens, report.stop_reason, report.stop_position) == (0, ReuseStopReason.BYPASS, 0)


def test_a_mirror_is_sent_the_table_and_the_rows_that_changed():
    rig, sent = Rig(), []
    rig.mirror.upload_rows = lambda rows, slots: sent.append((rows, list(slots)))
    rig.join(rig.container(), prompt(6), 2)
    ((rows, slots),) = sent
    assert (rows.tolist(), slots) == (rig.table.rows.tolist(), [2])


def test_a_coordinator_is_built_of_what_it_is_given():
    driver, seen = driver_for("eagle"), []
    given = driver.coordinator
    mirror, draft_mirror = object(), object()

    class Policy(BaseEndpointPolicy):
        def __init__(self, coordinator):
            seen.append(coordinator)
            super().__init__(coordinator)

    common = (given.config, given.deployment, given.profile, given.resources, given.stream)
    registration = PolicyRegistration("test", Policy, lambda profile, spec: True, 0, "test")
    built = ContextCacheCoordinator(*common, policies=[registration], mirror=mirror, draft_mirror=draft_mirror)
    assert seen == [built, built]  # one for plain requests, one for speculative
    assert (built.rows.base._mirror, built.rows.draft._mirror) == (mirror, draft_mirror)
    loaded = ContextCacheCoordinator(
        ContextCacheConfig(),
        given.deployment,
        FLAVOURS["attention"],
        ContextCachePhysicalResources(
            base_cache=given.resources.base_cache, base_page_table=given.resources.base_page_table
        ),
        given.stream,
    )
    assert "base-endpoint" in {registration.name for registration in loaded.registrations}


def test_a_recurrent_deployment_writes_no_rows_even_of_a_table_that_it_is_given():
    rig, driver = Rig(), driver_for("recurrent")
    given = driver.coordinator
    table = KVPageTable(given.deployment.max_batch_size, given.deployment.pages_per_slot, 16)
    storage = given.resources.snapshot_storage
    resources = ContextCachePhysicalResources(base_cache=None, base_page_table=table, snapshot_storage=storage)
    common = (given.config, given.deployment, given.profile, resources, given.stream)
    assert ContextCacheCoordinator(*common, policies=all_policies()).rows.base is None
    assert rig.coordinator.rows.base.table is rig.table
    assert rig.container().refused_slot is None


def test_a_coordinator_dropped_with_live_requests_logs_their_number(caplog):
    rig = Rig()
    rig.coordinator.__del__()
    ContextCacheCoordinator.__new__(ContextCacheCoordinator).__del__()  # its constructor refused
    assert caplog.messages == []
    handle = rig.container()
    rig.coordinator.__del__()
    assert caplog.messages == ["a coordinator was dropped with 1 live requests"]
    rig.coordinator.finish(handle)


def test_a_collected_handle_marks_its_request_for_the_next_call():
    RequestHandle.__new__(RequestHandle).__del__()  # its constructor refused
    RequestHandle().__del__()  # holds no request
    rig = Rig()
    handle = rig.container()
    impl = handle.impl
    assert (impl.dropped, rig.coordinator._has_dropped) == (False, False)
    handle.__del__()
    assert (impl.dropped, rig.coordinator._has_dropped) == (True, True)
    other = rig.container()  # any call
    assert (rig.coordinator._has_dropped, rig.coordinator.active_requests) == (False, 1)
    rig.coordinator.finish(other)


def test_a_sequence_that_ends_at_a_whole_block_without_anything_new_publishes_nothing():
    rig = Rig()
    handle = joined(rig, 8)
    counted = rig.coordinator.metrics()
    assert counted.published_blocks == 2
    rig.decode(handle, completed=[0], hold=[0])
    assert rig.coordinator.metrics() == counted
    assert bool(handle.impl.lengths.sealed[0]) is False


def test_a_checkpoint_captured_behind_a_chunk_that_came_to_nothing_is_given_up():
    driver = driver_for("hybrid")
    driver.admit(prompt(9))
    coordinator, impl = driver.coordinator, driver.request.impl
    free = coordinator.manager.pools.recurrent.free_count
    assert coordinator.prepare_decode_step(driver.request, driver.headroom, []) is OK
    assert snapshots.reserve_capture(coordinator, impl, 0, 8, PublicationPoint.PREFILL_CHUNK) is True
    snapshots.enqueue_capture(coordinator, impl, 0)
    assert coordinator.manager.pools.recurrent.free_count == free - 1
    assert coordinator.complete_decode_step(driver.request, OneTokenAdvances([HOLD_TOKEN])) is OK
    assert impl.sequences[0].staged_hybrid_publication is None
    assert coordinator.manager.pools.recurrent.free_count == free


def test_a_policy_that_is_too_slow_loses_what_it_staged():
    config = ContextCacheConfig(policy_deadline_seconds=1.0)
    driver = ToyDriver(FLAVOURS["hybrid"], policies=all_policies(), config=config)
    driver.admit(prompt(9))
    coordinator, impl = driver.coordinator, driver.request.impl
    free = coordinator.manager.pools.recurrent.free_count
    assert snapshots.reserve_capture(coordinator, impl, 0, 8, PublicationPoint.PREFILL_CHUNK) is True
    for overruns in (1, 2, 3):
        charge_time(coordinator, impl, lambda: [0], 1_000_000_000)  # the whole deadline is in time
        charge_time(coordinator, impl, lambda: [0], 1_000_000_001)
        assert coordinator.metrics().policy_deadline_overruns == overruns
        assert bool(impl.lengths.silenced[0]) is (overruns == 3)
    assert impl.sequences[0].staged_hybrid_publication is None
    assert coordinator.manager.pools.recurrent.free_count == free


@pytest.mark.parametrize("token", [0, 1])
def test_any_token_needs_a_complete_prompt_that_goes_on(token):
    rig = Rig()
    handle = rig.container()
    rig.join(handle, prompt(6), 0)
    assert rig.coordinator.prepare_decode_step(handle, HEADROOM, []) is OK
    with pytest.raises(InvalidArgumentError, match=f"^slot 0 cannot accept token {token}: it has 6 tokens"):
        rig.coordinator.complete_decode_step(handle, OneTokenAdvances([token]))
    assert rig.coordinator.complete_decode_step(handle, OneTokenAdvances([HOLD_TOKEN])) is OK


def test_a_finished_prompt_is_not_prepared_again():
    rig = Rig()
    request = rig.begun(rig.admission(prompt(6), 0))
    rig.prefill(request)
    assert request.impl.has_pending_device_work() is False
    with pytest.raises(ContractViolation, match=r"^prepare_prefill needs an admitted request"):
        rig.coordinator.prepare_prefill(request)


def test_an_acquisition_says_what_became_of_it_and_keeps_nothing_back():
    rig = Rig(num_pages=2)
    how = {"lookup_policy": ContextCacheLookupPolicy.USE_CACHE, "headroom": HEADROOM, "speculative_request": False}
    fits = acquire.acquire_sequence(rig.coordinator, rig.admission(prompt(7), 0), **how)
    assert (fits.status, rig.free()) == (AcquireStatus.ACQUIRED, 0)
    refused = acquire.acquire_sequence(rig.coordinator, rig.admission(prompt(7), 1), **how)
    assert (refused.status, refused.lease) == (AcquireStatus.INSUFFICIENT_CAPACITY, None)
    fits.lease.release()


def test_a_batch_may_take_every_page_of_both_pools():
    config = ContextCacheConfig(policy_deadline_seconds=None)
    pools = {"num_pages": 3, "num_draft_pages": 3, "max_kv_capacity": 12}
    driver = ToyBatchDriver(FLAVOURS["eagle"], policies=all_policies(), config=config, **pools)
    assert driver.begin(prompt(6)) is not None  # 6 tokens and 4 of headroom in pages of 4
    pages = driver.coordinator.manager.pools
    assert (pages.base.free_count, pages.draft.free_count) == (0, 0)
    driver.abandon_batch()
    driver.close()


@pytest.mark.parametrize(("flavour", "pinned"), [("hybrid", False), ("mtp", True)])
def test_a_plain_checkpoint_taken_over_in_flight_is_unpinned_at_once(flavour, pinned):
    config = ContextCacheConfig(policy_deadline_seconds=None, checkpoint_interval_tokens=8)
    driver = ToyDriver(FLAVOURS[flavour], policies=all_policies(), config=config)
    first, second = (driver.admit(prompt(20)) for _ in range(2))
    driver.prefill_chunk(first, 16)
    assert driver.coordinator.rebind_prefill(driver.request, driver.index(second)) == 16
    lease = driver.request.sequence(driver.index(second)).lease
    assert (lease.recurrent_snapshot_slot is not None) is pinned


def test_the_ledger_counts_in_integers():
    lengths = Rig().container().impl.lengths
    kinds = {name: getattr(lengths, name).dtype.name for name in ("committed", "num_tokens", "coverage", "finalized")}
    assert kinds == {"committed": "int64", "num_tokens": "int64", "coverage": "int64", "finalized": "bool"}
