"""Compaction of batch rows on CUDA, against the reference; the reference against indexing."""

from __future__ import annotations

import pytest
import torch
from row_ops import assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.compact_rows import compact_rows, launch_config, word_size
from edgellm.kernels.ref import compact_rows as ref

MAPPINGS = {
    "all stay": list(range(12)),
    "first leaves": [-1, *range(11)],
    "last leaves": [*range(11), -1],
    "every second": [-1 if i % 2 == 0 else i // 2 for i in range(12)],
    "all leave": [-1] * 12,
    "one is left": [-1] * 11 + [0],
    "long": [-1 if i % 3 == 1 else i - (i + 1) // 3 for i in range(50)],
}


def int32(values: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("name", MAPPINGS)
def test_reference_is_indexing(name: str) -> None:
    mapping = int32(MAPPINGS[name])
    kept = (mapping >= 0).nonzero().flatten()
    assert mapping[kept].tolist() == list(range(len(kept)))
    tensor = torch.arange(len(mapping) * 2 * 3).view(len(mapping) * 2, 3)
    expected = tensor.view(-1, 2, 3).clone()
    expected[: len(kept)] = expected[kept]
    ref.compact_rows(tensor, mapping, rows=2)
    assert torch.equal(tensor, expected.view(-1, 3))


def test_words_and_launch_config() -> None:
    assert word_size(64, 256) == 16
    assert word_size(64, 260) == 4
    assert word_size(20, 256) == 4
    assert word_size(3, 256) == 1
    assert launch_config(4096, 16).grid == (2, 1, 1)


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    compact_rows(torch.zeros(6, 8), int32([0, -1, 1]), rows=2)
    compact_rows(torch.zeros(0, 8), int32([]))
    assert [launch.key for launch in launches] == [(16,)]
    assert (launches[0].params["row_bytes"], launches[0].params["num_rows"]) == (64, 3)


@pytest.mark.parametrize(
    ("tensor", "rows", "message"),
    [
        (torch.zeros(6, 4), 1, "3 entries of 1 rows"),
        (torch.zeros(6, 4), 0, "at least 1"),
        (torch.zeros(4, 3).t(), 1, "contiguous"),
        (torch.tensor(1.0), 1, "tensor is"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor, rows: int, message: str) -> None:
    launches = record_launches(monkeypatch)
    with pytest.raises(InvalidArgumentError, match=message):
        compact_rows(tensor, int32([0, 1, 2]), rows=rows)
    with pytest.raises(InvalidArgumentError, match="mapping is"):
        compact_rows(torch.zeros(3), torch.zeros(3))
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize(("shape", "rows"), [((), 1), ((3,), 1), ((64,), 4), ((5, 1000), 2)])
def test_device_equals_reference(name: str, dtype: torch.dtype, shape: tuple[int, ...], rows: int) -> None:
    mapping = int32(MAPPINGS[name])
    tensor = (torch.randn(len(mapping) * rows, *shape) * 50).to(dtype)
    actual = tensor.cuda()
    compact_rows(actual, mapping.cuda(), rows=rows)
    ref.compact_rows(tensor, mapping, rows=rows)
    assert_same_bits(actual, tensor)


@pytest.mark.gpu
def test_targets_that_do_not_increase_are_skipped() -> None:
    tensor = torch.arange(6, device="cuda")
    compact_rows(tensor, int32([0, 0, 4, 1, 99, 2], "cuda"))
    assert tensor.tolist() == [0, 3, 5, 3, 4, 5]


@pytest.mark.gpu
def test_graph_equals_eager() -> None:
    tensor, mapping = torch.arange(12.0, device="cuda"), int32(MAPPINGS["all stay"], "cuda")
    graph = captured(lambda: compact_rows(tensor, mapping))
    mapping.copy_(int32(MAPPINGS["every second"]))
    graph.replay()
    assert tensor.tolist() == [1, 3, 5, 7, 9, 11, 6, 7, 8, 9, 10, 11]


@pytest.mark.gpu
def test_sanitizer_compact_rows() -> None:
    for width in (3, 4, 8):
        compact_rows(torch.zeros(12, width, device="cuda").half(), int32(MAPPINGS["every second"], "cuda"))
    torch.cuda.synchronize()
