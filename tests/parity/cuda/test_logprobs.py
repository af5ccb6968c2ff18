"""Log-probabilities: the reference against the host's, then the device against the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from row_ops import captured, record_launches
from sample_case import random_logits

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.logprobs import MAX_TOP, launch_config, logprobs, logprobs_workspace
from edgellm.kernels.cu.sample import LOGIT_TYPES
from edgellm.kernels.ref import logprobs as ref
from edgellm.sampling.params import SamplingParams
from edgellm.sampling.sampler import Sampler, SamplingState

INF = float("inf")
KINDS = ("smooth", "ties", "excluded", "flat", "outlier", "peaked")
VOCABS = [1, 2, 7, 31, 33, 1000, 8192, 8193]


def results(num_rows: int, num_top: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.full((num_rows,), 7.0, dtype=torch.float64, device=device),
        torch.full((num_rows, num_top), 7.0, dtype=torch.float64, device=device),
        torch.full((num_rows, num_top), 7, dtype=torch.int32, device=device),
    )


def by_reference(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    found = results(len(token_ids), num_top)
    ref.logprobs(logits, token_ids, *found, torch.empty(0, dtype=torch.uint8))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_reference_is_the_host(vocab_size: int, kind: str) -> None:
    num_top = min(50, vocab_size + 3)
    logits = torch.from_numpy(random_logits(np.random.default_rng(vocab_size), kind, (5, vocab_size)))
    params = SamplingParams(temperature=0.0, logprobs=num_top)
    states = [SamplingState(params, [0], vocab_size) for _ in range(5)]
    host = Sampler().sample(logits, states)
    chosen, values, ids = by_reference(logits, torch.tensor(host.token_ids, dtype=torch.int32), num_top)
    for row, record in enumerate(host.logprobs):
        assert record is not None
        assert float(chosen[row]) == pytest.approx(record.logprob, abs=1e-12)
        size = len(record.top)
        assert ids[row, :size].tolist() == [token_id for token_id, _ in record.top]
        assert values[row, :size].tolist() == pytest.approx([value for _, value in record.top], abs=1e-12)
        assert values[row, size:].tolist() == [-INF] * (num_top - size)


def test_launch_config() -> None:
    assert launch_config(3, 151_936).grid == (19, 3, 1)


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    workspace = torch.zeros(logprobs_workspace(4, 300), dtype=torch.uint8)
    token_ids = torch.zeros(9, dtype=torch.int32)
    index = torch.zeros(4, dtype=torch.int32)
    logprobs(torch.zeros(9, 300), token_ids, *results(4, 5), workspace, row_index=index, token_index=index)
    logprobs(torch.zeros(9, 300).double(), token_ids, *results(4, 0), workspace)
    logprobs(torch.zeros(9, 300), token_ids, *results(0, 5), workspace)
    assert [launch.key for launch in launches] == [(torch.float32,), (torch.float64,)]
    assert [launch.params["num_top"] for launch in launches] == [5, 0]


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(4, 300, dtype=torch.int64), "logits is"),
        (1, torch.zeros(4), "token_ids is"),
        (2, torch.zeros(4), "chosen is"),
        (3, torch.zeros(4, 6, dtype=torch.float64), "top_values is"),
        (4, torch.zeros(3, 5, dtype=torch.int32), "top_ids is"),
        (5, torch.zeros(5, dtype=torch.uint8), "workspace has 5 bytes"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, position: int, value: torch.Tensor, message: str) -> None:
    launches = record_launches(monkeypatch)
    workspace = torch.zeros(logprobs_workspace(4, 300), dtype=torch.uint8)
    arguments = [torch.zeros(4, 300), torch.zeros(4, dtype=torch.int32), *results(4, 5), workspace]
    arguments[position] = value
    with pytest.raises(InvalidArgumentError, match=message):
        logprobs(*arguments)
    assert not launches


def test_too_many_most_likely_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    record_launches(monkeypatch)
    workspace = torch.zeros(logprobs_workspace(1, 300), dtype=torch.uint8)
    with pytest.raises(InvalidArgumentError, match="the limit is 64"):
        logprobs(torch.zeros(1, 300), torch.zeros(1, dtype=torch.int32), *results(1, MAX_TOP + 1), workspace)


# ---- the device ----------------------------------------------------------------------------------------------------


def on_device(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    found = results(len(token_ids), num_top, "cuda")
    size = logprobs_workspace(len(token_ids), logits.shape[1])
    logprobs(logits.cuda(), token_ids.cuda(), *found, torch.zeros(size, dtype=torch.uint8, device="cuda"))
    return tuple(tensor.cpu() for tensor in found)


def assert_same(mine: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for found, wanted in zip(mine[:2], expected[:2], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-12, equal_nan=True)
    assert torch.equal(mine[2], expected[2])


def chosen_ids(vocab_size: int, num_rows: int) -> torch.Tensor:
    return torch.arange(num_rows, dtype=torch.int32) * 37 % vocab_size


@pytest.mark.gpu
@pytest.mark.parametrize("num_top", [0, 1, 20, 64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_device_equals_reference(vocab_size: int, kind: str, num_top: int) -> None:
    logits = torch.from_numpy(random_logits(np.random.default_rng(num_top), kind, (5, vocab_size)))
    token_ids = chosen_ids(vocab_size, 5)
    assert_same(on_device(logits, token_ids, num_top), by_reference(logits, token_ids, num_top))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ties", "excluded", "outlier"])
@pytest.mark.parametrize("vocab_size", [49_152, 151_936])
def test_device_equals_reference_on_whole_vocabularies(vocab_size: int, kind: str) -> None:
    logits = torch.from_numpy(random_logits(np.random.default_rng(4), kind, (5, vocab_size)))
    token_ids = chosen_ids(vocab_size, 5)
    assert_same(on_device(logits, token_ids, 50), by_reference(logits, token_ids, 50))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LOGIT_TYPES)
def test_device_types_strides_and_index(dtype: torch.dtype) -> None:
    wide = torch.from_numpy(random_logits(np.random.default_rng(1), "smooth", (9, 20_000))).to(dtype).cuda()
    token_ids = torch.tensor([5, -1, 9, 3], dtype=torch.int32, device="cuda")
    row_index = torch.tensor([8, 2, 2], dtype=torch.int32, device="cuda")
    token_index = torch.tensor([2, 1, 0], dtype=torch.int32, device="cuda")
    found, expected = results(3, 7, "cuda"), results(3, 7, "cuda")
    workspace = torch.zeros(logprobs_workspace(3, 18_997), dtype=torch.uint8, device="cuda")
    for run, into in ((logprobs, found), (ref.logprobs, expected)):
        run(wide[:, 3:19_000], token_ids, *into, workspace, row_index=row_index, token_index=token_index)
    assert_same(tuple(one.cpu() for one in found), tuple(one.cpu() for one in expected))
    assert math.isnan(float(found[0][1]))


@pytest.mark.gpu
def test_device_rows_do_not_depend_on_the_batch() -> None:
    logits = torch.from_numpy(random_logits(np.random.default_rng(2), "ties", (40, 49_152)))
    token_ids = chosen_ids(49_152, 40)
    together = on_device(logits, token_ids, 20)
    for row in (0, 17, 39):
        alone = on_device(logits[row : row + 1], token_ids[row : row + 1], 20)
        assert all(torch.equal(one[0], all_rows[row]) for one, all_rows in zip(alone, together, strict=True))


@pytest.mark.gpu
def test_device_in_a_graph() -> None:
    logits = torch.randn(4, 30_000, device="cuda")
    token_ids = chosen_ids(30_000, 4).cuda()
    found = results(4, 9, "cuda")
    workspace = torch.zeros(logprobs_workspace(4, 30_000), dtype=torch.uint8, device="cuda")
    graph = captured(lambda: logprobs(logits, token_ids, *found, workspace))
    for _ in range(3):
        logits.normal_()
        graph.replay()
        expected = by_reference(logits.cpu(), token_ids.cpu(), 9)
        assert_same(tuple(one.cpu() for one in found), expected)


@pytest.mark.gpu
def test_device_sanitizer() -> None:
    logits = torch.from_numpy(random_logits(np.random.default_rng(3), "ties", (3, 9000)))
    token_ids = chosen_ids(9000, 3)
    assert_same(on_device(logits, token_ids, 20), by_reference(logits, token_ids, 20))
