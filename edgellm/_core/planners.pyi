from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from edgellm._core.block_hash import TokenChain
from edgellm._core.block_index import BlockIndex
from edgellm._core.page_ledger import ResourcePools
from edgellm.cache.types import ContextCacheLookupPolicy, Hash128, ResourceDemand, ReusePlanKind, ReuseStopReason

@final
class ReusePlan:
    chain: TokenChain
    num_tokens: int
    matched_token_length: int
    reuse_token_length: int
    total_pages: int
    stop_position: int
    kind: ReusePlanKind
    stop_reason: ReuseStopReason
    @property
    def mode(self) -> str: ...
    @property
    def base_page_bindings(self) -> npt.NDArray[np.int32]: ...
    @property
    def matched_block_hashes(self) -> list[Hash128]: ...
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

def plan_eviction(demand: ResourceDemand, pools: ResourcePools, index: BlockIndex) -> EvictionPlan: ...
