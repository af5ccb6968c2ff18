"""The gates of rows on CUDA: a sigmoid or silu factor, and decay and beta of the gated delta rule."""

from __future__ import annotations

import ctypes

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import MAX_GRID_YZ, ROW_TYPES, access_elements, allows_vectors
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_rows, check_vector, describe, type_name

THREADS = 128  # kGateThreads


class GateParams(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("gate_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("is_scalar", ctypes.c_int32),
        ("has_silu", ctypes.c_int32),
    )


class DeltaGatesParams(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("rate", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("decay", ctypes.c_void_p),
        ("beta", ctypes.c_void_p),
        ("a_stride", ctypes.c_int64),
        ("b_stride", ctypes.c_int64),
        ("decay_stride", ctypes.c_int64),
        ("beta_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("width", ctypes.c_int32),
    )


GATE = KernelSpec(
    name="gate_rows",
    entry="gate_rows",
    source="gates.cu",
    params=GateParams,
    params_name="GateParams",
    variants=tuple(
        Variant((dtype, step), f"{type_name(dtype)}, {step}")
        for dtype in ROW_TYPES
        for step in (access_elements(dtype), 1)
    ),
)
DELTA = KernelSpec(
    name="delta_gates",
    entry="delta_gates",
    source="gates.cu",
    params=DeltaGatesParams,
    params_name="DeltaGatesParams",
    variants=tuple(Variant((dtype,), type_name(dtype)) for dtype in ROW_TYPES),
)
SPECS = (GATE, DELTA)


def gate_config(num_rows: int, width: int, step: int) -> LaunchConfig:
    """A thread for `step` columns; rows along y, several a block when there are more than a grid holds."""
    return LaunchConfig((-(-width // (step * THREADS)), min(num_rows, MAX_GRID_YZ), 1), (THREADS, 1, 1))


def delta_config(num_rows: int, width: int) -> LaunchConfig:
    """A thread an element."""
    return LaunchConfig((-(-num_rows * width // THREADS), 1, 1), (THREADS, 1, 1))


def gate_(x: torch.Tensor, gate: torch.Tensor, *, silu: bool = False) -> None:
    """x *= sigmoid(gate), or silu(gate), in float32 with one rounding.

    Args:
        x: (N, W) float32, float16 or bfloat16, CUDA; rows may lie apart.
        gate: (N, W) or (N, 1), dtype of x, not overlapping it.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes x.  Ordering: torch's current stream; never waits.
    """
    check_rows("x", x, dtype=ROW_TYPES)
    num_rows, width = x.shape
    if gate.dim() != 2 or gate.shape[1] not in (1, width):
        raise InvalidArgumentError(f"gate is {describe(gate)}; ({num_rows}, {width}) or ({num_rows}, 1) is needed")
    check_rows("gate", gate, dtype=x.dtype, rows=num_rows)
    if x.numel() == 0:
        return
    is_scalar = gate.shape[1] != width
    params = GateParams(
        address(x), address(gate), x.stride(0), gate.stride(0), num_rows, width, int(is_scalar), int(silu)
    )
    step = access_elements(x.dtype) if allows_vectors(x, None if is_scalar else gate) else 1
    loader.kernel(GATE, (x.dtype, step)).launch(gate_config(num_rows, width, step), params, pdl=True)


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> None:
    """decay = rate * softplus(a + bias) and beta = sigmoid(b), in float32.

    Args:
        a, b: (N, H) float32, float16 or bfloat16, one type, CUDA; rows may lie apart.
        rate, bias: (H,) float32; the rate of a decay is negative.
        decay, beta: (N, H) float32, to be filled; rows may lie apart.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes decay, beta.  Ordering: torch's current stream; never waits.
    """
    check_rows("a", a, dtype=ROW_TYPES)
    num_rows, width = a.shape
    check_rows("b", b, dtype=a.dtype, rows=num_rows, width=width)
    for name, vector in (("rate", rate), ("bias", bias)):
        check_vector(name, vector, width, torch.float32)
    for name, rows in (("decay", decay), ("beta", beta)):
        check_rows(name, rows, dtype=torch.float32, rows=num_rows, width=width)
    if a.numel() == 0:
        return
    params = DeltaGatesParams(
        address(a),
        address(b),
        address(rate),
        address(bias),
        address(decay),
        address(beta),
        a.stride(0),
        b.stride(0),
        decay.stride(0),
        beta.stride(0),
        num_rows,
        width,
    )
    loader.kernel(DELTA, (a.dtype,)).launch(delta_config(num_rows, width), params, pdl=True)
