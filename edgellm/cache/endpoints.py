"""Endpoint helpers of the policies: what of a sequence is ready, and publishing it once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgellm.cache.types import ContextCacheCoordinatorStatus, PublicationPoint, PublishStatus, ReusePlanMode
from edgellm.errors import ContractViolation, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm._core.cache_manager import PublishResult
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.metrics import ContextCacheMetrics
    from edgellm.cache.request import Impl

_ENDPOINTS = (PublicationPoint.PREFILL_END, PublicationPoint.DECODE_END)


def synchronize(coordinator: ContextCacheCoordinator, impl: Impl) -> ContextCacheCoordinatorStatus:
    """Wait for the request's stream on behalf of a policy.

    A failed wait poisons: whether the device still writes is unknown, and the drain of the request decides.
    """
    if coordinator._quarantine.drain(impl):
        impl.lengths.draft_unproven[: impl.lengths.size] = False
        return ContextCacheCoordinatorStatus.OK
    coordinator._quarantine.poison("a stream could not be drained")
    return ContextCacheCoordinatorStatus.POISONED


def publish_ready_endpoint(
    coordinator: ContextCacheCoordinator, impl: Impl, slot: int, point: PublicationPoint
) -> None:
    """Publish the committed full blocks of one sequence, when `point` has something new to say.

    At prefill end and decode end the endpoint is also offered for retention; at decode end the unfilled last page
    is kept too and the lease is sealed.  Checkpoint deployments publish blocks only: their endpoints are
    checkpoints.  Skipped for lookup bypass, for generated state under PREFILL_STATE_ONLY, and when nothing was
    completed since the last time.

    Where another sequence published a block first, the lease takes that page over and the row is bound again.

    Raises:
        ContractViolation: the slot is out of range, has draft state (use `publish_spec_endpoint`), or did not end.
        InvariantError: the row could not be written again.
    """
    require_slot(impl, slot)
    if impl.leases[slot].mode is ReusePlanMode.SPEC:
        raise ContractViolation(f"slot {slot} has draft state; publish it with publish_spec_endpoint")
    publish_blocks(coordinator, impl, slot, int(impl.lengths.common[slot]), point)


def publish_generated(coordinator: ContextCacheCoordinator, impl: Impl, completed_slots: Sequence[int]) -> None:
    """After a decode step: endpoints of ended sequences, and every block that became full.

    One rule for every flavour: it goes by the common length, which equals the committed one without draft state.
    A frozen prefill is not proven complete yet, so its sequence waits (one that ends before its first verification
    is published when the request is terminalized).
    """
    for slot in completed_slots:
        require_slot(impl, slot)
        if impl.sequences[slot].frozen_spec_prefill_length is None:
            publish_blocks(coordinator, impl, slot, int(impl.lengths.common[slot]), PublicationPoint.DECODE_END)
    lengths, size = impl.lengths, impl.lengths.size
    due = lengths.common[:size] >= (lengths.offered_blocks[:size] + 1) * coordinator.page_size
    due &= lengths.publishes_generated[:size] & lengths.finalized[:size] & ~lengths.sealed[:size]
    if due.any():
        for slot in np.flatnonzero(due).tolist():
            publish_blocks(coordinator, impl, slot, int(lengths.common[slot]), PublicationPoint.DECODE_BLOCK)


def publish_blocks(
    coordinator: ContextCacheCoordinator, impl: Impl, slot: int, length: int, point: PublicationPoint
) -> None:
    """Publish the full blocks below `length`, of base and (paired draft, no checkpoints) draft.

    The lengths were checked.

    Raises:
        ContractViolation: decode end of a sequence that goes on: sealing its lease would end it.
    """
    lengths = impl.lengths
    if point is PublicationPoint.DECODE_END and not lengths.ended[slot]:
        raise ContractViolation(f"slot {slot} was not reported as ended; publish what it completed as DECODE_BLOCK")
    if not lengths.publishes[slot] or lengths.sealed[slot]:
        return
    if impl.sequences[slot].frozen_spec_prefill_length is not None:
        return  # nobody has proven its draft complete yet; the step or wait that does will publish
    if not lengths.publishes_generated[slot] and point in (PublicationPoint.DECODE_BLOCK, PublicationPoint.DECODE_END):
        if point is PublicationPoint.DECODE_BLOCK:
            return
        length = min(length, int(lengths.prompt[slot]))  # the prompt's own unfilled page may still be kept
    checkpoints = coordinator.profile.uses_checkpoint_reuse
    blocks, into = divmod(length, coordinator.page_size)
    retain_tail = point is PublicationPoint.DECODE_END and into > 0 and not checkpoints
    is_endpoint = point in _ENDPOINTS and not checkpoints and blocks > int(lengths.recorded_blocks[slot])
    if not (is_endpoint or retain_tail or blocks > int(lengths.offered_blocks[slot])):
        return
    _offer(coordinator, impl, slot, length, make_record=is_endpoint, retain_tail=retain_tail)


def _offer(
    coordinator: ContextCacheCoordinator, impl: Impl, slot: int, length: int, *, make_record: bool, retain_tail: bool
) -> None:
    """One publication through the manager, the rows it moved, the ledger and the counters."""
    lease, lengths, manager = impl.leases[slot], impl.lengths, coordinator._manager
    require_proven(impl, slot, length)
    paired = lease.mode is ReusePlanMode.SPEC
    publish = manager.publish_spec if paired else manager.publish
    base, draft = lease.rebound_page_count, lease.rebound_draft_page_count
    result = publish(lease, impl.chains[slot], length, make_record=make_record, retain_tail=retain_tail)
    coordinator.rows.rebind_moved(impl.sequences[slot], base, draft)
    blocks = length // coordinator.page_size
    lengths.offered_blocks[slot] = max(int(lengths.offered_blocks[slot]), blocks)
    lengths.sealed[slot] = lease.sealed
    if make_record:
        lengths.recorded_blocks[slot] = blocks
        coordinator.counters.spec_pair_publications += paired
    record_publication(coordinator.counters, result, is_endpoint=make_record)


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


def require_proven(impl: Impl, slot: int, length: int) -> None:
    """The runtime reported the state of `slot` as final up to `length`, whatever the ledger says by now.

    Raises:
        InvalidArgumentError: it did not; the policy moved the ledger by other means than its helpers.
    """
    if impl.lengths.draft_unproven[slot]:
        raise InvalidArgumentError(f"slot {slot}: the draft pass over its prompt is not proven complete; freeze it")
    proven = int(impl.lengths.proven[slot])
    if length > proven:
        raise InvalidArgumentError(f"slot {slot}: {length} tokens were to be published, and {proven} are final")


def require_slot(impl: Impl, slot: int) -> None:
    """A policy named a sequence that exists.

    Raises:
        ContractViolation: it is out of range.
    """
    if not 0 <= slot < len(impl.sequences):
        raise ContractViolation(f"slot {slot} is out of range; the request has {len(impl.sequences)} sequences")
