"""State put back to checkpoints on CUDA, against the reference; the reference against what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from row_ops import assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.scatter_state import MAX_PIECES, launch_config, scatter_state
from edgellm.kernels.ref import scatter_state as ref

SLOTS, SOURCES = (4, -1, 0, 6), (2, 99, 0, 4)


def int32(values: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_reference() -> None:
    live, kept = torch.arange(14).view(7, 2), -torch.arange(10).view(5, 2)
    ref.scatter_state(live, kept, int32(SLOTS), int32(SOURCES))
    assert live.tolist() == [[0, -1], [2, 3], [4, 5], [6, 7], [-4, -5], [10, 11], [-8, -9]]
    pieces = [torch.arange(14).view(7, 2), torch.arange(7)]
    ref.scatter_state(pieces, [kept, -torch.arange(5)], int32(SLOTS), int32(SOURCES))
    assert torch.equal(pieces[0], live)
    assert pieces[1].tolist() == [0, 1, 2, 3, -2, 5, -4]


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    slots, sources = int32(SLOTS), int32(SOURCES)
    scatter_state(torch.zeros(7, 8), torch.zeros(5, 8), slots, sources)
    scatter_state([torch.zeros(7, 8), torch.zeros(7, 3)], [torch.zeros(5, 8), torch.zeros(5, 3)], slots, sources)
    scatter_state(torch.zeros(7, 3).half(), torch.zeros(5, 3).half(), slots, sources)
    many = [torch.zeros(7, 4)] * (MAX_PIECES + 1)
    scatter_state(many, [torch.zeros(5, 4)] * len(many), slots, sources)
    assert [launch.key for launch in launches] == [(16,), (4,), (2,), (16,), (16,)]
    assert [launch.config.grid for launch in launches] == [(1, 4, 1), (1, 4, 2), (1, 4, 1), (1, 4, 64), (1, 4, 1)]
    assert list(launches[1].params["words"][:3]) == [8, 3, 0]
    launches.clear()
    scatter_state(torch.zeros(7, 8), torch.zeros(5, 8), slots[:0], sources[:0])
    scatter_state(torch.zeros(7, 0), torch.zeros(5, 0), slots, sources)
    scatter_state([], [], slots, sources)
    assert not launches
    assert launch_config(3, 2, 4096).grid == (4, 3, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"live": torch.zeros(7, 8).t()}, "live is"),
        ({"live": [torch.zeros(7, 8), torch.zeros(6, 8)], "checkpoint": [torch.zeros(5, 8)] * 2}, "live is"),
        ({"checkpoint": torch.zeros(5, 9)}, "checkpoint is"),
        ({"checkpoint": torch.zeros(5, 8).half()}, "checkpoint is"),
        ({"checkpoint": []}, "as many checkpoints as pieces"),
        ({"slots": torch.zeros(4)}, "slots is"),
        ({"sources": int32((1, 2))}, "sources is"),
        ({"live": torch.zeros(7, 3).byte(), "checkpoint": torch.zeros(5, 3).byte()}, "odd bytes"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
    launches = record_launches(monkeypatch)
    arguments = {
        "live": torch.zeros(7, 8),
        "checkpoint": torch.zeros(5, 8),
        "slots": int32(SLOTS),
        "sources": int32(SOURCES),
    }
    with pytest.raises(InvalidArgumentError, match=message):
        scatter_state(**(arguments | changes))
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_device_equals_reference(dtype: torch.dtype) -> None:
    shapes = [(8,), (3, 5), (), (32, 128), (2, 64, 64)] * 14  # more than one launch takes
    live = [torch.randn(7, *shape).to(dtype) for shape in shapes]
    kept = [torch.randn(5, *shape).to(dtype) for shape in shapes]
    actual, stored = [piece.to("cuda") for piece in live], [piece.to("cuda") for piece in kept]
    # Sources and slots out of range move nothing on the device.
    scatter_state(actual, stored, int32((*SLOTS, 7, 5), "cuda"), int32((*SOURCES, 0, -1), "cuda"))
    ref.scatter_state(live, kept, int32(SLOTS), int32(SOURCES))
    for ours, theirs in zip(actual, live, strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.gpu
def test_a_graph_follows_its_slots() -> None:
    live, kept = torch.zeros(7, 1000, device="cuda"), torch.randn(5, 1000, device="cuda")
    slots, sources = int32((-1, -1), "cuda"), int32((0, 0), "cuda")
    graph = captured(lambda: scatter_state(live, kept, slots, sources))
    assert not live.any()
    slots.copy_(int32((3, 5), "cuda"))
    sources.copy_(int32((4, 1), "cuda"))
    graph.replay()
    assert_same_bits(live[[3, 5]], kept[[4, 1]])
    assert not live[[0, 1, 2, 4, 6]].any()
