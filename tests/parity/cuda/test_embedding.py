"""Embedding lookup with media rows on CUDA: the reference against indexing, then the device against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from row_ops import ROW_TYPES, assert_same_bits, captured, record_launches, strided_rows

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.embedding import embedding, launch_config
from edgellm.kernels.ref import embedding as ref

VOCAB = 50


def int32(values: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_reference_is_indexing() -> None:
    table, media = torch.randn(VOCAB, 6), torch.randn(2, 6)
    out, error = torch.full((6, 6), float("nan")), int32([0])
    ref.embedding(int32([3, 49, 7, -1, 8, 9]), table, out, media=media, media_index=int32([-1, -1, 1, -1, -1, 0]))
    assert torch.equal(out, torch.stack((table[3], table[49], media[1], torch.zeros(6), table[8], media[0])))
    ref.embedding(int32([-1]), table, out[:1], error=error)
    assert int(error) == 0
    ref.embedding(int32([3, 50]), table, out[:2], error=error)
    assert int(error) == 1
    assert torch.equal(out[:2], torch.stack((table[3], torch.zeros(6))))


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    table, out = torch.randn(VOCAB, 1024).half(), torch.empty(3, 1024).half()
    embedding(int32([1, 2, 3]), table, out)
    embedding(int32([1, 2, 3]), table[:, :9], out[:, :9], error=int32([0]))
    embedding(int32([]), table, out[:0])
    assert [launch.key for launch in launches] == [(torch.float16, 8), (torch.float16, 1)]
    assert launches[0].config == launch_config(3, 1024, 8)
    assert launches[0].config.grid == (3, 1, 1)
    assert launches[0].params["error"] is None
    assert launches[1].params["num_ids"] == VOCAB


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": torch.zeros(2, dtype=torch.int64)}, "ids is"),
        ({"table": torch.zeros(VOCAB, 8, dtype=torch.int8)}, "table is"),
        ({"out": torch.zeros(2, 9)}, "out is"),
        ({"out": torch.zeros(2, 8).half()}, "out is"),
        ({"media": torch.zeros(2, 8)}, "belong together"),
        ({"media": torch.zeros(2, 7), "media_index": int32([0, 0])}, "media is"),
        ({"media": torch.zeros(2, 8), "media_index": int32([0])}, "media_index is"),
        ({"error": int32([0, 0])}, "error is"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
    launches = record_launches(monkeypatch)
    arguments = {"ids": int32([1, 2]), "table": torch.zeros(VOCAB, 8), "out": torch.zeros(2, 8)} | changes
    with pytest.raises(InvalidArgumentError, match=message):
        embedding(**arguments)
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize(("width", "stride"), [(1024, 1024), (2056, 2056), (8, 16), (33, 40), (3, 3)])
def test_device_equals_reference(dtype: torch.dtype, width: int, stride: int) -> None:
    table, media = strided_rows(VOCAB, width, stride, dtype), strided_rows(4, width, width, dtype)
    device_table = torch.empty(VOCAB, stride, dtype=dtype, device="cuda")[:, :width].copy_(table)
    ids = int32([0, VOCAB - 1, -1, 7, VOCAB, 3, -2, 5, 5])
    index = int32([-1, -1, -1, 3, -1, 0, -1, 4, -1])
    for tokens in (1, 4, 9):
        for options in ({}, {"media": media, "media_index": index[:tokens]}):
            expected, error = torch.empty(tokens, width, dtype=dtype), int32([0])
            ref.embedding(ids[:tokens], table, expected, error=error, **options)
            out, device_error = torch.full_like(expected, float("nan"), device="cuda"), int32([0], "cuda")
            moved = {name: tensor.cuda() for name, tensor in options.items()}
            embedding(ids[:tokens].cuda(), device_table, out, error=device_error, **moved)
            assert_same_bits(out, expected)
            assert int(device_error) == int(error) == (1 if tokens == 9 else 0)


@pytest.mark.gpu
def test_graph_equals_eager() -> None:
    table, ids = torch.randn(VOCAB, 64, device="cuda").bfloat16(), int32([1, 2, 3], "cuda")
    out, error = torch.empty(3, 64, device="cuda", dtype=torch.bfloat16), int32([0], "cuda")
    graph = captured(lambda: embedding(ids, table, out, error=error))
    ids.copy_(int32([9, -1, 49]))
    graph.replay()
    assert_same_bits(out, torch.stack((table[9], torch.zeros_like(table[0]), table[49])))
    assert int(error) == 0
    ids[0] = VOCAB
    graph.replay()
    assert int(error) == 1


@pytest.mark.gpu
def test_sanitizer_embedding() -> None:
    for width in (16, 7):
        table, out = torch.randn(VOCAB, width, device="cuda"), torch.empty(3, width, device="cuda")
        embedding(int32([0, 49, 50], "cuda"), table, out, error=int32([0], "cuda"))
    torch.cuda.synchronize()
