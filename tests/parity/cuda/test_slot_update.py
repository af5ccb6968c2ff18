"""Updates of per-slot state on CUDA, against the reference; the reference against indexing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from row_ops import assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.slot_update import STATE_TYPES, launch_config, slot_update
from edgellm.kernels.ref import slot_update as ref

SLOTS = [6, -1, 0, 3, 7]  # 7 is beyond the last


def int32(values: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_reference() -> None:
    state = torch.arange(14).view(7, 2)
    ref.slot_update(state, int32([1, -1, 9]))
    ref.slot_update(state, int32([2, -1]), torch.tensor([[70, 71], [0, 0]]))
    ref.slot_update(state, int32([3, 0]), torch.tensor([[1, 2], [3, 4]]), add=True)
    assert state.tolist() == [[3, 5], [0, 0], [70, 71], [7, 9], [8, 9], [10, 11], [12, 13]]


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    slot_update(torch.zeros(7, 16), int32([1]))
    slot_update(torch.zeros(7, dtype=torch.int32), int32([1, 2]), int32([5, 6]), add=True)
    slot_update(torch.zeros(7), int32([]))
    assert [launch.key for launch in launches] == [(torch.float32, 4), (torch.int32, 1)]
    assert launches[0].params["values"] is None
    assert (launches[1].params["is_add"], launches[1].params["width"]) == (1, 1)
    assert launches[1].config == launch_config(2, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"state": torch.zeros(4, dtype=torch.bool)}, "state is"),
        ({"state": torch.zeros(4, 4).t()}, "state is"),
        ({"slots": torch.zeros(2)}, "slots is"),
        ({"values": torch.zeros(2, 3)}, "values is"),
        ({"values": torch.zeros(2, dtype=torch.int32)}, "values is"),
        ({"add": True}, "no values to add"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str) -> None:
    launches = record_launches(monkeypatch)
    state = torch.zeros(4, 4)[:, 0] if "values" in arguments else torch.zeros(4)
    with pytest.raises(InvalidArgumentError, match=message):
        slot_update(**({"state": state.contiguous(), "slots": int32([0, 1])} | arguments))
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", STATE_TYPES)
@pytest.mark.parametrize("shape", [(), (3,), (8,), (4, 1024), (1025,)])
def test_device_equals_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    state = (torch.randn(7, *shape) * 50).to(dtype)
    values = (torch.randn(5, *shape) * 50).to(dtype)
    for options in ({}, {"values": values}, {"values": values, "add": True}):
        expected, actual = state.clone(), state.cuda()
        ref.slot_update(expected, int32(SLOTS), **options)
        moved = options | ({"values": values.cuda()} if "values" in options else {})
        slot_update(actual, int32(SLOTS, "cuda"), **moved)
        assert_same_bits(actual, expected)


@pytest.mark.gpu
def test_graph_equals_eager() -> None:
    lengths, slots, added = int32([5, 6, 7], "cuda"), int32([0, -1], "cuda"), int32([1, 1], "cuda")
    graph = captured(lambda: slot_update(lengths, slots, added, add=True))
    lengths.copy_(int32([5, 6, 7]))
    slots.copy_(int32([2, 1]))
    graph.replay()
    graph.replay()
    assert lengths.tolist() == [5, 8, 9]


@pytest.mark.gpu
def test_sanitizer_slot_update() -> None:
    for width in (3, 8):
        state, values = torch.zeros(7, width, device="cuda"), torch.ones(5, width, device="cuda")
        slot_update(state, int32(SLOTS, "cuda"), values, add=True)
        slot_update(state, int32(SLOTS, "cuda"))
    torch.cuda.synchronize()
