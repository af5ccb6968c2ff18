from collections.abc import Sequence
from types import TracebackType
from typing import Any, final

import numpy as np
import numpy.typing as npt

from edgellm._core.block_hash import TokenChain
from edgellm._core.block_index import BlockIndex
from edgellm._core.page_ledger import ResourcePools
from edgellm._core.planners import ReusePlan
from edgellm._core.records import RecordStore
from edgellm.cache.types import (
    AcquireStatus,
    CacheRecord,
    ContextCacheLookupPolicy,
    ContextCacheManagerMetrics,
    PublishStatus,
    RecordId,
    ResourceDemand,
    SpecReuseContract,
)

@final
class CacheRequestLease:
    manager: ContextCacheManager
    shared_block_count: int
    published_block_count: int
    rebound_page_count: int
    valid: bool
    def __enter__(self) -> CacheRequestLease: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def release(self) -> None: ...
    @property
    def mode(self) -> str: ...
    @property
    def num_base_pages(self) -> int: ...
    @property
    def base_pages(self) -> npt.NDArray[np.int32]: ...

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

@final
class ContextCacheManager:
    page_size: int
    pools: ResourcePools
    index: BlockIndex
    records: RecordStore
    spec_reuse_contract: SpecReuseContract | None
    def __init__(
        self,
        page_size: int,
        capacities: ResourceDemand,
        *,
        max_records: int | None = None,
        spec_reuse_contract: SpecReuseContract | None = None,
        hash_mask: int = ...,
    ) -> None: ...
    def plan(self, chain: TokenChain, lookup_policy: ContextCacheLookupPolicy = ...) -> ReusePlan: ...
    def acquire(self, plan: ReusePlan, *, min_tokens: int = 0, reserve_pages: int = 0) -> AcquireResult: ...
    def acquire_vanilla(
        self,
        chain: TokenChain,
        *,
        lookup_policy: ContextCacheLookupPolicy = ...,
        min_tokens: int = 0,
        reserve_pages: int = 0,
    ) -> AcquireResult: ...
    def release(self, lease: CacheRequestLease) -> None: ...
    def grow_base_pages(self, lease: CacheRequestLease, additional: int) -> bool: ...
    def ensure_base_pages(self, lease: CacheRequestLease, min_tokens: int) -> bool: ...
    def ensure_coverage(
        self, leases: list[CacheRequestLease], lengths: Sequence[int] | npt.NDArray[Any], extra: int
    ) -> int: ...
    def publish(
        self, lease: CacheRequestLease, chain: TokenChain, resident_state_length: int, *, make_record: bool
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
    def evict_record(self, record_id: int) -> None: ...
    def evict_all(self) -> int: ...
    @property
    def available_pages(self) -> int: ...
    @property
    def num_live_leases(self) -> int: ...
    def record(self, record_id: int) -> CacheRecord: ...
    def metrics(self) -> ContextCacheManagerMetrics: ...
    def check_invariants(self) -> None: ...
