"""What the attention kernels over ragged rows share: their parameter struct, and the checks of their operands."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.tensors import (
    KVLayout,
    address,
    check_alignment,
    check_rows,
    check_shape,
    check_vector,
    kv_layout,
)

MAX_GROUP = 16  # query heads of one kv head
# The driver's limit of blocks along y and z of a grid.
MAX_GRID_YZ = 65535


class PagedPrefillParams(ctypes.Structure):
    _fields_ = (
        ("query", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("past_len", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("tree_mask", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("partial_out", ctypes.c_void_p),
        ("partial_stats", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("num_sequences", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("head_bytes", ctypes.c_int32),
        ("page_bytes", ctypes.c_int32),
        ("page_shift", ctypes.c_int32),
        ("pages_per_slot", ctypes.c_int32),
        ("mask_words", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("tile_rows", ctypes.c_int32),
        ("splits", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("ring", ctypes.c_int32),
        ("deterministic", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class RaggedOperands:
    """The operands of one call, in the order of the ops' signature."""

    query: torch.Tensor
    pages: torch.Tensor
    page_table: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    past_len: torch.Tensor
    out: torch.Tensor
    num_heads: int
    scale: float
    window: int
    soft_cap: float
    sinks: torch.Tensor | None
    tree_mask: torch.Tensor | None

    def check(self, dtypes: tuple[torch.dtype, ...]) -> KVLayout:
        """Check everything that needs no device read.

        Returns:
            The layout of the pages.
        Raises:
            InvalidArgumentError: names the operand, what it is and what is needed.
        """
        head_dim = self._check_rows(dtypes)
        layout = kv_layout(self.pages, head_dim)
        self._check_layout(layout)
        num_sequences = self.slots.shape[0] if self.slots.dim() == 1 else -1
        check_shape("page_table", self.page_table, (-1, -1), torch.int32)
        check_shape("slots", self.slots, (-1,), torch.int32)
        check_vector("query_start", self.query_start, num_sequences + 1, torch.int32)
        check_vector("past_len", self.past_len, num_sequences, torch.int32)
        if self.sinks is not None:
            check_vector("sinks", self.sinks, self.num_heads, torch.float32)
        if self.tree_mask is not None:
            check_shape("tree_mask", self.tree_mask, (self.query.shape[0], -1), torch.int32)
        self._check_numbers()
        return layout

    def _check_rows(self, dtypes: tuple[torch.dtype, ...]) -> int:
        if self.num_heads < 1 or self.out.dim() != 2 or self.out.shape[1] % self.num_heads:
            raise InvalidArgumentError(
                f"out is {tuple(self.out.shape)} for {self.num_heads} heads; (rows, num_heads * head_dim) is needed"
            )
        rows, width = self.out.shape
        check_rows("query", self.query, dtype=dtypes, rows=rows, min_width=width)
        check_rows("out", self.out, dtype=self.query.dtype, width=width, contiguous=True)
        check_alignment("query", self.query)
        check_alignment("out", self.out)
        return width // self.num_heads

    def _check_layout(self, layout: KVLayout) -> None:
        group, rest = divmod(self.num_heads, layout.kv_heads)
        if rest or not 1 <= group <= MAX_GROUP:
            raise InvalidArgumentError(
                f"{self.num_heads} query heads over {layout.kv_heads} kv heads; 1 to {MAX_GROUP} for each is needed"
            )
        dtype = self.query.dtype
        if layout.dtype != dtype and not (layout.is_fp8 and dtype in (torch.float16, torch.bfloat16)):
            raise InvalidArgumentError(
                f"pages are {layout.dtype} and query is {dtype}; the same type, or fp8 pages of 16-bit rows, are needed"
            )
        check_alignment("pages", self.pages)

    def _check_numbers(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise InvalidArgumentError(f"scale is {self.scale}; a positive number is needed, usually head_dim ** -0.5")
        if self.window < 0:
            raise InvalidArgumentError(f"window is {self.window}; 0 (no window) or a number of keys is needed")
        if not (math.isfinite(self.soft_cap) and self.soft_cap >= 0):
            raise InvalidArgumentError(f"soft_cap is {self.soft_cap}; 0 (no cap) or a positive number is needed")

    def params(self, layout: KVLayout) -> PagedPrefillParams:
        """The struct, but for what only a launch knows."""
        return PagedPrefillParams(
            query=address(self.query),
            pages=address(self.pages),
            page_table=address(self.page_table),
            slots=address(self.slots),
            query_start=address(self.query_start),
            past_len=address(self.past_len),
            sinks=address(self.sinks),
            tree_mask=address(self.tree_mask),
            out=address(self.out),
            query_stride=self.query.stride(0),
            num_rows=self.query.shape[0],
            num_sequences=self.slots.shape[0],
            num_heads=self.num_heads,
            num_kv_heads=layout.kv_heads,
            group=self.num_heads // layout.kv_heads,
            head_bytes=layout.head_bytes,
            page_bytes=layout.page_bytes,
            page_shift=layout.page_size.bit_length() - 1,
            pages_per_slot=self.page_table.shape[1],
            mask_words=0 if self.tree_mask is None else self.tree_mask.shape[1],
            window=self.window,
            head_dim=layout.head_dim,
            scale=self.scale,
            soft_cap=self.soft_cap,
        )
