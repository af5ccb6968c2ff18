"""The length that a sequence may reach is the user's, whatever is written ahead of it: the text of plain decoding.

Every decoder with long chains, and EAGLE with trees of far more tokens than are left, at prompts of every distance from
the limit; on the CPU executor and on the CUDA executor with its kernels replaced by their references.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from helped_drafts import HelpedDraft
from helped_trees import HelpedTrees
from reference_placement import ReferencePlacement, make_engine
from tiny_drafts import PAIRS, TinyPair

from edgellm import Engine, SamplingParams, SpeculativeOptions
from edgellm.errors import InputTooLongError, InvalidArgumentError
from edgellm.runtime.placement import CpuPlacement
from edgellm.testing.recount import require_baseline

pytestmark = pytest.mark.usefixtures("decoders_of_this_tree")

LIMIT, PAGE = 64, 8
LEFT = (40, 24, 9, 2, 1)
GREEDY = SamplingParams(max_tokens=LIMIT, temperature=0.0, ignore_eos=True)
TREE = {"num_drafts": 36, "top_k": 4, "depth": 3}
SCRATCH = {"num_drafts": 6, "top_k": 8, "depth": 6}  # levels that grow take more entries than are proposed
CHAIN = {"num_drafts": 15}
CASES = {**{name: (name, CHAIN) for name in PAIRS}, "tree": ("eagle", TREE), "scratch": ("eagle", SCRATCH)}
PLACEMENTS = {"cpu": CpuPlacement, "cuda": ReferencePlacement}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyPair]:
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in PAIRS.items()}


def prompt_of(length: int) -> list[int]:
    return [1 + (length * 31 + place * 7) % 250 for place in range(length)]


def make(
    pair: TinyPair, shape: dict[str, int] | None, placement: type[CpuPlacement] = CpuPlacement, **options: Any
) -> Engine:
    if shape is not None:
        speculative = SpeculativeOptions(decoder=pair.decoder, draft=pair.draft, adaptive=False, **shape)
        options["speculative"] = speculative
    chosen = {"max_model_len": LIMIT, "page_size": PAGE, "max_batch_size": 3} | options
    return make_engine(pair.model, placement, **chosen)


def answers(engine: Engine) -> list[tuple[list[int], str | None]]:
    outputs = engine.generate([prompt_of(LIMIT - left) for left in LEFT], GREEDY)
    return [(output.token_ids, output.finish_reason) for output in outputs]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("case", CASES)
def test_answers_reach_the_limit_of_plain_decoding(pairs: dict[str, TinyPair], case: str, placement: str) -> None:
    """Without a budget: the pool that a deployment chooses has room for every seat at full length."""
    name, shape = CASES[case]
    pair = pairs[name]
    with make(pair, None, PLACEMENTS[placement]) as plain:
        wanted = answers(plain)
    assert [len(token_ids) for token_ids, _ in wanted] == list(LEFT)
    with make(pair, shape, PLACEMENTS[placement]) as engine:
        assert engine.memory_budget.max_model_len == LIMIT
        known = [(prompt_of(LIMIT - left), token_ids) for left, (token_ids, _) in zip(LEFT, wanted, strict=True)]
        HelpedDraft(engine, known) if "top_k" not in shape else HelpedTrees(engine, known)
        runtime = engine._frontend.open_runtime("test")
        assert answers(engine) == wanted
        assert answers(engine) == wanted  # over what the first time left in the cache
        with pytest.raises(InputTooLongError, match=r"at least 1 token it exceeds the 64 tokens that a sequence may"):
            engine.generate([prompt_of(LIMIT)], GREEDY)
    require_baseline(runtime.coordinator)


def test_a_limit_below_the_proposals_answers(pairs: dict[str, TinyPair]) -> None:
    with make(pairs["eagle"], None, max_model_len=16) as plain, make(pairs["eagle"], CHAIN, max_model_len=16) as engine:
        wanted, found = (one.generate([[9]], GREEDY)[0] for one in (plain, engine))
    assert len(wanted.token_ids) == 15
    assert found.token_ids == wanted.token_ids


def test_the_whole_context_of_a_model_is_used(tmp_path: Path) -> None:
    """No room behind the last position has to be taken from it, and there is no larger limit to ask for."""
    pair = PAIRS["eagle"](tmp_path, max_position_embeddings=48)
    with make(pair, None, max_model_len=None) as plain, make(pair, TREE, max_model_len=None) as engine:
        wanted, found = (one.generate([prompt_of(20)], GREEDY)[0] for one in (plain, engine))
    assert len(wanted.token_ids) == 28
    assert found.token_ids == wanted.token_ids


def test_a_pool_that_ends_first_names_what_is_written_ahead(pairs: dict[str, TinyPair]) -> None:
    with make(pairs["eagle"], CHAIN, kv_budget=LIMIT) as engine:
        assert "enough for 1 sequence" not in engine.memory_budget.describe()
        assert len(engine.generate([prompt_of(40)], GREEDY)[0].token_ids) == LIMIT - 40 - 15
        with pytest.raises(InputTooLongError) as caught:
            engine.generate([prompt_of(60)], GREEDY)
    for word in ("answer of at least 1 token", "15 tokens that speculation writes ahead", "kv_budget", "num_drafts"):
        assert word in str(caught.value)
    assert "max_model_len" not in str(caught.value)


def test_a_pool_below_the_proposals_is_refused_at_once(pairs: dict[str, TinyPair]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"16 tokens.* 15 .*ahead.*raise kv_budget.*num_drafts"):
        make(pairs["eagle"], CHAIN, kv_budget=16)
    with make(pairs["eagle"], CHAIN, kv_budget=17) as engine:
        assert len(engine.generate([[9]], GREEDY)[0].token_ids) == 3 * PAGE - 1 - 15


def test_the_pool_holds_every_seat_at_full_length(pairs: dict[str, TinyPair]) -> None:
    with make(pairs["eagle"], CHAIN) as engine:
        budget = engine.memory_budget
        assert budget.num_pages == math.ceil(3 * (LIMIT + 15) / PAGE)
        assert "enough for 3 sequences" in budget.describe()
