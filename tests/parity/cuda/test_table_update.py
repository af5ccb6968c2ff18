"""Update of page rows on CUDA, against the reference."""

from __future__ import annotations

import pytest
import torch
from row_ops import assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.table_update import launch_config, table_update
from edgellm.kernels.ref import table_update as ref


def int32(values: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def rows_of(count: int, width: int, device: str = "cpu") -> torch.Tensor:
    return torch.arange(count * width, dtype=torch.int32, device=device).view(count, width) + 100


def test_reference() -> None:
    table = torch.zeros(4, 2, dtype=torch.int32)
    ref.table_update(table, int32([3, -1, 4, 0]), rows_of(4, 2))
    assert table.tolist() == [[106, 107], [0, 0], [0, 0], [100, 101]]


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    table_update(torch.zeros(9, 1024, dtype=torch.int32), int32([1, 2]), rows_of(2, 1024))
    table_update(torch.zeros(9, 5, dtype=torch.int32), int32([1, 2]), rows_of(2, 5))
    table_update(torch.zeros(9, 5, dtype=torch.int32), int32([]), rows_of(0, 5))
    assert [launch.key for launch in launches] == [(4,), (1,)]
    assert launches[0].config == launch_config(2, 1024, 4)
    assert launches[0].params["num_slots"] == 9


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    table = torch.zeros(9, 4, dtype=torch.int32)
    with pytest.raises(InvalidArgumentError, match="table is"):
        table_update(table[0], int32([1]), rows_of(1, 4))
    with pytest.raises(InvalidArgumentError, match="slots is"):
        table_update(table, int32([1]).float(), rows_of(1, 4))
    with pytest.raises(InvalidArgumentError, match="rows is"):
        table_update(table, int32([1]), rows_of(2, 4))
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "stride"), [(1, 1), (4, 4), (5, 8), (8, 12), (1000, 1000), (1030, 1031)])
def test_device_equals_reference(width: int, stride: int) -> None:
    slots = int32([8, 0, -1, 3, 9])
    table = torch.full((9, stride), -1, dtype=torch.int32)
    actual = table.cuda()
    table_update(actual[:, :width], slots.cuda(), rows_of(5, width, "cuda"))
    ref.table_update(table[:, :width], slots, rows_of(5, width))
    assert_same_bits(actual, table)


@pytest.mark.gpu
def test_graph_equals_eager() -> None:
    table, slots, rows = int32([-1] * 24, "cuda").view(3, 8), int32([-1, -1], "cuda"), rows_of(2, 8, "cuda")
    graph = captured(lambda: table_update(table, slots, rows))
    slots.copy_(int32([2, -1]))
    graph.replay()
    assert table.tolist() == [[-1] * 8, [-1] * 8, rows[0].tolist()]


@pytest.mark.gpu
def test_sanitizer_table_update() -> None:
    for width in (8, 5):
        table = torch.zeros(4, width, dtype=torch.int32, device="cuda")
        table_update(table, int32([3, -1], "cuda"), rows_of(2, width, "cuda"))
    torch.cuda.synchronize()
