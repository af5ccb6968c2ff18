"""Attention of single query rows over paged K and V in place, and moves between rows and pages (CPU)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import _ops
from edgellm.kernels.cpu.elementwise import check_rows
from edgellm.kernels.cpu.threads import helper_threads, kernel_threads

if TYPE_CHECKING:
    import numpy.typing as npt

SEGMENT_TOKENS = _ops.SEGMENT_TOKENS
MAX_HEAD_DIM = 512


def check_pages(pages: torch.Tensor) -> tuple[int, int, int]:
    """(kv heads, page size, head_dim) of one layer's pages (num_pages, 2, kv heads, page size, head_dim)."""
    if pages.dim() != 5 or pages.shape[1] != 2 or not pages.is_contiguous() or pages.device.type != "cpu":
        raise InvalidArgumentError(
            f"pages is {tuple(pages.shape)} on {pages.device}; a C-contiguous CPU tensor "
            "(num_pages, 2, kv_heads, page_size, head_dim) is needed"
        )
    if pages.dtype not in (torch.float32, torch.bfloat16) or pages.shape[4] > MAX_HEAD_DIM:
        raise InvalidArgumentError(
            f"pages has dtype {pages.dtype} and head_dim {pages.shape[4]}; "
            f"float32 or bfloat16 and at most {MAX_HEAD_DIM} are supported"
        )
    return int(pages.shape[2]), int(pages.shape[3]), int(pages.shape[4])


class PagedAttention:
    """The single query rows of one step, checked and laid out once, then run for each layer.

    A row's keys are always taken in the same segments, so its result does not depend on the rows beside it.
    """

    def __init__(
        self,
        *,
        pages: torch.Tensor,
        num_heads: int,
        query_dtype: torch.dtype,
        query_rows: npt.NDArray[np.int64],
        page_rows: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
        lengths: npt.NDArray[np.int32],
        scale: float,
        window: int = 0,
        short_step: bool = True,
        tree_mask: npt.NDArray[np.int32] | None = None,
        tree_start: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Lay out R rows.

        Args:
            pages: any layer's pages; all layers have this shape.
            query_rows: (R,) token row of each query in `query` and `out` of `run`.
            page_rows: (num_slots, pages_per_slot) int32, C-contiguous page table, kept and read during `run`.
            slots: (R,) page-table row of each query.
            lengths: (R,) keys up to each query's own, at least 1.
            window: of those, each query sees the last so many; the pages before them are not read.  0 is all.
            short_step: the step has few rows, so its linear layers run on the helper threads as well.
            tree_mask: (R, words) int32; where bit j % 32 of word j // 32 is set, the query sees the key at place
                tree_start + j, and of the keys from there on no others.  A row of zeros sees all of its length.
            tree_start: (R,) first place that a row's bits speak of; with `tree_mask`.
        Raises:
            InvalidArgumentError: a length needs a page that the table does not have, or disagrees with its row's bits.
        """
        self._shape = check_pages(pages)
        self._pages_shape = pages.shape
        starts = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
        tree = None if tree_mask is None else _tree_rows(tree_mask, tree_start, lengths)
        covered = lengths if tree is None else tree.ends
        self._check_rows(page_rows, slots, covered, num_pages=pages.shape[0])
        if num_heads % self._shape[0]:
            raise InvalidArgumentError(f"{num_heads} query heads are not a multiple of {self._shape[0]} kv heads")
        self._width = num_heads * self._shape[2]
        self._query_dtype = query_dtype
        self._last_row = int(query_rows.max())
        segments = (lengths + (SEGMENT_TOKENS - 1)) // SEGMENT_TOKENS - starts // SEGMENT_TOKENS
        segment_start = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(segments, out=segment_start[1:])
        scratch = np.empty(int(segment_start[-1]) * num_heads * (self._shape[2] + 2), np.float32)
        # The kernel reads these by address: they live as long as this object.
        self._arrays = (
            np.ascontiguousarray(query_rows, np.int64),
            page_rows,
            slots.astype(np.int64) * page_rows.shape[1],
            np.ascontiguousarray(starts, np.int32),
            np.ascontiguousarray(lengths, np.int32),
            segment_start,
            _task_order(slots, starts // SEGMENT_TOKENS, segments, self._shape[0]),
            scratch,
        )
        self._tree = tree
        addresses = (array.ctypes.data for array in self._arrays)
        rows_at, pages_at, tables_at, starts_at, lengths_at, segments_at, order_at, scratch_at = addresses
        self._rows = _ops.AttentionRows(
            self._shape,
            pages.dtype == torch.bfloat16,
            rows_at,
            pages_at,
            tables_at,
            starts_at,
            lengths_at,
            segments_at,
            order_at,
            scratch_at,
            len(lengths),
            num_heads,
            query_dtype == torch.bfloat16,
            scale,
            helper_threads() if short_step else kernel_threads(),
            *(() if tree is None else (tree.starts.ctypes.data, tree.words.ctypes.data, tree.words.shape[1])),
        )

    def run(self, pages: torch.Tensor, query: torch.Tensor, out: torch.Tensor) -> None:
        """Attend over one layer.

        Args:
            pages: (num_pages, 2, kv_heads, page_size, head_dim), as given at construction.
            query: (T, >= num_heads * head_dim) rows that start with the query heads.
            out: (T, num_heads * head_dim); only the rows of `query_rows` are written.
        """
        if pages.shape != self._pages_shape or not pages.is_contiguous():
            raise InvalidArgumentError(f"pages is {tuple(pages.shape)}; {tuple(self._pages_shape)} was laid out")
        check_rows("query", query)
        check_rows("out", out, self._width)
        if query.dtype != self._query_dtype or out.dtype != query.dtype or query.shape[1] < self._width:
            raise InvalidArgumentError(
                f"query {tuple(query.shape)} {query.dtype} and out {tuple(out.shape)} {out.dtype} do not fit "
                f"{self._width} columns of {self._query_dtype}"
            )
        if min(query.shape[0], out.shape[0]) <= self._last_row:
            raise InvalidArgumentError(
                f"query has {query.shape[0]} rows and out {out.shape[0]}; row {self._last_row} is asked for"
            )
        self._rows.run(pages.data_ptr(), query.data_ptr(), query.shape[1], out.data_ptr(), out.shape[1])

    def _check_rows(
        self,
        page_rows: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
        lengths: npt.NDArray[np.int32],
        *,
        num_pages: int,
    ) -> None:
        if page_rows.dtype != np.int32 or not page_rows.flags.c_contiguous:
            raise InvalidArgumentError("page_rows must be a C-contiguous int32 array")
        page_size = self._shape[1]
        longest: dict[int, int] = {}  # rows of one sequence share its pages
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            if length < 1:
                longest[slot] = length
                break
            longest[slot] = max(length, longest.get(slot, 0))
        for slot, length in longest.items():
            used = page_rows[slot, : (length + page_size - 1) // page_size] if length > 0 else page_rows[:0]
            if length < 1 or len(used) * page_size < length or used.min() < 0 or used.max() >= num_pages:
                raise InvalidArgumentError(
                    f"slot {slot} has length {length}, but its page row {used.tolist()} does not cover it with pages "
                    f"in [0, {num_pages}); grow the row before the step"
                )


@dataclass(frozen=True, slots=True)
class _TreeRows:
    """Rows of trees, as the kernel takes them.

    Attributes:
        starts: (R,) int32 first key that the bits choose; `lengths` where they choose none.
        words: (R, words) int32.
        ends: (R,) int32 one past the last place that each row reads.
    """

    starts: npt.NDArray[np.int32]
    words: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int32]


def _tree_rows(
    words: npt.NDArray[np.int32], starts: npt.NDArray[np.int32] | None, lengths: npt.NDArray[np.int32]
) -> _TreeRows:
    if words.dtype != np.int32 or words.ndim != 2 or len(words) != len(lengths):
        raise InvalidArgumentError(
            f"tree_mask is {words.shape} {words.dtype}; ({len(lengths)}, words) int32 is needed for {len(lengths)} rows"
        )
    if starts is None or len(starts) != len(lengths):
        raise InvalidArgumentError("tree_start must come with tree_mask, a place for each row")
    words = np.ascontiguousarray(words)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    counts = bits.sum(axis=1, dtype=np.int32)
    of_tree = counts > 0
    if not np.array_equal((starts + counts)[of_tree], lengths[of_tree]):
        raise InvalidArgumentError(
            f"rows of trees that begin at {starts[of_tree].tolist()} and see {counts[of_tree].tolist()} of their keys "
            f"have lengths {lengths[of_tree].tolist()}; each must be the sum"
        )
    last = bits.shape[1] - bits[:, ::-1].argmax(axis=1)
    return _TreeRows(
        starts=np.where(of_tree, starts, lengths).astype(np.int32),
        words=words,
        ends=np.where(of_tree, starts + last, lengths).astype(np.int32),
    )


def _task_order(
    slots: npt.NDArray[np.int32], first_segment: npt.NDArray[np.int32], segments: npt.NDArray[np.int32], kv_heads: int
) -> npt.NDArray[np.int32]:
    """Task codes, segment * kv_heads + kv_head, in an order in which rows that read the same keys follow each other.

    Rows of one sequence (tokens that are verified together) then find them in the processor's cache.  The order changes
    no result.
    """
    count = int(segments.sum())
    codes = np.arange(count * kv_heads, dtype=np.int32)
    if len(slots) == 1 or len(np.unique(slots)) == len(slots):
        return codes
    row = np.repeat(np.arange(len(slots)), segments)
    place = np.arange(count) - np.repeat(np.cumsum(segments) - segments, segments) + first_segment[row]
    kv_head = np.tile(np.arange(kv_heads), count)
    keys = np.repeat(np.stack((row, place, np.asarray(slots)[row])), kv_heads, axis=1)
    return codes[np.lexsort((keys[0], kv_head, keys[1], keys[2]))]


def write_kv(pages: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: npt.NDArray[np.int64]) -> None:
    """Store K and V rows at their places.

    Args:
        pages: (num_pages, 2, kv_heads, page_size, head_dim), float32 or bfloat16.
        key, value: (T, kv_heads, head_dim), float32 or bfloat16, each row contiguous, the same row stride.
        offsets: (T,) int64, page_id * page_size + place; negative skips the token.
    Effects: writes pages.
    """
    shape = check_pages(pages)
    rows = (len(offsets), shape[0], shape[2])
    for name, tensor in (("key", key), ("value", value)):
        if (
            tensor.shape != rows
            or tensor.stride()[1:] != (shape[2], 1)
            or tensor.dtype not in (torch.float32, torch.bfloat16)
        ):
            raise InvalidArgumentError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}; {rows} is needed"
            )
    if key.dtype != value.dtype or key.stride(0) != value.stride(0):
        raise InvalidArgumentError("key and value differ in dtype or row stride")
    if offsets.dtype != np.int64 or not offsets.flags.c_contiguous:
        raise InvalidArgumentError("offsets must be a C-contiguous int64 array")
    if len(offsets) and offsets.max() >= pages.shape[0] * shape[1]:
        raise InvalidArgumentError(f"offset {offsets.max()} is beyond the last place {pages.shape[0] * shape[1] - 1}")
    _ops.write_kv(
        pages.data_ptr(),
        shape,
        pages.dtype == torch.bfloat16,
        key.data_ptr(),
        value.data_ptr(),
        key.stride(0),
        key.dtype == torch.bfloat16,
        offsets.ctypes.data,
        len(offsets),
        kernel_threads(),
    )


def gather_kv(pages: torch.Tensor, page_ids: npt.NDArray[np.int32], length: int) -> torch.Tensor:
    """The first `length` tokens of a sequence.

    Returns:
        (2, kv_heads, length, head_dim), dtype of pages; a new tensor.
    """
    shape = check_pages(pages)
    used = page_ids[: (length + shape[1] - 1) // shape[1]]
    if len(used) * shape[1] < length or (len(used) and (used.min() < 0 or used.max() >= pages.shape[0])):
        raise InvalidArgumentError(
            f"{length} tokens are not covered by pages {used.tolist()} of {shape[1]} tokens in [0, {pages.shape[0]})"
        )
    used = np.ascontiguousarray(used, np.int32)
    out = torch.empty((2, shape[0], length, shape[2]), dtype=pages.dtype)
    _ops.gather_kv(
        pages.data_ptr(),
        shape,
        pages.dtype == torch.bfloat16,
        used.ctypes.data,
        length,
        out.data_ptr(),
        kernel_threads(),
    )
    return out
