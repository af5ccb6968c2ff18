"""Gather of page rows on CUDA, against the reference."""

from __future__ import annotations

import pytest
import torch
from row_ops import assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.page_table_gather import launch_config, page_table_gather
from edgellm.kernels.ref import page_table_gather as ref


def int32(values: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_table(width: int, stride: int, device: str = "cpu") -> torch.Tensor:
    return torch.arange(9 * stride, dtype=torch.int32, device=device).view(9, stride)[:, :width]


def test_reference() -> None:
    out = torch.zeros(4, 3, dtype=torch.int32)
    ref.page_table_gather(make_table(3, 3), int32([2, -1, 9, 0]), out)
    assert out.tolist() == [[6, 7, 8], [-1, -1, -1], [-1, -1, -1], [0, 1, 2]]


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    page_table_gather(make_table(1024, 1024), int32([1, 2]), torch.empty(2, 1024, dtype=torch.int32))
    page_table_gather(make_table(5, 8), int32([1, 2]), torch.empty(2, 5, dtype=torch.int32))
    page_table_gather(make_table(5, 8), int32([]), torch.empty(0, 5, dtype=torch.int32))
    assert [launch.key for launch in launches] == [(4,), (1,)]
    assert launches[0].config == launch_config(2, 1024, 4)
    assert launches[0].config.grid == (2, 2, 1)


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    with pytest.raises(InvalidArgumentError, match="table is"):
        page_table_gather(make_table(4, 4).long(), int32([1]), torch.empty(1, 4, dtype=torch.int32))
    with pytest.raises(InvalidArgumentError, match="slots is"):
        page_table_gather(make_table(4, 4), int32([1]).long(), torch.empty(1, 4, dtype=torch.int32))
    with pytest.raises(InvalidArgumentError, match="out is"):
        page_table_gather(make_table(4, 4), int32([1]), torch.empty(1, 5, dtype=torch.int32))
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "stride"), [(1, 1), (4, 4), (5, 8), (8, 12), (1000, 1000), (1030, 1031)])
def test_device_equals_reference(width: int, stride: int) -> None:
    slots = int32([8, 0, -1, 3, 9, 3])
    out, expected = torch.zeros(6, width, dtype=torch.int32, device="cuda"), torch.zeros(6, width, dtype=torch.int32)
    page_table_gather(make_table(width, stride, "cuda"), slots.cuda(), out)
    ref.page_table_gather(make_table(width, stride), slots, expected)
    assert_same_bits(out, expected)


@pytest.mark.gpu
def test_graph_equals_eager() -> None:
    table, slots, out = make_table(8, 8, "cuda"), int32([1, 2], "cuda"), int32([0] * 16, "cuda").view(2, 8)
    graph = captured(lambda: page_table_gather(table, slots, out))
    slots.copy_(int32([-1, 7]))
    graph.replay()
    assert out.tolist() == [[-1] * 8, table[7].tolist()]


@pytest.mark.gpu
def test_sanitizer_page_table_gather() -> None:
    for width in (8, 5):
        out = torch.empty(3, width, dtype=torch.int32, device="cuda")
        page_table_gather(make_table(width, width, "cuda"), int32([8, -1, 0], "cuda"), out)
    torch.cuda.synchronize()
