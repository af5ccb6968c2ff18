"""Random rows for the sampler, and the comparison of its device path with its host path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgellm.sampling.params import SamplingParams
from edgellm.sampling.sampler import Sampler, SampleResult, SamplingState


def random_state(rng: np.random.Generator, vocab_size: int) -> SamplingState:
    """A sequence of eight tokens with every kind of setting on or off."""
    params = SamplingParams(
        max_tokens=50,
        temperature=float(rng.choice([0.0, 0.2, 1.0, 3.0])),
        top_k=int(rng.choice([0, 1, 7, vocab_size])),
        top_p=float(rng.choice([1.0, 0.9, 0.3])),
        min_p=float(rng.choice([0.0, 0.1])),
        repetition_penalty=float(rng.choice([1.0, 1.2])),
        presence_penalty=float(rng.choice([0.0, 0.5])),
        logit_bias={int(rng.integers(vocab_size)): 2.5} if rng.random() < 0.3 else {},
        seed=int(rng.integers(2**63)),
        min_tokens=int(rng.choice([0, 9])),
        logprobs=[None, 0, 3][rng.integers(3)],
    )
    state = SamplingState(params, rng.integers(vocab_size, size=5).tolist(), vocab_size, [0])
    for token_id in rng.integers(vocab_size, size=3).tolist():
        state.record(token_id)
    return state


def assert_as_on_the_host(result: SampleResult, logits: torch.Tensor, states: list[SamplingState]) -> None:
    """Same ids and reasons; log-probabilities of the same tokens, whose sums may round otherwise."""
    host = Sampler().sample(logits.cpu(), states)
    assert result.token_ids == host.token_ids
    assert result.errors == host.errors
    for mine, theirs in zip(result.logprobs, host.logprobs, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-12, rel=1e-12)
            assert [token_id for token_id, _ in mine.top] == [token_id for token_id, _ in theirs.top]
            assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-12)
