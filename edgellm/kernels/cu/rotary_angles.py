"""Cosine and sine of every token's rotary angles, once a step for all layers."""

from __future__ import annotations

import ctypes

import torch

from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_shape

THREADS = 128


class RotaryAnglesParams(ctypes.Structure):
    _fields_ = (
        ("positions", ctypes.c_void_p),
        ("inv_freq", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int32),
        ("half", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


SPEC = KernelSpec(
    name="rotary_angles",
    entry="rotary_angles",
    params=RotaryAnglesParams,
    params_name="RotaryAnglesParams",
    variants=(Variant((THREADS,), str(THREADS)),),
)


def launch_config(num_tokens: int, half: int) -> LaunchConfig:
    """A thread for one cosine and its sine."""
    return LaunchConfig((-(-num_tokens * half // THREADS), 1, 1), (THREADS, 1, 1))


def rotary_angles(positions: torch.Tensor, inv_freq: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """out[0] = cos(position * inv_freq) * scale, out[1] the sine; the angle is rounded to float32 as on the host.

    Args:
        positions: (T,) int32, CUDA.
        inv_freq: (D/2,) float32, radians per position.
        out: (2, T, D/2) float32, contiguous.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes out.  Ordering: torch's current stream; never waits.
    """
    check_shape("positions", positions, (-1,), torch.int32)
    check_shape("inv_freq", inv_freq, (-1,), torch.float32)
    num_tokens, half = positions.shape[0], inv_freq.shape[0]
    check_shape("out", out, (2, num_tokens, half), torch.float32)
    if num_tokens == 0:
        return
    params = RotaryAnglesParams(address(positions), address(inv_freq), address(out), num_tokens, half, scale)
    loader.kernel(SPEC, (THREADS,)).launch(launch_config(num_tokens, half), params, pdl=True)
