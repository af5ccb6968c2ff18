"""Rebinding an incomplete prompt to state that another sequence published after its admission."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edgellm.cache import snapshots
from edgellm.cache.types import ContextCacheLookupPolicy, ReusePlanMode, ReuseReport, ReuseStopReason

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl


def rebind_prefill(coordinator: ContextCacheCoordinator, impl: Impl, slot: int) -> int:
    """Let `slot` share what the index knows by now: blocks, or (checkpoint deployments) a deeper checkpoint.

    An MTP sequence that moved needs its boundary hidden row again (`restore_hybrid_mtp_boundary_hidden`), as after
    admission; its checkpoint stays pinned as long, and while it is, there is no looking again.

    Returns:
        The committed length afterwards; never less than before.
    Effects: lease, row, committed length and reuse report of `slot`; nothing where nothing was found.
    """
    lengths, sequence = impl.lengths, impl.sequences[slot]
    committed, lease = int(lengths.committed[slot]), sequence.lease
    if sequence.lookup_policy is ContextCacheLookupPolicy.BYPASS or lease.recurrent_snapshot_slot is not None:
        return committed
    checkpoints = coordinator.profile.uses_checkpoint_reuse
    base, draft = lease.rebound_page_count, lease.rebound_draft_page_count
    if checkpoints:
        known = coordinator._manager.rebind_checkpoint(lease, sequence.chain, committed)
    else:
        known = coordinator._manager.rebind(lease, sequence.chain)
    if coordinator.rows.rebind_moved(sequence, base, draft):
        lengths.offered_blocks[slot] = max(int(lengths.offered_blocks[slot]), lease.published_block_count)
    if known <= committed:
        return committed
    if checkpoints:
        impl.mark_copies_enqueued()
        snapshots.restore_state(coordinator, sequence, known)
    if lease.mode is ReusePlanMode.HYBRID:
        snapshots.release_restored(coordinator, impl, slot)
    gained = known - committed
    sequence.reuse_report = _report_after(sequence.reuse_report, gained, known, coordinator.page_size)
    lengths.committed[slot] = lengths.common[slot] = lengths.proven[slot] = known
    coordinator.counters.rebound_tokens += gained
    return known


def _report_after(report: ReuseReport, gained: int, known: int, page_size: int) -> ReuseReport:
    """The reuse report once a producer in flight gave more; FULL when no whole block is left to share."""
    complete = known >= (report.prompt_tokens - 1) // page_size * page_size
    return replace(
        report,
        reused_tokens=report.reused_tokens + gained,
        matched_tokens=max(report.matched_tokens, known),
        stop_reason=ReuseStopReason.FULL if complete else report.stop_reason,
        stop_position=max(report.stop_position, known),
    )
