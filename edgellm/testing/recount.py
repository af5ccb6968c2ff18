"""Recounting helpers: is every page accounted for, from the outside, after each step?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from edgellm.cache.types import ResourceType
from edgellm.errors import InvariantError

if TYPE_CHECKING:
    from edgellm._core.cache_manager import ContextCacheManager
    from edgellm.cache.coordinator import ContextCacheCoordinator


class PageCount(NamedTuple):
    """Pages of one pool by who holds them; the three always add up to the total.

    Attributes:
        leased: pages with an active reference (also cached or not).
        retained: pages that only the index holds.
    """

    free: int
    leased: int
    retained: int
    total: int


def count_pages(manager: ContextCacheManager, kind: ResourceType = ResourceType.BASE_KV_PAGE) -> PageCount:
    """Walk every page of a pool and its free list.

    Raises:
        InvariantError: the sum, the free list or a reference count is wrong.
    """
    pool = manager.pools.pool(kind)
    total = pool.capacity
    leased = [page for page in range(total) if pool.active_ref(page) > 0]
    retained = [page for page in range(total) if pool.active_ref(page) == 0 and pool.cache_ref(page) > 0]
    free = pool.free_list()
    if len(set(free)) != len(free):
        raise InvariantError(f"{kind.name}: a page is twice on the free list {free}")
    if sorted([*free, *leased, *retained]) != list(range(total)):
        raise InvariantError(
            f"{kind.name}: {len(free)} free + {len(leased)} leased + {len(retained)} retained != {total} pages"
        )
    if pool.free_count != len(free):
        raise InvariantError(f"{kind.name}: free count {pool.free_count}, the list has {len(free)}")
    return PageCount(len(free), len(leased), len(retained), total)


def recount(coordinator: ContextCacheCoordinator) -> PageCount:
    """Every invariant of coordinator and manager, then the base pool page by page."""
    coordinator.check_invariants()
    return count_pages(coordinator.manager)


def require_baseline(coordinator: ContextCacheCoordinator) -> PageCount:
    """Nobody is alive: no page leased, no slot occupied, every row empty.

    Raises:
        InvariantError: something was not given back.
    """
    counted = recount(coordinator)
    if coordinator.active_requests:
        raise InvariantError(f"{coordinator.active_requests} requests are still alive")
    if counted.leased:
        raise InvariantError(f"{counted.leased} of {counted.total} pages are still leased")
    return counted
