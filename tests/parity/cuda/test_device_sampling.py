"""`Sampler` on CUDA logits, kernels and all, against the host's path: token for token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_batches import assert_as_on_the_host, random_state

from edgellm.sampling.guidance import Guidance
from edgellm.sampling.params import SamplingParams
from edgellm.sampling.sampler import Sampler, SamplingState
from edgellm.sampling.structured import StructuredOutput
from edgellm.testing.toy_tokenizer import ToyTokenizer

pytestmark = pytest.mark.gpu


def assert_same(sampler: Sampler, logits: torch.Tensor, states: list[SamplingState]) -> None:
    assert_as_on_the_host(sampler.sample(logits.cuda(), states), logits, states)


@pytest.mark.parametrize("vocab_size", [2, 33, 1000, 49_152, 151_936])
def test_random_batches(vocab_size: int) -> None:
    rng, sampler = np.random.default_rng(vocab_size), Sampler()
    for trial in range(6):
        num_rows = int(rng.integers(1, 40))
        logits = torch.from_numpy(rng.normal(size=(num_rows, vocab_size)) * 3).float()
        logits = logits.bfloat16().float() if trial % 2 else logits
        logits[rng.random(num_rows) < 0.1] = float(rng.choice([np.nan, np.inf, -np.inf]))
        assert_same(sampler, logits, [random_state(rng, vocab_size) for _ in range(num_rows)])


def test_thousands_of_draws() -> None:
    rng, sampler = np.random.default_rng(1), Sampler()
    for _ in range(10):
        logits = torch.from_numpy(rng.normal(size=(500, 64)) * 2).float()
        assert_same(sampler, logits, [random_state(rng, 64) for _ in range(500)])


def test_other_types() -> None:
    rng, sampler = np.random.default_rng(2), Sampler()
    states = [random_state(rng, 9000) for _ in range(8)]
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert_same(sampler, torch.from_numpy(rng.normal(size=(8, 9000))).to(dtype), states)
    assert_same(sampler, torch.randn(9000, 8).t(), states)


def test_plain_greedy_rows() -> None:
    logits = torch.randn(9, 49_152).bfloat16().float()
    states = [SamplingState(SamplingParams(temperature=0.0), [0], 49_152) for _ in range(9)]
    assert_same(Sampler(), logits, states)


def test_guided_rows_among_others() -> None:
    rng, sampler = np.random.default_rng(3), Sampler()
    guidance = Guidance(ToyTokenizer(300), 300)
    for form in (StructuredOutput(regex="ab?c*"), StructuredOutput(choice=["yes", "no"])):
        params = SamplingParams(seed=1, structured=form, logprobs=2)
        for recorded in ([], [7]):
            states = [SamplingState(params, [1], 300, [1], guide=guidance.start(form)), random_state(rng, 300)]
            for token_id in recorded:
                states[0].record(token_id)
            assert_same(sampler, torch.from_numpy(rng.normal(size=(2, 300))).float(), states)


def test_on_a_stream_of_its_own() -> None:
    rng, sampler = np.random.default_rng(4), Sampler()
    logits = torch.from_numpy(rng.normal(size=(6, 9000))).float()
    states = [random_state(rng, 9000) for _ in range(6)]
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_same(sampler, logits, states)
    assert_same(sampler, logits, states)
