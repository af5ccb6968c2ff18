"""Rotary angles on CUDA: the reference against the model's own, then the device against the reference."""

from __future__ import annotations

import pytest
import torch
from row_ops import assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.rotary_angles import launch_config, rotary_angles
from edgellm.kernels.ref import rotary_angles as ref
from edgellm.models.config import RopeConfig
from edgellm.models.rope import RotaryAngles, inverse_frequencies

POSITIONS = (0, 1, 17, 4095, 32768, 40959, 131071, 1_000_000)


def inv_freq(head_dim: int = 128) -> torch.Tensor:
    return inverse_frequencies(RopeConfig(theta=1e6), head_dim)[0]


def test_reference_is_what_the_cpu_model_uses() -> None:
    positions = torch.tensor(POSITIONS, dtype=torch.int32)
    out = torch.empty(2, len(POSITIONS), 64)
    ref.rotary_angles(positions, inv_freq(), 1.0, out)
    assert torch.equal(out, RotaryAngles(RopeConfig(theta=1e6), 128)(positions))


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    rotary_angles(torch.zeros(5, dtype=torch.int32), inv_freq(), 0.5, torch.empty(2, 5, 64))
    rotary_angles(torch.zeros(0, dtype=torch.int32), inv_freq(), 0.5, torch.empty(2, 0, 64))
    assert len(launches) == 1
    assert launches[0].config == launch_config(5, 64)
    assert launches[0].config.grid == (3, 1, 1)
    assert launches[0].params["scale"] == 0.5


@pytest.mark.parametrize(
    ("positions", "out", "message"),
    [
        (torch.zeros(5), torch.empty(2, 5, 64), "positions is"),
        (torch.zeros(5, dtype=torch.int64), torch.empty(2, 5, 64), "positions is"),
        (torch.zeros(5, dtype=torch.int32), torch.empty(2, 5, 32), "out is"),
        (torch.zeros(5, dtype=torch.int32), torch.empty(2, 6, 64), "out is"),
        (torch.zeros(5, dtype=torch.int32), torch.empty(2, 5, 64, dtype=torch.bfloat16), "out is"),
    ],
)
def test_bad_arguments(
    monkeypatch: pytest.MonkeyPatch, positions: torch.Tensor, out: torch.Tensor, message: str
) -> None:
    record_launches(monkeypatch)
    with pytest.raises(InvalidArgumentError, match=message):
        rotary_angles(positions, inv_freq(), 1.0, out)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [2, 16, 64, 128, 256])
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_device_equals_reference(head_dim: int, scale: float) -> None:
    positions = torch.tensor(POSITIONS, dtype=torch.int32)
    expected = torch.empty(2, len(POSITIONS), head_dim // 2)
    ref.rotary_angles(positions, inv_freq(head_dim), scale, expected)
    out = torch.full_like(expected, float("nan"), device="cuda")
    rotary_angles(positions.cuda(), inv_freq(head_dim).cuda(), scale, out)
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=5e-7)


@pytest.mark.gpu
def test_graph_equals_eager() -> None:
    positions, freq = torch.tensor(POSITIONS, dtype=torch.int32, device="cuda"), inv_freq().cuda()
    out, expected = torch.empty(2, 2, len(POSITIONS), 64, device="cuda")
    graph = captured(lambda: rotary_angles(positions, freq, 1.0, out))
    positions.add_(3)
    graph.replay()
    rotary_angles(positions, freq, 1.0, expected)
    assert_same_bits(out, expected)


@pytest.mark.gpu
def test_sanitizer_rotary_angles() -> None:
    positions = torch.arange(5, dtype=torch.int32, device="cuda")
    rotary_angles(positions, inv_freq(6).cuda(), 1.0, torch.empty(2, 5, 3, device="cuda"))
    torch.cuda.synchronize()
