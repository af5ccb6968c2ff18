"""Causal depthwise convolution on CUDA over the tokens of each sequence, with its last inputs as state."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.delta_params import check_heads, check_state_rows
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import ACCESS_BYTES, MAX_GRID_YZ, ROW_TYPES
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_rows, check_shape, check_vector, type_name

if TYPE_CHECKING:
    from edgellm.kernels.cu.state_rows import StateRows

LANES = 32  # kConvLanes
RUN = 8  # tokens a thread, kRun
MAX_GROUPS = 16  # kConvGroups
WIDTHS = range(2, 9)
PAIRED_WIDTH = 4  # what models have: two channels a thread, or four where rows go by tiles
TILE_THREADS = 128  # kConvThreads
TILE_STEP = 4  # channels a thread of a tile, kConvStep
TILES = (64, 32, 16)  # tokens; all more than a window has
FEW_BLOCKS = 528  # tiles become smaller until there are so many blocks: four a multiprocessor of a large device


class CausalConvParams(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("checkpoint", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("checkpoint_start", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("state_stride", ctypes.c_int64),
        ("checkpoint_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("num_checkpoints", ctypes.c_int32),
        ("channels", ctypes.c_int32),
        ("has_silu", ctypes.c_int32),
        ("tile", ctypes.c_int32),
    )


SPEC = KernelSpec(
    name="causal_conv",
    entry="causal_conv",
    params=CausalConvParams,
    params_name="CausalConvParams",
    variants=tuple(
        Variant((dtype, width, step), f"{type_name(dtype)}, {width}, {step}")
        for dtype in ROW_TYPES
        for width in WIDTHS
        for step in ((1, 2) if width == PAIRED_WIDTH else (1,))
    ),
)
TILES_SPEC = KernelSpec(
    name="causal_conv_tiles",
    entry="causal_conv_tiles",
    source="causal_conv_tiles.cu",
    params=CausalConvParams,
    params_name="CausalConvParams",
    variants=tuple(Variant((dtype, PAIRED_WIDTH), f"{type_name(dtype)}, {PAIRED_WIDTH}") for dtype in ROW_TYPES),
)
SPECS = (SPEC, TILES_SPEC)


def launch_config(tokens: int, rows: int, channels: int, step: int) -> LaunchConfig:
    """LANES * step channels along x, a row along y; as many groups of RUN tokens as a row of usual length fills."""
    runs = -(-tokens // (RUN * rows))
    groups = min(MAX_GROUPS, 1 << (runs - 1).bit_length())
    return LaunchConfig((-(-channels // (LANES * step)), rows, 1), (LANES, groups, 1))


def tile_config(tokens: int, rows: int, channels: int) -> tuple[LaunchConfig, int]:
    """TILE_THREADS * TILE_STEP channels along x, places of tiles along y; and the tokens of a tile.

    Tile i of row n has place query_start[n] // tile + n + i.  The bits of the result do not depend on the tile.
    """
    columns = -(-channels // (TILE_THREADS * TILE_STEP))
    places = {tile: -(-tokens // tile) + rows - 1 for tile in TILES}
    tile = next((tile for tile in TILES if columns * places[tile] >= FEW_BLOCKS), TILES[-1])
    return LaunchConfig((columns, places[tile], 1), (TILE_THREADS, 1, 1)), tile


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
    *,
    silu: bool,
    checkpoint: torch.Tensor | None = None,
) -> None:
    """out[t] = silu?(bias + sum_j weight[:, j] * window[:, j]); the window ends with x[t].  In float32, one rounding.

    A sequence's bits depend neither on how it is cut into steps nor on the rows beside it.

    Args:
        x: (T, C) float32, float16 or bfloat16, CUDA; rows may lie apart.
        weight: (C, W) float32, W from 2 to 8.
        bias: (C,) float32 or None.
        state: (slots, C, W - 1) float32, the last inputs of each sequence, oldest first; slots may lie apart.
        rows: which tokens belong to which slot, on the device.
        out: (T, C), dtype of x; may be x.
        checkpoint: (CK, C, W - 1) float32; None where no row has checkpoints.
    Raises:
        InvalidArgumentError: shapes, types, strides or devices do not fit.  Nothing was launched.
    Effects: writes out, state, checkpoint.  Ordering: torch's current stream; never waits.
    """
    tokens, channels, width = _check(x, weight, bias, state, rows, out, checkpoint)
    if tokens == 0 or rows.num_rows == 0:
        return
    params = CausalConvParams(
        x=address(x),
        weight=address(weight),
        bias=address(bias),
        state=address(state),
        checkpoint=address(checkpoint),
        out=address(out),
        query_start=address(rows.query_start),
        slots=address(rows.slots),
        checkpoint_start=None if checkpoint is None else address(rows.checkpoint_start),
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        state_stride=state.stride(0),
        checkpoint_stride=0 if checkpoint is None else checkpoint.stride(0),
        num_rows=rows.num_rows,
        num_slots=state.shape[0],
        num_checkpoints=0 if checkpoint is None else checkpoint.shape[0],
        channels=channels,
        has_silu=int(silu),
    )
    if _goes_by_tiles(x, weight, state, out, checkpoint):
        config, params.tile = tile_config(tokens, rows.num_rows, channels)
        if config.grid[1] <= MAX_GRID_YZ:
            loader.kernel(TILES_SPEC, (x.dtype, width)).launch(config, params, pdl=True)
            return
    step = 2 if width == PAIRED_WIDTH and channels % 2 == 0 and _has_pairs(x) and _has_pairs(out) else 1
    config = launch_config(tokens, rows.num_rows, channels, step)
    loader.kernel(SPEC, (x.dtype, width, step)).launch(config, params, pdl=True)


def _goes_by_tiles(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, out: torch.Tensor, checkpoint: torch.Tensor | None
) -> bool:
    """Whether four channels make one access everywhere, and no tile writes what another one reads."""
    channels, width = weight.shape
    if width != PAIRED_WIDTH or channels % TILE_STEP or _share_memory(x, out):
        return False
    kept = (state,) if checkpoint is None else (state, checkpoint)
    return all(_has_quads(rows) for rows in (x, out, *kept)) and weight.data_ptr() % ACCESS_BYTES == 0


def _has_quads(rows: torch.Tensor) -> bool:
    return rows.stride(0) % TILE_STEP == 0 and rows.data_ptr() % (TILE_STEP * rows.element_size()) == 0


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the spans of two tensors of rows meet."""
    low, high = sorted((rows.data_ptr(), _span_bytes(rows)) for rows in (one, other))
    return low[0] + low[1] > high[0]


def _span_bytes(rows: torch.Tensor) -> int:
    return ((rows.shape[0] - 1) * rows.stride(0) + rows.shape[1]) * rows.element_size()


def _has_pairs(rows: torch.Tensor) -> bool:
    return rows.stride(0) % 2 == 0 and rows.data_ptr() % (2 * rows.element_size()) == 0


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
    checkpoint: torch.Tensor | None,
) -> tuple[int, int, int]:
    """(tokens, channels, taps) of operands that fit together."""
    if weight.dim() != 2 or weight.shape[0] < 1 or weight.shape[1] not in WIDTHS:
        raise InvalidArgumentError(
            f"weight is {tuple(weight.shape)}; (C, W) with W from {WIDTHS[0]} to {WIDTHS[-1]} is needed"
        )
    channels, width = weight.shape
    check_rows("x", x, dtype=ROW_TYPES, width=channels)
    check_rows("out", out, dtype=x.dtype, rows=x.shape[0], width=channels)
    check_shape("weight", weight, (channels, width), torch.float32)
    if bias is not None:
        check_vector("bias", bias, channels, torch.float32)
    check_heads("state", state, (-1, channels, width - 1), torch.float32)
    if checkpoint is not None:
        check_heads("checkpoint", checkpoint, (-1, channels, width - 1), torch.float32)
    check_state_rows(rows)
    if rows.num_rows > MAX_GRID_YZ:
        raise InvalidArgumentError(f"{rows.num_rows} rows; at most {MAX_GRID_YZ} fit a grid")
    return x.shape[0], channels, width
