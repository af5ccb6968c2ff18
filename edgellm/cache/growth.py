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
    """Lease pages until `committed + headroom` positions are covered, and bind the rows that grew.

    Args:
        slots: participants in execution order; None means all.
    Returns:
        None, or the first sequence that could not grow.  Growth of those before it stays.
    Effects: leases, host rows, coverage.  Nothing is uploaded.
    """
    lengths, size = impl.lengths, impl.lengths.size
    extra = headroom.base_extra_tokens
    short = lengths.committed[:size] + extra > lengths.coverage[:size]
    if slots is not None:
        short &= _participants(slots, size)
    if not short.any():
        return None
    growing = np.flatnonzero(short)
    too_wide = lengths.committed[growing] + extra > coordinator.row_capacity_tokens
    if too_wide.any():
        return int(growing[too_wide.argmax()])
    growing_slots: list[int] = growing.tolist()
    leases = [impl.leases[slot] for slot in growing_slots]
    refused = coordinator.manager.ensure_coverage(leases, lengths.committed[growing].tolist(), extra)
    grown = growing_slots if refused < 0 else growing_slots[:refused]
    _bind_grown(coordinator, impl, grown)
    return None if refused < 0 else growing_slots[refused]


def _participants(slots: Sequence[int], size: int) -> npt.NDArray[np.bool_]:
    """(size,) mask of the named slots."""
    named = np.asarray(slots, dtype=np.int64)
    if len(named) and not (named.min() >= 0 and named.max() < size):
        raise ContractViolation(f"slots reach from {named.min()} to {named.max()}; the request has {size} sequences")
    mask = np.zeros(size, np.bool_)
    mask[named] = True
    return mask


def _bind_grown(coordinator: ContextCacheCoordinator, impl: Impl, grown: list[int]) -> None:
    coverage = impl.lengths.coverage
    for slot in grown:
        pages = impl.leases[slot].base_pages
        held = int(coverage[slot]) // coordinator.page_size
        coordinator.rows.extend(impl.sequences[slot], held, pages[held:])
        coverage[slot] = len(pages) * coordinator.page_size
