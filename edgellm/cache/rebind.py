"""Rebinding an incomplete prompt to blocks that another sequence published after its admission."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edgellm.cache.types import ContextCacheLookupPolicy, ReuseReport, ReuseStopReason

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl


def rebind_prefill(coordinator: ContextCacheCoordinator, impl: Impl, slot: int) -> int:
    """Let `slot` share blocks that the index knows by now, in place of its own private pages.

    Returns:
        The committed length afterwards; never less than before.
    Effects: lease, row, committed length and reuse report of `slot`; nothing where nothing was found.
    """
    lengths, sequence = impl.lengths, impl.sequences[slot]
    committed = int(lengths.committed[slot])
    if sequence.lookup_policy is ContextCacheLookupPolicy.BYPASS:
        return committed
    rebound = sequence.lease.rebound_page_count
    known = coordinator.manager.rebind(sequence.lease, sequence.chain)
    if sequence.lease.rebound_page_count != rebound:
        coordinator.rows.rebind(sequence)
        lengths.published_blocks[slot] = sequence.lease.published_block_count
    if known <= committed:
        return committed
    gained = known - committed
    sequence.reuse_report = _report_after(sequence.reuse_report, gained, known, coordinator.page_size)
    lengths.committed[slot] = lengths.common[slot] = known
    coordinator.counters.rebound_tokens += gained
    return known


def _report_after(report: ReuseReport, gained: int, known: int, page_size: int) -> ReuseReport:
    """The reuse report once a producer in flight gave more; FULL when nothing reusable is left."""
    complete = known >= (report.prompt_tokens - 1) // page_size * page_size
    return replace(
        report,
        reused_tokens=report.reused_tokens + gained,
        matched_tokens=max(report.matched_tokens, known),
        stop_reason=ReuseStopReason.FULL if complete else report.stop_reason,
        stop_position=max(report.stop_position, known),
    )
