"""`ManagerView`: the cache manager for reading.  What policies, sessions, tests and tools may look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgellm.errors import ContractViolation

if TYPE_CHECKING:
    from edgellm._core.block_hash import TokenChain
    from edgellm._core.cache_manager import ContextCacheManager
    from edgellm._core.planners import ReusePlan
    from edgellm.cache.types import (
        BaseStateKind,
        CacheRecord,
        ContextCacheLookupPolicy,
        ContextCacheManagerMetrics,
        ResourceDemand,
        ResourceType,
    )


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_POOL = _names("capacity free_count active_ref cache_ref is_free free_list check_invariants")
_INDEX = _names(
    """page_size capacity size tail_count lru_size class_sizes now num_namespaces lookup_prefix partial_match
    partial_candidates cover_of prefix_tail_of hash_of parent_of child_count children_of tails_of token_count_of
    depth_of priority_of expiry_of class_of volatile_from_of tokens_of path_of evicted withheld eviction_order
    check_invariants"""
)
_DRAFTS = _names(
    """capacity size lru_size class_sizes base_of parent_of child_count successor_of token_count_of priority_of
    class_of drafts_of find_draft path_of eviction_order check_invariants"""
)
_RECORDS = _names(
    """size max_records checkpoint_count checkpoint_capacity page_size stale_checkpoint stale_partial
    checkpoint_class_sizes node key hybrid_key exact_length recurrent_slot partial_slot draft_node mtp kind owner
    superseded priority_of expiry_of class_of tail_tokens tail_media records_at checkpoint_at best_checkpoint
    candidate_lengths lru_to_mru checkpoint_order partial_order check_invariants"""
)


class ReadOnly:
    """A core object of which only the named members are reachable."""

    __slots__ = ("_allowed", "_target")

    def __init__(self, target: Any, allowed: frozenset[str]) -> None:
        self._target = target
        self._allowed = allowed

    def __getattr__(self, name: str) -> Any:
        if name not in self._allowed:
            raise ContractViolation(
                f"{type(self._target).__name__}.{name} is not for reading; the view offers {sorted(self._allowed)}"
            )
        return getattr(self._target, name)

    def __len__(self) -> int:
        return len(self._target)

    def __contains__(self, item: object) -> bool:
        return item in self._target


class PoolsView:
    """The resource pools for reading."""

    __slots__ = ("_pools",)

    def __init__(self, pools: Any) -> None:
        self._pools = pools

    @property
    def base(self) -> ReadOnly:
        return ReadOnly(self._pools.base, _POOL)

    @property
    def draft(self) -> ReadOnly:
        return ReadOnly(self._pools.draft, _POOL)

    @property
    def recurrent(self) -> ReadOnly:
        return ReadOnly(self._pools.recurrent, _POOL)

    @property
    def partial(self) -> ReadOnly:
        return ReadOnly(self._pools.partial, _POOL)

    @property
    def capacities(self) -> ResourceDemand:
        capacities: ResourceDemand = self._pools.capacities
        return capacities

    def pool(self, kind: ResourceType) -> ReadOnly:
        """One pool."""
        return ReadOnly(self._pools.pool(kind), _POOL)

    def free_count(self, kind: ResourceType) -> int:
        return int(self._pools.free_count(kind))

    def capacity(self, kind: ResourceType) -> int:
        return int(self._pools.capacity(kind))


class ManagerView:
    """Everything of `ContextCacheManager` that changes nothing."""

    __slots__ = ("_manager",)

    def __init__(self, manager: ContextCacheManager) -> None:
        self._manager = manager

    @property
    def page_size(self) -> int:
        return self._manager.page_size

    @property
    def base_state_kind(self) -> BaseStateKind:
        return self._manager.base_state_kind

    @property
    def available_pages(self) -> int:
        """Base pages that are free or may be evicted."""
        return self._manager.available_pages

    @property
    def available_draft_pages(self) -> int:
        """Draft pages that are free or may be evicted."""
        return self._manager.available_draft_pages

    @property
    def num_live_leases(self) -> int:
        return self._manager.num_live_leases

    @property
    def pools(self) -> PoolsView:
        return PoolsView(self._manager.pools)

    @property
    def index(self) -> ReadOnly:
        return ReadOnly(self._manager.index, _INDEX)

    @property
    def drafts(self) -> ReadOnly:
        return ReadOnly(self._manager.drafts, _DRAFTS)

    @property
    def records(self) -> ReadOnly:
        return ReadOnly(self._manager.records, _RECORDS)

    def plan(
        self, chain: TokenChain, lookup_policy: ContextCacheLookupPolicy, *, speculative: bool = False
    ) -> ReusePlan:
        """What a request with these tokens would reuse now.  Pure."""
        return self._manager.plan(chain, lookup_policy, speculative=speculative)

    def record(self, record_id: int) -> CacheRecord:
        return self._manager.record(record_id)

    def metrics(self) -> ContextCacheManagerMetrics:
        return self._manager.metrics()

    def check_invariants(self) -> None:
        self._manager.check_invariants()

    def check_counts(self) -> None:
        self._manager.check_counts()
