"""The planners against their plain-Python model: every short prompt, on trees that random operations left behind."""

from __future__ import annotations

import itertools
import random

import pytest
from cache_model import Lockstep
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm._core.block_index import DEFAULT_HASH_MASK
from edgellm.cache.types import ContextCacheLookupPolicy, ReusePlanKind, ReuseStopReason
from edgellm.testing.cache_workout import FLAVOURS, MEDIA_NAMESPACE
from edgellm.testing.random_operations import Shape, random_step

LONGEST = 7
PROMPTS = [tokens for length in range(LONGEST + 1) for tokens in itertools.product((0, 1), repeat=length)]


def grown_tree(name: str, seed: int, page_size: int, pages: int, hash_mask: int) -> Lockstep:
    flavour = FLAVOURS[name]
    work = Lockstep(flavour, page_size, 4 * pages if flavour.index_only else pages, hash_mask=hash_mask)
    rng = random.Random(seed)
    shape = Shape(vocabulary=2, longest_prompt=LONGEST, most_live=4, longest_chunk=2 * page_size)
    for _ in range(25):
        random_step(rng, shape, work)
    return work


@pytest.mark.parametrize("name", FLAVOURS)
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 2, 3, 4]),
    pages=st.integers(6, 16),
    hash_mask=st.sampled_from([DEFAULT_HASH_MASK, 0]),
    namespace=st.sampled_from([0, 0, 1, MEDIA_NAMESPACE]),
)
def test_every_short_prompt_is_planned_as_the_model_says(
    name: str, seed: int, page_size: int, pages: int, hash_mask: int, namespace: int
) -> None:
    """Behaviour 45 for every flavour: bounds, demand, purity; and the exact plan."""
    work = grown_tree(name, seed, page_size, pages, hash_mask)
    before = work.state()
    for tokens in PROMPTS:
        symbols = work.symbols_of(namespace, tokens)
        chain = work.chain(namespace, symbols)
        for speculative in {False, work.flavour.contract is not None}:
            plan = work.manager.plan(chain, speculative=speculative)
            work.compare_plan(plan, work.model.plan(namespace, tuple(symbols), speculative, False))
            check_bounds(work, plan, len(tokens))
    assert work.state() == before


def check_bounds(work: Lockstep, plan, num_tokens: int) -> None:  # type: ignore[no-untyped-def]
    """I10 and I11."""
    assert 0 <= plan.reuse_token_length <= plan.matched_token_length <= num_tokens
    assert plan.reuse_token_length < num_tokens or num_tokens == 0
    assert plan.reuse_token_length + plan.replayed_token_count <= plan.matched_token_length
    if plan.kind is ReusePlanKind.FULL_INPUT_REWIND:
        assert plan.matched_token_length == num_tokens
    shared = len(plan.base_page_bindings)
    if not work.flavour.index_only:
        assert shared + plan.demand.base_kv_pages == -(-num_tokens // work.page_size)
    if plan.stop_reason is ReuseStopReason.FULL:
        assert plan.reuse_token_length == max(0, num_tokens - 1)
    if not work.flavour.checkpoints:
        assert plan.reuse_token_length == shared * work.page_size + plan.tail_token_count
        assert (plan.tail_source is None) == (plan.tail_token_count == 0)


@pytest.mark.parametrize("name", FLAVOURS)
def test_a_bypass_plan_looks_at_nothing(name: str) -> None:
    work = grown_tree(name, 3, 2, 12, DEFAULT_HASH_MASK)
    for tokens in PROMPTS:
        plan = work.manager.plan(work.chain(0, tokens), ContextCacheLookupPolicy.BYPASS)
        assert plan.reuse_token_length == plan.matched_token_length == len(plan.base_page_bindings) == 0
        assert plan.stop_reason is ReuseStopReason.BYPASS
