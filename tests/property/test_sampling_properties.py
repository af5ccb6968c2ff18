"""The sampler against a plain-Python model of the documented pipeline, on small vocabularies."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.sampling.filters import top_k_ids, top_p_indices
from edgellm.sampling.params import SamplingParams
from edgellm.sampling.philox import uniform
from edgellm.sampling.sampler import NO_TOKEN, Sampler, SamplingState

MAX_VOCAB = 12
# Coarse values make equal logits and equal shares common: ties are where implementations differ.
LOGIT = st.one_of(st.integers(-4, 4).map(float), st.floats(-30, 30, width=32), st.just(-math.inf))
ODD_LOGIT = st.one_of(LOGIT, st.sampled_from([math.nan, math.inf]))


def exponential(value: float) -> float:
    """NumPy's exp of one number: the C library's and NumPy's may differ in the last bit."""
    with np.errstate(under="ignore"):
        return float(np.exp(np.array([value]))[0])


def running_sums(values: list[float]) -> list[float]:
    """Left to right, plain float addition (`sum` compensates since Python 3.12)."""
    total, sums = 0.0, []
    for value in values:
        total += value
        sums.append(total)
    return sums


def descending(ids: list[int], key) -> list[int]:
    return sorted(ids, key=lambda token_id: (-key(token_id), token_id))


def filtered(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Token id to weight after temperature, top-k, top-p and min-p; ids ascending."""
    ids = list(range(len(logits)))
    if params.top_k > 0:
        ids = sorted(descending(ids, logits.__getitem__)[: params.top_k])
    largest = max(logits[token_id] for token_id in ids)
    weights = {token_id: exponential((logits[token_id] - largest) / params.temperature) for token_id in ids}
    if params.top_p < 1.0:
        goal = params.top_p * running_sums(list(weights.values()))[-1]
        order = descending(ids, weights.__getitem__)
        sums = running_sums([weights[token_id] for token_id in order])
        num_kept = next((place + 1 for place, total in enumerate(sums) if total >= goal), len(order))
        weights = {token_id: weights[token_id] for token_id in sorted(order[:num_kept])}
    if params.min_p > 0.0:
        floor = params.min_p * max(weights.values())
        weights = {token_id: weight for token_id, weight in weights.items() if weight >= floor}
    return weights


def reference(logits, params, prompt, output, eos, seed):
    """`(token id or None when the row fails, log-probabilities or None)` of the whole pipeline."""
    if any(math.isnan(value) or value == math.inf for value in logits) or max(logits) == -math.inf:
        return None, None
    edited = list(logits)
    for token_id, bias in params.logit_bias.items():
        edited[token_id] += bias
    total = math.log(math.fsum(math.exp(value - max(edited)) for value in edited)) + max(edited)
    logprobs = [value - total for value in edited]
    for token_id in set(prompt) | set(output):
        value = edited[token_id]
        penalty = params.repetition_penalty
        edited[token_id] = value / penalty if value > 0 else value * penalty
    for token_id in set(output):
        edited[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    if len(output) < params.min_tokens:
        for token_id in {*params.stop_token_ids, *(() if params.ignore_eos else eos)}:
            edited[token_id] = -math.inf
        if max(edited) == -math.inf:
            return None, None
    if params.temperature == 0.0:
        return edited.index(max(edited)), logprobs
    weights = filtered(edited, params)
    sums = running_sums(list(weights.values()))
    target = uniform(seed, len(prompt) + len(output)) * sums[-1]
    ids = list(weights)
    return next((ids[place] for place, total in enumerate(sums) if total > target), ids[-1]), logprobs


@st.composite
def rows(draw, vocab_size: int, logit=LOGIT):
    token = st.integers(0, vocab_size - 1)
    params = SamplingParams(
        max_tokens=20,
        temperature=draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0, 1.0, 3.0, 1e-300])),
        top_k=draw(st.integers(-1, vocab_size + 1)),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.25, 0.5, 0.9, 0.999, 1e-9])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.5, 0.5, 7.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.25, -0.5, 2.0])),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, -1.0, 0.5, 3.0]), max_size=3)),
        seed=draw(st.integers(0, 2**64 - 1)),
        stop_token_ids=draw(st.lists(token, max_size=2)),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.sampled_from([0, 0, 2, 5])),
        logprobs=draw(st.sampled_from([None, 0, 3])),
    )
    logits = draw(st.lists(logit, min_size=vocab_size, max_size=vocab_size))
    prompt = draw(st.lists(token, min_size=1, max_size=6))
    output = draw(st.lists(token, max_size=6))
    return params, logits, prompt, output


@st.composite
def batches(draw):
    vocab_size = draw(st.integers(1, MAX_VOCAB))
    eos = draw(st.lists(st.integers(0, vocab_size - 1), max_size=2))
    return eos, draw(st.lists(rows(vocab_size, draw(st.sampled_from([LOGIT, ODD_LOGIT]))), min_size=1, max_size=5))


def build(params, prompt, output, eos, vocab_size) -> SamplingState:
    state = SamplingState(params, np.array(prompt, np.int32), vocab_size, eos)
    for token_id in output:
        state.record(token_id)
    return state


def as_float32(logits: list[float]) -> list[float]:
    return np.array(logits, np.float32).astype(np.float64).tolist()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(batches())
def test_every_row_equals_the_plain_python_pipeline(batch):
    eos, members = batch
    vocab_size = len(members[0][1])
    states = [build(params, prompt, output, eos, vocab_size) for params, _, prompt, output in members]
    result = Sampler().sample(torch.tensor([logits for _, logits, _, _ in members], dtype=torch.float32), states)
    for row, (params, logits, prompt, output) in enumerate(members):
        expected, logprobs = reference(as_float32(logits), params, prompt, output, eos, params.seed)
        if expected is None:
            assert result.token_ids[row] == NO_TOKEN
            assert row in result.errors
            continue
        assert row not in result.errors
        assert result.token_ids[row] == expected, (params, logits)
        check_logprobs(result.logprobs[row], expected, logprobs, params)


def check_logprobs(record, token_id, logprobs, params) -> None:
    if params.logprobs is None:
        assert record is None
        return
    assert record.token_id == token_id
    assert math.isclose(record.logprob, logprobs[token_id], abs_tol=1e-9)
    finite = [i for i in descending(list(range(len(logprobs))), logprobs.__getitem__) if logprobs[i] > -math.inf]
    assert len(record.top) == min(params.logprobs, len(finite))
    # Compared by value: biases may make two logits equal in one summation order and not in the other.
    for (_, value), reference_id in zip(record.top, finite, strict=False):
        assert math.isclose(value, logprobs[reference_id], abs_tol=1e-9)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(batches(), st.randoms(use_true_random=False))
def test_the_batch_around_a_row_does_not_matter(batch, random):
    eos, members = batch
    vocab_size = len(members[0][1])
    logits = torch.tensor([logits for _, logits, _, _ in members], dtype=torch.float32)
    states = [build(params, prompt, output, eos, vocab_size) for params, _, prompt, output in members]
    together = Sampler().sample(logits, states)
    order = list(range(len(members)))
    random.shuffle(order)
    shuffled = Sampler().sample(logits[order], [states[row] for row in order])
    assert shuffled.token_ids == [together.token_ids[row] for row in order]
    for row in order:
        alone = Sampler().sample(logits[row : row + 1], [states[row]])
        assert alone.token_ids == [together.token_ids[row]]
        assert alone.logprobs == [together.logprobs[row]]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(1, 61))
def test_top_k_equals_a_stable_sort(values, k):
    logits = np.array(values, np.float64)
    expected = sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])
    assert top_k_ids(logits, k).tolist() == expected


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.one_of(st.integers(0, 8).map(lambda n: 10.0**-n), st.floats(0, 1)), min_size=1, max_size=60),
    st.floats(1e-6, 1.0, exclude_max=True),
)
def test_top_p_equals_a_full_sort_for_any_spread(tail, top_p):
    weights = np.array([1.0, *tail])
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    sums = running_sums([float(weights[i]) for i in order])
    goal = top_p * running_sums(weights.tolist())[-1]
    num_kept = next((place + 1 for place, total in enumerate(sums) if total >= goal), len(order))
    assert top_p_indices(weights, top_p).tolist() == sorted(order[:num_kept])
