"""Hybrid with MTP: the checkpoint at the stable predecessor boundary, with the hidden row that its successor needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgellm.cache.endpoints import record_publication, require_slot, synchronize
from edgellm.cache.snapshots import checkpoint_kind, count_pressure, lengths_to_keep, release_restored, storage_of
from edgellm.cache.types import ContextCacheCoordinatorStatus, ReusePlanMode
from edgellm.errors import ContractViolation, InvalidArgumentError

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl, SequenceState
    from edgellm.cache.types import HybridSnapshotReservation

Status = ContextCacheCoordinatorStatus


def check_boundary(impl: Impl, slot: int, length: int, row: int) -> None:
    """Arguments of a boundary publication.

    Raises:
        ContractViolation: the slot is out of range, or the request has no MTP lease.
        InvalidArgumentError: a negative row, or a length beyond the prompt (beyond the state, once that is complete).
    """
    require_slot(impl, slot)
    if impl.leases[slot].mode is not ReusePlanMode.HYBRID_MTP:
        raise ContractViolation(f"slot {slot} is no MTP sequence; begin its request with speculative_request=True")
    lengths = impl.lengths
    limit = int((lengths.committed if lengths.finalized[slot] else lengths.num_tokens)[slot])
    if row < 0:
        raise InvalidArgumentError(f"boundary_hidden_row is {row}; rows start at 0")
    if length > limit:
        raise InvalidArgumentError(f"slot {slot}: a boundary at {length} is beyond its {limit} tokens")


def _require_asked(impl: Impl, slot: int, length: int | None, hidden_states: Any, row: int) -> None:
    """A policy does what the runtime asked for in this very call: only there is the state at that length."""
    call = impl.boundary_call
    if call is None or not call.same_as(slot, length, hidden_states, row):
        raise ContractViolation(
            f"slot {slot}: a policy may publish or restore only the MTP boundary that its hook was called for"
        )


def publish_boundary(
    coordinator: ContextCacheCoordinator,
    impl: Impl,
    slot: int,
    length: int,
    base_hidden_states: Any,
    boundary_hidden_row: int,
) -> ContextCacheCoordinatorStatus:
    """Capture recurrent state, the paired partial pages and the hidden row at `length`; wait once; publish.

    Skipped (OK) for lookup bypass, for generated state under PREFILL_STATE_ONLY, a length of 0 or one already
    published, and (counted) under snapshot pressure.

    Args:
        base_hidden_states: (sequences, rows, hidden) tensor; row `[slot, boundary_hidden_row]` is position length - 1.
    Returns:
        OK, or POISONED when the wait failed; then the drain of the request decides.
    Raises:
        ContractViolation: this is not what the runtime asked for.
    """
    require_slot(impl, slot)
    _require_asked(impl, slot, length, base_hidden_states, boundary_hidden_row)
    sequence = impl.sequences[slot]
    lengths = impl.lengths
    allowed = lengths.publishes_generated if length > int(lengths.prompt[slot]) else lengths.publishes
    if not allowed[slot] or length <= max(0, sequence.published_exact_length):
        return Status.OK
    # The slot may be evicted and captured anew below: every restore from it was enqueued before, on the same stream.
    release_restored(coordinator, impl, slot)
    coordinator.tell_time()
    reservation = coordinator._manager.reserve_hybrid_snapshots(sequence.lease, True)
    if reservation is None:
        count_pressure(coordinator)
        return Status.OK
    manager = coordinator._manager
    try:
        status = _capture(coordinator, impl, slot, length, reservation, base_hidden_states, boundary_hidden_row)
        if status is Status.OK:
            _publish(coordinator, impl, slot, length, reservation)
    except BaseException:
        manager.retire_hybrid_snapshot_reservation(sequence.lease, reservation)
        raise
    if status is Status.OK:  # otherwise the device may still write there: the lease keeps it until it is drained
        manager.retire_hybrid_snapshot_reservation(sequence.lease, reservation)
    return status


def _capture(
    coordinator: ContextCacheCoordinator,
    impl: Impl,
    slot: int,
    length: int,
    reservation: HybridSnapshotReservation,
    base_hidden_states: Any,
    row: int,
) -> ContextCacheCoordinatorStatus:
    sequence, storage = impl.sequences[slot], storage_of(coordinator)
    lease, recurrent = sequence.lease, reservation.recurrent_snapshot_slot
    page = (length - 1) // coordinator.page_size
    storage.capture_recurrent(recurrent, sequence.resident.slot)
    storage.capture_partial_kv(
        reservation.partial_kv_snapshot_slot,
        base_page=int(lease.base_pages[page]),
        draft_page=int(lease.draft_pages[page]),
        valid_token_count=length - page * coordinator.page_size,
    )
    storage.capture_boundary_hidden(recurrent, base_hidden_states[slot], row)
    coordinator._manager.mark_snapshots_written(lease, reservation)
    return _wait(coordinator, impl)


def _wait(coordinator: ContextCacheCoordinator, impl: Impl) -> ContextCacheCoordinatorStatus:
    """One wait in the middle of a step, which is as pending afterwards as it was before."""
    pending = impl.has_pending_device_work()
    coordinator.counters.hybrid_capture_synchronizations += 1
    status = synchronize(coordinator, impl)
    if pending:
        impl.mark_device_work_enqueued()
    return status


def _publish(
    coordinator: ContextCacheCoordinator,
    impl: Impl,
    slot: int,
    length: int,
    reservation: HybridSnapshotReservation,
) -> None:
    sequence, lengths = impl.sequences[slot], impl.lengths
    lease = sequence.lease
    base, draft = lease.rebound_page_count, lease.rebound_draft_page_count
    kind, keep = checkpoint_kind(sequence, length), lengths_to_keep(sequence)
    result = coordinator._manager.publish_hybrid_mtp(
        lease, sequence.chain, length, reservation, kind=kind, keep_lengths=keep
    )
    sequence.published_exact_length = length
    coordinator.rows.rebind_moved(sequence, base, draft)
    blocks = (length - 1) // coordinator.page_size
    lengths.offered_blocks[slot] = max(int(lengths.offered_blocks[slot]), blocks)
    record_publication(coordinator.counters, result, is_endpoint=True)


def restore_boundary(
    coordinator: ContextCacheCoordinator, impl: Impl, slot: int, base_hidden_states: Any, destination_row: int
) -> ContextCacheCoordinatorStatus:
    """Copy the saved hidden row to `[slot, destination_row, :]`, in stream order, without waiting.

    Raises:
        ContractViolation: this is not what the runtime asked for, or nothing is bound to the sequence any more.
    """
    require_slot(impl, slot)
    _require_asked(impl, slot, None, base_hidden_states, destination_row)
    sequence = impl.sequences[slot]
    check_restorable(sequence, destination_row)
    copy_hidden_row(coordinator, sequence.lease.recurrent_snapshot_slot, base_hidden_states[slot], destination_row)
    sequence.boundary_restored = True
    return Status.OK


def copy_hidden_row(
    coordinator: ContextCacheCoordinator, snapshot_slot: int | None, hidden_states: Any, row: int
) -> None:
    """Enqueue the copy of a saved hidden row into `hidden_states[row]`."""
    storage_of(coordinator).restore_boundary_hidden(snapshot_slot, hidden_states, row)


def check_restorable(sequence: SequenceState, destination_row: int) -> None:
    """A checkpoint is bound and the row is a row."""
    if sequence.lease.recurrent_snapshot_slot is None:
        raise ContractViolation("no checkpoint is bound to the sequence: it began cold, or a publication released it")
    if destination_row < 0:
        raise InvalidArgumentError(f"destination_row is {destination_row}; rows start at 0")
