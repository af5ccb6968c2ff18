"""Linear layers on few rows (decode), where reading the weight is the cost, also with a gate behind.

A row has the same bits in any company of at most 16.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import DeviceLimits, LaunchConfig, device_limits
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import (
    address,
    check_alignment,
    check_rows,
    check_vector,
    describe,
    type_name,
)

MAX_ROWS = 16
HALF_TYPES = (torch.bfloat16, torch.float16)

# As in linear.cuh and skinny_linear.cu.
SLICES = 16  # runs that the sum over K is cut into; a warp each
BLOCK_K = 32
TILE_ROWS = 8
PARTIAL_BYTES = TILE_ROWS * TILE_ROWS * 4  # of one slice, one weight tile and one x tile
THREADS = SLICES * 32


class LinearParams(ctypes.Structure):
    """Arguments of every linear kernel; strides in elements."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("residual_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("in_width", ctypes.c_int32),
        ("out_width", ctypes.c_int32),
        ("out_is_float", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class SkinnyVariant:
    """Tiles (8 rows each) of weight a group and of x rows a block, and how many 32-k blocks of a slice a lane holds.

    `shared`: the weight is held in shared memory rather than in registers.  `one_wave`: takes so many registers that it
    pays only where all blocks run at once.  `long`: slices may be longer.  `walks`: as many blocks as multiprocessors,
    which take group after group (with `long`); else a block a group.
    """

    tiles: int
    row_tiles: int
    blocks: int
    shared: bool = True
    one_wave: bool = False
    long: bool = False
    walks: bool = False

    def arguments(self, *, gated: bool) -> str:
        walk = "edgellm::kLong" if self.long else "edgellm::kOnce"
        flags = ", ".join("true" if flag else "false" for flag in (self.shared, gated))
        return f"{self.tiles}, {self.row_tiles}, {self.blocks}, {walk}, {flags}"

    @property
    def shared_bytes(self) -> int:
        """Of a block: the weight, and sums of all slices, twice where the next group's come meanwhile."""
        weight = self.blocks * self.tiles * THREADS * 16 if self.shared else 0
        return weight + (2 if self.long else 1) * SLICES * self.tiles * self.row_tiles * PARTIAL_BYTES

    def groups(self, out_width: int, *, gated: bool) -> int:
        """With a gate, half of a group's tiles are up rows of the same columns."""
        return -(-out_width // (TILE_ROWS * self.tiles // (2 if gated else 1)))

    def takes(self, in_width: int) -> bool:
        """Whether it covers slices of rows that wide."""
        return self.long or slice_blocks(in_width) <= self.blocks


def slice_blocks(in_width: int) -> int:
    """32-k blocks of a slice."""
    return -(-in_width // (BLOCK_K * SLICES))


# In order of preference among those that take a shape, as measured on an H200 (bench/gpu/bench_linear.py); the last of
# each row count takes any shape and fits 99 KiB of shared memory.
VARIANTS = (
    SkinnyVariant(3, 1, 2, shared=False),
    SkinnyVariant(2, 1, 4, shared=False, one_wave=True),
    SkinnyVariant(2, 1, 4),
    SkinnyVariant(2, 1, 6, shared=False, one_wave=True),
    SkinnyVariant(2, 1, 6),
    SkinnyVariant(2, 1, 8),
    SkinnyVariant(1, 1, 4, long=True),
    SkinnyVariant(3, 2, 2),
    SkinnyVariant(2, 2, 4, shared=False, one_wave=True),
    SkinnyVariant(2, 2, 4),
    SkinnyVariant(2, 2, 6, shared=False, one_wave=True),
    SkinnyVariant(2, 2, 6),
    SkinnyVariant(2, 2, 4, long=True, walks=True),
)

GATED_VARIANTS = (
    SkinnyVariant(6, 1, 2),
    SkinnyVariant(2, 1, 4),
    SkinnyVariant(2, 1, 6),
    SkinnyVariant(2, 1, 8),
    SkinnyVariant(2, 1, 4, long=True, walks=True),
    SkinnyVariant(6, 2, 2),
    SkinnyVariant(2, 2, 4),
    SkinnyVariant(2, 2, 6),
    SkinnyVariant(2, 2, 4, long=True, walks=True),
)


def _spec(name: str, variants: tuple[SkinnyVariant, ...], *, gated: bool) -> KernelSpec:
    return KernelSpec(
        name=name,
        entry="skinny_linear",
        source="skinny_linear.cu",
        params=LinearParams,
        params_name="LinearParams",
        variants=tuple(
            Variant((dtype, each), f"{type_name(dtype)}, {each.arguments(gated=gated)}")
            for dtype in HALF_TYPES
            for each in variants
        ),
    )


SPEC = _spec("skinny_linear", VARIANTS, gated=False)
GATED = _spec("skinny_linear_gated", GATED_VARIANTS, gated=True)
SPECS = (SPEC, GATED)


@dataclass(frozen=True, slots=True)
class SkinnyPlan:
    """A variant and how to launch it."""

    variant: SkinnyVariant
    config: LaunchConfig


@cache
def launch_plan(
    num_rows: int, in_width: int, out_width: int, limits: DeviceLimits, *, gated: bool = False
) -> SkinnyPlan:
    """The first variant that takes the shape.  The bits of the result do not depend on it.

    Args:
        num_rows: of x, any number; more than 16 take several blocks a group, which meet in the L2.
    Raises:
        InvalidArgumentError: the device has too little shared memory.
    """
    row_tiles = 1 if num_rows <= TILE_ROWS else 2
    for variant in GATED_VARIANTS if gated else VARIANTS:
        fits = variant.row_tiles == row_tiles and variant.shared_bytes <= limits.max_shared_bytes
        if not fits or not variant.takes(in_width):
            continue
        plan = plan_of(variant, num_rows, out_width, limits, gated=gated)
        if not variant.one_wave or plan.config.grid[0] * plan.config.grid[1] <= limits.sm_count:
            return plan
    raise InvalidArgumentError(
        f"the device offers {limits.max_shared_bytes} bytes of shared memory a block; 99 KiB are needed"
    )


def launch_config(num_rows: int, in_width: int, out_width: int, limits: DeviceLimits) -> LaunchConfig:
    """Grid (groups, rows / 16), block and shared memory for a shape."""
    return launch_plan(num_rows, in_width, out_width, limits).config


def plan_of(
    variant: SkinnyVariant, num_rows: int, out_width: int, limits: DeviceLimits, *, gated: bool = False
) -> SkinnyPlan:
    """How a variant is launched: a block a group, or one a multiprocessor, each with as many groups."""
    groups = variant.groups(out_width, gated=gated)
    row_blocks = -(-num_rows // (TILE_ROWS * variant.row_tiles))
    rounds = -(-groups * row_blocks // limits.sm_count) if variant.walks else 1
    config = LaunchConfig((-(-groups // rounds), row_blocks, 1), (THREADS, 1, 1), variant.shared_bytes)
    return SkinnyPlan(variant, config)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
) -> None:
    """out = x weight^T + bias + residual, summed in float32 and rounded once.

    A row's bits do not depend on the other rows or their number, and are those of `deterministic_linear`.

    Args:
        x: (M, K) bfloat16 or float16, M at most 16, K a multiple of 8, 16-byte aligned; rows may be apart.
        weight: (N, K), dtype of x, contiguous.  Read before the kernel in front has ended: it must not write it.
        out: (M, N), dtype of x or float32; rows may be apart.
        bias: (N,), dtype of x.
        residual: (M, N), dtype of out; may be out itself (out += x weight^T + bias).
    Raises:
        InvalidArgumentError: shapes, types, alignment or devices do not fit.  Nothing was launched.
    Effects: writes out.  Ordering: torch's current stream; never waits.
    """
    _check_rows_few(x)
    check_linear(x, weight, out, bias, residual, HALF_TYPES)
    if out.numel():
        launch(x, weight, out, bias, residual)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """silu(gate) * up, where gate and up are the halves of `skinny_linear`'s result, rounded to x's type.

    Args:
        x: as in `skinny_linear`.
        weight: (2N, K): gate rows, then up rows; so is bias.
        out: (M, N), dtype of x; rows may be apart.
    Raises:
        InvalidArgumentError: as `skinny_linear`.
    Effects: writes out.  Ordering: torch's current stream; never waits.  Next to `silu_mul` of `skinny_linear` a few
    results may differ by one rounding.
    """
    _check_rows_few(x)
    check_linear(x, weight, out, bias, None, HALF_TYPES, gated=True)
    if out.numel():
        launch(x, weight, out, bias, None, gated=True)


def _check_rows_few(x: torch.Tensor) -> None:
    if x.dim() == 2 and x.shape[0] > MAX_ROWS:
        raise InvalidArgumentError(f"x has {x.shape[0]} rows; at most {MAX_ROWS}: use another linear for more")


def check_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    types: tuple[torch.dtype, ...],
    *,
    gated: bool = False,
) -> None:
    """Refuse operands of a linear that do not fit together.

    Raises:
        InvalidArgumentError: names the tensor, what it is and what is needed.
    """
    check_rows("x", x, dtype=types)
    num_rows, in_width = x.shape
    check_rows("weight", weight, dtype=x.dtype, width=in_width, contiguous=True)
    if gated and weight.shape[0] % 2:
        raise InvalidArgumentError(f"weight is {describe(weight)}; an even number of rows (gate, then up) is needed")
    out_width = weight.shape[0] // 2 if gated else weight.shape[0]
    out_types = (x.dtype,) if gated else (x.dtype, torch.float32)
    check_rows("out", out, dtype=out_types, rows=num_rows, width=out_width)
    if bias is not None:
        check_vector("bias", bias, weight.shape[0], x.dtype)
    if residual is not None:
        check_rows("residual", residual, dtype=out.dtype, rows=num_rows, width=out_width)
    for name, tensor in (("weight", weight), ("out", out)):
        if tensor.device != x.device:
            raise InvalidArgumentError(f"{name} is {describe(tensor)} and x on {x.device}; put them on one device")
    if x.dtype != torch.float32:
        _check_pieces(x, weight)


def _check_pieces(x: torch.Tensor, weight: torch.Tensor) -> None:
    """16-byte pieces of rows are copied, so rows start at and consist of whole ones."""
    if x.shape[1] % 8:
        raise InvalidArgumentError(f"rows of x and weight have {x.shape[1]} elements; a multiple of 8 is needed")
    check_alignment("x", x)
    check_alignment("weight", weight)


def linear_params(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> LinearParams:
    """The argument of a linear kernel; operands were checked."""
    return LinearParams(
        address(x),
        address(weight),
        address(bias),
        address(residual),
        address(out),
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        x.shape[0],
        x.shape[1],
        out.shape[1],
        out.dtype == torch.float32,
    )


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    gated: bool = False,
) -> None:
    """Launch for any number of rows; operands were checked and none is empty."""
    plan = launch_plan(x.shape[0], x.shape[1], out.shape[1], device_limits(x.device), gated=gated)
    params = linear_params(x, weight, out, bias, residual)
    loader.kernel(SPECS[gated], (x.dtype, plan.variant)).launch(plan.config, params, pdl=True)
