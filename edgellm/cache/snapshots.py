"""Recurrent state around the device: zeroing, restoring, capturing and publishing checkpoints.

Every copy is ordered on the coordinator's stream, before whatever is enqueued later; that is why a restored
checkpoint is unpinned as soon as its copies are enqueued.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgellm.cache.endpoints import record_publication, require_proven, require_slot, synchronize
from edgellm.cache.request import StagedHybridPublication
from edgellm.cache.types import (
    CheckpointKind,
    ContextCacheCoordinatorStatus,
    HybridCheckpointKey,
    PublicationPoint,
    ReusePlanMode,
)
from edgellm.errors import ContractViolation, InvalidArgumentError
from edgellm.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl, SequenceState

logger = get_logger(__name__)

_GENERATED = (PublicationPoint.DECODE_BLOCK, PublicationPoint.DECODE_END)


def storage_of(coordinator: ContextCacheCoordinator) -> Any:
    """The snapshot storage of a checkpoint deployment."""
    storage = coordinator.resources.snapshot_storage
    if storage is None:
        raise ContractViolation("this deployment keeps no recurrent checkpoints; deploy a hybrid or recurrent model")
    return storage


# --- restoring -------------------------------------------------------------------------------------------------


def prepare_state(coordinator: ContextCacheCoordinator, impl: Impl, slot: int) -> None:
    """Zero the resident's recurrent state, or restore the checkpoint its lease is bound to.

    The pins of a plain checkpoint go at once.  Those of an MTP lease stay, because its boundary hidden row is still to
    be restored: until its next checkpoint is published, or its prompt is complete.
    """
    sequence, storage = impl.sequences[slot], storage_of(coordinator)
    if sequence.lease.recurrent_snapshot_slot is None:
        storage.zero_recurrent(sequence.resident.slot)
        return
    restore_state(coordinator, sequence, sequence.reuse_token_length)
    if sequence.lease.mode is ReusePlanMode.HYBRID:
        release_restored(coordinator, impl, slot)


def restore_state(coordinator: ContextCacheCoordinator, sequence: SequenceState, length: int) -> None:
    """Enqueue the copies that make `sequence` stand at the checkpoint of `length` tokens."""
    storage, lease = storage_of(coordinator), sequence.lease
    storage.restore_recurrent(lease.recurrent_snapshot_slot, sequence.resident.slot)
    if lease.partial_kv_snapshot_slot is not None:
        storage.restore_partial_kv(lease.partial_kv_snapshot_slot, **_partial_page(coordinator, sequence, length))
    coordinator.counters.hybrid_restores += 1


def _partial_page(coordinator: ContextCacheCoordinator, sequence: SequenceState, length: int) -> dict[str, Any]:
    """The page that holds token `length - 1`, its draft twin for MTP leases, and how many of its tokens count."""
    page = (length - 1) // coordinator.page_size
    lease = sequence.lease
    paired = lease.mode is ReusePlanMode.HYBRID_MTP
    return {
        "base_page": int(lease.base_pages[page]),
        "draft_page": int(lease.draft_pages[page]) if paired else None,
        "valid_token_count": length - page * coordinator.page_size,
    }


def release_restored(coordinator: ContextCacheCoordinator, impl: Impl, slot: int) -> None:
    """Unpin the checkpoint a sequence was restored from.  Nothing where none is bound."""
    require_slot(impl, slot)
    coordinator._manager.release_restored_hybrid_snapshots(impl.leases[slot])


# --- capturing -------------------------------------------------------------------------------------------------


def reserve_hybrid_capture(
    coordinator: ContextCacheCoordinator, impl: Impl, slot: int, length: int, point: PublicationPoint
) -> bool:
    """Reserve snapshot slots for a plain checkpoint on behalf of a policy, at `length`, where the state stands.

    A hook that is given advances applies them first, and reserves for complete prompts; a hook about one sequence
    reserves for that one.  Of all others the device may hold more than the ledger says.

    Skips, returns and raises as `reserve_capture`.

    Raises:
        ContractViolation: the state of the sequence may stand elsewhere than its ledger says.
        InvalidArgumentError: `length` is not the committed length.
    """
    require_slot(impl, slot)
    if not _may_capture(impl, slot, length, point):
        return False
    _require_standing(impl, slot, length)
    return reserve_capture(coordinator, impl, slot, length, point)


def _require_standing(impl: Impl, slot: int, length: int) -> None:
    """The ledger of `slot` says `length`, and the device stands there."""
    step = impl.step
    unsettled = step is not None and not (step.applied and impl.lengths.finalized[slot])
    if unsettled or impl.hook_slot not in (None, slot):
        raise ContractViolation(
            f"slot {slot}: its state may be ahead of its ledger here; capture it after `apply`, or in its own hook"
        )
    committed = int(impl.lengths.committed[slot])
    if length != committed:
        raise InvalidArgumentError(f"slot {slot}: a checkpoint at {length}, and its state stands at {committed}")


def _may_capture(impl: Impl, slot: int, length: int, point: PublicationPoint) -> bool:
    lengths = impl.lengths
    allowed = lengths.publishes_generated if point in _GENERATED else lengths.publishes
    return bool(allowed[slot]) and length > impl.sequences[slot].published_exact_length


def reserve_capture(
    coordinator: ContextCacheCoordinator, impl: Impl, slot: int, length: int, point: PublicationPoint
) -> bool:
    """Reserve snapshot slots for a plain checkpoint at `length`, where a step that just ran left the state.

    Skipped for lookup bypass, for generated state under PREFILL_STATE_ONLY, when a checkpoint at least that long is
    published, and (counted) when the snapshot pools are busy.

    Returns:
        Whether a capture is staged now.
    Raises:
        ContractViolation: the slot is out of range, has an unpublished capture, or is an MTP lease.
        InvalidArgumentError: the state of the sequence does not stand at `length`.
    """
    require_slot(impl, slot)
    if not _may_capture(impl, slot, length, point):
        return False
    sequence, lengths = impl.sequences[slot], impl.lengths
    if sequence.lease.mode is not ReusePlanMode.HYBRID:
        raise ContractViolation(f"slot {slot} takes no plain checkpoint; its lease is {sequence.lease.mode.value}")
    if sequence.staged_hybrid_publication is not None:
        raise ContractViolation(f"slot {slot} has an unpublished checkpoint; publish it before capturing the next")
    committed = int(lengths.committed[slot])
    high = committed if point in _GENERATED else int(lengths.num_tokens[slot])
    if not committed <= length <= high:
        raise InvalidArgumentError(f"slot {slot}: a checkpoint at {length} must be from {committed} to {high}")
    return _stage(coordinator, sequence, length, point)


def _stage(coordinator: ContextCacheCoordinator, sequence: SequenceState, length: int, point: PublicationPoint) -> bool:
    needs_partial = coordinator.profile.has_attention and length % coordinator.page_size != 0
    coordinator.tell_time()
    reservation = coordinator._manager.reserve_hybrid_snapshots(sequence.lease, needs_partial)
    if reservation is None:
        count_pressure(coordinator)
        return False
    sequence.staged_hybrid_publication = StagedHybridPublication(exact_key(sequence, length), reservation, point)
    return True


def count_pressure(coordinator: ContextCacheCoordinator) -> None:
    """One checkpoint found no snapshot slot; logged at powers of two."""
    counters = coordinator.counters
    counters.hybrid_snapshot_pressure_skips += 1
    skips = counters.hybrid_snapshot_pressure_skips
    if skips & (skips - 1) == 0:
        logger.warning("%d checkpoints were skipped: all snapshots are in use; raise the snapshot budgets", skips)


def exact_key(sequence: SequenceState, length: int) -> HybridCheckpointKey:
    """Identity of exactly the first `length` tokens, media included."""
    return HybridCheckpointKey(sequence.chain.prefix_hash(length), length)


def enqueue_capture(coordinator: ContextCacheCoordinator, impl: Impl, slot: int) -> None:
    """Enqueue the copies of the staged checkpoint of `slot`, once."""
    sequence, storage = impl.sequences[slot], storage_of(coordinator)
    staged = sequence.staged_hybrid_publication
    if staged is None or staged.captured:
        return
    reservation = staged.snapshots
    storage.capture_recurrent(reservation.recurrent_snapshot_slot, sequence.resident.slot)
    if reservation.partial_kv_snapshot_slot is not None:
        page = _partial_page(coordinator, sequence, staged.checkpoint.exact_length)
        storage.capture_partial_kv(reservation.partial_kv_snapshot_slot, **page)
    coordinator._manager.mark_snapshots_written(sequence.lease, reservation)
    sequence.staged_hybrid_publication = replace(staged, captured=True)


def capture_staged(coordinator: ContextCacheCoordinator, impl: Impl) -> ContextCacheCoordinatorStatus:
    """Enqueue every staged copy and wait once for all of them; resolve without waiting when nothing is staged.

    Raises:
        ContractViolation, InvalidArgumentError: a state has moved on since it was reserved for.
    """
    staged = _staged_slots(impl)
    if not staged:
        impl.mark_device_work_resolved_without_sync()
        return ContextCacheCoordinatorStatus.OK
    for slot in staged:
        capture = impl.sequences[slot].staged_hybrid_publication
        if capture is not None and not capture.captured:
            _require_standing(impl, slot, capture.checkpoint.exact_length)
            enqueue_capture(coordinator, impl, slot)
    coordinator.counters.hybrid_capture_synchronizations += 1
    return synchronize(coordinator, impl)


def _staged_slots(impl: Impl) -> Sequence[int]:
    return [slot for slot, sequence in enumerate(impl.sequences) if sequence.staged_hybrid_publication is not None]


# --- publishing ------------------------------------------------------------------------------------------------


def publish_staged(coordinator: ContextCacheCoordinator, impl: Impl, slot: int) -> None:
    """Publish the captured checkpoint of `slot`, when there is one.

    Raises:
        ContractViolation: the sequence is not committed that far yet, or the copies were not enqueued.
    """
    require_slot(impl, slot)
    sequence, lengths = impl.sequences[slot], impl.lengths
    staged = sequence.staged_hybrid_publication
    if staged is None:
        return
    length = staged.checkpoint.exact_length
    if not staged.captured or length > int(lengths.committed[slot]):
        raise ContractViolation(
            f"slot {slot}: the checkpoint at {length} is not complete (captured: {staged.captured}, "
            f"committed: {int(lengths.committed[slot])}); capture and commit it first"
        )
    require_proven(impl, slot, length)
    lease, manager = sequence.lease, coordinator._manager
    base, draft = lease.rebound_page_count, lease.rebound_draft_page_count
    kind, keep = checkpoint_kind(sequence, length), lengths_to_keep(sequence)
    result = manager.publish_hybrid(lease, sequence.chain, length, staged.snapshots, kind=kind, keep_lengths=keep)
    manager.retire_hybrid_snapshot_reservation(lease, staged.snapshots)
    sequence.staged_hybrid_publication = None
    sequence.published_exact_length = length
    coordinator.rows.rebind_moved(sequence, base, draft)
    blocks = length // coordinator.page_size
    lengths.offered_blocks[slot] = max(int(lengths.offered_blocks[slot]), blocks)
    record_publication(coordinator.counters, result, is_endpoint=True)


def checkpoint_kind(sequence: SequenceState, length: int) -> CheckpointKind:
    """Why a checkpoint is where it is; that decides what may supersede it.

    The first of several named boundaries is taken for the end of the instructions that conversations share.
    """
    boundaries = sequence.template_boundaries
    if len(boundaries) > 1 and length == boundaries[0]:
        return CheckpointKind.ANCHOR
    stable_end = int(sequence.lengths.prompt[sequence.index]) - sequence.replay_tail_length
    if length in boundaries or length >= stable_end:
        return CheckpointKind.TAIL
    return CheckpointKind.BRANCH if length == sequence.branch_point else CheckpointKind.LADDER


def lengths_to_keep(sequence: SequenceState) -> tuple[int, ...]:
    """Checkpoints that the prompt's own new ones must not supersede: what the policy wants, ends excepted."""
    return tuple(
        length for length in sequence.wanted_checkpoints if checkpoint_kind(sequence, length) is not CheckpointKind.TAIL
    )


def drop_staged(coordinator: ContextCacheCoordinator, sequence: SequenceState) -> None:
    """Give up a staged checkpoint; its slots go back to their pools."""
    staged, sequence.staged_hybrid_publication = sequence.staged_hybrid_publication, None
    if staged is not None:
        coordinator._manager.retire_hybrid_snapshot_reservation(sequence.lease, staged.snapshots)
