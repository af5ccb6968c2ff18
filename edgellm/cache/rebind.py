"""Rebinding an incomplete prompt to blocks that another sequence published after its admission."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edgellm.cache.types import ContextCacheLookupPolicy

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
    shared_before = sequence.lease.shared_block_count
    known = coordinator.manager.rebind(sequence.lease, sequence.chain)
    if sequence.lease.shared_block_count != shared_before:
        coordinator.rows.bind([sequence])
        coordinator.rows.upload()
        lengths.published_blocks[slot] = sequence.lease.published_block_count
    if known <= committed:
        return committed
    gained = known - committed
    report = sequence.reuse_report
    sequence.reuse_report = replace(
        report,
        reused_tokens=report.reused_tokens + gained,
        matched_tokens=max(report.matched_tokens, known),
        stop_position=max(report.stop_position, known),
    )
    lengths.committed[slot] = lengths.common[slot] = known
    coordinator.counters.rebound_tokens += gained
    return known
