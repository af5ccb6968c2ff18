"""Attention of one query token a sequence over its pages, in one launch that plans itself on the device."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import DeviceLimits, LaunchConfig, device_limits
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import (
    SCALE_BYTES,
    KVLayout,
    address,
    check_alignment,
    check_device,
    check_rows,
    check_shape,
    check_vector,
    describe,
    kv_layout,
    type_name,
)

WARP = 32
TILE_KEYS = 16  # kTileKeys
MAX_WARPS = 8  # kMaxWarps
STAGES = (6, 4, 3, 2)  # tiles in a warp's ring that the kernel can wait for
ALIGN_TILES = 16  # a piece may be so much longer to end with a pair: about what merging between blocks costs in time
HEADS_A_TILE = 8
MAX_GROUP = 16
HEAD_DIMS = (64, 128, 256)
QUERY_TYPES = (torch.float16, torch.bfloat16)
PARTIAL_PAD = 4  # floats of a head's partial beside its columns: maximum, sum, two unused
STATE_BYTES = 1280  # kStateBytes
COUNTER_ALIGNMENT = 64  # counters of a workspace are padded to a multiple of so many


class PagedDecodeParams(ctypes.Structure):
    _fields_ = (
        ("query", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("page_bytes", ctypes.c_int64),
        ("head_bytes", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("page_shift", ctypes.c_int32),
        ("pages_per_slot", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("stages", ctypes.c_int32),
        ("align_tiles", ctypes.c_int32),
        ("early_reads", ctypes.c_int32),
        ("score_scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    )


def _variants() -> tuple[Variant, ...]:
    return tuple(
        Variant(
            (dtype, is_fp8, head_dim, head_tiles),
            f"{type_name(dtype)}, {type_name(torch.float8_e4m3fn if is_fp8 else dtype)}, {head_dim}, {head_tiles}",
        )
        for dtype in QUERY_TYPES
        for is_fp8 in (False, True)
        for head_dim in HEAD_DIMS
        for head_tiles in (1, 2)
    )


SPEC = KernelSpec(
    name="paged_decode",
    entry="paged_decode",
    params=PagedDecodeParams,
    params_name="PagedDecodeParams",
    variants=_variants(),
)


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """How the kernel is launched, and the stages of the ring of each of its warps."""

    config: LaunchConfig
    stages: int


@lru_cache(maxsize=256)
def launch_config(head_dim: int, group: int, is_fp8: bool, limits: DeviceLimits) -> DecodeLaunch:
    """One block for each multiprocessor; as many warps as have rings that work, then as many stages as fit.

    Args:
        group: query heads for each kv head.
    Raises:
        InvalidArgumentError: not even one warp fits the device's shared memory.
    """
    budget = limits.max_shared_bytes - STATE_BYTES
    partial = _partial_bytes(head_dim, group)
    stage = _stage_bytes(head_dim, is_fp8)
    query = 0 if head_dim * _head_tiles(group) <= 256 else head_dim // 16 * WARP * 16
    usable = [stages for stages in STAGES if stages * stage >= partial]  # a ring is where a warp leaves its last part
    for warps in (MAX_WARPS, MAX_WARPS // 2, MAX_WARPS // 4, 1):
        for stages in usable:
            shared_bytes = warps * (stages * stage + query + partial)
            if shared_bytes <= budget:
                config = LaunchConfig((limits.sm_count, 1, 1), (warps * WARP, 1, 1), shared_bytes + STATE_BYTES)
                return DecodeLaunch(config, stages)
    raise InvalidArgumentError(
        f"decode attention with head_dim {head_dim} and {group} query heads a kv head needs "
        f"{usable[-1] * stage + query + partial} bytes of shared memory; the device has {budget}"
    )


def _stage_bytes(head_dim: int, is_fp8: bool) -> int:
    """Keys and values of one tile, and for fp8 their scales, padded to whole rows."""
    return 2 * TILE_KEYS * head_dim + max(head_dim, 2 * TILE_KEYS * SCALE_BYTES) if is_fp8 else 4 * TILE_KEYS * head_dim


def _partial_bytes(head_dim: int, group: int) -> int:
    return group * (head_dim + PARTIAL_PAD) * 4


def _head_tiles(group: int) -> int:
    return -(-group // HEADS_A_TILE)


def paged_decode_workspace(max_batch: int, num_heads: int, head_dim: int, limits: DeviceLimits) -> int:
    """Bytes of workspace for any call with these heads; they do not depend on the batch.

    The caller zeroes it once; each call leaves it fit for the next.
    """
    if max_batch < 1 or num_heads < 1 or head_dim not in HEAD_DIMS:
        raise InvalidArgumentError(
            f"workspace for a batch of {max_batch}, {num_heads} heads of {head_dim}; at least one row and one "
            f"head, and a head size of {', '.join(map(str, HEAD_DIMS))} are needed"
        )
    return _workspace_bytes(min(num_heads, MAX_GROUP), head_dim, limits.sm_count)


def _workspace_bytes(group: int, head_dim: int, blocks: int) -> int:
    """A counter for each block, then two partials."""
    counters = -(-blocks // COUNTER_ALIGNMENT) * COUNTER_ALIGNMENT
    return 4 * counters + 2 * blocks * _partial_bytes(head_dim, group)


def paged_decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    early_reads: bool = False,
    starts: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
) -> None:
    """out[n] = attention of query[n] over the first lengths[n] keys of slot slots[n], the new token's included.

    The keys of all sequences and kv heads are cut into equal pieces on the device, one for each multiprocessor, and
    partial results merged in a fixed order: bits depend on lengths, slots and window, not on when blocks run.  Scores
    and sums are float32, probabilities are rounded to query's dtype before they meet V.

    Args:
        query: (N, >= num_heads * head_dim) float16 or bfloat16, CUDA; rows may be apart, 16-byte aligned.
        pages: one layer's pages of query's dtype, or fp8; head_dim 64, 128 or 256, at most 16 heads a kv head.
        page_table: (num_slots, pages_per_slot) int32.
        slots: (N,) int32; -1: padding, nothing is written.
        lengths: (N,) int32; 0: as padding.
        out: (N, num_heads * head_dim), dtype of query.
        workspace: at least `paged_decode_workspace` bytes, contiguous, zero before its first use; one stream at a time.
        scale: of the scores, before the cap.
        window: keys seen at most, the newest ones; 0: all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0: none.
        sinks: (num_heads,) float32 logits that take part in the softmax and have no value, or None.
        early_reads: slots, lengths, page_table and all keys but each row's newest may be read before the kernel in
            front has ended.  For a caller who knows that a kernel which ends before the one in front starts has
            written them: this kernel lets the next start only after all in front of it have ended.
        starts: (N,) int32, multiples of 16: keys before are left out of each row; without a window.  Read early too.
        states: (N, num_heads, head_dim + 4) float32: what rows that do not start at 0 write instead of out: sums of the
            weighted values, maximum (of scores times log2 e) that the weights are relative to, sum of the weights, two
            unused; without the sink.  Needed with starts.
    Raises:
        InvalidArgumentError: shapes, types, alignment or devices do not fit.  Nothing was launched.
    Effects: writes out, uses workspace.  Ordering: torch's current stream; never waits.
    """
    layout = _check(query, pages, page_table, slots, lengths, out, num_heads)
    head_dim, group = layout.head_dim, num_heads // layout.kv_heads
    _check_options(scale, window, soft_cap, sinks, num_heads)
    _check_starts(starts, states, window, (query.shape[0], num_heads, head_dim + PARTIAL_PAD))
    if query.shape[0] == 0:
        return
    limits = device_limits(query.device)
    launch = launch_config(head_dim, group, layout.is_fp8, limits)
    _check_workspace(workspace, _workspace_bytes(group, head_dim, launch.config.grid[0]))
    log2_e = math.log2(math.e)
    params = PagedDecodeParams(
        address(query),
        address(pages),
        address(page_table),
        address(slots),
        address(lengths),
        address(sinks),
        address(starts),
        address(out),
        address(states),
        address(workspace),
        query.stride(0),
        out.stride(0),
        layout.page_bytes,
        layout.head_bytes,
        query.shape[0],
        layout.kv_heads,
        group,
        layout.page_size.bit_length() - 1,
        page_table.shape[1],
        window,
        launch.stages,
        ALIGN_TILES,
        early_reads,
        scale / soft_cap if soft_cap else scale * log2_e,
        soft_cap * log2_e,
    )
    kernel = loader.kernel(SPEC, (query.dtype, layout.is_fp8, head_dim, _head_tiles(group)))
    kernel.launch(launch.config, params, pdl=True)


def _check(
    query: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    num_heads: int,
) -> KVLayout:
    num_rows, width = query.shape[0], out.shape[-1]
    if num_heads < 1 or width % num_heads or width // num_heads not in HEAD_DIMS:
        raise InvalidArgumentError(
            f"out is {describe(out)} for {num_heads} heads; a head size of {', '.join(map(str, HEAD_DIMS))} is needed"
        )
    check_rows("query", query, dtype=QUERY_TYPES, min_width=width)
    check_rows("out", out, dtype=query.dtype, rows=num_rows, width=width)
    layout = kv_layout(pages, width // num_heads)
    if not layout.is_fp8 and layout.dtype != query.dtype:
        raise InvalidArgumentError(f"pages are {layout.dtype} and query is {query.dtype}; the same type, or fp8 pages")
    if num_heads % layout.kv_heads or num_heads // layout.kv_heads > MAX_GROUP:
        raise InvalidArgumentError(
            f"{num_heads} heads over {layout.kv_heads} kv heads; a whole group of at most {MAX_GROUP} is needed"
        )
    check_shape("page_table", page_table, (-1, -1), torch.int32)
    check_vector("slots", slots, num_rows, torch.int32)
    check_vector("lengths", lengths, num_rows, torch.int32)
    for name, tensor in (("query", query), ("pages", pages), ("out", out)):
        check_alignment(name, tensor)
    return layout


def _check_options(scale: float, window: int, soft_cap: float, sinks: torch.Tensor | None, num_heads: int) -> None:
    if not math.isfinite(scale) or not math.isfinite(soft_cap) or soft_cap < 0 or window < 0:
        raise InvalidArgumentError(
            f"scale {scale}, soft_cap {soft_cap}, window {window}; finite numbers, the last two not negative, "
            "are needed"
        )
    if sinks is not None:
        check_vector("sinks", sinks, num_heads, torch.float32)


def _check_starts(
    starts: torch.Tensor | None, states: torch.Tensor | None, window: int, shape: tuple[int, int, int]
) -> None:
    if starts is None:
        return
    if window or states is None:
        raise InvalidArgumentError(
            f"starts with window {window} and {'no states' if states is None else 'states'}; no window, and states for "
            "the rows that do not start at 0, are needed"
        )
    check_vector("starts", starts, shape[0], torch.int32)
    check_shape("states", states, shape, torch.float32)
    check_alignment("states", states)


def _check_workspace(workspace: torch.Tensor, needed: int) -> None:
    have = workspace.numel() * workspace.element_size()
    if have < needed or not workspace.is_contiguous():
        raise InvalidArgumentError(
            f"workspace is {describe(workspace)}, {have} bytes; {needed} contiguous bytes are needed, see "
            "paged_decode_workspace"
        )
    check_device("workspace", workspace)
    check_alignment("workspace", workspace)
