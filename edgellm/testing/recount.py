"""Recounting helpers: is every page and every snapshot accounted for, from the outside, after each step?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from edgellm.cache.types import ResourceType
from edgellm.errors import InvariantError

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator


class PageCount(NamedTuple):
    """Units of one pool by who holds them; the three always add up to the total.

    Attributes:
        leased: units with an active reference (also cached or not).
        retained: units that only the index holds.
    """

    free: int
    leased: int
    retained: int
    total: int


@dataclass(frozen=True, slots=True)
class Recount:
    """All four pools, counted unit by unit."""

    base: PageCount
    draft: PageCount
    recurrent: PageCount
    partial: PageCount

    @property
    def pools(self) -> tuple[PageCount, PageCount, PageCount, PageCount]:
        return self.base, self.draft, self.recurrent, self.partial

    @property
    def free(self) -> int:
        return self.base.free

    @property
    def leased(self) -> int:
        return self.base.leased

    @property
    def retained(self) -> int:
        return self.base.retained

    @property
    def total(self) -> int:
        return self.base.total


def count_pages(manager: Any, kind: ResourceType = ResourceType.BASE_KV_PAGE) -> PageCount:
    """Walk every unit of a pool and its free list.

    Args:
        manager: a `ContextCacheManager`, or the coordinator's view of one.
    Raises:
        InvariantError: the sum, the free list or a reference count is wrong.
    """
    pool = manager.pools.pool(kind)
    total = pool.capacity
    free = pool.free_list()
    leased, retained = [], []
    for unit in range(total):
        if pool.active_ref(unit) > 0:
            leased.append(unit)
        elif pool.cache_ref(unit) > 0:
            retained.append(unit)
    if len(set(free)) != len(free):
        raise InvariantError(f"{kind.name}: a unit is twice on the free list {free}")
    if sorted([*free, *leased, *retained]) != list(range(total)):
        raise InvariantError(
            f"{kind.name}: {len(free)} free + {len(leased)} leased + {len(retained)} retained != {total} units"
        )
    if pool.free_count != len(free):
        raise InvariantError(f"{kind.name}: free count {pool.free_count}, the list has {len(free)}")
    return PageCount(len(free), len(leased), len(retained), total)


def count_all(manager: Any) -> Recount:
    """`count_pages` of the four pools."""
    return Recount(*(count_pages(manager, kind) for kind in ResourceType))


def recount(coordinator: ContextCacheCoordinator) -> Recount:
    """Every invariant of coordinator and manager, then the four pools unit by unit."""
    coordinator.check_invariants()
    return count_all(coordinator.manager)


def require_baseline(coordinator: ContextCacheCoordinator) -> Recount:
    """Nobody is alive: nothing leased in any pool, no slot occupied, every row empty.

    Raises:
        InvariantError: something was not given back.
    """
    counted = recount(coordinator)
    if coordinator.active_requests:
        raise InvariantError(f"{coordinator.active_requests} requests are still alive")
    for kind, count in zip(ResourceType, counted.pools, strict=True):
        if count.leased:
            raise InvariantError(f"{kind.name}: {count.leased} of {count.total} units are still leased")
    return counted
