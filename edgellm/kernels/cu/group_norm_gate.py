"""Gated norm behind a Mamba-2 scan: RMS norm over groups of channels, of what the gate lets through."""

from __future__ import annotations

import ctypes

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import MAX_GRID_YZ, ROW_TYPES, access_elements, allows_vectors
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_rows, check_vector, type_name

THREADS = 256  # kGroupNormThreads


class GroupNormGateParams(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("gate_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("group_width", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


SPEC = KernelSpec(
    name="group_norm_gate",
    entry="group_norm_gate",
    params=GroupNormGateParams,
    params_name="GroupNormGateParams",
    variants=tuple(
        Variant((dtype, step), f"{type_name(dtype)}, {step}")
        for dtype in ROW_TYPES
        for step in (access_elements(dtype), 1)
    ),
)


def launch_config(num_rows: int, num_groups: int) -> LaunchConfig:
    """A block for each group of each row; several rows a block when there are more than a grid holds."""
    return LaunchConfig((num_groups, min(num_rows, MAX_GRID_YZ), 1), (THREADS, 1, 1))


def group_norm_gate(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, num_groups: int
) -> None:
    """out = y / sqrt(mean of y^2 over a group + eps) * weight with y = x * silu(gate), in float32 with one rounding.

    Args:
        x, gate: (T, W) float32, float16 or bfloat16, CUDA; rows may be apart.
        weight: (W,) float32.
        out: (T, W), dtype of x; may be x.
        num_groups: of W / num_groups neighbouring columns each.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes out.  Ordering: torch's current stream; never waits.
    """
    check_rows("x", x, dtype=ROW_TYPES)
    num_rows, width = x.shape
    check_rows("gate", gate, dtype=x.dtype, rows=num_rows, width=width)
    check_vector("weight", weight, width, torch.float32)
    check_rows("out", out, dtype=x.dtype, rows=num_rows, width=width)
    if num_groups < 1 or width < 1 or width % num_groups:
        raise InvalidArgumentError(f"{width} columns in {num_groups} groups; equal groups of at least one are needed")
    if num_rows == 0:
        return
    group_width = width // num_groups
    group = slice(0, group_width)
    vectors = allows_vectors(x[:, group], gate[:, group], weight[group], out[:, group])
    params = GroupNormGateParams(
        address(x),
        address(gate),
        address(weight),
        address(out),
        x.stride(0),
        gate.stride(0),
        out.stride(0),
        num_rows,
        group_width,
        eps,
    )
    kernel = loader.kernel(SPEC, (x.dtype, access_elements(x.dtype) if vectors else 1))
    kernel.launch(launch_config(num_rows, num_groups), params, pdl=True)
