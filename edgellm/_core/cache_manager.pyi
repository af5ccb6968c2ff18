from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy.typing as npt

from edgellm._core.block_hash import TokenChain
from edgellm._core.cache_state import CacheRequestLease as CacheRequestLease
from edgellm._core.cache_state import CacheState
from edgellm._core.planners import ReusePlan
from edgellm.cache.types import (
    AcquireStatus,
    CacheRecord,
    CheckpointKind,
    ContextCacheLookupPolicy,
    ContextCacheManagerMetrics,
    HybridSnapshotReservation,
    PublishStatus,
    RecordId,
    RetentionPriority,
)

@final
class AcquireResult:
    lease: CacheRequestLease | None
    status: AcquireStatus
    plan: ReusePlan

@final
class PublishResult:
    status: PublishStatus
    record: RecordId | None
    published_block_count: int
    new_block_count: int
    published_draft_block_count: int
    new_draft_block_count: int
    retained_tail_tokens: int

@final
class ContextCacheManager(CacheState):
    def plan(
        self, chain: TokenChain, lookup_policy: ContextCacheLookupPolicy = ..., *, speculative: bool = False
    ) -> ReusePlan: ...
    def acquire(
        self,
        plan: ReusePlan,
        *,
        min_tokens: int = 0,
        draft_min_tokens: int = 0,
        reserve_pages: int = 0,
        draft_reserve_pages: int = 0,
        priority: RetentionPriority = ...,
        expiry: int = 0,
    ) -> AcquireResult: ...
    def acquire_vanilla(
        self,
        chain: TokenChain,
        *,
        lookup_policy: ContextCacheLookupPolicy = ...,
        min_tokens: int = 0,
        draft_min_tokens: int = 0,
        reserve_pages: int = 0,
    ) -> AcquireResult: ...
    def acquire_spec(
        self,
        chain: TokenChain,
        *,
        lookup_policy: ContextCacheLookupPolicy = ...,
        min_tokens: int = 0,
        draft_min_tokens: int = 0,
        reserve_pages: int = 0,
    ) -> AcquireResult: ...
    def acquire_hybrid(
        self,
        chain: TokenChain,
        *,
        lookup_policy: ContextCacheLookupPolicy = ...,
        min_tokens: int = 0,
        draft_min_tokens: int = 0,
        reserve_pages: int = 0,
    ) -> AcquireResult: ...
    def acquire_hybrid_mtp(
        self,
        chain: TokenChain,
        *,
        lookup_policy: ContextCacheLookupPolicy = ...,
        min_tokens: int = 0,
        draft_min_tokens: int = 0,
        reserve_pages: int = 0,
    ) -> AcquireResult: ...
    def release(self, lease: CacheRequestLease) -> None: ...
    def release_tail_source(self, lease: CacheRequestLease) -> None: ...
    def release_restored_hybrid_snapshots(self, lease: CacheRequestLease) -> None: ...
    def grow_base_pages(self, lease: CacheRequestLease, additional: int) -> bool: ...
    def grow_spec_pages(self, lease: CacheRequestLease, base_additional: int, draft_additional: int) -> bool: ...
    def ensure_base_pages(self, lease: CacheRequestLease, min_tokens: int) -> bool: ...
    def ensure_coverage(
        self,
        leases: list[CacheRequestLease],
        lengths: Sequence[int] | npt.NDArray[Any],
        extra: int,
        draft_extra: int = 0,
    ) -> int: ...
    def publish(
        self,
        lease: CacheRequestLease,
        chain: TokenChain,
        resident_state_length: int,
        *,
        make_record: bool,
        retain_tail: bool = False,
    ) -> PublishResult: ...
    def publish_spec(
        self,
        lease: CacheRequestLease,
        chain: TokenChain,
        common_state_length: int,
        *,
        make_record: bool,
        retain_tail: bool = False,
    ) -> PublishResult: ...
    def append_tokens(
        self,
        leases: list[CacheRequestLease],
        chains: list[TokenChain],
        tokens: Any,
        publish: bool,
        *,
        lookahead: int = 1,
    ) -> int: ...
    def rebind(self, lease: CacheRequestLease, chain: TokenChain) -> int: ...
    def reserve_hybrid_snapshots(
        self, lease: CacheRequestLease, needs_partial: bool
    ) -> HybridSnapshotReservation | None: ...
    def mark_snapshots_written(self, lease: CacheRequestLease, reservation: HybridSnapshotReservation) -> None: ...
    def retire_hybrid_snapshot_reservation(
        self, lease: CacheRequestLease, reservation: HybridSnapshotReservation
    ) -> None: ...
    def publish_hybrid(
        self,
        lease: CacheRequestLease,
        chain: TokenChain,
        exact_length: int,
        reservation: HybridSnapshotReservation,
        *,
        kind: CheckpointKind = ...,
        keep_lengths: Iterable[int] = (),
    ) -> PublishResult: ...
    def publish_hybrid_mtp(
        self,
        lease: CacheRequestLease,
        chain: TokenChain,
        exact_length: int,
        reservation: HybridSnapshotReservation,
        *,
        kind: CheckpointKind = ...,
        keep_lengths: Iterable[int] = (),
    ) -> PublishResult: ...
    def rebind_checkpoint(self, lease: CacheRequestLease, chain: TokenChain, committed: int) -> int: ...
    def set_now(self, now_ns: int) -> None: ...
    def expire(self) -> int: ...
    def note_withheld(self, chain: TokenChain, block_idx: int) -> None: ...
    def set_expiry(self, lease: CacheRequestLease, expiry: int) -> None: ...
    def set_volatile_from(self, lease: CacheRequestLease, position: int) -> None: ...
    def evict_record(self, record_id: int) -> None: ...
    def evict_all(self) -> int: ...
    def record(self, record_id: int) -> CacheRecord: ...
    def metrics(self) -> ContextCacheManagerMetrics: ...
    def check_counts(self) -> None: ...
    def check_invariants(self) -> None: ...
