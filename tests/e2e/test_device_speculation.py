"""Speculation on the CUDA executor, its kernels replaced by their references: the text of plain decoding.

Prompts run in chunks beside verified rows.  Two of three proposals are right, so that rounds end at every place and
state is taken back from every checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helped_drafts import HelpedDraft
from reference_placement import ReferencePlacement, make_engine
from tiny_drafts import PAIRS, TinyPair

import edgellm_eagle.plugin
import edgellm_hybrid.plugin
import edgellm_lookup.decoder
import edgellm_shared_kv.plugin
from edgellm import Engine, SamplingParams, SpeculativeOptions
from edgellm.cache.types import ContextCacheLookupPolicy
from edgellm.errors import UnsupportedModelError
from edgellm.models.device_attention import AttentionMode
from edgellm.plugins import load_plugins
from edgellm.request import LLMGenerationRequest, LLMGenerationResponse
from edgellm.testing.recount import recount

EXTRA = (
    ("eagle", edgellm_eagle.plugin),
    ("hybrid", edgellm_hybrid.plugin),
    ("lookup", edgellm_lookup.decoder),
    ("shared-kv", edgellm_shared_kv.plugin),
)
PROMPTS = [
    [1 + (index * 31 + place * 7) % 250 for place in range(length)] for index, length in enumerate((5, 41, 70, 18, 33))
]
GREEDY = SamplingParams(max_tokens=18, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=18, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Case:
    """A model with its draft, and the text of plain decoding.

    Attributes:
        second: prompts of the turn behind each greedy answer.
        texts: answers by settings and by prompts; greedy to the second turn as well.
    """

    pair: TinyPair
    second: list[list[int]]
    texts: dict[str, list[list[int]]]

    def help(self, engine: Engine, *names: str) -> None:
        """Make two of three proposals right."""
        known = [(self.second if name == "second" else PROMPTS, self.texts[name]) for name in names]
        HelpedDraft(engine, [pair for prompts, texts in known for pair in zip(prompts, texts, strict=True)])


@pytest.fixture(scope="module", autouse=True)
def plugins_of_this_tree() -> Iterator[None]:
    loaded = load_plugins(extra=EXTRA, autoload=False, strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgellm.plugins.load_plugins", lambda: loaded)
        yield


@pytest.fixture(scope="module", params=PAIRS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    pair = PAIRS[request.param](tmp_path_factory.mktemp(request.param))
    with make(pair, speculate=False) as plain:
        greedy, sampled = (token_ids(respond(plain, PROMPTS, params)) for params in (GREEDY, SAMPLED))
        second = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(PROMPTS, greedy, strict=True)]
        behind = token_ids(respond(plain, second, GREEDY, reuse=False))
    return Case(pair, second, {"greedy": greedy, "sampled": sampled, "second": behind})


def make(
    pair: TinyPair, mode: AttentionMode = AttentionMode.EXACT, *, batch: int = 5, speculate: bool = True
) -> Engine:
    placement = type("OfMode", (ReferencePlacement,), {"mode": mode})
    options: dict[str, Any] = {}
    if speculate:
        options["speculative"] = SpeculativeOptions(
            decoder=pair.decoder, draft=pair.draft, num_drafts=4, adaptive=False
        )
    return make_engine(pair.model, placement, kv_budget=4096, max_batch_size=batch, **options)


def respond(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, *, reuse: bool = True
) -> list[LLMGenerationResponse]:
    """All prompts at once: more of them than seats where the batch is small."""
    policy = ContextCacheLookupPolicy.USE_CACHE if reuse else ContextCacheLookupPolicy.BYPASS
    requests = [LLMGenerationRequest(prompt_token_ids=ids, sampling=params, lookup_policy=policy) for ids in prompts]
    handles = [engine._frontend.submit(request) for request in requests]
    return [handle.get(60.0) for handle in handles]


def token_ids(responses: Sequence[LLMGenerationResponse]) -> list[list[int]]:
    return [list(response.token_ids) for response in responses]


class Unverifying:
    """An executor that only decodes."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        if name in ("forward_verify", "rewind", "request_hidden"):
            raise AttributeError(name)
        return getattr(self._executor, name)


def test_a_decoder_that_proposes_is_refused_where_nothing_verifies(tmp_path: Path) -> None:
    class Placement(ReferencePlacement):
        def build_executor(self, *arguments: Any, **options: Any) -> Any:
            return Unverifying(super().build_executor(*arguments, **options))

    pair = PAIRS["prompt_lookup"](tmp_path)
    with pytest.raises(UnsupportedModelError, match="'prompt-lookup' proposes tokens, and Unverifying cannot verify"):
        make_engine(pair.model, Placement, kv_budget=4096, speculative="prompt_lookup")


def test_trees_are_refused_where_only_chains_are_verified(tmp_path: Path) -> None:
    class OfChains(Unverifying):
        def __getattr__(self, name: str) -> Any:
            if name == "commit_rows":
                raise AttributeError(name)
            return getattr(self._executor, name)

    class Placement(ReferencePlacement):
        def build_executor(self, *arguments: Any, **options: Any) -> Any:
            return OfChains(super().build_executor(*arguments, **options))

    pair = PAIRS["eagle"](tmp_path)
    trees = SpeculativeOptions(decoder="eagle", draft=pair.draft, top_k=3)
    with pytest.raises(UnsupportedModelError, match=r"top_k is 3, and OfChains verifies chains only"):
        make_engine(pair.model, Placement, kv_budget=4096, speculative=trees)


@pytest.mark.parametrize("batch", [1, 5])
def test_the_text_is_that_of_plain_decoding(case: Case, batch: int) -> None:
    with make(case.pair, batch=batch) as engine:
        case.help(engine, "greedy", "second")
        cold = respond(engine, PROMPTS, GREEDY, reuse=False)
        assert token_ids(cold) == case.texts["greedy"]
        accepted = sum(response.accepted_draft_tokens for response in cold)
        assert sum(response.proposed_draft_tokens for response in cold) > accepted > 6 * len(PROMPTS)
        assert engine.metrics().cache.reused_tokens == 0
        assert token_ids(respond(engine, PROMPTS, GREEDY)) == case.texts["greedy"]
        assert token_ids(respond(engine, case.second, GREEDY)) == case.texts["second"]
        assert engine.metrics().cache.reused_tokens > 0
        assert recount(engine._runtime.coordinator).leased == 0


def test_drawn_tokens_are_those_of_plain_decoding(case: Case) -> None:
    with make(case.pair) as engine:
        case.help(engine, "sampled")
        assert token_ids(respond(engine, PROMPTS, SAMPLED)) == case.texts["sampled"]


@pytest.mark.parametrize("case", ["prompt_lookup", "hybrid_lookup"], indirect=True)
@pytest.mark.parametrize("mode", [AttentionMode.SPLIT, AttentionMode.DETERMINISTIC])
def test_in_every_attention_mode(case: Case, mode: AttentionMode) -> None:
    with make(case.pair, mode) as engine:
        case.help(engine, "greedy")
        assert token_ids(respond(engine, PROMPTS, GREEDY)) == case.texts["greedy"]
