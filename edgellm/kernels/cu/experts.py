"""Routed experts (mixture of experts) on CUDA: sorted by expert on the device, each expert's weights read as few times
as its rows allow.

A token's bits depend neither on the tokens beside it nor on their number.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.deterministic_linear import VARIANTS as LINEAR_TILES
from edgellm.kernels.cu.deterministic_linear import TileVariant
from edgellm.kernels.cu.launch import DeviceLimits, LaunchConfig, device_limits
from edgellm.kernels.cu.rows import ACCESS_BYTES, ROW_TYPES
from edgellm.kernels.cu.skinny_linear import HALF_TYPES
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import (
    address,
    check_alignment,
    check_device,
    check_rows,
    check_shape,
    describe,
    type_name,
)

# As in experts.cuh and experts.cu.
MAX_EXPERTS = 1024
MAX_CHOICES = 32
ROUTE_THREADS = MAX_EXPERTS
STREAM_ROWS = 16
SLICES = 16
STREAM_THREADS = 32 * SLICES
FLOAT_THREADS = 128
FLOAT_COLUMNS = 32
COMBINE_THREADS = 256
ITEM_BYTES = 16
GATE_UP, DOWN, DOWN_TOTAL = "kGateUp", "kDown", "kDownTotal"
STREAM_PLACES = {GATE_UP: (2, 4), DOWN: (1, 6), DOWN_TOTAL: (1, 6)}  # tiles of weight, and places, of a lane

SMALL_TILE_MEAN_ROWS = 96  # of an expert, up to which tiles of few rows are faster


class ExpertsParams(ctypes.Structure):
    """Arguments of every kernel of experts; strides in elements."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("shares", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("total", ctypes.c_void_p),
        ("items", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("inner", ctypes.c_void_p),
        ("product", ctypes.c_void_p),
        ("rows_stride", ctypes.c_int64),
        ("total_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("inner_size", ctypes.c_int32),
        ("item_rows", ctypes.c_int32),
        ("chosen_is_wide", ctypes.c_int32),
        ("is_gelu", ctypes.c_int32),
        ("accumulate", ctypes.c_int32),
    )


def _spec(name: str, variants: tuple[Variant, ...], source: str = "experts.cu") -> KernelSpec:
    return KernelSpec(
        name=name, entry=name, source=source, params=ExpertsParams, params_name="ExpertsParams", variants=variants
    )


ROUTE = _spec("experts_route", (Variant((), str(ROUTE_THREADS)),))
STREAM = _spec(
    "experts_stream",
    tuple(
        Variant((dtype, part), f"{type_name(dtype)}, edgellm::{part}") for dtype in HALF_TYPES for part in STREAM_PLACES
    ),
)
TILES = _spec(
    "experts_tiles",
    tuple(
        Variant((dtype, tile, gate_up), f"{type_name(dtype)}, {tile.arguments}, {str(gate_up).lower()}")
        for dtype in HALF_TYPES
        for tile in LINEAR_TILES
        for gate_up in (True, False)
    ),
    source="experts_tiles.cu",
)
FLOATS = _spec("experts_float", (Variant((True,), "true"), Variant((False,), "false")))
COMBINE = _spec("experts_combine", (Variant((), str(COMBINE_THREADS)),))
SPECS = (ROUTE, STREAM, TILES, FLOATS, COMBINE)


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """T rows with k experts of E each; D hidden and F inner size."""

    num_rows: int
    count: int
    num_experts: int
    hidden: int
    inner_size: int

    @property
    def pairs(self) -> int:
        return self.num_rows * self.count

    def max_items(self, item_rows: int) -> int:
        """However the pairs fall on experts."""
        return self.pairs // item_rows + min(self.num_experts, self.pairs)


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """How the parts are computed: by streams (`tile` None) or tiles of 16-bit types, or in float32."""

    item_rows: int
    tile: TileVariant | None
    is_float: bool
    combines: bool  # products are kept and added up by a launch of its own


@cache
def launch_plan(shape: ExpertsShape, dtype: torch.dtype, limits: DeviceLimits) -> ExpertsPlan:
    """By the rows, and how many an expert has in the mean, as measured on an H200.  The bits do not depend on it."""
    if dtype == torch.float32:
        return ExpertsPlan(STREAM_ROWS, None, is_float=True, combines=True)
    mean_rows = shape.pairs / min(shape.num_experts, shape.pairs)
    large, small = LINEAR_TILES
    if shape.num_rows <= STREAM_ROWS:
        return ExpertsPlan(STREAM_ROWS, None, is_float=False, combines=False)
    fits = large.shared_bytes <= limits.max_shared_bytes
    tile = large if fits and mean_rows > SMALL_TILE_MEAN_ROWS else small
    return ExpertsPlan(tile.tile[0], tile, is_float=False, combines=True)


def stream_shared_bytes(part: str) -> int:
    """Shared memory of a block: places of the weight, sums of all slices twice, and the totals where it has them."""
    tiles, places = STREAM_PLACES[part]
    partials = STREAM_ROWS * 8 * tiles * 4
    totals = STREAM_ROWS * 8 * 4 if part == DOWN_TOTAL else 0
    return places * tiles * STREAM_THREADS * ACCESS_BYTES + 2 * SLICES * partials + totals


def stream_config(shape: ExpertsShape, part: str, limits: DeviceLimits) -> LaunchConfig:
    """Two blocks a multiprocessor, or fewer where there is less to do however the pairs fall."""
    tiles = (shape.inner_size if part == GATE_UP else shape.hidden) // 8
    work = tiles if part == DOWN_TOTAL else tiles * shape.max_items(STREAM_ROWS)
    blocks = min(work, 2 * limits.sm_count)
    return LaunchConfig((blocks, 1, 1), (STREAM_THREADS, 1, 1), stream_shared_bytes(part))


def tiles_config(shape: ExpertsShape, tile: TileVariant, *, gate_up: bool) -> LaunchConfig:
    """A block a tile of the most items there can be; half of a tile's weight rows are up rows of the same columns."""
    columns = tile.tile[1] // 2 if gate_up else tile.tile[1]
    tiles = -(-(shape.inner_size if gate_up else shape.hidden) // columns)
    return LaunchConfig((shape.max_items(tile.tile[0]) * tiles, 1, 1), (tile.threads, 1, 1), tile.shared_bytes)


def float_config(shape: ExpertsShape, *, gate_up: bool) -> LaunchConfig:
    """A block a tile of the most items there can be."""
    tiles = -(-(shape.inner_size if gate_up else shape.hidden) // FLOAT_COLUMNS)
    return LaunchConfig((shape.max_items(STREAM_ROWS) * tiles, 1, 1), (FLOAT_THREADS, 1, 1))


def combine_config(shape: ExpertsShape) -> LaunchConfig:
    """Blocks of columns for every token."""
    return LaunchConfig((shape.num_rows, -(-shape.hidden // COMBINE_THREADS), 1), (COMBINE_THREADS, 1, 1))


def launch_config(shape: ExpertsShape) -> LaunchConfig:
    """Of the routing: one block, whatever the shape."""
    return LaunchConfig((1, 1, 1), (ROUTE_THREADS, 1, 1))


@dataclass(frozen=True, slots=True)
class ExpertsLayout:
    """Where the parts of the workspace begin, and its size, in bytes."""

    order: int
    places: int
    inner: int
    product: int
    size: int


@cache
def workspace_layout(shape: ExpertsShape, dtype: torch.dtype) -> ExpertsLayout:
    """Items, order, places, inner rows, and products where there are more rows than a stream adds up itself."""
    combines = dtype == torch.float32 or shape.num_rows > STREAM_ROWS
    sizes = (
        ITEM_BYTES * (1 + shape.max_items(STREAM_ROWS)),
        4 * shape.pairs,
        4 * shape.pairs,
        dtype.itemsize * shape.pairs * shape.inner_size,
        4 * shape.pairs * shape.hidden if combines else 0,
    )
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + -(-size // ACCESS_BYTES) * ACCESS_BYTES)
    return ExpertsLayout(*ends[1:])


def experts_workspace(
    max_rows: int, count: int, num_experts: int, hidden: int, inner_size: int, dtype: torch.dtype
) -> int:
    """Bytes of workspace that `experts` wants for up to `max_rows` rows with `count` experts each.

    Args:
        hidden, inner_size: D and F of the weights, whose type is `dtype`.
    """
    return workspace_layout(ExpertsShape(max_rows, count, num_experts, hidden, inner_size), dtype).size


def experts(
    rows: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    total: torch.Tensor,
    *,
    gelu: bool = False,
    accumulate: bool = True,
    workspace: torch.Tensor | None = None,
) -> None:
    """total[t] += sum over j of shares[t, j] * (down(silu(gate) * up) of expert chosen[t, j]) of rows[t].

    Sums over D and F are in the order of `skinny_linear` (float32: ascending), gate, up and their product are rounded
    to the rows' type, and a token's total is taken in float32 in ascending order of experts.

    Args:
        rows: (T, D) float32, float16 or bfloat16; rows may be apart.  For the 16-bit types D and F are multiples of 8
            and rows start at multiples of 16 bytes.
        shares: (T, k) float32, k up to 32.
        chosen: (T, k) int32 or int64, each expert at most once in a row; numbers outside [0, E) are skipped.
        gate_up: (E, 2F, D), rows gate, up.  down: (E, D, F).  Both of the dtype of rows, contiguous; E up to 1024.
            Read before the kernel in front has ended: it must not write them.
        total: (T, D) float32; rows may be apart.
        gelu: the tanh form of gelu in the place of silu.
        accumulate: add to total; otherwise overwrite it.
        workspace: uint8, at least `experts_workspace` bytes, starting at a multiple of 16; needs no clearing.
    Raises:
        InvalidArgumentError: shapes, types, alignment or devices do not fit, or the workspace is missing or too small.
            Nothing was launched.
    Effects: writes total and workspace.  Ordering: torch's current stream; never waits.
    """
    shape = _check_operands(rows, shares, chosen, gate_up, down, total)
    if shape.pairs == 0 or shape.hidden == 0:
        if not accumulate:
            total.zero_()
        return
    layout = workspace_layout(shape, rows.dtype)
    base = _workspace_base(workspace, layout.size)
    limits = device_limits(rows.device)
    plan = launch_plan(shape, rows.dtype, limits)
    params = ExpertsParams(
        *(address(tensor) for tensor in (rows, shares, chosen, gate_up, down, total)),
        base,
        base + layout.order,
        base + layout.places,
        base + layout.inner,
        base + layout.product,
        rows.stride(0),
        total.stride(0),
        shape.num_rows,
        shape.count,
        shape.num_experts,
        shape.hidden,
        shape.inner_size,
        plan.item_rows,
        chosen.dtype == torch.int64,
        gelu,
        accumulate,
    )
    _launch(shape, plan, rows.dtype, params, limits)


def _launch(
    shape: ExpertsShape, plan: ExpertsPlan, dtype: torch.dtype, params: ExpertsParams, limits: DeviceLimits
) -> None:
    loader.kernel(ROUTE, ()).launch(launch_config(shape), params, pdl=True)
    for part in (GATE_UP, DOWN if plan.combines else DOWN_TOTAL):
        gate_up = part == GATE_UP
        if plan.is_float:
            kernel, config = loader.kernel(FLOATS, (gate_up,)), float_config(shape, gate_up=gate_up)
        elif plan.tile is not None:
            kernel = loader.kernel(TILES, (dtype, plan.tile, gate_up))
            config = tiles_config(shape, plan.tile, gate_up=gate_up)
        else:
            kernel, config = loader.kernel(STREAM, (dtype, part)), stream_config(shape, part, limits)
        kernel.launch(config, params, pdl=True)
    if plan.combines:
        loader.kernel(COMBINE, ()).launch(combine_config(shape), params, pdl=True)


def _workspace_base(workspace: torch.Tensor | None, size: int) -> int:
    """Its address."""
    if workspace is None or workspace.dtype != torch.uint8 or not workspace.is_contiguous() or workspace.numel() < size:
        what = "missing" if workspace is None else describe(workspace)
        raise InvalidArgumentError(f"workspace is {what}; uint8 of at least {size} bytes (experts_workspace) is needed")
    check_device("workspace", workspace)
    check_alignment("workspace", workspace)
    return workspace.data_ptr()


def _check_operands(
    rows: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    total: torch.Tensor,
) -> ExpertsShape:
    check_rows("rows", rows, dtype=ROW_TYPES)
    if down.dim() != 3 or chosen.dim() != 2:
        raise InvalidArgumentError(f"down is {describe(down)} and chosen {describe(chosen)}; (E, D, F), (T, k) needed")
    num_rows, hidden = rows.shape
    num_experts, _, inner_size = down.shape
    shape = ExpertsShape(num_rows, chosen.shape[1], num_experts, hidden, inner_size)
    check_shape("down", down, (num_experts, hidden, inner_size), rows.dtype)
    check_shape("gate_up", gate_up, (num_experts, 2 * inner_size, hidden), rows.dtype)
    if chosen.dtype not in (torch.int32, torch.int64):
        raise InvalidArgumentError(f"chosen is {describe(chosen)}; int32 or int64 is needed")
    check_shape("chosen", chosen, (num_rows, shape.count), chosen.dtype)
    check_shape("shares", shares, (num_rows, shape.count), torch.float32)
    check_rows("total", total, dtype=torch.float32, rows=num_rows, width=hidden)
    _check_sizes(shape, rows, gate_up, down)
    return shape


def _check_sizes(shape: ExpertsShape, rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> None:
    if not 1 <= shape.num_experts <= MAX_EXPERTS or shape.count > MAX_CHOICES:
        raise InvalidArgumentError(
            f"{shape.count} of {shape.num_experts} experts; up to {MAX_CHOICES} of {MAX_EXPERTS} are supported on CUDA"
        )
    if shape.pairs * max(1, shape.hidden // 8) >= 2**31:
        raise InvalidArgumentError(f"{shape.num_rows} rows are too many for one call; give fewer at a time")
    if rows.dtype == torch.float32:
        return
    if shape.hidden % 8 or shape.inner_size % 8:
        raise InvalidArgumentError(
            f"the experts have hidden size {shape.hidden} and inner size {shape.inner_size}; multiples of 8 are needed"
        )
    for name, tensor in (("rows", rows), ("gate_up", gate_up), ("down", down)):
        check_alignment(name, tensor)
