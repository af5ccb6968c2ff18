"""Growing leases for the next step: vectorised test first, core calls only for sequences that need pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgellm.cache.types import DecodingKvHeadroom
from edgellm.errors import ContractViolation

if TYPE_CHECKING:
    import numpy.typing as npt

    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl


def grow_for_step(
    coordinator: ContextCacheCoordinator, impl: Impl, headroom: DecodingKvHeadroom, slots: Sequence[int] | None
) -> int | None:
    """Lease pages until `committed + headroom` positions are covered in both pools, and bind the rows that grew.

    Args:
        slots: participants in execution order; None means all that have not ended.
    Returns:
        None, or the first sequence that could not grow.  Growth of those before it stays.
    Raises:
        ContractViolation: a named slot is out of range or has ended.
    Effects: leases, host rows, coverage.  Nothing is uploaded.
    """
    lengths, size = impl.lengths, impl.lengths.size
    extra, draft_extra = headroom.base_extra_tokens, headroom.draft_extra_tokens
    short = lengths.committed[:size] + extra > lengths.coverage[:size]
    if draft_extra:
        short |= lengths.committed[:size] + draft_extra > lengths.draft_coverage[:size]
    short &= ~lengths.ended[:size] if slots is None else _participants(impl, slots)
    if not short.any():
        return None
    growing = np.flatnonzero(short)
    too_wide = lengths.committed[growing] + max(extra, draft_extra) > coordinator.row_capacity_tokens
    if too_wide.any():
        return int(growing[too_wide.argmax()])
    growing_slots: list[int] = growing.tolist()
    leases = [impl.leases[slot] for slot in growing_slots]
    coordinator.tell_time()
    try:
        refused = coordinator._manager.ensure_coverage(leases, lengths.committed[growing].tolist(), extra, draft_extra)
    except BaseException:  # out of memory in the middle: those in front have grown, and their rows follow
        _bind_grown(coordinator, impl, growing_slots)
        raise
    _bind_grown(coordinator, impl, growing_slots if refused < 0 else growing_slots[:refused])
    return None if refused < 0 else growing_slots[refused]


def _participants(impl: Impl, slots: Sequence[int]) -> npt.NDArray[np.bool_]:
    """(size,) mask of the named slots."""
    size = impl.lengths.size
    named = np.asarray(slots, dtype=np.int64)
    if len(named) and not (named.min() >= 0 and named.max() < size):
        raise ContractViolation(f"slots reach from {named.min()} to {named.max()}; the request has {size} sequences")
    ended = impl.lengths.ended[:size][named]
    if ended.any():
        raise ContractViolation(f"slot {int(named[ended.argmax()])} was reported as ended; it takes part in no step")
    mask = np.zeros(size, np.bool_)
    mask[named] = True
    return mask


def _bind_grown(coordinator: ContextCacheCoordinator, impl: Impl, grown: list[int]) -> None:
    page_size, rows, lengths = coordinator.page_size, coordinator.rows, impl.lengths
    for slot in grown:
        sequence = impl.sequences[slot]
        if rows.base is not None:
            held = int(lengths.coverage[slot]) // page_size
            lengths.coverage[slot] = rows.base.extend(sequence, held) * page_size
        if rows.draft is not None and sequence.lease.num_draft_pages:
            held = int(lengths.draft_coverage[slot]) // page_size
            lengths.draft_coverage[slot] = rows.draft.extend(sequence, held) * page_size
