"""Decode attention where rows share the pages of a prefix, which are read once for all (Juravsky et al. 2024)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import DeviceLimits, LaunchConfig, device_limits
from edgellm.kernels.cu.paged_decode import HEAD_DIMS, PARTIAL_PAD, QUERY_TYPES, paged_decode, paged_decode_workspace
from edgellm.kernels.cu.paged_prefill import (
    MERGE_THREADS,
    RECORD_BYTES,
    WARPGROUP_ARCH,
    PrefillShape,
    has_warpgroups,
    max_blocks,
    tile_block,
    tile_threads_and_rows,
)
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import (
    KVLayout,
    address,
    check_alignment,
    check_device,
    check_vector,
    describe,
    kv_layout,
    type_name,
)

MAX_GROUPS = 32  # kMaxGroups
ALIGNMENT = 16  # bytes from which each part of a workspace starts


class PagedCascadeParams(ctypes.Structure):
    _fields_ = (
        ("query", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
        ("members", ctypes.c_void_p),
        ("group_start", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("own", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("head_bytes", ctypes.c_int32),
        ("page_bytes", ctypes.c_int32),
        ("page_shift", ctypes.c_int32),
        ("pages_per_slot", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("ring", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


CASCADE = KernelSpec(
    name="paged_cascade",
    entry="paged_cascade",
    params=PagedCascadeParams,
    params_name="PagedCascadeParams",
    variants=tuple(
        Variant(
            (dtype, is_fp8, head_dim),
            f"{type_name(dtype)}, {type_name(torch.float8_e4m3fn if is_fp8 else dtype)}, {head_dim}",
        )
        for dtype in QUERY_TYPES
        for is_fp8 in (False, True)
        for head_dim in HEAD_DIMS
    ),
)
WARPGROUPS = KernelSpec(
    name="paged_cascade_sm90",
    entry="paged_cascade_sm90",
    params=PagedCascadeParams,
    params_name="PagedCascadeParams",
    variants=tuple(
        Variant((dtype, head_dim), f"{type_name(dtype)}, {head_dim}") for dtype in QUERY_TYPES for head_dim in HEAD_DIMS
    ),
    min_arch=WARPGROUP_ARCH,
    max_arch=WARPGROUP_ARCH,
    arch_suffix="a",
)
MERGE = KernelSpec(
    name="paged_cascade_merge",
    entry="paged_cascade_merge",
    params=PagedCascadeParams,
    params_name="PagedCascadeParams",
    source="paged_cascade.cu",
    variants=tuple(
        Variant((dtype, head_dim), f"{type_name(dtype)}, {head_dim}") for dtype in QUERY_TYPES for head_dim in HEAD_DIMS
    ),
)
SPECS = (CASCADE, WARPGROUPS, MERGE)


@dataclass(frozen=True, slots=True)
class CascadeLaunch:
    """The launches beside decode attention's.

    Attributes:
        tile_rows: packed rows of a tile.
        blocks: of one kv head.
        ring: key or value tiles in shared memory.
    """

    attention: LaunchConfig
    merge: LaunchConfig
    by_warpgroups: bool
    tile_rows: int
    blocks: int
    ring: int


@lru_cache(maxsize=1024)
def launch_config(
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    is_fp8: bool,
    limits: DeviceLimits,
    *,
    by_warpgroups: bool | None = None,
) -> CascadeLaunch:
    """As many blocks as run at the same time, whatever the groups: what each does follows from device memory.

    Args:
        by_warpgroups: which kernel does it, for comparisons; None: the better one of the device.
    """
    shape = PrefillShape(num_rows, num_rows, num_heads, num_kv_heads, head_dim, 0, is_fp8, deterministic=False)
    if by_warpgroups is None:
        by_warpgroups = has_warpgroups(shape, limits)
    block = tile_block(shape, limits, by_warpgroups=by_warpgroups)
    blocks = _blocks_of_a_head(block.per_sm, num_kv_heads, limits)
    grid = (limits.sm_count, 1, 1) if by_warpgroups else (num_kv_heads, blocks, 1)
    # The kernel of warpgroup products keeps its record behind what prompts need.
    shared_bytes = block.shared_bytes + by_warpgroups * RECORD_BYTES
    return CascadeLaunch(
        LaunchConfig(grid, (block.threads, 1, 1), shared_bytes),
        LaunchConfig((-(-num_rows * num_heads * 32 // MERGE_THREADS), 1, 1), (MERGE_THREADS, 1, 1)),
        by_warpgroups,
        block.rows,
        blocks,
        block.ring,
    )


def _blocks_of_a_head(per_sm: int, num_kv_heads: int, limits: DeviceLimits) -> int:
    return max(1, limits.sm_count * per_sm // num_kv_heads)


@dataclass(frozen=True, slots=True)
class WorkspaceParts:
    """Bytes of a workspace: decode attention's, states of rows' own keys, states of parts of shared keys."""

    decode: int
    own: int
    parts: int

    @property
    def total(self) -> int:
        return self.decode + self.own + self.parts


def _workspace_parts(
    max_batch: int, num_heads: int, num_kv_heads: int, head_dim: int, limits: DeviceLimits
) -> WorkspaceParts:
    threads, tile_rows = tile_threads_and_rows(head_dim, deterministic=False, limits=limits)
    state_bytes = (head_dim + PARTIAL_PAD) * 4
    packed_rows = max_batch * num_heads // num_kv_heads
    most_tiles = (packed_rows + min(MAX_GROUPS, max_batch) * (tile_rows - 1)) // tile_rows
    items = max(_blocks_of_a_head(max_blocks(threads, head_dim), num_kv_heads, limits), most_tiles)
    decode = -(-paged_decode_workspace(max_batch, num_heads, head_dim, limits) // ALIGNMENT) * ALIGNMENT
    return WorkspaceParts(decode, max_batch * num_heads * state_bytes, items * num_kv_heads * tile_rows * state_bytes)


def paged_cascade_workspace(
    max_batch: int, num_heads: int, num_kv_heads: int, head_dim: int, limits: DeviceLimits
) -> int:
    """Bytes of workspace for calls of up to `max_batch` rows.

    It begins with that of `paged_decode`: the caller zeroes it once, and may use it for both.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise InvalidArgumentError(f"{num_heads} heads over {num_kv_heads} kv heads; a whole group is needed")
    return _workspace_parts(max_batch, num_heads, num_kv_heads, head_dim, limits).total


def paged_cascade(
    query: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    shared: torch.Tensor,
    members: torch.Tensor,
    group_start: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    *,
    num_heads: int,
    scale: float,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    early_reads: bool = False,
    by_warpgroups: bool | None = None,
) -> None:
    """As `paged_decode` without a window, for rows in groups that share the pages of their first keys.

    A group's shared keys are read from the pages of its first member, once for up to 128 (row, head)s of a kv head;
    what is left of each row by `paged_decode`.  Both are softmax states in float32, joined in a fixed order: bits
    depend on lengths, slots and groups.  Rows in no group get the bits that `paged_decode` gives them in such a batch.

    Args:
        shared: (N,) int32: keys that row n has in the same pages as the rest of its group, a multiple of 16, less than
            lengths[n], the same throughout a group; 0: in no group.
        members: (N,) int32: rows of the groups, group by group; what is behind the last group's is not read.
        group_start: (MAX_GROUPS + 1,) int32, rising from 0: group g has members group_start[g] to group_start[g + 1].
            Empty groups may be anywhere.
        workspace: at least `paged_cascade_workspace` bytes of uint8, zero before its first use; one stream at a time.
        by_warpgroups: see `launch_config`.
        others: see `paged_decode`; with early_reads `shared` may be read early too.
    Raises:
        InvalidArgumentError: shapes, types, alignment or devices do not fit.  Nothing was launched.
    Effects: writes out, uses workspace.  Ordering: torch's current stream; never waits, never allocates: may be
        captured in a graph, and replayed with other groups.
    """
    num_rows = query.shape[0]
    layout = _check(query, pages, out, shared, members, group_start, num_heads)
    if num_rows == 0:
        return
    limits = device_limits(query.device)
    parts = _workspace_parts(num_rows, num_heads, layout.kv_heads, layout.head_dim, limits)
    _check_workspace(workspace, parts.total)
    launch = launch_config(
        num_rows, num_heads, layout.kv_heads, layout.head_dim, layout.is_fp8, limits, by_warpgroups=by_warpgroups
    )
    own = workspace[parts.decode : parts.decode + parts.own].view(torch.float32).view(num_rows, num_heads, -1)
    params = PagedCascadeParams(
        address(query),
        address(pages),
        address(page_table),
        address(slots),
        address(lengths),
        address(shared),
        address(members),
        address(group_start),
        address(sinks),
        address(out),
        address(own),
        workspace.data_ptr() + parts.decode + parts.own,
        query.stride(0),
        out.stride(0),
        num_rows,
        num_heads,
        layout.kv_heads,
        num_heads // layout.kv_heads,
        layout.head_bytes,
        layout.page_bytes,
        layout.page_size.bit_length() - 1,
        page_table.shape[-1],
        launch.blocks,
        launch.ring,
        scale,
        soft_cap,
    )
    paged_decode(
        query,
        pages,
        page_table,
        slots,
        lengths,
        out,
        workspace[: parts.decode],
        num_heads=num_heads,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
        early_reads=early_reads,
        starts=shared,
        states=own,
    )
    if launch.by_warpgroups:
        attention = loader.kernel(WARPGROUPS, (query.dtype, layout.head_dim))
    else:
        attention = loader.kernel(CASCADE, (query.dtype, layout.is_fp8, layout.head_dim))
    attention.launch(launch.attention, params, pdl=True)
    loader.kernel(MERGE, (query.dtype, layout.head_dim)).launch(launch.merge, params, pdl=True)


def _check(
    query: torch.Tensor,
    pages: torch.Tensor,
    out: torch.Tensor,
    shared: torch.Tensor,
    members: torch.Tensor,
    group_start: torch.Tensor,
    num_heads: int,
) -> KVLayout:
    """What `paged_decode` does not check; enough to lay out the workspace."""
    num_rows = query.shape[0]
    if num_heads < 1 or out.dim() != 2 or out.shape[1] % num_heads or out.shape[1] // num_heads not in HEAD_DIMS:
        raise InvalidArgumentError(
            f"out is {describe(out)} for {num_heads} heads; a head size of {', '.join(map(str, HEAD_DIMS))} is needed"
        )
    layout = kv_layout(pages, out.shape[1] // num_heads)
    if num_heads % layout.kv_heads:
        raise InvalidArgumentError(f"{num_heads} heads over {layout.kv_heads} kv heads; a whole group is needed")
    check_vector("shared", shared, num_rows, torch.int32)
    check_vector("members", members, num_rows, torch.int32)
    check_vector("group_start", group_start, MAX_GROUPS + 1, torch.int32)
    return layout


def _check_workspace(workspace: torch.Tensor, needed: int) -> None:
    if workspace.dtype != torch.uint8 or workspace.dim() != 1 or workspace.numel() < needed:
        raise InvalidArgumentError(
            f"workspace is {describe(workspace)}; {needed} bytes of uint8 are needed, see paged_cascade_workspace"
        )
    check_device("workspace", workspace)
    check_alignment("workspace", workspace)
