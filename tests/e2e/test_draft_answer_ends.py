"""Answers of decoders whose draft has pages of its own are kept to their ends: the draft catches up when they end.

Entries of a sequence that proposes nothing, or little, wait for each other; on the CPU executor and on the CUDA
executor with its kernels replaced by their references.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from draft_state import DraftState
from helped_drafts import HelpedDraft
from reference_placement import ReferencePlacement, make_engine
from tiny_drafts import TinyPair, write_eagle_pair

from edgellm import Engine, SamplingParams, SpeculativeOptions
from edgellm.cache.types import ContextCacheCommitPolicy, ContextCacheLookupPolicy
from edgellm.request import LLMGenerationRequest, LLMGenerationResponse
from edgellm.runtime.placement import CpuPlacement
from edgellm.testing.recount import require_baseline

pytestmark = pytest.mark.usefixtures("decoders_of_this_tree")

PAGE, MESSAGE = 8, [7, 8, 9]
PROMPT = [1 + place * 37 % 250 for place in range(25)]
PLACEMENTS = {"cpu": CpuPlacement, "cuda": ReferencePlacement}
SHAPES = {"chain": {"num_drafts": 4}, "tree": {"num_drafts": 6, "top_k": 2, "depth": 3}}
LENGTHS = (1, 2, 7, 40)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_eagle_pair(tmp_path_factory.mktemp("eagle"))


@pytest.fixture(scope="module")
def text(pair: TinyPair) -> list[int]:
    with make_engine(pair.model) as plain:
        return ask(plain, PROMPT, 40).token_ids


def make(pair: TinyPair, placement: str, shape: str = "chain") -> Engine:
    speculative = SpeculativeOptions(decoder="eagle", draft=pair.draft, adaptive=False, **SHAPES[shape])
    return make_engine(pair.model, PLACEMENTS[placement], kv_budget=4096, max_batch_size=3, speculative=speculative)


def submit(engine: Engine, prompt: Sequence[int], count: int, **changes: Any) -> Any:
    sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **changes.pop("sampling", {}))
    return engine._frontend.submit(LLMGenerationRequest(prompt_token_ids=list(prompt), sampling=sampling, **changes))


def ask(engine: Engine, prompt: Sequence[int], count: int, **changes: Any) -> LLMGenerationResponse:
    response: LLMGenerationResponse = submit(engine, prompt, count, **changes).get(60.0)
    return response


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("plainly", [True, False], ids=["plainly", "speculating"])
def test_the_next_turn_begins_where_the_answer_ended(pair: TinyPair, placement: str, shape: str, plainly: bool) -> None:
    with make(pair, placement, shape) as engine, make(pair, placement, shape) as cold:
        warm_state, cold_state = DraftState(engine), DraftState(cold)
        for length in LENGTHS:
            prompt = [length, *PROMPT]
            first = ask(engine, prompt, length, disable_spec_decode=plainly)
            again = [*prompt, *first.token_ids, *MESSAGE]
            warm = ask(engine, again, 6)
            fresh = ask(cold, again, 6, lookup_policy=ContextCacheLookupPolicy.BYPASS)
            assert warm.token_ids == fresh.token_ids
            # The last token of an answer has no state.
            assert warm.reuse.reused_tokens == len(prompt) + length - 1
            warm_state.require_same(cold_state)
            warm_state.forget()
            cold_state.forget()
    require_baseline(warm_state.runtime.coordinator)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("length", range(1, 8))
def test_answers_that_end_inside_an_accepted_run(pair: TinyPair, text: list[int], placement: str, length: int) -> None:
    """The session keeps less than was accepted, and the draft's state ends there too; others go on beside it."""
    assert len(set(text[:length])) == length  # the token ends the answer here
    other = [*reversed(PROMPT)]
    with make_engine(pair.model) as plain:
        again = [*PROMPT, *text[:length], *MESSAGE]
        others, wanted = ask(plain, other, 20).token_ids, ask(plain, again, 9).token_ids
    with make(pair, placement) as engine:
        HelpedDraft(engine, [(PROMPT, text), (other, others), (again, wanted)])
        beside = submit(engine, other, 20)
        first = ask(engine, PROMPT, 40, sampling={"stop_token_ids": [text[length - 1]]})
        assert first.token_ids == text[:length]
        second = ask(engine, again, 9)
        assert beside.get(60.0).token_ids == others
    assert second.token_ids == wanted
    assert second.reuse.reused_tokens == len(PROMPT) + length - 1


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_another_end_of_the_answer_gives_up_the_entry_that_depends_on_it(
    pair: TinyPair, text: list[int], placement: str
) -> None:
    with make(pair, placement) as engine, make(pair, placement) as cold:
        warm_state, cold_state = DraftState(engine), DraftState(cold)
        first = ask(engine, PROMPT, 13, disable_spec_decode=True)
        warm_state.forget()
        again = [*PROMPT, *first.token_ids[:-1], first.token_ids[-1] % 250 + 1, *MESSAGE]
        assert ask(engine, again, 6).reuse.reused_tokens == len(PROMPT) + 13 - 2
        ask(cold, again, 6)
        warm_state.require_same(cold_state)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_nothing_is_written_for_answers_that_are_not_kept(
    pair: TinyPair, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(pair, placement) as engine:
        decoder: Any = engine._frontend.open_runtime("test").decoder
        asked: list[tuple[list[int], list[int]]] = []
        monkeypatch.setattr(decoder, "complete_drafts", lambda *args: asked.append(args))
        for changes in (
            {"commit_policy": ContextCacheCommitPolicy.PREFILL_STATE_ONLY},
            {"lookup_policy": ContextCacheLookupPolicy.BYPASS},
        ):
            ask(engine, PROMPT, 9, **changes)
        assert asked == []
        ask(engine, PROMPT, 9)
        assert [list(lengths) for _, lengths in asked] == [[len(PROMPT) + 8]]
