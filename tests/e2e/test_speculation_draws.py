"""Sampled speculation draws from the distribution of plain decoding: chi-square tests, which a biased rule fails.

With a vocabulary of four tokens the probabilities of every short text are known exactly, from the plain model's own
log-probabilities.  Every decoder answers one prompt with many seeds.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from chi_square import agrees, chi_square, critical_value
from decoder_plugins import use_decoder_plugins
from tiny_drafts import PAIRS, TinyPair

from edgellm import LLM, SamplingParams, SpeculativeOptions
from edgellm.decoding.verify import VerifiedRun, verify_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.sampling.sampler import Sampler, SamplingState

VOCAB = 4
PROMPT = [0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0]  # every pair of tokens: lookup always finds one
LENGTH = 3  # the first token comes with the prompt, the two behind it are verified in one round
DRAWS, BIASED_DRAWS = 500, 400
TEMPERATURE = 1.0


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    use_decoder_plugins(monkeypatch)


@dataclass(frozen=True, slots=True)
class Known:
    """A pair, and the probability of every text of `LENGTH` tokens behind `PROMPT`."""

    pair: TinyPair
    probabilities: dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def known_of() -> dict[str, Known]:
    return {}


@pytest.fixture
def known(
    request: pytest.FixtureRequest, known_of: dict[str, Known], tmp_path_factory: pytest.TempPathFactory
) -> Known:
    name: str = request.param
    if name not in known_of:
        pair = PAIRS[name](tmp_path_factory.mktemp(name), vocab_size=VOCAB)
        with open_llm(pair, speculative=False) as llm:
            known_of[name] = Known(pair, text_probabilities(llm))
    return known_of[name]


def open_llm(pair: TinyPair, *, speculative: bool) -> LLM:
    options = SpeculativeOptions(decoder=pair.decoder, draft=pair.draft, num_drafts=2, adaptive=False)
    return LLM(
        pair.model,
        device="cpu",
        kv_budget=4096,
        page_size=8,
        max_batch_size=64,
        speculative=options if speculative else None,
    )


def text_probabilities(llm: LLM) -> dict[tuple[int, ...], float]:
    params = SamplingParams(max_tokens=1, temperature=TEMPERATURE, seed=0, logprobs=VOCAB, ignore_eos=True)
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        outputs = llm.generate([[*PROMPT, *text] for text in texts], params, use_cache=False)
        longer = {}
        for (text, probability), output in zip(texts.items(), outputs, strict=True):
            assert output.logprobs is not None
            for token, logprob in output.logprobs[0].top:
                longer[(*text, token)] = probability * math.exp(logprob)
        texts = longer
    assert len(texts) == VOCAB**LENGTH
    assert sum(texts.values()) == pytest.approx(1.0, abs=1e-4)
    return texts


def draw(pair: TinyPair, count: int, *, speculative: bool) -> tuple[Counter[tuple[int, ...]], int]:
    """Texts of so many seeds, and how many proposals were kept."""
    params = [
        SamplingParams(max_tokens=LENGTH + 1, temperature=TEMPERATURE, seed=seed, ignore_eos=True)
        for seed in range(count)
    ]
    with open_llm(pair, speculative=speculative) as llm:
        outputs = llm.generate([PROMPT] * count, params, use_cache=False)
    texts = Counter(tuple(output.token_ids[:LENGTH]) for output in outputs)
    return texts, sum(output.accepted_draft_tokens for output in outputs)


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("known", PAIRS, indirect=True)
def test_texts_are_drawn_from_the_model(known: Known, speculative: bool) -> None:
    texts, kept = draw(known.pair, DRAWS, speculative=speculative)
    assert agrees(texts, known.probabilities), chi_square(texts, known.probabilities)
    assert (kept > DRAWS // 10) == speculative


@pytest.mark.parametrize("known", PAIRS, indirect=True)
def test_a_rule_that_favours_proposals_is_found(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: the same draws, judged by the usual wrong rule."""
    monkeypatch.setattr("edgellm.decoding.chain.verify_runs", SecondChance().verify_runs)
    texts, _ = draw(known.pair, BIASED_DRAWS, speculative=True)
    statistic, freedom = chi_square(texts, known.probabilities)
    assert statistic > 1.5 * critical_value(freedom)


class SecondChance:
    """A refused proposal is replaced by a draw from the whole distribution, not from what is left of it.

    The proposal gets p + (1 - p) p instead of p.
    """

    def __init__(self) -> None:
        self._coin = random.Random(5)

    def verify_runs(
        self,
        logits: torch.Tensor,
        proposals: Sequence[Sequence[int]],
        sampler: Sampler,
        states: Sequence[SamplingState],
    ) -> list[VerifiedRun]:
        runs, first = [], 0
        for chain, state in zip(proposals, states, strict=True):
            rows = logits[first : first + len(chain) + 1]
            runs.append(self._run(rows, chain, sampler, state))
            first += len(chain) + 1
        return runs

    def _run(self, logits: torch.Tensor, chain: Sequence[int], sampler: Sampler, state: SamplingState) -> VerifiedRun:
        (run,) = verify_runs(logits, [chain], sampler, [state])
        kept = len(run.token_ids)
        if kept > len(chain) or self._coin.random() >= float(logits[kept - 1].softmax(0)[chain[kept - 1]]):
            return run
        (fair,) = self._coin.choices(range(VOCAB), logits[kept].softmax(0).tolist())
        return VerifiedRun([*run.token_ids[:-1], chain[kept - 1], fair])
