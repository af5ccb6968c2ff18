"""Planners: what is reused and what would be evicted (behaviours 31 to 45 for attention-only requests).

The tree changes the eviction rules: victims are blocks, not records, and always leaves.  33 (a shared page): the
shared block is an ancestor and goes last.  34 (pinned page): a held block is no victim at all, so nothing useless is
evicted before a useful one.  36 (protected record): what a plan is about to share is held, so it is exempt, not last
resort (69 in `test_cache_manager.py`).  37 concerns draft pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edgellm._core.block_hash import TokenChain
from edgellm._core.block_index import BlockIndex
from edgellm._core.cache_manager import CacheRequestLease, ContextCacheManager
from edgellm._core.planners import EvictionPlan, plan_eviction, plan_vanilla_reuse
from edgellm.cache.types import ContextCacheLookupPolicy, ResourceDemand, ReusePlanKind, ReuseStopReason
from edgellm.errors import InvalidArgumentError

P = 4
BYPASS = ContextCacheLookupPolicy.BYPASS


def chain(tokens: Sequence[int], page_size: int = P) -> TokenChain:
    out = TokenChain(page_size)
    out.extend(tokens)
    return out


def index_with(num_blocks: int) -> BlockIndex:
    """Blocks of the prompt 0, 1, 2 .. on pages 0, 1, 2 .."""
    index = BlockIndex(P, 8)
    for i in range(num_blocks):
        index.insert(chain(range(num_blocks * P)), i, i)
    return index


def cached(manager: ContextCacheManager, tokens: Sequence[int], *, release: bool = True) -> CacheRequestLease:
    """Run a prompt through the cache: its full blocks are published with a record."""
    prompt = chain(tokens)
    lease = manager.acquire_vanilla(prompt).lease
    assert lease is not None
    manager.publish(lease, prompt, len(tokens), make_record=True)
    if release:
        lease.release()
    return lease


def manager_of(pages: int) -> ContextCacheManager:
    return ContextCacheManager(P, ResourceDemand(base_kv_pages=pages))


def demand(pages: int) -> ResourceDemand:
    return ResourceDemand(base_kv_pages=pages)


@pytest.mark.parametrize(
    ("behaviour", "cached_blocks", "num_tokens", "kind", "matched", "reuse", "need", "stop", "position"),
    [
        (39, 0, 10, "NO_REUSABLE_PREFIX", 0, 0, 3, "NO_RECORD", 0),
        (40, 2, 9, "STANDARD", 8, 8, 1, "FULL", 8),
        (41, 2, 8, "FULL_INPUT_REWIND", 8, 4, 1, "FULL", 8),
        (42, 1, 4, "FULL_INPUT_REWIND", 4, 0, 1, "FULL", 4),
        (44, 2, 0, "STANDARD", 0, 0, 0, "FULL", 0),
        (45, 2, 3, "NO_REUSABLE_PREFIX", 0, 0, 1, "NO_RECORD", 0),
        (45, 1, 12, "STANDARD", 4, 4, 2, "NO_RECORD", 4),
        (45, 3, 11, "STANDARD", 8, 8, 1, "FULL", 8),
    ],
)
def test_vanilla_plan(
    behaviour: int,
    cached_blocks: int,
    num_tokens: int,
    kind: str,
    matched: int,
    reuse: int,
    need: int,
    stop: str,
    position: int,
) -> None:
    index = index_with(cached_blocks)
    prompt = chain(range(num_tokens))
    plan = plan_vanilla_reuse(index, prompt)
    assert plan.kind is ReusePlanKind[kind], behaviour
    assert (plan.matched_token_length, plan.reuse_token_length) == (matched, reuse)
    assert plan.demand == demand(need)
    assert plan.base_page_bindings.tolist() == list(range(reuse // P))
    assert plan.matched_block_hashes == [prompt.hash_at(i) for i in range(reuse // P)]
    assert (plan.stop_reason, plan.stop_position) == (ReuseStopReason[stop], position)
    assert (plan.num_tokens, plan.total_pages, plan.mode) == (num_tokens, -(-num_tokens // P), "vanilla")
    assert index.size == cached_blocks
    index.check_invariants()


def test_43_bypass_looks_at_nothing() -> None:
    plan = plan_vanilla_reuse(index_with(2), chain(range(9)), lookup_policy=BYPASS)
    assert plan.kind is ReusePlanKind.NO_REUSABLE_PREFIX
    assert (plan.matched_token_length, plan.reuse_token_length, plan.demand) == (0, 0, demand(3))
    assert plan.base_page_bindings.tolist() == plan.matched_block_hashes == []
    assert (plan.stop_reason, plan.stop_position) == (ReuseStopReason.BYPASS, 0)


def test_44_bad_arguments() -> None:
    index, prompt = index_with(2), chain(range(9))
    for bad in (-1, 10):
        with pytest.raises(InvalidArgumentError, match=f"cannot plan {bad} tokens of a chain that has 9"):
            plan_vanilla_reuse(index, prompt, num_tokens=bad)
    with pytest.raises(InvalidArgumentError, match="page size 2, the cache 4"):
        plan_vanilla_reuse(index, chain(range(9), 2))
    with pytest.raises(InvalidArgumentError, match="must be a ContextCacheLookupPolicy"):
        plan_vanilla_reuse(index, prompt, lookup_policy="use_cache")  # type: ignore[arg-type]


def test_plan_of_a_leading_part() -> None:
    index, prompt = index_with(2), chain(range(9))
    assert plan_vanilla_reuse(index, prompt, num_tokens=8).kind is ReusePlanKind.FULL_INPUT_REWIND
    assert plan_vanilla_reuse(index, prompt, num_tokens=7).reuse_token_length == 4
    assert plan_vanilla_reuse(index, prompt, num_tokens=0).kind is ReusePlanKind.STANDARD


def test_stop_reason_tells_evicted_from_never_seen() -> None:
    index, prompt = index_with(3), chain(range(13))
    index.erase_page(2)
    plan = plan_vanilla_reuse(index, prompt)
    assert (plan.stop_reason, plan.stop_position) == (ReuseStopReason.EVICTED, 8)
    other = plan_vanilla_reuse(index, chain([*range(8), 77, 78, 79, 80, 81]))
    assert (other.stop_reason, other.stop_position) == (ReuseStopReason.NO_RECORD, 8)


@pytest.mark.parametrize("length", range(1, 14))
def test_stop_reason_is_full_exactly_when_all_that_can_be_reused_was(length: int) -> None:
    """At least one token runs again, so the last page of an aligned prompt is never reused, known or not."""
    plan = plan_vanilla_reuse(index_with(2), chain(range(length)))
    reusable = (length - 1) // P * P
    assert plan.reuse_token_length == min(reusable, 8)
    assert (plan.stop_reason is ReuseStopReason.FULL) == (plan.matched_token_length > 0 and reusable <= 8)


def test_31_enough_free_pages_need_no_victim() -> None:
    manager = manager_of(4)
    cached(manager, range(8))
    assert plan_eviction(demand(2), manager.pools, manager.index) == EvictionPlan(True, (), ResourceDemand())


def test_32_victims_come_in_lru_order() -> None:
    manager = manager_of(3)
    for n in range(3):
        cached(manager, [n] * P)
    assert plan_eviction(demand(2), manager.pools, manager.index) == EvictionPlan(True, (0, 1), demand(2))
    # A full match recomputes its page (taken from block 0), yet refreshes the block that is known already.
    cached(manager, [1] * P)
    assert manager.pools.base.free_list() == [0]
    assert plan_eviction(demand(3), manager.pools, manager.index).victims == (2, 1)


def test_33_shared_block_goes_after_both_branches() -> None:
    manager = manager_of(3)
    cached(manager, [0, 1, 2, 3, 4, 4, 4, 4])
    cached(manager, [0, 1, 2, 3, 5, 5, 5, 5])
    assert plan_eviction(demand(1), manager.pools, manager.index) == EvictionPlan(True, (1,), demand(1))
    assert plan_eviction(demand(3), manager.pools, manager.index).victims == (1, 2, 0)


def test_34_held_blocks_are_no_victims() -> None:
    manager = manager_of(2)
    held = cached(manager, [0] * P, release=False)
    cached(manager, [1] * P)
    assert plan_eviction(demand(1), manager.pools, manager.index) == EvictionPlan(True, (1,), demand(1))
    held.release()
    assert plan_eviction(demand(2), manager.pools, manager.index).victims == (1, 0)


def test_35_everything_held_is_infeasible_and_changes_nothing() -> None:
    manager = manager_of(2)
    lease = cached(manager, range(8), release=False)
    assert plan_eviction(demand(1), manager.pools, manager.index) == EvictionPlan(False, (), ResourceDemand())
    assert manager.index.size == 2
    lease.release()


def test_other_pools_have_nothing_to_evict_yet() -> None:
    manager = manager_of(2)
    assert plan_eviction(ResourceDemand(draft_kv_pages=1), manager.pools, manager.index).feasible is False


def test_38_negative_demand_is_refused() -> None:
    manager = manager_of(2)
    with pytest.raises(InvalidArgumentError, match="0 or more in every pool"):
        plan_eviction(demand(-1), manager.pools, manager.index)
