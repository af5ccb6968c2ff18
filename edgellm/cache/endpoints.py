"""Endpoint helpers shared by the policies: what of a sequence is ready, and publishing it once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgellm.cache.types import PublicationPoint, PublishStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm._core.cache_manager import PublishResult
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.metrics import ContextCacheMetrics
    from edgellm.cache.request import Impl

_ENDPOINTS = (PublicationPoint.PREFILL_END, PublicationPoint.DECODE_END)
_GENERATED = (PublicationPoint.DECODE_BLOCK, PublicationPoint.DECODE_END)


def publish_ready_endpoint(
    coordinator: ContextCacheCoordinator, impl: Impl, slot: int, point: PublicationPoint
) -> None:
    """Publish the committed full blocks of one sequence, when `point` has something new to say.

    At prefill end and decode end the endpoint is also offered for retention.  Skipped for lookup bypass,
    for generated state under PREFILL_STATE_ONLY, and when nothing was completed since the last time.

    Where another sequence published a block first, the lease takes that page over and the row is bound again.

    Raises:
        InvariantError: the manager refused (nothing was changed), or the row could not be written again.
    """
    lengths = impl.lengths
    allowed = lengths.publishes_generated if point in _GENERATED else lengths.publishes
    if not allowed[slot]:
        return
    blocks = int(lengths.committed[slot]) // coordinator.page_size
    is_endpoint = point in _ENDPOINTS
    done = lengths.recorded_blocks if is_endpoint else lengths.published_blocks
    if blocks <= done[slot]:
        return
    lease = impl.leases[slot]
    rebound = lease.rebound_page_count
    result = coordinator.manager.publish(
        lease, impl.chains[slot], int(lengths.committed[slot]), make_record=is_endpoint
    )
    if lease.rebound_page_count != rebound:
        coordinator.rows.rebind(impl.sequences[slot])
    lengths.published_blocks[slot] = blocks
    if is_endpoint:
        lengths.recorded_blocks[slot] = blocks
    record_publication(coordinator.counters, result, is_endpoint=is_endpoint)


def publish_generated(coordinator: ContextCacheCoordinator, impl: Impl, completed_slots: Sequence[int]) -> None:
    """After a decode step: endpoints of ended sequences, and every generated block that became full."""
    for slot in completed_slots:
        publish_ready_endpoint(coordinator, impl, slot, PublicationPoint.DECODE_END)
    lengths, size = impl.lengths, impl.lengths.size
    due = lengths.committed[:size] >= (lengths.published_blocks[:size] + 1) * coordinator.page_size
    due &= lengths.publishes_generated[:size] & lengths.finalized[:size]
    if due.any():
        for slot in np.flatnonzero(due).tolist():
            publish_ready_endpoint(coordinator, impl, slot, PublicationPoint.DECODE_BLOCK)


def record_publication(counters: ContextCacheMetrics, result: PublishResult, *, is_endpoint: bool) -> None:
    """Count one publication."""
    counters.published_blocks += result.new_block_count
    if not is_endpoint:
        counters.block_publications += 1
        return
    counters.publication_attempts += 1
    counters.published_endpoints += 1
    if result.status is PublishStatus.EXISTING_RECORD:
        counters.existing_publications += 1
    else:
        counters.committed_publications += 1
