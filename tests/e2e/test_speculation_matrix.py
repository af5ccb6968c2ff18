"""Speculation on = speculation off, token for token, for every decoder on a real architecture through `LLM`.

Greedy, float32, tiny random weights: each decoder x {1, 5 requests at once} x {reuse on, off} x {prompts in chunks, in
one step}.  Drafts are random and helped (`HelpedDraft`), so that every length of an accepted run occurs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from decoder_plugins import use_decoder_plugins
from helped_drafts import HelpedDraft
from tiny_drafts import PAIRS, TinyPair

from edgellm import LLM, SamplingParams, SchedulingOptions, SpeculativeOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.outputs import RequestOutput

PAGE, SEATS = 8, 5
PROMPTS = ["the quick brown fox " * 2, "a", "0123456789" * 7, "in or out, that is: in or out", "zz top zz top zz"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    use_decoder_plugins(monkeypatch)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A pair, and what plain decoding says to the prompts (`first`) and to the turn behind each answer (`second`)."""

    pair: TinyPair
    first: list[RequestOutput]
    second: list[RequestOutput]


@pytest.fixture(scope="module")
def plain_texts() -> dict[str, Wanted]:
    return {}


@pytest.fixture
def wanted(
    request: pytest.FixtureRequest, plain_texts: dict[str, Wanted], tmp_path_factory: pytest.TempPathFactory
) -> Wanted:
    """Plain decoding, one request at a time, every prompt in one step, nothing reused."""
    name: str = request.param
    if name not in plain_texts:
        pair = PAIRS[name](tmp_path_factory.mktemp(name))
        with open_llm(pair.model) as llm:
            first = [llm.generate(prompt, GREEDY, use_cache=False)[0] for prompt in PROMPTS]
            second = [llm.generate(prompt, GREEDY, use_cache=False)[0] for prompt in second_prompts(first)]
        plain_texts[name] = Wanted(pair, first, second)
    return plain_texts[name]


def second_prompts(first: Sequence[RequestOutput]) -> list[list[int]]:
    return [[*output.prompt_token_ids, *output.token_ids, 7, 8, 9] for output in first]


def open_llm(model: Path, *, chunk: int = 0, speculative: SpeculativeOptions | None = None) -> LLM:
    """Args:
    chunk: most tokens of a prompt in a step; 0 takes every prompt whole.
    """
    scheduling = SchedulingOptions(max_prompt_step_tokens=chunk or 512, max_num_tokens=chunk + SEATS if chunk else 512)
    return LLM(
        model,
        device="cpu",
        kv_budget=4096,
        page_size=PAGE,
        max_batch_size=SEATS,
        scheduling=scheduling,
        speculative=speculative,
    )


def ask(llm: LLM, prompts: Sequence[object], batch: int, use_cache: bool) -> list[RequestOutput]:
    if batch == 1:
        return [llm.generate(prompt, GREEDY, use_cache=use_cache)[0] for prompt in prompts]  # type: ignore[arg-type]
    return llm.generate(list(prompts), GREEDY, use_cache=use_cache)  # type: ignore[arg-type]


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("chunk", [PAGE, 0], ids=["chunked", "one-shot"])
@pytest.mark.parametrize("use_cache", [True, False], ids=["reuse", "cold"])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("wanted", PAIRS, indirect=True)
def test_speculation_changes_no_token(wanted: Wanted, batch: int, use_cache: bool, chunk: int) -> None:
    pair = wanted.pair
    options = SpeculativeOptions(decoder=pair.decoder, draft=pair.draft, num_drafts=4, adaptive=False)
    with open_llm(pair.model, chunk=chunk, speculative=options) as llm:
        HelpedDraft(llm, [(o.prompt_token_ids, o.token_ids) for o in [*wanted.first, *wanted.second]])
        first = ask(llm, PROMPTS, batch, use_cache)
        second = ask(llm, second_prompts(wanted.first), batch, use_cache)
    assert ids(first) == ids(wanted.first)
    assert ids(second) == ids(wanted.second)
    require_speculation([*first, *second])
    for one, two in zip(first, second, strict=True):
        assert one.reuse.reused_tokens == 0
        if not use_cache:
            assert two.reuse.reused_tokens == 0
        elif len(one.prompt_token_ids) > PAGE:
            assert two.reuse.reused_tokens >= len(one.prompt_token_ids) - PAGE - 1


def require_speculation(outputs: Sequence[RequestOutput]) -> None:
    """Some proposals were kept and some were not: both ways of ending a round were taken."""
    proposed = sum(output.proposed_draft_tokens for output in outputs)
    accepted = sum(output.accepted_draft_tokens for output in outputs)
    assert proposed > 50
    assert 0.1 * proposed < accepted < 0.9 * proposed
