"""Attention of ragged rows over pages on tensor cores, for heads of 512 columns; `paged_prefill` has narrower ones."""

from __future__ import annotations

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.prefill_operands import MAX_GRID_YZ, PagedPrefillParams, RaggedOperands
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import type_name

HEAD_DIM = 512  # kWide
THREADS = 256  # kWideThreads
TILE_ROWS = 16  # kWideRows
TILE_KEYS = 32  # kWideKeys
PITCH = HEAD_DIM + 8
QUERY_TYPES = (torch.float16, torch.bfloat16)

SPEC = KernelSpec(
    name="paged_attention_wide",
    entry="paged_attention_wide",
    params=PagedPrefillParams,
    params_name="PagedPrefillParams",
    variants=tuple(
        Variant((dtype, is_fp8), f"{type_name(dtype)}, {type_name(torch.float8_e4m3fn if is_fp8 else dtype)}")
        for dtype in QUERY_TYPES
        for is_fp8 in (False, True)
    ),
)


def shared_bytes() -> int:
    """Query rows, a tile of keys and of values; scores by halves, weights, a factor a row, scales of two tiles."""
    rows = 2 * PITCH * (TILE_ROWS + 2 * TILE_KEYS)
    scores = 2 * TILE_ROWS * (TILE_KEYS + 4) * 4 + TILE_ROWS * (TILE_KEYS + 8) * 2
    return rows + scores + TILE_ROWS * 4 + 4 * TILE_KEYS * 4


def launch_config(num_rows: int, num_sequences: int, kv_heads: int, group: int) -> LaunchConfig:
    """A block for each kv head and TILE_ROWS of its packed rows, of which each sequence may leave one tile unfilled."""
    tiles = num_rows * group // TILE_ROWS + num_sequences
    return LaunchConfig((kv_heads, tiles, 1), (THREADS, 1, 1), shared_bytes())


def paged_attention_wide(
    query: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    past_len: torch.Tensor,
    out: torch.Tensor,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
) -> None:
    """`paged_prefill` for a head_dim of 512: float16 or bfloat16 rows over pages of the same type or fp8.

    A row's bits depend on its query and its keys alone, not on chunks, batch or page size.

    Args, effects and ordering: as `paged_prefill`.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    """
    operands = RaggedOperands(
        query=query,
        pages=pages,
        page_table=page_table,
        slots=slots,
        query_start=query_start,
        past_len=past_len,
        out=out,
        num_heads=num_heads,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        tree_mask=tree_mask,
    )
    layout = operands.check(QUERY_TYPES)
    if layout.head_dim != HEAD_DIM:
        raise InvalidArgumentError(f"head_dim is {layout.head_dim}; this kernel has {HEAD_DIM} alone")
    config = launch_config(query.shape[0], slots.shape[0], layout.kv_heads, num_heads // layout.kv_heads)
    if config.grid[1] > MAX_GRID_YZ:
        raise InvalidArgumentError(
            f"{query.shape[0]} rows of {slots.shape[0]} sequences make {config.grid[1]} row tiles; at most "
            f"{MAX_GRID_YZ} fit a grid: give fewer rows at a time"
        )
    if query.shape[0] and slots.shape[0]:
        loader.kernel(SPEC, (query.dtype, layout.is_fp8)).launch(config, operands.params(layout), pdl=True)
