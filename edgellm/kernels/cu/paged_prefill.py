"""Attention of ragged rows over pages (FlashAttention-2, Dao 2023): prefill chunks, tree rows, deterministic rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import DeviceLimits, LaunchConfig, device_limits
from edgellm.kernels.cu.prefill_operands import MAX_GRID_YZ, PagedPrefillParams, RaggedOperands
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import KVLayout, check_alignment, check_vector, type_name

ROW_TYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
SEGMENT_TOKENS = 1024  # kSegmentTokens
MIN_PART_TOKENS = 512  # kMinPartTokens
KEY_TILE = 64
WARP_ROWS = 16
MAX_RING = 4
MAX_SPLITS = 64
MAX_PADDING = 127  # rows of a step that may be padding; of fewer than twice as many, half
MERGE_THREADS = 128
WARPGROUP_ARCH = 90
WARPGROUP_MISSING = ((256, True),)  # (head_dim, deterministic): the sums of segments do not fit shared memory
WARPGROUP_THREADS = 384
WARPGROUP_ROWS = 128
WARPGROUP_RING = 4  # tiles of keys or values
WARPGROUP_CONTROL_BYTES = 256  # barriers and records
BLOCK_RESERVED_BYTES = 1024  # shared memory that the driver takes of each block
RECORD_BYTES = 1024  # kRecordBytes

PREFILL = KernelSpec(
    name="paged_prefill",
    entry="paged_prefill",
    params=PagedPrefillParams,
    params_name="PagedPrefillParams",
    variants=tuple(
        Variant(
            (dtype, is_fp8, head_dim, deterministic),
            f"{type_name(dtype)}, {type_name(torch.float8_e4m3fn if is_fp8 else dtype)}, {head_dim}, "
            f"{str(deterministic).lower()}",
        )
        for dtype in ROW_TYPES
        for is_fp8 in (False, True)
        for head_dim in HEAD_DIMS
        for deterministic in (False, True)
    ),
)
WARPGROUPS = KernelSpec(
    name="paged_prefill_sm90",
    entry="paged_prefill_sm90",
    params=PagedPrefillParams,
    params_name="PagedPrefillParams",
    source="paged_prefill_sm90.cu",
    variants=tuple(
        Variant((dtype, head_dim, deterministic), f"{type_name(dtype)}, {head_dim}, {str(deterministic).lower()}")
        for dtype in ROW_TYPES
        for head_dim in HEAD_DIMS
        for deterministic in (False, True)
        if (head_dim, deterministic) not in WARPGROUP_MISSING
    ),
    min_arch=WARPGROUP_ARCH,
    max_arch=WARPGROUP_ARCH,
    arch_suffix="a",
)
MERGE = KernelSpec(
    name="paged_prefill_merge",
    entry="paged_prefill_merge",
    params=PagedPrefillParams,
    params_name="PagedPrefillParams",
    source="paged_prefill.cu",
    variants=tuple(
        Variant((dtype, head_dim), f"{type_name(dtype)}, {head_dim}") for dtype in ROW_TYPES for head_dim in HEAD_DIMS
    ),
)
SPECS = (PREFILL, WARPGROUPS, MERGE)


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What a launch depends on; everything is known to the host without reading device memory."""

    num_rows: int
    num_sequences: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_keys: int  # places of a page table row
    is_fp8: bool
    deterministic: bool


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """The launches of one call.  `parts` softmax states a row may be stored in the workspace, then merged."""

    attention: LaunchConfig
    merge: LaunchConfig | None
    by_warpgroups: bool
    tile_rows: int
    ring: int
    blocks: int  # that run at the same time
    splits: int  # blocks that share a tile's keys, at most: how many do follows from the tiles that there are
    parts: int


def paged_prefill(
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
    deterministic: bool = False,
    workspace: torch.Tensor | None = None,
    by_warpgroups: bool | None = None,
) -> None:
    """out = softmax(cap(scale * query . keys)) . values, over the keys that each row sees.

    Row i of sequence n is token past_len[n] + i and sees all keys up to itself, its own included (K and V of the new
    tokens are in their pages already).  With a window it sees the last `window` of them.

    Args:
        query: (T, >= num_heads * head_dim) float16 or bfloat16, CUDA; rows may be apart; head_dim 64, 128 or 256.
        pages: one layer's pages, of query's dtype or fp8; num_heads / kv_heads is 1 to 16.
        page_table: (num_slots, pages_per_slot) int32, -1 unused.  Pages before the window may be absent.
        slots: (N,) int32 rows of page_table; -1: a padding sequence, whose rows are not written.
        query_start: (N + 1,) int32, rising; sequence n has rows query_start[n] to query_start[n + 1].
        past_len: (N,) int32 keys before the sequence's first row.
        out: (T, num_heads * head_dim), dtype of query, contiguous; rows of no sequence are not written.
        soft_cap: scores become cap * tanh(score / cap); 0: no cap.
        sinks: (num_heads,) float32 logits of keys without value that join each softmax, or None.
        tree_mask: (T, words) int32; bit j of row i: it sees new token j of its sequence, in place of the causal rule.
            The past stays visible (in a window: as many of its last keys as the mask's bits leave).
        deterministic: a row's bits depend on its query and keys alone, not on N, T, chunk borders or page size: keys
            in segments of SEGMENT_TOKENS, merged in order.
        workspace: (bytes,) uint8 of `paged_prefill_workspace`; without it, or with a smaller one, few rows over many
            keys are not spread over the device.  Never changes deterministic results.  Contents do not matter.
        by_warpgroups: which kernel does it, for comparisons; None: the better one of the device.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes out and workspace.  Ordering: torch's current stream; never waits, never allocates: may be
    captured in a graph, and replayed with other lengths, starts and tables of the same shapes.
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
    layout = operands.check(ROW_TYPES)
    if layout.head_dim not in HEAD_DIMS:
        raise InvalidArgumentError(f"head_dim is {layout.head_dim}; this kernel has {', '.join(map(str, HEAD_DIMS))}")
    if workspace is not None:
        check_vector("workspace", workspace, workspace.numel(), torch.uint8)
        check_alignment("workspace", workspace)
    if not query.shape[0] or not slots.shape[0]:
        return
    shape = prefill_shape(operands, layout, deterministic=deterministic)
    limits = device_limits(query.device)
    workspace_bytes = 0 if workspace is None else workspace.numel()
    launch = launch_config(shape, limits, workspace_bytes, by_warpgroups=by_warpgroups)
    params = operands.params(layout)
    params.tile_rows, params.ring = launch.tile_rows, launch.ring
    params.blocks, params.splits = launch.blocks, launch.splits
    params.deterministic = int(deterministic)
    if launch.merge is not None and workspace is not None:
        params.partial_out = workspace.data_ptr()
        params.partial_stats = workspace.data_ptr() + launch.parts * shape.num_rows * num_heads * shape.head_dim * 4
    if launch.by_warpgroups:
        kernel = loader.kernel(WARPGROUPS, (query.dtype, layout.head_dim, deterministic))
    else:
        kernel = loader.kernel(PREFILL, (query.dtype, layout.is_fp8, layout.head_dim, deterministic))
    kernel.launch(launch.attention, params, pdl=True)
    if launch.merge is not None:
        loader.kernel(MERGE, (query.dtype, layout.head_dim)).launch(launch.merge, params, pdl=True)


def prefill_shape(operands: RaggedOperands, layout: KVLayout, *, deterministic: bool) -> PrefillShape:
    """The shape of a checked call."""
    return PrefillShape(
        num_rows=operands.query.shape[0],
        num_sequences=operands.slots.shape[0],
        num_heads=operands.num_heads,
        num_kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        max_keys=operands.page_table.shape[1] * layout.page_size,
        is_fp8=layout.is_fp8,
        deterministic=deterministic,
    )


def paged_prefill_workspace(
    num_heads: int, head_dim: int, limits: DeviceLimits, *, max_rows: int = 0, max_keys: int = 0
) -> int:
    """Bytes of workspace with which few rows over many keys are spread over the device.

    Args:
        max_rows, max_keys: for deterministic calls: rows of the largest call worth spreading (the decode batch, say)
            and keys that a sequence may have; one softmax state is kept for each row, head and segment.
    """
    threads, tile_rows = tile_threads_and_rows(head_dim, deterministic=False, limits=limits)
    spread_rows = limits.sm_count * max_blocks(threads, head_dim) * tile_rows
    segment_rows = max_rows * num_heads * -(-max_keys // SEGMENT_TOKENS)
    return max(spread_rows, segment_rows) * _state_bytes(head_dim)


def has_warpgroups(shape: PrefillShape, limits: DeviceLimits) -> bool:
    """Whether the kernel of warpgroup products can serve a call.

    Rows of deterministic calls get other bits by one kernel than by the other: the choice depends on nothing that may
    change from call to call of a deployment.
    """
    missing = shape.is_fp8 or (shape.head_dim, shape.deterministic) in WARPGROUP_MISSING
    return limits.arch == WARPGROUP_ARCH and not missing


def tile_threads_and_rows(head_dim: int, *, deterministic: bool, limits: DeviceLimits) -> tuple[int, int]:
    """Threads of a block and packed rows of its tile; as `PrefillShape` of the device source."""
    small = limits.arch in (86, 89) or limits.arch >= 120
    if head_dim == 256:
        return (256, 64) if deterministic else (128, 64) if small else (256, 128)
    return (128, 64) if deterministic else (128, 128)


def tile_bytes(shape: PrefillShape, tile_rows: int) -> tuple[int, int]:
    """Shared bytes of the query rows, and of one key or value tile."""
    stage = KEY_TILE * (shape.head_dim + 8 if shape.is_fp8 else shape.head_dim * 2)
    return tile_rows * shape.head_dim * 2, stage


def max_blocks(threads: int, head_dim: int) -> int:
    """Blocks that one SM's registers hold."""
    return 1 if threads == 256 or head_dim == 256 else 2


def ring_and_blocks(query_bytes: int, stage_bytes: int, max_blocks: int, limits: DeviceLimits) -> tuple[int, int]:
    """The longest ring with which the most blocks fit an SM, and that number of blocks."""
    room = limits.max_shared_bytes + BLOCK_RESERVED_BYTES
    for blocks in range(max_blocks, 0, -1):
        ring = (room // blocks - BLOCK_RESERVED_BYTES - RECORD_BYTES - query_bytes) // stage_bytes
        if ring >= 2:
            return min(ring, MAX_RING), blocks
    raise InvalidArgumentError(
        f"the device gives a block {limits.max_shared_bytes} bytes of shared memory; "
        f"{query_bytes + 2 * stage_bytes + RECORD_BYTES} are needed"
    )


def _state_bytes(head_dim: int) -> int:
    """A softmax state of a row in the workspace: sums, maximum, total."""
    return (head_dim + 2) * 4


@dataclass(frozen=True, slots=True)
class TileBlock:
    """A block of a kernel: threads, packed rows, shared memory, tiles in its ring, and how many share an SM."""

    threads: int
    rows: int
    shared_bytes: int
    ring: int
    per_sm: int


def tile_block(shape: PrefillShape, limits: DeviceLimits, *, by_warpgroups: bool) -> TileBlock:
    """The largest that the device holds; `by_warpgroups` says of which kernel."""
    if by_warpgroups:
        tile_keys = 64 if shape.head_dim == 256 else 128
        query_places = 1 if shape.head_dim == 256 or shape.deterministic else 2
        rows_and_keys = query_places * WARPGROUP_ROWS + WARPGROUP_RING * tile_keys
        totals = WARPGROUP_ROWS * shape.head_dim * 4 if shape.deterministic else 0
        shared_bytes = rows_and_keys * shape.head_dim * 2 + WARPGROUP_CONTROL_BYTES + totals
        return TileBlock(WARPGROUP_THREADS, WARPGROUP_ROWS, shared_bytes, WARPGROUP_RING, 1)
    threads, rows = tile_threads_and_rows(shape.head_dim, deterministic=shape.deterministic, limits=limits)
    query_bytes, stage_bytes = tile_bytes(shape, rows)
    ring, per_sm = ring_and_blocks(query_bytes, stage_bytes, max_blocks(threads, shape.head_dim), limits)
    return TileBlock(threads, rows, RECORD_BYTES + query_bytes + ring * stage_bytes, ring, per_sm)


@lru_cache(maxsize=4096)
def launch_config(
    shape: PrefillShape, limits: DeviceLimits, workspace_bytes: int, *, by_warpgroups: bool | None = None
) -> PrefillLaunch:
    """Blocks for every row tile that there can be, times the blocks that share a tile's keys.

    Args:
        by_warpgroups: which kernel; None: that of warpgroup products wherever there is one.
    Raises:
        InvalidArgumentError: too many rows for one launch, too little shared memory, or no such kernel.
    """
    if by_warpgroups is None:
        by_warpgroups = has_warpgroups(shape, limits)
    elif by_warpgroups and not has_warpgroups(shape, limits):
        raise InvalidArgumentError(f"by_warpgroups: there is no such kernel for {shape} on {limits}; leave it out")
    block = tile_block(shape, limits, by_warpgroups=by_warpgroups)
    packed_rows = shape.num_rows * shape.num_heads // shape.num_kv_heads
    tiles = (packed_rows + shape.num_sequences * (block.rows - 1)) // block.rows
    if tiles > MAX_GRID_YZ:
        raise InvalidArgumentError(
            f"{shape.num_rows} rows make {tiles} tiles; {MAX_GRID_YZ} fit one launch, pass fewer rows at once"
        )
    room = workspace_bytes // (shape.num_rows * shape.num_heads * _state_bytes(shape.head_dim))
    blocks = limits.sm_count * block.per_sm
    fewest_rows = max(1, shape.num_rows // 2, shape.num_rows - MAX_PADDING)
    fewest_tiles = -(-fewest_rows * shape.num_heads // (shape.num_kv_heads * block.rows))
    splits, parts = _spread(shape, blocks // (fewest_tiles * shape.num_kv_heads), room)
    merge_blocks = -(-shape.num_rows * shape.num_heads * 32 // MERGE_THREADS)
    items = shape.num_kv_heads * tiles * splits
    grid = (min(items, limits.sm_count), 1, 1) if by_warpgroups else (shape.num_kv_heads, tiles, splits)
    return PrefillLaunch(
        attention=LaunchConfig(grid, (block.threads, 1, 1), block.shared_bytes),
        merge=LaunchConfig((merge_blocks, 1, 1), (MERGE_THREADS, 1, 1)) if splits > 1 else None,
        by_warpgroups=by_warpgroups,
        tile_rows=block.rows,
        ring=block.ring,
        blocks=blocks,
        splits=splits,
        parts=parts,
    )


def _spread(shape: PrefillShape, free: int, room: int) -> tuple[int, int]:
    """(splits, parts): blocks that share a tile's keys, and states a row that they store.

    Args:
        free: blocks that run at the same time, for each row tile of a step with few of them.
        room: states a row that the workspace holds.
    """
    if free < 2:
        return 1, 1
    if shape.deterministic:
        parts = -(-shape.max_keys // SEGMENT_TOKENS)
        return (min(parts, MAX_SPLITS), parts) if 2 <= parts <= room else (1, 1)
    splits = min(free, room, MAX_SPLITS, shape.max_keys // MIN_PART_TOKENS)
    return (splits, splits) if splits > 1 else (1, 1)
