from types import TracebackType
from typing import final

import numpy as np
import numpy.typing as npt

from edgellm._core.block_index import BlockIndex
from edgellm._core.draft_index import DraftIndex
from edgellm._core.page_ledger import ResourcePools
from edgellm._core.records import RecordStore
from edgellm.cache.types import BaseStateKind, ResourceDemand, RetentionPriority, ReusePlanMode, SpecReuseContract

@final
class CacheRequestLease:
    manager: CacheState
    mode: ReusePlanMode
    shared_block_count: int
    shared_draft_block_count: int
    published_block_count: int
    published_draft_block_count: int
    rebound_page_count: int
    rebound_draft_page_count: int
    tail_token_count: int
    volatile_from: int
    expiry: int
    sealed: bool
    valid: bool
    def __enter__(self) -> CacheRequestLease: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def release(self) -> None: ...
    @property
    def priority(self) -> RetentionPriority: ...
    @property
    def num_base_pages(self) -> int: ...
    @property
    def base_pages(self) -> npt.NDArray[np.int32]: ...
    @property
    def num_draft_pages(self) -> int: ...
    @property
    def draft_pages(self) -> npt.NDArray[np.int32]: ...
    @property
    def tail_source(self) -> int | None: ...
    @property
    def draft_tail_source(self) -> int | None: ...
    @property
    def recurrent_snapshot_slot(self) -> int | None: ...
    @property
    def partial_kv_snapshot_slot(self) -> int | None: ...

class CacheState:
    page_size: int
    pools: ResourcePools
    index: BlockIndex
    drafts: DraftIndex
    records: RecordStore
    spec_reuse_contract: SpecReuseContract | None
    base_state_kind: BaseStateKind
    def __init__(
        self,
        page_size: int,
        capacities: ResourceDemand,
        *,
        max_records: int | None = None,
        base_state_kind: BaseStateKind = ...,
        spec_reuse_contract: SpecReuseContract | None = None,
        hash_mask: int = ...,
    ) -> None: ...
    @property
    def available_pages(self) -> int: ...
    @property
    def available_draft_pages(self) -> int: ...
    @property
    def num_live_leases(self) -> int: ...
    def _fail_after(self, passes: int) -> None: ...
    @property
    def _allocation_points(self) -> int: ...
