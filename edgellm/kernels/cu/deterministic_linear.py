"""Linear layers in deterministic mode: a row's bits depend on that row and the weight only, at any number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from edgellm.kernels.cu import loader, skinny_linear
from edgellm.kernels.cu.launch import DeviceLimits, LaunchConfig, device_limits
from edgellm.kernels.cu.skinny_linear import HALF_TYPES, LinearParams, check_linear, linear_params
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import type_name

STAGE_K = 64
STAGE_ROW_BYTES = 2 * STAGE_K
WARPGROUP_ARCH = 90
MAX_SKINNY_ROWS = 64
SKINNY_BYTES_US = 34e3  # of weight that the skinny kernel takes in a microsecond an SM, again for every 16 rows


@dataclass(frozen=True, slots=True)
class TileVariant:
    """Rows of x and of the weight in a block's tile and in a warp's part of it; pipeline stages; blocks an SM.

    `stage_us` and `busy_us`: 64 k in a block that has its SM for itself, and a block's share of a full SM, as measured
    on an H200; only ratios matter.
    """

    tile: tuple[int, int]
    warp: tuple[int, int]
    stages: int
    blocks_per_sm: int
    stage_us: float
    busy_us: float

    @property
    def threads(self) -> int:
        return 32 * (self.tile[0] // self.warp[0]) * (self.tile[1] // self.warp[1])

    @property
    def shared_bytes(self) -> int:
        return self.stages * sum(self.tile) * STAGE_ROW_BYTES

    @property
    def arguments(self) -> str:
        return ", ".join(map(str, (*self.tile, *self.warp, self.stages, self.blocks_per_sm)))

    def takes(self, in_width: int, limits: DeviceLimits) -> bool:
        return self.shared_bytes <= limits.max_shared_bytes


@dataclass(frozen=True, slots=True)
class WarpgroupVariant:
    """Warpgroups of a block, 64 rows of x each against 128 of the weight, and pipeline stages; `stage_us` as above."""

    groups: int
    stages: int
    stage_us: float

    @property
    def busy_us(self) -> float:
        return self.stage_us

    @property
    def tile(self) -> tuple[int, int]:
        return 64 * self.groups, 128

    @property
    def threads(self) -> int:
        return 128 * self.groups

    @property
    def shared_bytes(self) -> int:
        return self.stages * sum(self.tile) * STAGE_ROW_BYTES + 1024  # and what aligning the panels takes

    @property
    def arguments(self) -> str:
        return f"{self.groups}, {self.stages}"

    def takes(self, in_width: int, limits: DeviceLimits) -> bool:
        """On 9.0, where runs of K are whole stages."""
        return limits.arch == WARPGROUP_ARCH and skinny_linear.slice_blocks(in_width) % 2 == 0


VARIANTS = (
    TileVariant((128, 128), (32, 64), 5, 1, 0.9, 0.9),
    TileVariant((64, 64), (32, 32), 4, 3, 0.44, 0.3),
)
WARPGROUP_VARIANTS = (WarpgroupVariant(1, 6, 0.52), WarpgroupVariant(2, 6, 0.72), WarpgroupVariant(3, 5, 1.0))


@dataclass(frozen=True, slots=True)
class FloatVariant:
    """Rows of x and of the weight in a block's tile, those of one thread, and k of a step."""

    tile: tuple[int, int]
    thread: tuple[int, int]
    step: int

    @property
    def threads(self) -> int:
        return (self.tile[0] // self.thread[0]) * (self.tile[1] // self.thread[1])

    @property
    def arguments(self) -> str:
        return ", ".join(map(str, (*self.tile, *self.thread, self.step)))


FLOAT_VARIANTS = (FloatVariant((64, 64), (4, 4), 16), FloatVariant((8, 32), (1, 1), 32))

TILES = KernelSpec(
    name="deterministic_linear",
    entry="deterministic_linear",
    params=LinearParams,
    params_name="LinearParams",
    variants=tuple(
        Variant((dtype, each), f"{type_name(dtype)}, {each.arguments}") for dtype in HALF_TYPES for each in VARIANTS
    ),
)
WARPGROUPS = KernelSpec(
    name="deterministic_linear_sm90",
    entry="deterministic_linear_sm90",
    source="deterministic_linear_sm90.cu",
    params=LinearParams,
    params_name="LinearParams",
    variants=tuple(
        Variant((dtype, each), f"{type_name(dtype)}, {each.arguments}")
        for dtype in HALF_TYPES
        for each in WARPGROUP_VARIANTS
    ),
    min_arch=WARPGROUP_ARCH,
    max_arch=WARPGROUP_ARCH,
    arch_suffix="a",
)
FLOATS = KernelSpec(
    name="deterministic_linear_float",
    entry="deterministic_linear_float",
    source="deterministic_linear.cu",
    params=LinearParams,
    params_name="LinearParams",
    variants=tuple(Variant((each,), each.arguments) for each in FLOAT_VARIANTS),
)
SPECS = (TILES, WARPGROUPS, FLOATS)


def _blocks(tile: tuple[int, int], num_rows: int, out_width: int) -> int:
    return -(-num_rows // tile[0]) * -(-out_width // tile[1])


@cache
def half_variant(
    num_rows: int, in_width: int, out_width: int, limits: DeviceLimits
) -> TileVariant | WarpgroupVariant | None:
    """What ends first by a count of stages, for 16-bit types; None: the skinny kernel.  Bits do not depend on it."""
    if num_rows <= skinny_linear.MAX_ROWS:
        return None

    def cost(variant: TileVariant | WarpgroupVariant) -> float:
        rounds = -(-_blocks(variant.tile, num_rows, out_width) // limits.sm_count)
        return -(-in_width // STAGE_K) * max(variant.stage_us, rounds * variant.busy_us)

    best = min((each for each in (*VARIANTS, *WARPGROUP_VARIANTS) if each.takes(in_width, limits)), key=cost)
    weight_bytes = -(-num_rows // skinny_linear.MAX_ROWS) * out_width * in_width * 2
    skinny_us = weight_bytes / (SKINNY_BYTES_US * limits.sm_count)
    return None if num_rows <= MAX_SKINNY_ROWS and skinny_us < cost(best) else best


def float_variant(num_rows: int) -> FloatVariant:
    """Small tiles for few rows.  The bits do not depend on it."""
    return FLOAT_VARIANTS[1] if num_rows <= 16 else FLOAT_VARIANTS[0]


def launch_config(
    num_rows: int, out_width: int, variant: TileVariant | WarpgroupVariant | FloatVariant
) -> LaunchConfig:
    """A block a tile."""
    blocks = _blocks(variant.tile, num_rows, out_width)
    shared = 0 if isinstance(variant, FloatVariant) else variant.shared_bytes
    return LaunchConfig((blocks, 1, 1), (variant.threads, 1, 1), shared)


def deterministic_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
) -> None:
    """out = x weight^T + bias + residual, summed in float32 and rounded once; equal bits at any number of rows.

    Args:
        x: (M, K) bfloat16, float16 or float32; rows may be apart.  For the 16-bit types K is a multiple of 8 and rows
            start at multiples of 16 bytes.
        weight: (N, K), dtype of x, contiguous.  Read before the kernel in front has ended: it must not write it.
        out: (M, N), dtype of x or float32; rows may be apart.
        bias: (N,), dtype of x.
        residual: (M, N), dtype of out; may be out itself (out += x weight^T + bias).
    Raises:
        InvalidArgumentError: shapes, types, alignment or devices do not fit.  Nothing was launched.
    Effects: writes out.  Ordering: torch's current stream; never waits.
    """
    check_linear(x, weight, out, bias, residual, (*HALF_TYPES, torch.float32))
    if not out.numel():
        return
    variant: TileVariant | WarpgroupVariant | FloatVariant | None
    if x.dtype == torch.float32:
        variant = float_variant(x.shape[0])
    else:
        variant = half_variant(x.shape[0], x.shape[1], weight.shape[0], device_limits(x.device))
    if variant is None:
        skinny_linear.launch(x, weight, out, bias, residual)
    else:
        launch(x, weight, out, bias, residual, variant)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    variant: TileVariant | WarpgroupVariant | FloatVariant,
) -> None:
    """Launch one variant; operands were checked and none is empty."""
    spec = FLOATS if isinstance(variant, FloatVariant) else TILES if isinstance(variant, TileVariant) else WARPGROUPS
    key = (variant,) if isinstance(variant, FloatVariant) else (x.dtype, variant)
    config = launch_config(x.shape[0], weight.shape[0], variant)
    loader.kernel(spec, key).launch(config, linear_params(x, weight, out, bias, residual), pdl=True)
