"""Planners: pure functions that decide what is reused and what would be evicted.  They change nothing."""

cimport cython

from edgellm._core.block_hash cimport TokenChain, to_hash128
from edgellm._core.block_index cimport BlockIndex
from edgellm._core.page_ledger cimport ResourcePools

import numpy as np

from dataclasses import dataclass

from edgellm.cache.types import (
    ContextCacheLookupPolicy,
    ResourceDemand,
    ResourceType,
    ReusePlanKind,
    ReuseStopReason,
)
from edgellm.errors import InvalidArgumentError

cdef object _USE_CACHE = ContextCacheLookupPolicy.USE_CACHE
cdef object _BYPASS_POLICY = ContextCacheLookupPolicy.BYPASS
cdef object _STANDARD = ReusePlanKind.STANDARD
cdef object _NO_PREFIX = ReusePlanKind.NO_REUSABLE_PREFIX
cdef object _REWIND = ReusePlanKind.FULL_INPUT_REWIND
cdef object _FULL = ReuseStopReason.FULL
cdef object _NO_RECORD = ReuseStopReason.NO_RECORD
cdef object _EVICTED = ReuseStopReason.EVICTED
cdef object _BYPASS = ReuseStopReason.BYPASS


@cython.final
cdef class ReusePlan:
    """What one prompt reuses and what it must be given.  Immutable from Python.

    Attributes:
        chain: the prompt it was made for (shared, not copied).
        num_tokens: n, length of the planned prompt.
        matched_token_length: leading tokens the cache knew; a multiple of the page size.
        reuse_token_length: where prefill starts; at most matched, and below n for n > 0.
        total_pages: ceil(n / page size).
        kind: `ReusePlanKind`.
        stop_reason, stop_position: why matching stopped, and at which token.
    """

    @property
    def mode(self):
        return "vanilla"

    @property
    def base_page_bindings(self):
        """(shared blocks,) int32 pages that will be shared, first block first; a copy."""
        return np.array(self.bindings, dtype=np.int32)

    @property
    def matched_block_hashes(self):
        """`Hash128` of each bound block."""
        return [to_hash128(self.chain.hashes[i]) for i in range(self.bindings.size())]

    @property
    def demand(self):
        """Pages that must be allocated beside the bindings."""
        return ResourceDemand(base_kv_pages=self.total_pages - <Py_ssize_t>self.bindings.size())

    def __repr__(self):
        return (f"ReusePlan(num_tokens={self.num_tokens}, matched={self.matched_token_length}, "
                f"reuse={self.reuse_token_length}, kind={self.kind}, stop={self.stop_reason}@{self.stop_position})")


cdef ReusePlan make_vanilla_plan(BlockIndex index, TokenChain chain, Py_ssize_t num_tokens, object lookup_policy):
    cdef ReusePlan plan = ReusePlan.__new__(ReusePlan)
    cdef Py_ssize_t page_size = index.core.page_size
    cdef Py_ssize_t full_blocks = num_tokens // page_size
    cdef Py_ssize_t matched = 0
    if lookup_policy is not _USE_CACHE and lookup_policy is not _BYPASS_POLICY:
        raise InvalidArgumentError(f"lookup policy {lookup_policy!r} must be a ContextCacheLookupPolicy")
    if chain.page_size != page_size:
        raise InvalidArgumentError(f"the chain has page size {chain.page_size}, the cache {page_size}; make them equal")
    plan.chain = chain
    plan.num_tokens = num_tokens
    plan.total_pages = (num_tokens + page_size - 1) // page_size
    plan.kind = _STANDARD if num_tokens == 0 else _NO_PREFIX
    if lookup_policy is _BYPASS_POLICY:
        plan.stop_reason = _BYPASS
        return plan
    plan.bindings.resize(full_blocks)
    if full_blocks:
        matched = index.match(chain, index.find_namespace(chain.key_bytes), 0, full_blocks, plan.bindings.data())
        plan.bindings.resize(matched)
    plan.matched_token_length = plan.stop_position = matched * page_size
    if num_tokens == 0 or (matched and matched >= (num_tokens - 1) // page_size):
        plan.stop_reason = _FULL    # all that can be reused: at least one token runs again
    else:
        plan.stop_reason = _EVICTED if full_blocks and index.was_evicted(chain.hashes[matched]) else _NO_RECORD
    if matched and matched == plan.total_pages:
        # The whole prompt is known, but its last token must run again to give logits: recompute its page.
        plan.bindings.pop_back()
        plan.kind = _REWIND
    elif matched:
        plan.kind = _STANDARD
    plan.reuse_token_length = <Py_ssize_t>plan.bindings.size() * page_size
    return plan


def plan_vanilla_reuse(
    BlockIndex index not None, TokenChain chain not None, *, lookup_policy=ContextCacheLookupPolicy.USE_CACHE,
    num_tokens=None
):
    """Plan the reuse of an attention-only prompt without speculation.

    Args:
        chain: the prompt; its page size is the index's.
        num_tokens: plan only for this many leading tokens of `chain`; None for all.
    Returns:
        `ReusePlan`.  A fully known prompt that ends on a page boundary gives up its last page
        (`FULL_INPUT_REWIND`), because at least one token must be computed.
    Raises:
        InvalidArgumentError: page sizes differ, unknown policy, or `num_tokens` is outside the chain.
    Effects: none (pure).  Cost: O(matched blocks), one vector.
    """
    if num_tokens is None:
        num_tokens = chain.token_count()
    if not 0 <= num_tokens <= chain.token_count():
        raise InvalidArgumentError(f"cannot plan {num_tokens} tokens of a chain that has {chain.token_count()}")
    return make_vanilla_plan(index, chain, num_tokens, lookup_policy)


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """Which cached blocks would go.

    Attributes:
        feasible: whether free pages and victims together meet the demand.
        victims: pages of the blocks that would be evicted, in that order; empty when infeasible.
        reclaimed: units that would become free.
    """

    feasible: bool
    victims: tuple
    reclaimed: ResourceDemand


def plan_eviction(demand, ResourcePools pools not None, BlockIndex index not None):
    """Which blocks an allocation of `demand` would evict: from the front of the LRU list, always leaves.

    Returns:
        `EvictionPlan`; the shortest front of the list that meets the demand.  Blocks that a lease holds are not in
        the list, so they never count.
    Raises:
        InvalidArgumentError: negative demand.
    Effects: none (pure).  Cost: O(victims); an allocation itself needs only the length of the list.
    """
    if not demand.is_non_negative():
        raise InvalidArgumentError(f"a demand must be 0 or more in every pool, got {demand}")
    short = demand.base_kv_pages - pools.base.free_count
    others_fit = all(
        demand.get(kind) <= pools.free_count(kind) for kind in ResourceType if kind is not ResourceType.BASE_KV_PAGE)
    if not others_fit or short > index.lru_size:
        return EvictionPlan(False, (), ResourceDemand())
    victims = tuple(index.eviction_order()[:max(0, short)])
    return EvictionPlan(True, victims, ResourceDemand(base_kv_pages=len(victims)))
