"""Long rows of the gated delta rule on CUDA, a chunk of tokens at a time on tensor cores (Yang et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.delta_params import DeltaOperands, DeltaShape, GatedDeltaParams, is_wide
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import check_alignment, check_device, describe, type_name

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 64  # tokens, kChunk
THREADS = 128  # kChunkThreads
GROUP = 32  # columns, kGroup
SCAN_GROUPS = 1  # of a block of the scan, at most 2: more share what they read, fewer spread over the device
READ_GROUPS = 4  # of a block that reads, at most 4
SCORE_TILES = 10  # kScoreTiles
FEW_TOKENS = 64  # steps of so few tokens go token by token
FEW_TOKENS_A_ROW = 8  # and steps of so few tokens a row
MAX_PLACES = 32  # chunks of one launch, which bound the workspace
KEY_DIMS = (64, 128)
ALIGNMENT = 16
HALF_TYPES = (torch.float16, torch.bfloat16)


def _spec(entry: str, source: str, *, is_typed: bool = True) -> KernelSpec:
    if is_typed:
        variants = tuple(
            Variant((dtype, key_dim), f"{type_name(dtype)}, {key_dim}") for dtype in HALF_TYPES for key_dim in KEY_DIMS
        )
    else:
        variants = tuple(Variant((key_dim,), str(key_dim)) for key_dim in KEY_DIMS)
    return KernelSpec(
        name=entry,
        entry=entry,
        source=source,
        params=GatedDeltaParams,
        params_name="GatedDeltaParams",
        variants=variants,
    )


SOLVE = _spec("delta_solve", "gated_delta_chunks.cu")
SCAN = _spec("delta_scan", "gated_delta_scan.cu", is_typed=False)
READ = _spec("delta_read", "gated_delta_read.cu")
KERNELS = (SOLVE, SCAN, READ)


def solve_config(places: int, heads: int) -> LaunchConfig:
    """A block for a chunk and a head."""
    return LaunchConfig((places, heads, 1), (THREADS, 1, 1))


def scan_config(shape: DeltaShape) -> LaunchConfig:
    """A block for a row, a head and SCAN_GROUPS groups of columns; shared memory as `ScanShared` has it."""
    groups = min(SCAN_GROUPS, shape.value_dim // GROUP)
    shared_bytes = groups * (2 * GROUP * (shape.key_dim + CHUNK) + 4 * THREADS // 32)
    blocks = -(-shape.value_dim // (groups * GROUP))
    return LaunchConfig((blocks, shape.heads, shape.rows), (groups * THREADS, 1, 1), shared_bytes)


def read_config(places: int, shape: DeltaShape) -> LaunchConfig:
    """A block for a chunk, a head and READ_GROUPS groups of columns."""
    groups = min(READ_GROUPS, shape.value_dim // GROUP)
    blocks = -(-shape.value_dim // (groups * GROUP))
    return LaunchConfig((places, shape.heads, blocks), (groups * 32, 1, 1))


def num_places(tokens: int, rows: int) -> int:
    """Places of chunks: row n has those from query_start[n] // CHUNK + n on, so that none need to be counted."""
    return -(-tokens // CHUNK) + rows - 1


def _has_variant(key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    return dtype in HALF_TYPES and key_dim in KEY_DIMS and value_dim % GROUP == 0


def _are_long(tokens: int, rows: int) -> bool:
    return tokens > max(FEW_TOKENS, FEW_TOKENS_A_ROW * rows)


def chunks_pay(operands: DeltaOperands, shape: DeltaShape) -> bool:
    """Whether there are kernels for these rows, and the step may hold long ones."""
    dtype = operands.q.dtype
    if not _has_variant(shape.key_dim, shape.value_dim, dtype) or not _are_long(shape.tokens, shape.rows):
        return False
    return all(_is_aligned(rows) for rows in (operands.q, operands.k, operands.v, operands.out)) and is_wide(
        operands.state
    )


def _is_aligned(rows: torch.Tensor) -> bool:
    """Whether four elements of a row make one access."""
    return rows.stride(0) % 4 == 0 and rows.data_ptr() % (4 * rows.element_size()) == 0


def place_sizes(key_heads: int, heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """Bytes of a place in each part of the workspace, multiples of ALIGNMENT."""
    return {
        "queries": key_heads * CHUNK * key_dim * 2,
        "keys": key_heads * CHUNK * key_dim * 2,
        "reads": heads * CHUNK * key_dim * 2,
        "scores": heads * SCORE_TILES * 16 * 16 * 2,
        "values": heads * CHUNK * value_dim * 2,
        "states": heads * key_dim * value_dim * 2,
        "totals": heads * CHUNK * 4,
        "scales": heads * value_dim // GROUP * 16,
    }


def workspace_bytes(
    tokens: int, rows: int, key_heads: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> int:
    """See `gated_delta.gated_delta_workspace`."""
    if not _has_variant(key_dim, value_dim, dtype) or tokens <= FEW_TOKENS:
        return 0
    places = min(MAX_PLACES, num_places(tokens, min(rows, tokens)))
    return places * sum(place_sizes(key_heads, heads, key_dim, value_dim).values())


def launch_chunks(params: GatedDeltaParams, shape: DeltaShape, dtype: torch.dtype, workspace: torch.Tensor) -> None:
    """Launch the work on every row that goes by chunks.

    Raises:
        InvalidArgumentError: the workspace is of another type, not aligned, or has no room for one chunk.
    """
    sizes = place_sizes(shape.key_heads, shape.heads, shape.key_dim, shape.value_dim)
    held = _places_held(workspace, sum(sizes.values()))
    key = (dtype, shape.key_dim)
    for first, count in _segments(num_places(shape.tokens, shape.rows), min(held, MAX_PLACES)):
        params.first_place, params.num_places = first, count
        place = workspace.data_ptr()
        for part, size in sizes.items():
            setattr(params, part, place)
            place += count * size
        loader.kernel(SOLVE, key).launch(solve_config(count, shape.heads), params, pdl=True)
        loader.kernel(SCAN, key[1:]).launch(scan_config(shape), params, pdl=True)
        loader.kernel(READ, key).launch(read_config(count, shape), params, pdl=True)


def _segments(places: int, most: int) -> Iterator[tuple[int, int]]:
    for first in range(0, places, most):
        yield first, min(most, places - first)


def _places_held(workspace: torch.Tensor, place_bytes: int) -> int:
    if workspace.dtype != torch.uint8 or not workspace.is_contiguous() or workspace.numel() < place_bytes:
        raise InvalidArgumentError(
            f"workspace is {describe(workspace)}; contiguous uint8 of `gated_delta_workspace` bytes is needed, "
            f"{place_bytes} at least for these heads"
        )
    check_device("workspace", workspace)
    check_alignment("workspace", workspace, ALIGNMENT)
    return workspace.numel() // place_bytes
