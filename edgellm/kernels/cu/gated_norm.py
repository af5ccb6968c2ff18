"""RMS norm of each head followed by a silu gate, in one pass over the rows."""

from __future__ import annotations

import ctypes

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import ROW_TYPES, allows_vectors
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_rows, check_vector, describe, type_name

WARP = 32
WARPS = 4  # kGatedNormWarps
PARTS = (2, 4, 8)  # dims a lane; 0 takes any head


class GatedNormParams(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("gate_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


SPEC = KernelSpec(
    name="gated_norm",
    entry="gated_norm",
    params=GatedNormParams,
    params_name="GatedNormParams",
    variants=tuple(
        Variant((dtype, parts), f"{type_name(dtype)}, {parts}") for dtype in ROW_TYPES for parts in (*PARTS, 0)
    ),
)


def launch_config(num_rows: int, heads: int) -> LaunchConfig:
    """A warp a head."""
    return LaunchConfig((-(-num_rows * heads // WARPS), 1, 1), (WARPS * WARP, 1, 1))


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = h / sqrt(mean(h^2) + eps) * weight * silu(gate) for each head h of x; rounded in front of the gate, too.

    Args:
        x: (T, H * D) float32, float16 or bfloat16, CUDA; rows may lie apart.
        gate: (T, H * D), dtype of x.
        weight: (D,) float32.
        out: (T, H * D), dtype of x; may be x.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes out.  Ordering: torch's current stream; never waits.
    """
    check_rows("x", x, dtype=ROW_TYPES)
    num_rows, width = x.shape
    if weight.dim() != 1 or not weight.numel() or width % weight.numel():
        raise InvalidArgumentError(f"weight is {describe(weight)}; (D,) with D a divisor of x's {width} is needed")
    head_dim = weight.numel()
    check_vector("weight", weight, head_dim, torch.float32)
    check_rows("gate", gate, dtype=x.dtype, rows=num_rows, width=width)
    check_rows("out", out, dtype=x.dtype, rows=num_rows, width=width)
    if x.numel() == 0:
        return
    params = GatedNormParams(
        address(x),
        address(gate),
        address(weight),
        address(out),
        x.stride(0),
        gate.stride(0),
        out.stride(0),
        num_rows,
        width // head_dim,
        head_dim,
        eps,
    )
    parts = head_dim // WARP
    if head_dim % WARP or parts not in PARTS or not allows_vectors(x, gate, weight, out):
        parts = 0
    loader.kernel(SPEC, (x.dtype, parts)).launch(launch_config(num_rows, width // head_dim), params, pdl=True)
