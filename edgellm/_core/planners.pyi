from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from edgellm._core.block_hash import TokenChain
from edgellm._core.block_index import BlockIndex
from edgellm._core.draft_index import DraftIndex
from edgellm._core.page_ledger import ResourcePools
from edgellm.cache.types import (
    ContextCacheLookupPolicy,
    Hash128,
    HybridCheckpointKey,
    RecordId,
    ResourceDemand,
    ReusePlanKind,
    ReusePlanMode,
    ReuseStopReason,
)

@final
class ReusePlan:
    chain: TokenChain
    num_tokens: int
    matched_token_length: int
    reuse_token_length: int
    known_token_length: int
    total_pages: int
    stop_position: int
    tail_token_count: int
    replayed_token_count: int
    namespace_known: bool
    mode: ReusePlanMode
    kind: ReusePlanKind
    stop_reason: ReuseStopReason
    hybrid_record: RecordId | None
    hybrid_checkpoint: HybridCheckpointKey | None
    @property
    def base_page_bindings(self) -> npt.NDArray[np.int32]: ...
    @property
    def draft_page_bindings(self) -> npt.NDArray[np.int32]: ...
    @property
    def matched_block_hashes(self) -> list[Hash128]: ...
    @property
    def tail_source(self) -> int | None: ...
    @property
    def draft_tail_source(self) -> int | None: ...
    @property
    def recurrent_snapshot_binding(self) -> int | None: ...
    @property
    def partial_kv_snapshot_binding(self) -> int | None: ...
    @property
    def demand(self) -> ResourceDemand: ...

def plan_vanilla_reuse(
    index: BlockIndex,
    chain: TokenChain,
    *,
    lookup_policy: ContextCacheLookupPolicy = ...,
    num_tokens: int | None = None,
) -> ReusePlan: ...

@dataclass(frozen=True, slots=True)
class EvictionPlan:
    feasible: bool
    victims: tuple[int, ...]
    reclaimed: ResourceDemand
    draft_victims: tuple[int, ...] = ...

def plan_eviction(
    demand: ResourceDemand, pools: ResourcePools, index: BlockIndex, drafts: DraftIndex | None = None
) -> EvictionPlan: ...
