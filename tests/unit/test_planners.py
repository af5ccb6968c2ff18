"""Planners: what is reused and what would be evicted (behaviours 31 to 66).

The rules are those of the block tree with token-granular reuse; docs/block-tree.md lists where they differ from the
numbered text and why.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manager_rig import (
    BYPASS,
    A,
    B,
    C,
    D,
    P,
    Run,
    cached,
    chain,
    checkpointed,
    hybrid,
    mtp,
    pure,
    snapshot,
    spec,
    vanilla,
)

from edgellm._core.block_hash import TokenChain
from edgellm._core.block_index import BlockIndex
from edgellm._core.cache_manager import ContextCacheManager
from edgellm._core.planners import EvictionPlan, ReusePlan, plan_eviction, plan_vanilla_reuse
from edgellm.cache.deployment import resolve_spec_reuse_contract
from edgellm.cache.types import (
    Hash128,
    HybridCheckpointKey,
    ResourceDemand,
    ReusePlanKind,
    ReusePlanMode,
    ReuseStopReason,
    SpecReuseContract,
)
from edgellm.errors import InvalidArgumentError


def index_with(num_blocks: int) -> BlockIndex:
    """Blocks of the prompt 0, 1, 2 .. on pages 0, 1, 2 .."""
    index = BlockIndex(P, 8)
    for i in range(num_blocks):
        index.insert(chain(range(num_blocks * P)), i, i)
    return index


def demand(pages: int, drafts: int = 0) -> ResourceDemand:
    return ResourceDemand(pages, drafts)


def evictions(manager: ContextCacheManager, pages: int, drafts: int = 0) -> EvictionPlan:
    return plan_eviction(demand(pages, drafts), manager.pools, manager.index, manager.drafts)


def lengths(plan: ReusePlan) -> tuple[int, int, int]:
    """Matched, reused, and of those copied."""
    return plan.matched_token_length, plan.reuse_token_length, plan.tail_token_count


def stop(plan: ReusePlan) -> tuple[str, int]:
    return plan.stop_reason.value, plan.stop_position


# D. Eviction


def test_31_enough_free_pages_need_no_victim() -> None:
    manager = vanilla(4)
    cached(manager, range(8))
    assert evictions(manager, 2) == EvictionPlan(True, (), ResourceDemand())


def test_32_victims_come_in_lru_order() -> None:
    manager = vanilla(3)
    for n in range(3):
        cached(manager, [n] * P)
    assert evictions(manager, 2) == EvictionPlan(True, (0, 1), demand(2))
    # A full match copies its page (into that of block 0), yet refreshes the block that is known already.
    cached(manager, [1] * P)
    assert manager.pools.base.free_list() == [0]
    assert evictions(manager, 3).victims == (2, 1)


def test_33_shared_block_goes_after_both_branches() -> None:
    manager = vanilla(3)
    cached(manager, [*A, *B])
    cached(manager, [*A, *C])
    assert evictions(manager, 1) == EvictionPlan(True, (1,), demand(1))
    assert evictions(manager, 3).victims == (1, 2, 0)


def test_34_held_blocks_are_no_victims() -> None:
    manager = vanilla(2)
    held = Run(manager, A)
    held.publish()
    cached(manager, B)
    assert evictions(manager, 1) == EvictionPlan(True, (1,), demand(1))
    held.release()
    assert evictions(manager, 2).victims == (1, 0)


def test_35_everything_held_is_infeasible_and_changes_nothing() -> None:
    manager = vanilla(2)
    held = Run(manager, range(8))
    held.publish()
    before = snapshot(manager)
    assert evictions(manager, 1) == EvictionPlan(False, (), ResourceDemand())
    assert snapshot(manager) == before


def test_36_what_a_plan_shares_is_exempt_not_last_resort() -> None:
    manager = vanilla(3)
    cached(manager, A)  # LRU
    cached(manager, B)
    run = Run(manager, [*A, *C, 1])
    assert run.pages == [0, 2, 1]
    assert 0 in manager.index
    # When even that does not suffice, the request is refused; its hit is never eaten.
    run.release()
    assert manager.acquire_vanilla(chain([*A, *C, *D, 1])).lease is None
    assert 0 in manager.index


def test_37_draft_pages_are_evicted_from_their_own_order() -> None:
    manager = spec(6, 3)
    Run(manager, [*C, 1], speculative=False).release()
    cached(manager, [*A, 1], speculative=True)
    cached(manager, [*B, 1], speculative=True)
    assert manager.drafts.eviction_order() == [0, 2]
    plan = evictions(manager, 0, 2)
    assert plan == EvictionPlan(True, (), demand(0, 1), (0,))
    assert Run(manager, [*C, *C], speculative=True).drafts == [1, 0]
    assert manager.index.size == 2  # the base block of the evicted draft stays
    manager.check_invariants()


def test_37_draft_nodes_go_with_their_base_block() -> None:
    manager = spec(2, 4)
    cached(manager, [*A, 1], speculative=True)
    assert evictions(manager, 2) == EvictionPlan(True, (0,), demand(1, 1))
    Run(manager, [*C, *C], speculative=False)
    assert (manager.index.size, manager.drafts.size) == (0, 0)
    assert manager.metrics().reclaimed_draft_kv_pages == 1


def test_38_negative_demand_is_refused() -> None:
    manager = vanilla(2)
    with pytest.raises(InvalidArgumentError, match="0 or more in every pool"):
        evictions(manager, -1)
    assert plan_eviction(ResourceDemand(0, 0, 1), manager.pools, manager.index).feasible is False


# E. Attention


@pytest.mark.parametrize(
    ("cached_blocks", "num_tokens", "kind", "matched", "reuse", "need", "reason", "position"),
    [
        pytest.param(0, 10, "NO_REUSABLE_PREFIX", 0, 0, 3, "no_record", 0, id="39"),
        pytest.param(2, 9, "STANDARD", 8, 8, 1, "full", 8, id="40"),
        pytest.param(2, 8, "FULL_INPUT_REWIND", 8, 7, 1, "full", 8, id="41"),
        pytest.param(1, 4, "FULL_INPUT_REWIND", 4, 3, 1, "full", 4, id="42"),
        pytest.param(2, 0, "STANDARD", 0, 0, 0, "full", 0, id="44"),
        pytest.param(2, 3, "FULL_INPUT_REWIND", 3, 2, 1, "full", 3, id="45-within-a-block"),
        pytest.param(1, 12, "STANDARD", 4, 4, 2, "no_record", 4, id="45-prefix"),
        pytest.param(3, 11, "FULL_INPUT_REWIND", 11, 10, 1, "full", 11, id="45-end-within-a-block"),
        pytest.param(2, 1, "FULL_INPUT_REWIND", 1, 0, 1, "full", 1, id="45-one-token"),
    ],
)
def test_39_and_40_and_41_and_42_and_44_and_45_vanilla_plan(
    cached_blocks: int, num_tokens: int, kind: str, matched: int, reuse: int, need: int, reason: str, position: int
) -> None:
    index = index_with(cached_blocks)
    prompt = chain(range(num_tokens))
    plan = plan_vanilla_reuse(index, prompt)
    assert plan.kind is ReusePlanKind[kind]
    assert lengths(plan) == (matched, reuse, reuse % P)
    assert plan.known_token_length == matched
    assert plan.demand == demand(need)
    assert plan.base_page_bindings.tolist() == list(range(reuse // P))
    assert plan.tail_source == (reuse // P if reuse % P else None)
    assert plan.matched_block_hashes == [prompt.hash_at(i) for i in range(reuse // P)]
    assert stop(plan) == (reason, position)
    assert (plan.num_tokens, plan.total_pages, plan.mode) == (num_tokens, -(-num_tokens // P), ReusePlanMode.VANILLA)
    assert (plan.draft_tail_source, plan.draft_page_bindings.tolist(), plan.replayed_token_count) == (None, [], 0)
    assert (plan.hybrid_record, plan.hybrid_checkpoint, plan.recurrent_snapshot_binding) == (None, None, None)
    assert plan.namespace_known == (cached_blocks > 0)
    index.check_invariants()


def test_39_empty_cache() -> None:
    plan = vanilla(4).plan(chain(range(10)))
    assert (plan.kind, plan.demand, lengths(plan)) == (ReusePlanKind.NO_REUSABLE_PREFIX, demand(3), (0, 0, 0))
    assert plan.namespace_known is False


def test_40_known_blocks_are_shared() -> None:
    plan = plan_vanilla_reuse(index_with(2), chain(range(9)))
    assert (plan.kind, plan.demand, lengths(plan)) == (ReusePlanKind.STANDARD, demand(1), (8, 8, 0))


def test_41_full_match_computes_one_token() -> None:
    plan = plan_vanilla_reuse(index_with(2), chain(range(8)))
    assert (plan.kind, plan.demand, lengths(plan)) == (ReusePlanKind.FULL_INPUT_REWIND, demand(1), (8, 7, 3))
    assert (plan.base_page_bindings.tolist(), plan.tail_source) == ([0], 1)


def test_42_full_match_of_one_block_copies_all_but_one_token() -> None:
    plan = plan_vanilla_reuse(index_with(1), chain(range(4)))
    assert (plan.kind, plan.demand, lengths(plan)) == (ReusePlanKind.FULL_INPUT_REWIND, demand(1), (4, 3, 3))
    assert (plan.base_page_bindings.tolist(), plan.tail_source) == ([], 0)


def test_43_bypass_looks_at_nothing() -> None:
    plan = plan_vanilla_reuse(index_with(2), chain(range(9)), lookup_policy=BYPASS)
    assert plan.kind is ReusePlanKind.NO_REUSABLE_PREFIX
    assert (lengths(plan), plan.demand, plan.tail_source) == ((0, 0, 0), demand(3), None)
    assert plan.base_page_bindings.tolist() == plan.matched_block_hashes == []
    assert stop(plan) == ("bypass", 0)


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
    assert plan_vanilla_reuse(index, prompt, num_tokens=7).reuse_token_length == 6
    assert plan_vanilla_reuse(index, prompt, num_tokens=0).kind is ReusePlanKind.STANDARD


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=5),
    prompt=st.lists(st.integers(0, 1), max_size=16),
    tail=st.booleans(),
)
def test_45_every_plan_keeps_the_rules_and_changes_nothing(
    prompts: list[list[int]], prompt: list[int], tail: bool
) -> None:
    """M is the longest common prefix with anything stored; R = min(M, n - 1), whole pages shared, the rest copied."""
    manager = vanilla(40)
    stored: list[list[int]] = []
    for tokens in prompts:
        run = Run(manager, tokens)
        if tail or len(tokens) >= P:
            run.publish(tail=tail)
        run.release()
        stored.append(tokens if tail else tokens[: len(tokens) // P * P])
    before = snapshot(manager)
    plan = manager.plan(chain(prompt))
    assert snapshot(manager) == before
    n = len(prompt)
    known = max(
        next((i for i, (a, b) in enumerate(zip(s, prompt, strict=False)) if a != b), min(len(s), n)) for s in stored
    )
    assert lengths(plan) == (known, max(0, min(known, n - 1)), max(0, min(known, n - 1)) % P)
    assert len(plan.base_page_bindings) + plan.demand.base_kv_pages == -(-n // P)
    assert len(plan.base_page_bindings) == plan.reuse_token_length // P
    assert (plan.tail_source is not None) == (plan.tail_token_count > 0)
    assert (plan.stop_reason is ReuseStopReason.FULL) == (plan.reuse_token_length >= n - 1)


# Why matching stopped


def test_stop_reason_tells_evicted_from_never_seen() -> None:
    index, prompt = index_with(3), chain(range(13))
    index.erase_page(2)
    assert stop(plan_vanilla_reuse(index, prompt)) == ("evicted", 8)
    assert stop(plan_vanilla_reuse(index, chain([*range(8), 77, 78, 79, 80, 81]))) == ("no_record", 8)


def test_stop_reason_policy_until_the_block_is_published() -> None:
    manager = vanilla(8)
    run = Run(manager, [*A, *B, 1])
    run.publish(4, make_record=False)
    manager.note_withheld(run.chain, 1)
    assert stop(manager.plan(chain([*A, *B, 9]))) == ("policy", 4)
    assert stop(manager.plan(chain([*A, *C, 9]))) == ("no_record", 4)
    run.publish(8)
    assert stop(manager.plan(chain([*A, *B, 9]))) == ("full", 8)
    for bad in (-1, 2):
        with pytest.raises(InvalidArgumentError, match="not a full block"):
            manager.note_withheld(run.chain, bad)


def test_stop_reason_media_where_the_next_block_holds_some() -> None:
    manager = vanilla(8)
    cached(manager, [*A, *B])
    cat = Hash128(1, 1)
    assert stop(manager.plan(chain([*A, 11, 0, 11, 11, 5], media=[None] * 5 + [cat] + [None] * 3))) == ("media", 5)
    assert stop(manager.plan(chain([*A, 11, 0, 5], media=[None] * 5 + [cat, None]))) == ("media", 5)
    # Text in front of it is reused all the same: R = M = 5, one token of it copied.
    plan = manager.plan(chain([*A, 11, 0, 5], media=[None] * 5 + [cat, None]))
    assert (lengths(plan), plan.tail_source) == ((5, 5, 1), 1)


def test_stop_reason_template_tail_inside_a_volatile_end() -> None:
    """The generation prompt at the end of a turn is not repeated by the next one."""
    manager = vanilla(8)
    run = Run(manager, [*A, 1, 2, 3])
    manager.set_volatile_from(run.lease, 5)
    run.publish(tail=True)
    run.release()
    assert stop(manager.plan(chain([*A, 1, 7, 7, 7]))) == ("template_tail", 5)
    assert stop(manager.plan(chain([*A, 1, 2, 7, 7]))) == ("template_tail", 6)
    assert stop(manager.plan(chain([*A, 7, 7, 7, 7]))) == ("no_record", 4)


def test_stop_reason_template_tail_at_a_page_boundary() -> None:
    manager = vanilla(8)
    run = Run(manager, [*A, *B, *C])
    manager.set_volatile_from(run.lease, 4)
    run.publish()
    assert stop(manager.plan(chain([*A, 7, 7]))) == ("template_tail", 4)
    # Behind the volatile part the branch is an ordinary one.
    assert stop(manager.plan(chain([*A, *B, 7, 7]))) == ("no_record", 8)


# F. Speculative


def test_46_base_only_hits_are_ignored() -> None:
    manager = spec(12)
    cached(manager, [*A, *B])
    plan = manager.plan(chain([*A, *B, 1]), speculative=True)
    assert (plan.kind, lengths(plan), plan.demand) == (ReusePlanKind.NO_REUSABLE_PREFIX, (0, 0, 0), demand(3, 3))
    assert (plan.known_token_length, stop(plan)) == (8, ("no_record", 0))


def test_47_one_token_of_look_ahead_costs_one_token() -> None:
    manager = spec(12)
    cached(manager, [*A, *B, 5], speculative=True)
    plan = manager.plan(chain([*A, *B, 6]), speculative=True)
    assert (plan.kind, lengths(plan), plan.demand) == (ReusePlanKind.STANDARD, (8, 7, 3), demand(2, 2))
    assert (plan.replayed_token_count, stop(plan)) == (1, ("lookahead_replay", 8))
    assert (plan.base_page_bindings.tolist(), plan.tail_source) == ([0], 1)
    assert (plan.draft_page_bindings.tolist(), plan.draft_tail_source) == ([0], 1)


def test_47_look_ahead_costs_nothing_when_the_next_token_is_the_same() -> None:
    manager = spec(12)
    cached(manager, [*A, *B, 5], speculative=True)
    plan = manager.plan(chain([*A, *B, 5]), speculative=True)
    assert (lengths(plan), plan.replayed_token_count, stop(plan)) == ((8, 8, 0), 0, ("full", 8))


def test_48_full_match_computes_one_token() -> None:
    manager = spec(12)
    cached(manager, [*A, *B, 5], speculative=True)
    plan = manager.plan(chain([*A, *B]), speculative=True)
    assert (plan.kind, lengths(plan)) == (ReusePlanKind.FULL_INPUT_REWIND, (8, 7, 3))
    assert (plan.demand, stop(plan)) == (demand(1, 1), ("full", 8))


def test_49_one_paired_block_is_reused_but_for_a_token() -> None:
    manager = spec(12)
    cached(manager, [*A, 5], speculative=True)
    plan = manager.plan(chain([*A, 6]), speculative=True)
    assert (plan.kind, lengths(plan), plan.replayed_token_count) == (ReusePlanKind.STANDARD, (4, 3, 3), 1)


def test_49_nothing_left_is_cold() -> None:
    manager = spec(12, future=4)
    cached(manager, [*A, 5], speculative=True)
    plan = manager.plan(chain([*A, 5]), speculative=True)
    assert (plan.kind, lengths(plan), plan.replayed_token_count) == (ReusePlanKind.NO_REUSABLE_PREFIX, (4, 0, 0), 4)
    assert stop(plan) == ("lookahead_replay", 4)


def test_50_no_look_ahead_no_replay() -> None:
    manager = spec(12, future=0)
    cached(manager, [*A, *B], speculative=True)
    plan = manager.plan(chain([*A, *B, 6]), speculative=True)
    assert (lengths(plan), plan.replayed_token_count, plan.demand) == ((8, 8, 0), 0, demand(1, 1))
    assert lengths(manager.plan(chain([*A, *B]), speculative=True)) == (8, 7, 3)


def test_51_long_look_ahead_costs_exactly_its_tokens() -> None:
    manager = spec(12, future=P + 1)
    cached(manager, [*A, *B, *C], speculative=True)
    plan = manager.plan(chain([*A, *B, *C, 1]), speculative=True)
    assert (lengths(plan), plan.replayed_token_count, plan.demand) == ((12, 7, 3), 5, demand(3, 3))


def test_52_base_blocks_behind_the_draft_state_are_ignored() -> None:
    manager = spec(12, future=0)
    cached(manager, [*A, *B], speculative=True)
    cached(manager, [*A, *B, *C])
    plan = manager.plan(chain([*A, *B, *C, 1]), speculative=True)
    assert (lengths(plan), plan.known_token_length) == ((8, 8, 0), 12)
    assert (plan.base_page_bindings.tolist(), stop(plan)) == ([0, 1], ("no_record", 8))


def test_53_base_page_is_canonical_and_draft_page_is_the_lineage_s() -> None:
    manager = spec(12, future=0)
    cached(manager, [*A, 1])  # base page 0, vanilla
    other = Run(manager, [*C, 1], speculative=True)
    run = Run(manager, [*A, *B], speculative=True)
    assert (run.pages, run.drafts) == ([4, 5], [2, 3])
    run.publish()
    assert run.pages == [0, 5]
    plan = manager.plan(chain([*A, 9]), speculative=True)
    assert (plan.base_page_bindings.tolist(), plan.draft_page_bindings.tolist()) == ([0], [2])
    other.release()


def test_54_contract_without_draft_pages_uses_base_hits() -> None:
    manager = ContextCacheManager(P, demand(12), spec_reuse_contract=SpecReuseContract(False, 0))
    cached(manager, [*A, *B])
    plan = manager.plan(chain([*A, *B, 6]), speculative=True)
    assert (plan.mode, lengths(plan), plan.demand) == (ReusePlanMode.VANILLA, (8, 8, 0), demand(1))
    full = manager.plan(chain([*A, *B]), speculative=True)
    assert (full.kind, lengths(full)) == (ReusePlanKind.FULL_INPUT_REWIND, (8, 7, 3))


def test_54_contract_without_draft_pages_still_looks_ahead() -> None:
    manager = ContextCacheManager(P, demand(12), spec_reuse_contract=SpecReuseContract(False, 2))
    cached(manager, [*A, *B])
    plan = manager.plan(chain([*A, *B, 6]), speculative=True)
    assert (lengths(plan), plan.replayed_token_count, stop(plan)) == ((8, 6, 2), 2, ("lookahead_replay", 8))
    assert manager.plan(chain([*A, *B, 6])).reuse_token_length == 8  # vanilla requests ignore it


def test_55_a_draft_node_never_outlives_its_base_block() -> None:
    """Records own no draft state in the tree; what could dangle is a draft node, and the recount would see it."""
    manager = spec(4)
    for tokens in ([*A, *B, 1], [*C, *D, 1], [*A, *D, 1]):
        run = Run(manager, tokens, speculative=True)
        run.publish()
        run.release()
        manager.check_invariants()
        assert all(manager.drafts.base_of(d) in manager.index for d in range(4) if d in manager.drafts)


def test_56_contract_of_each_decoder() -> None:
    both = {"has_draft_config": True, "has_spec_config": True}
    assert resolve_spec_reuse_contract("vanilla", **both) is None
    assert resolve_spec_reuse_contract("eagle", **both) == SpecReuseContract(True, 1)
    assert resolve_spec_reuse_contract("dflash", **both) == SpecReuseContract(True, 0)
    with pytest.raises(InvalidArgumentError):
        resolve_spec_reuse_contract("eagle", has_draft_config=False, has_spec_config=True)


def test_spec_tails_are_extended_only_within_one_lineage() -> None:
    manager = spec(16, future=0)
    first = Run(manager, [*A, 1, 2, 3], speculative=True)
    first.publish(tail=True)
    first.release()
    plan = manager.plan(chain([*A, 1, 2, 9]), speculative=True)
    assert (lengths(plan), plan.tail_source, plan.draft_tail_source) == ((6, 6, 2), 1, 1)
    # A base-only child agrees for more tokens, but has no draft state.
    cached(manager, [*A, 1, 2, 9, 8])
    assert lengths(manager.plan(chain([*A, 1, 2, 9, 9, 9]), speculative=True)) == (6, 6, 2)


def test_spec_tail_keeps_its_last_token_when_its_successor_is_the_same() -> None:
    manager = spec(16)
    first = Run(manager, [*A, 1, 2, 3], speculative=True)
    first.publish(6, tail=True)  # the token at 6 is known: 3
    first.release()
    same = manager.plan(chain([*A, 1, 2, 3, 9]), speculative=True)
    assert (lengths(same), same.replayed_token_count) == ((6, 6, 2), 0)
    other = manager.plan(chain([*A, 1, 2, 4, 9]), speculative=True)
    assert (lengths(other), other.replayed_token_count) == ((6, 5, 1), 1)
    inside = manager.plan(chain([*A, 1, 4, 4, 9]), speculative=True)
    assert (lengths(inside), inside.replayed_token_count) == ((5, 4, 0), 1)


def test_speculative_plan_needs_a_contract() -> None:
    with pytest.raises(InvalidArgumentError, match="needs a manager with a spec_reuse_contract"):
        vanilla(4).plan(chain(A), speculative=True)


# G. Checkpoints


def test_57_checkpoint_within_a_page() -> None:
    manager = hybrid(8)
    tokens = [*A, 5, 6]
    (record,) = checkpointed(manager, tokens)
    plan = manager.plan(chain([*tokens, 7, 8, 9]))
    assert (plan.mode, plan.kind, lengths(plan)) == (ReusePlanMode.HYBRID, ReusePlanKind.STANDARD, (6, 6, 0))
    assert (plan.base_page_bindings.tolist(), plan.demand) == ([0], demand(2))
    assert (plan.hybrid_record, plan.recurrent_snapshot_binding, plan.partial_kv_snapshot_binding) == (record, 0, 0)
    assert plan.hybrid_checkpoint == HybridCheckpointKey(chain(tokens).prefix_hash(6), 6)


def test_58_checkpoint_at_the_end_of_the_prompt_is_of_no_use() -> None:
    manager = hybrid(8)
    checkpointed(manager, [*A, 5, 6])
    plan = manager.plan(chain([*A, 5, 6]))
    assert (plan.kind, lengths(plan), plan.known_token_length) == (ReusePlanKind.NO_REUSABLE_PREFIX, (0, 0, 0), 6)
    assert stop(plan) == ("no_checkpoint", 6)


@pytest.mark.parametrize("store", [hybrid, pure, mtp])
@pytest.mark.parametrize(
    ("tokens", "known"),
    [([*A, 5, 6], 6), ([*A, 5, 6, 7], 7), ([*A, 5, 9, 7, 7], 5), ([*A, 9, 6], 4), ([*A, *B], 8), ([*A, *B, 1], 8)],
)
def test_what_a_checkpoint_behind_the_prompt_holds_is_known(store: Callable, tokens: list[int], known: int) -> None:
    """Its state is of no use; but the tokens were computed, and that is what the report must not deny."""
    manager = store(12)
    behind = [*A, *B, *C, 1, 2] if known == 8 else [*A, 5, 6, 7]
    checkpointed(manager, behind, speculative=store is mtp)
    checkpointed(manager, A[:3], speculative=store is mtp)
    plan = manager.plan(chain(tokens), speculative=store is mtp)
    assert lengths(plan) == (3, 3, 0)
    assert (plan.known_token_length, stop(plan)) == (known, ("no_checkpoint", known))


def test_media_in_the_tail_of_a_checkpoint_are_not_compared_one_by_one() -> None:
    manager = hybrid(8)
    cat = Hash128(1, 1)
    Run(manager, chain([*A, 5, 0, 7], media=[None] * 5 + [cat, None])).checkpoint()
    plan = manager.plan(chain([*A, 5, 0, 7], media=[None] * 5 + [cat, None]))
    assert (plan.known_token_length, stop(plan)) == (5, ("no_checkpoint", 5))


def test_59_aligned_checkpoint_has_no_partial_page() -> None:
    manager = hybrid(8)
    checkpointed(manager, [*A, *B])
    plan = manager.plan(chain([*A, *B, 1]))
    assert (lengths(plan), plan.demand, plan.partial_kv_snapshot_binding) == ((8, 8, 0), demand(1), None)
    assert stop(plan) == ("full", 8)


def test_60_a_checkpoint_of_other_tokens_is_skipped_for_a_shallower_one() -> None:
    manager = hybrid(8)
    checkpointed(manager, [*A, 5, 6])
    checkpointed(manager, [*A, 5, 7, 7, 7])
    plan = manager.plan(chain([*A, 5, 6, 7, 7, 1]))
    assert lengths(plan) == (6, 6, 0)
    assert stop(plan) == ("no_record", 6)


def test_61_pure_recurrent_has_no_pages() -> None:
    manager = pure(8)
    (record,) = checkpointed(manager, [*A, 5, 6])
    plan = manager.plan(chain([*A, 5, 6, 7]))
    assert (plan.mode, lengths(plan), plan.demand) == (ReusePlanMode.HYBRID, (6, 6, 0), demand(0))
    assert (plan.base_page_bindings.tolist(), plan.matched_block_hashes) == ([], [])
    assert (plan.hybrid_record, plan.recurrent_snapshot_binding, plan.partial_kv_snapshot_binding) == (record, 0, None)
    assert manager.plan(chain([*B, 1])).demand == demand(0)


def test_62_mtp_checkpoint_keeps_its_last_page_private() -> None:
    manager = mtp(8)
    checkpointed(manager, [*A, *B], speculative=True)
    plan = manager.plan(chain([*A, *B, 1]), speculative=True)
    assert (plan.mode, lengths(plan), plan.demand) == (ReusePlanMode.HYBRID_MTP, (8, 8, 0), demand(2, 2))
    assert (plan.base_page_bindings.tolist(), plan.draft_page_bindings.tolist()) == ([0], [0])
    assert (plan.recurrent_snapshot_binding, plan.partial_kv_snapshot_binding) == (0, 0)


def test_63_plain_checkpoint_is_a_miss_for_mtp() -> None:
    manager = mtp(8)
    checkpointed(manager, [1, 2, 3])
    plan = manager.plan(chain([1, 2, 3, 4, 5]), speculative=True)
    assert (lengths(plan), plan.demand, stop(plan)) == ((0, 0, 0), demand(2, 2), ("no_checkpoint", 3))


@pytest.mark.parametrize("length", [6, 8])
def test_64_plain_request_uses_any_mtp_checkpoint(length: int) -> None:
    manager = mtp(8)
    tokens = [*A, *B, 1]
    checkpointed(manager, tokens, length, speculative=True)
    plan = manager.plan(chain(tokens))
    assert (plan.mode, lengths(plan)) == (ReusePlanMode.HYBRID, (length, length, 0))
    assert (plan.base_page_bindings.tolist(), plan.partial_kv_snapshot_binding) == ([0], 0)
    assert plan.demand == demand(2)


def test_65_mtp_checkpoint_within_the_first_page() -> None:
    manager = mtp(8)
    (record,) = checkpointed(manager, [1, 2, 3], speculative=True)
    plan = manager.plan(chain([1, 2, 3, 4, 5]), speculative=True)
    assert (lengths(plan), plan.hybrid_record, plan.demand) == ((3, 3, 0), record, demand(2, 2))
    assert manager.record(record).draft_page_path == ()


def test_66_bypass_looks_at_no_checkpoint() -> None:
    manager = hybrid(8)
    checkpointed(manager, [*A, 5, 6])
    plan = manager.plan(chain([*A, 5, 6, 7]), BYPASS)
    assert (lengths(plan), plan.hybrid_record, stop(plan)) == ((0, 0, 0), None, ("bypass", 0))


def test_known_tokens_name_the_branch_point() -> None:
    """The tree knows where two prompts part, also where no checkpoint is: that is where one will be placed."""
    manager = hybrid(12)
    checkpointed(manager, [*A, *B, *C, 1])
    plan = manager.plan(chain([*A, *B, 12, 12, 9, 9]))
    assert (lengths(plan), plan.known_token_length, stop(plan)) == ((0, 0, 0), 10, ("no_checkpoint", 10))


def test_checkpoint_with_media_in_its_tail_needs_the_same_media() -> None:
    manager = hybrid(8)
    cat, dog = Hash128(1, 1), Hash128(2, 2)

    def prompt(digest: Hash128, *more: int) -> TokenChain:
        return chain([*A, 5, 0, *more], media=[None] * 5 + [digest] + [None] * len(more))

    Run(manager, prompt(cat)).checkpoint()
    assert manager.plan(prompt(cat, 8)).reuse_token_length == 6
    assert manager.plan(prompt(dog, 8)).reuse_token_length == 0
    assert manager.plan(chain([*A, 5, 0, 8])).reuse_token_length == 0
