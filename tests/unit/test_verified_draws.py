"""The rule of verification on a vocabulary of two tokens: runs have the probabilities of plain decoding."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from chi_square import agrees, chi_square

from edgellm.decoding.verify import VerifiedRun, verify_runs
from edgellm.sampling.params import SamplingParams
from edgellm.sampling.sampler import Sampler
from edgellm.sampling.state import SamplingState

TARGET = [[0.7, 0.3], [0.2, 0.8], [0.55, 0.45]]  # of the places that a chain of two proposals reaches
DRAWS, BATCH = 3000, 500
CHAINS = list(itertools.product(range(2), repeat=2))
DRAFTS = {
    "good": [p * q for p, q in itertools.product(TARGET[0], TARGET[1])],  # proposes as the target draws
    "bad": [0.0, 0.0, 1.0, 0.0],  # always the less likely tokens
    "greedy": [0.0, 1.0, 0.0, 0.0],  # always the most likely ones
}


def run_probabilities(draft: list[float]) -> dict[object, float]:
    """Of (chain, run): each place is drawn from the target as long as the proposals before it were drawn."""
    found: dict[object, float] = {}
    for chain, proposed in zip(CHAINS, draft, strict=True):
        kept = proposed
        for place in range(3):
            for token, probability in enumerate(TARGET[place]):
                if place == 2 or token != chain[place]:
                    found[chain, (*chain[:place], token)] = kept * probability
            kept *= TARGET[place][chain[place]] if place < 2 else 1.0
    return {outcome: probability for outcome, probability in found.items() if probability}


def drawn(draft: list[float], verify) -> Counter[object]:
    logits, coin = torch.tensor(TARGET).log(), random.Random(4)
    counts: Counter[object] = Counter()
    for first in range(0, DRAWS, BATCH):
        chains = coin.choices(CHAINS, draft, k=BATCH)
        states = [
            SamplingState(SamplingParams(temperature=1.0, seed=seed), [0], 2) for seed in range(first, first + BATCH)
        ]
        runs = verify(logits.repeat(BATCH, 1), chains, Sampler(), states)
        counts.update((chain, tuple(run.token_ids)) for chain, run in zip(chains, runs, strict=True))
    return counts


@pytest.mark.parametrize("draft", DRAFTS)
def test_runs_have_the_probabilities_of_the_target(draft: str) -> None:
    wanted = run_probabilities(DRAFTS[draft])
    assert sum(wanted.values()) == pytest.approx(1.0)
    counts = drawn(DRAFTS[draft], verify_runs)
    assert agrees(counts, wanted), chi_square(counts, wanted)


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_rule_that_favours_proposals_a_little_is_found(draft: str) -> None:
    """A first proposal that was refused is kept all the same, once in four times; the rest is drawn fairly."""
    coin = random.Random(9)

    def behind(chain: tuple[int, ...]) -> list[int]:
        (second,), (third,) = (coin.choices(range(2), weights) for weights in TARGET[1:])
        return [second, third] if second == chain[1] else [second]

    def favouring(logits, chains, sampler, states):
        runs = verify_runs(logits, chains, sampler, states)
        return [
            VerifiedRun([chain[0], *behind(chain)]) if run.token_ids[0] != chain[0] and not coin.randrange(4) else run
            for chain, run in zip(chains, runs, strict=True)
        ]

    assert not agrees(drawn(DRAFTS[draft], favouring), run_probabilities(DRAFTS[draft]))
