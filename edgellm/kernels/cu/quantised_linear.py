"""Linear layers on few rows and weights of 4 or 8 bits, also with a gate behind; and the weights, expanded.

A row has the same bits in any company: where `sums_as_dense` says so, those of `skinny_linear` and
`deterministic_linear` on the expanded weight.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import DeviceLimits, LaunchConfig, device_limits
from edgellm.kernels.cu.skinny_linear import HALF_TYPES, SLICES, TILE_ROWS, slice_blocks
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import (
    address,
    check_alignment,
    check_device,
    check_rows,
    check_vector,
    describe,
    type_name,
)
from edgellm.kernels.packed_weight import BLOCK_COLUMNS, PANEL_ROWS, UNIT_BYTES, PackedKind

if TYPE_CHECKING:
    from edgellm.kernels.packed_weight import PackedWeight

MAX_ROWS = 96  # above, expanding the weight costs less than reading it for every 16 rows
MAX_WALKING_ROWS = 16  # more are blocks beside each other, which fill the device anyway
MAX_GRID = 65535
SCALE_BYTES = 256  # of a unit in shared memory: 8 a lane
EXPAND_THREADS = 256


class QuantisedParams(ctypes.Structure):
    """Arguments of every kernel on packed weights; strides in elements."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
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
        ("num_units", ctypes.c_int32),
        ("num_groups", ctypes.c_int32),
        ("group_shift", ctypes.c_int32),
        ("scale_step", ctypes.c_int32),
        ("span_mask", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class QuantisedVariant:
    """Panels (16 rows each) of weight a group, tiles of 8 x rows a block, warps, places of a warp, blocks on an SM.

    A warp takes 16 / warps slices of K; `places` units of each of its panels are on their way at once.
    """

    panels: int
    row_tiles: int
    warps: int
    places: int
    blocks_per_sm: int

    def arguments(self, *, gated: bool) -> str:
        numbers = (self.panels, self.row_tiles, self.warps, self.places, self.blocks_per_sm)
        return f"{', '.join(map(str, numbers))}, {'true' if gated else 'false'}"

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Of a block: the places, and the sums of all slices."""
        sums = SLICES * self.row_tiles * TILE_ROWS * self.panels * PANEL_ROWS * 4
        return self.warps * self.places * self.panels * (UNIT_BYTES + SCALE_BYTES) + sums

    def groups(self, out_width: int, *, gated: bool) -> int:
        """With a gate, half of a group's panels are up rows of the same columns."""
        return -(-out_width // (PANEL_ROWS * self.panels // (2 if gated else 1)))

    def fetches_at_once(self, kind: PackedKind, in_width: int) -> bool:
        """Whether all units of a warp have places of their own."""
        units = -(-slice_blocks(in_width) // (kind.unit_columns // BLOCK_COLUMNS))
        return units * (SLICES // self.warps) <= self.places


# The last of each row count fits 99 KiB of shared memory.
VARIANTS = (
    QuantisedVariant(2, 1, 16, 4, 2),
    QuantisedVariant(2, 1, 16, 2, 2),
    QuantisedVariant(1, 1, 16, 4, 2),
    QuantisedVariant(2, 2, 16, 4, 1),
    QuantisedVariant(2, 2, 16, 2, 1),
    QuantisedVariant(1, 2, 16, 8, 2),
    QuantisedVariant(1, 2, 16, 4, 2),
)
GATED_VARIANTS = (
    QuantisedVariant(2, 1, 16, 4, 2),
    QuantisedVariant(2, 1, 16, 2, 2),
    QuantisedVariant(2, 2, 16, 4, 1),
    QuantisedVariant(2, 2, 16, 2, 1),
)
# What a panel of a group costs, by panels and row tiles; of two panels it is 1.  With one row tile instructions, as
# counted in the compiled code; with two the reading of x, which a group does once.
PANEL_COST = {(1, 1): 1.12, (2, 1): 1.0, (1, 2): 1.5, (2, 2): 1.0}
# What a panel of a block costs that has a multiprocessor to itself: too few copies are under way.
LONE_BLOCK = 1.6
WALK_BALANCE = 0.9  # blocks that walk are worth it where so much of their rounds is full
BLOCK_RESERVED_BYTES = 1 << 10  # of shared memory
L1_BESIDE_SHARED_BYTES = 29 << 10  # of a multiprocessor's memory, what no block may have as shared


def _linear_spec(kind: PackedKind, *, gated: bool) -> KernelSpec:
    variants = GATED_VARIANTS if gated else VARIANTS
    return KernelSpec(
        name=f"quantised_linear_{kind.value}{'_gated' if gated else ''}",
        entry=f"quantised_linear_{kind.value}",
        source=f"quantised_linear_{kind.value}.cu",
        params=QuantisedParams,
        params_name="QuantisedParams",
        variants=tuple(
            Variant((dtype, each), f"{type_name(dtype)}, {each.arguments(gated=gated)}")
            for dtype in HALF_TYPES
            for each in variants
        ),
    )


def _expand_spec(kind: PackedKind) -> KernelSpec:
    return KernelSpec(
        name=f"expand_{kind.value}",
        entry=f"expand_{kind.value}",
        source=f"quantised_linear_{kind.value}.cu",
        params=QuantisedParams,
        params_name="QuantisedParams",
        variants=tuple(Variant((dtype,), f"{type_name(dtype)}, {EXPAND_THREADS}") for dtype in HALF_TYPES),
    )


LINEAR = {(kind, gated): _linear_spec(kind, gated=gated) for kind in PackedKind for gated in (False, True)}
EXPAND = {kind: _expand_spec(kind) for kind in PackedKind}
SPECS = (*LINEAR.values(), *EXPAND.values())


def sums_as_dense(kind: PackedKind, in_width: int) -> bool:
    """Whether the slices of K are those of the other linears; here they are whole units."""
    return slice_blocks(in_width) % (kind.unit_columns // BLOCK_COLUMNS) == 0


@cache
def span_units(kind: PackedKind, in_width: int, group_shift: int) -> int:
    """Neighbouring units of a slice that have the same scales wherever the slice begins, a power of two."""
    unit_blocks = kind.unit_columns // BLOCK_COLUMNS
    units = -(-slice_blocks(in_width) // unit_blocks)
    return min(units & -units, max(1, (1 << group_shift) // unit_blocks))


@dataclass(frozen=True, slots=True)
class QuantisedPlan:
    """A variant and how to launch it."""

    variant: QuantisedVariant
    config: LaunchConfig


@cache
def launch_plan(
    kind: PackedKind, num_rows: int, in_width: int, out_width: int, limits: DeviceLimits, *, gated: bool = False
) -> QuantisedPlan:
    """The variant for a shape.  The bits of the result do not depend on it.

    Args:
        num_rows: of x, any number; more than 16 take several blocks a group, which meet in the L2.
    Raises:
        InvalidArgumentError: the device has too little shared memory.
    """
    row_tiles = 1 if num_rows <= TILE_ROWS else 2
    fitting = [
        each
        for each in (GATED_VARIANTS if gated else VARIANTS)
        if each.row_tiles == row_tiles and each.shared_bytes <= limits.max_shared_bytes
    ]
    if not fitting:
        raise InvalidArgumentError(
            f"the device offers {limits.max_shared_bytes} bytes of shared memory a block; 99 KiB are needed"
        )
    variant = min(fitting, key=lambda each: _cost(each, kind, num_rows, in_width, out_width, limits, gated=gated))
    most = _walking_blocks(variant, num_rows, out_width, limits, gated=gated)
    return plan_of(variant, num_rows, out_width, gated=gated, max_groups=most)


def _cost(
    variant: QuantisedVariant,
    kind: PackedKind,
    num_rows: int,
    in_width: int,
    out_width: int,
    limits: DeviceLimits,
    *,
    gated: bool,
) -> tuple[float, bool, bool, int]:
    """Work of the busiest multiprocessor; then whether its L1 loses x, whether a warp waits for places, and memory."""
    panels = _busiest_panels(variant, variant.groups(out_width, gated=gated), limits)
    taken = variant.blocks_per_sm * (variant.shared_bytes + BLOCK_RESERVED_BYTES)
    x_bytes = min(num_rows, variant.row_tiles * TILE_ROWS) * in_width * 2
    misses = x_bytes > limits.max_shared_bytes + L1_BESIDE_SHARED_BYTES - taken
    at_once = variant.fetches_at_once(kind, in_width)
    work = panels * PANEL_COST[variant.panels, variant.row_tiles]
    return work, misses, not at_once, variant.shared_bytes if at_once else -variant.shared_bytes


def _busiest_panels(variant: QuantisedVariant, groups: int, limits: DeviceLimits) -> float:
    """Of one multiprocessor, one after the other; those of blocks that would run beside others, alone, count more."""
    of_one = -(-groups // limits.sm_count)
    if variant.blocks_per_sm == 1:
        return of_one * variant.panels
    if of_one == 1:
        return variant.panels * LONE_BLOCK
    return -(-of_one // variant.blocks_per_sm) * variant.blocks_per_sm * variant.panels


def _walking_blocks(
    variant: QuantisedVariant, num_rows: int, out_width: int, limits: DeviceLimits, *, gated: bool
) -> int:
    """As many as run at once, which take group after group; one for each group where they would often be idle."""
    groups, resident = variant.groups(out_width, gated=gated), variant.blocks_per_sm * limits.sm_count
    rounds = -(-groups // resident)
    walks = num_rows <= MAX_WALKING_ROWS and rounds > 1 and groups >= WALK_BALANCE * rounds * resident
    return resident if walks else MAX_GRID


def launch_config(kind: PackedKind, num_rows: int, in_width: int, out_width: int, limits: DeviceLimits) -> LaunchConfig:
    """Grid (rows / 16, groups), block and shared memory for a shape."""
    return launch_plan(kind, num_rows, in_width, out_width, limits).config


def plan_of(
    variant: QuantisedVariant, num_rows: int, out_width: int, *, gated: bool = False, max_groups: int = MAX_GRID
) -> QuantisedPlan:
    """How a variant is launched: a block a group, or `max_groups` blocks that take group after group."""
    groups = min(max_groups, variant.groups(out_width, gated=gated))
    row_blocks = -(-num_rows // (TILE_ROWS * variant.row_tiles))
    return QuantisedPlan(variant, LaunchConfig((row_blocks, groups, 1), (variant.threads, 1, 1), variant.shared_bytes))


def quantised_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
) -> None:
    """out = x weight^T + bias + residual, summed in float32 and rounded once.

    A row's bits do not depend on the other rows or their number.

    Args:
        x: (M, K) bfloat16 or float16, 16-byte aligned; rows may be apart.  The time grows with every 16 rows.
        weight: (N, K), of x's type when expanded.  Read before the kernel in front has ended: it must not write it.
        out: (M, N), dtype of x or float32; rows may be apart.
        bias: (N,), dtype of x.
        residual: (M, N), dtype of out; may be out itself (out += x weight^T + bias).
    Raises:
        InvalidArgumentError: shapes, types, alignment or devices do not fit.  Nothing was launched.
    Effects: writes out.  Ordering: torch's current stream; never waits.
    """
    check_quantised(x, weight, out, bias, residual)
    if out.numel():
        launch(x, weight, out, bias, residual)


def quantised_gated_linear(
    x: torch.Tensor, weight: PackedWeight, out: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """silu(gate) * up, where gate and up are the halves of `quantised_linear`'s result, rounded to x's type.

    Args:
        x: as in `quantised_linear`.
        weight: (2N, K): gate rows, then up rows; so is bias.  N is a multiple of 16.
        out: (M, N), dtype of x; rows may be apart.
    Raises:
        InvalidArgumentError: as `quantised_linear`.
    Effects: writes out.  Ordering: torch's current stream; never waits.  Next to `silu_mul` of `quantised_linear` a few
    results may differ by one rounding.
    """
    check_quantised(x, weight, out, bias, None, gated=True)
    if out.numel():
        launch(x, weight, out, bias, None, gated=True)


def expand_weight(weight: PackedWeight, out: torch.Tensor) -> None:
    """out = the weight, in its type.

    Args:
        weight: (N, K).
        out: (N, K), the weight's type, 16-byte aligned; rows may be apart.
    Raises:
        InvalidArgumentError: shapes, types, alignment or devices do not fit.  Nothing was launched.
    Effects: writes out.  Ordering: torch's current stream; never waits.
    """
    check_rows("out", out, dtype=weight.dtype, rows=weight.shape[0], width=weight.shape[1])
    check_alignment("out", out)
    _check_weight(weight, out)
    if not out.numel():
        return
    units = weight.packed.shape[0] * weight.packed.shape[1]
    params = quantised_params(out, weight, out, None, None, weight.shape[0])
    loader.kernel(EXPAND[weight.kind], (weight.dtype,)).launch(expand_config(units, device_limits(out.device)), params)


def expand_config(num_units: int, limits: DeviceLimits) -> LaunchConfig:
    """A warp a unit, at most as many blocks as run at once."""
    blocks = min(-(-num_units // (EXPAND_THREADS // 32)), 8 * limits.sm_count)
    return LaunchConfig((blocks, 1, 1), (EXPAND_THREADS, 1, 1))


def check_quantised(
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    gated: bool = False,
) -> None:
    """Refuse operands that do not fit together.

    Raises:
        InvalidArgumentError: names the tensor, what it is and what is needed.
    """
    check_rows("x", x, dtype=HALF_TYPES, width=weight.shape[1])
    rows = weight.shape[0]
    if gated and rows % (2 * PANEL_ROWS):
        raise InvalidArgumentError(
            f"weight has {rows} rows; gate and up rows, a multiple of {PANEL_ROWS} each, are needed"
        )
    out_width = rows // 2 if gated else rows
    check_rows("out", out, dtype=(x.dtype,) if gated else (x.dtype, torch.float32), rows=x.shape[0], width=out_width)
    if bias is not None:
        check_vector("bias", bias, rows, x.dtype)
    if residual is not None:
        check_rows("residual", residual, dtype=out.dtype, rows=x.shape[0], width=out_width)
    check_alignment("x", x)
    _check_weight(weight, x)


def _check_weight(weight: PackedWeight, beside: torch.Tensor) -> None:
    """
    Raises:
        InvalidArgumentError: another type or device than the tensor beside it, or not contiguous.
    """
    for name, tensor in (("packed", weight.packed), ("scales", weight.scales), ("zeros", weight.zeros)):
        if tensor is None:
            continue
        if tensor.device != beside.device or not tensor.is_contiguous():
            raise InvalidArgumentError(
                f"weight.{name} is {describe(tensor)}; contiguous on {beside.device} is needed: copy it there"
            )
        check_device(name, tensor)
    if weight.dtype != beside.dtype:
        raise InvalidArgumentError(f"weight expands to {weight.dtype} beside {beside.dtype}; load it for that type")


def quantised_params(
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_width: int,
) -> QuantisedParams:
    """The argument of a kernel; operands were checked.  `out_width`: columns of a product, or rows to expand."""
    return QuantisedParams(
        address(x),
        address(weight.packed),
        address(weight.scales),
        address(weight.zeros),
        address(bias),
        address(residual),
        address(out),
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        x.shape[0],
        weight.shape[1],
        out_width,
        out.dtype == torch.float32,
        weight.packed.shape[1],
        weight.scales.shape[1],
        weight.group_shift,
        weight.scales.shape[2] > 1,
        span_units(weight.kind, weight.shape[1], weight.group_shift) - 1,
        0,
    )


def launch(
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    gated: bool = False,
    plan: QuantisedPlan | None = None,
) -> None:
    """Launch for any number of rows; operands were checked and none is empty."""
    if plan is None:
        limits = device_limits(x.device)
        plan = launch_plan(weight.kind, x.shape[0], x.shape[1], out.shape[1], limits, gated=gated)
    params = quantised_params(x, weight, out, bias, residual, out.shape[1])
    loader.kernel(LINEAR[weight.kind, gated], (x.dtype, plan.variant)).launch(plan.config, params, pdl=True)
