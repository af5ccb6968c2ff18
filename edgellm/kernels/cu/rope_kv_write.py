"""From the rows of the QKV projection to what attention reads: head norms, rotation, K and V into their pages."""

from __future__ import annotations

import ctypes

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import ROW_TYPES, access_elements, allows_vectors
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import KVLayout, address, check_rows, check_shape, check_vector, kv_layout, type_name

THREADS = 128  # kRopeThreads
WARP = 32
HEAD_DIMS = (64, 128, 256)  # in registers; 0 stands for any other, element by element


class RopeKvWriteParams(ctypes.Structure):
    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("angles", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("token_seq", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("value_norm", ctypes.c_void_p),
        ("qkv_stride", ctypes.c_int64),
        ("page_bytes", ctypes.c_int64),
        ("head_bytes", ctypes.c_int64),
        ("num_tokens", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("rotary_half", ctypes.c_int32),
        ("page_shift", ctypes.c_int32),
        ("num_pages", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("pages_per_slot", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


def _variants() -> tuple[Variant, ...]:
    return tuple(
        Variant((dtype, is_fp8, head_dim), f"{type_name(dtype)}, {str(is_fp8).lower()}, {head_dim}")
        for dtype in ROW_TYPES
        for is_fp8 in ((False,) if dtype == torch.float32 else (False, True))
        for head_dim in (*HEAD_DIMS, 0)
    )


SPEC = KernelSpec(
    name="rope_kv_write",
    entry="rope_kv_write",
    params=RopeKvWriteParams,
    params_name="RopeKvWriteParams",
    variants=_variants(),
)


def launch_config(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> LaunchConfig:
    """A token along x, its heads along y.

    Args:
        num_heads: heads to work on: Q, K and V, or Q alone.
        head_dim: the variant's, 0 for the one that takes any.
    """
    lanes = WARP if head_dim == 0 else head_dim // 2 // access_elements(dtype)
    return LaunchConfig((num_tokens, -(-num_heads * lanes // THREADS), 1), (THREADS, 1, 1))


def rope_kv_write(
    qkv: torch.Tensor,
    angles: torch.Tensor | None,
    pages: torch.Tensor | None,
    page_table: torch.Tensor | None,
    slots: torch.Tensor | None,
    token_seq: torch.Tensor | None,
    positions: torch.Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int | None = None,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    value_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norm and rotate the heads of each row; Q stays in the row, K and V go to their pages.

    K and V of token t go to place positions[t] % page_size of page page_table[slots[token_seq[t]],
    positions[t] // page_size]; the row itself keeps the K and V it had.  Where the table has no page, K and V of
    that token are dropped.  Float32 arithmetic, one rounding; fp8 pages hold the rounded values, see `ref.fp8_pages`.

    Args:
        qkv: (T, >= (num_heads + 2 num_kv_heads) * head_dim) float32, float16 or bfloat16, CUDA; rows may be apart.
        angles: (2, T, rotary_dim / 2) float32, cosine and sine; None: no rotation.
        pages: one layer's pages, of qkv's dtype or (16-bit qkv) fp8; None: only Q, and the row needs only Q.
        page_table: (num_slots, pages_per_slot) int32, -1 unused.
        slots: (N,) int32, -1 padding.
        token_seq: (T,) int32 index into slots, -1 for padding tokens: nothing of theirs is written.
        positions: (T,) int32.
        rotary_dim: leading dims of a head that turn, in pairs (i, i + rotary_dim / 2); None: all of them.
        query_norm, key_norm, value_norm: (head_dim,) float32 weights of the per-head RMS norm, or None.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes qkv's Q and pages.  Ordering: torch's current stream; never waits.
    """
    layout = _check_pages(pages, qkv.dtype, head_dim, num_kv_heads)
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    num_tokens = _check_rows(qkv, num_heads, 0 if layout is None else num_kv_heads, head_dim)
    _check_angles(angles, num_tokens, rotary_dim, head_dim)
    _check_places(layout, page_table, slots, token_seq, positions, num_tokens)
    for name, norm in (("query_norm", query_norm), ("key_norm", key_norm), ("value_norm", value_norm)):
        if norm is not None:
            check_vector(name, norm, head_dim, torch.float32)
    if num_tokens == 0:
        return
    params = RopeKvWriteParams(
        address(qkv),
        address(angles),
        address(pages),
        address(page_table),
        address(slots),
        address(token_seq),
        address(positions),
        address(query_norm),
        address(key_norm),
        address(value_norm),
        qkv.stride(0),
        0 if layout is None else layout.page_bytes,
        0 if layout is None else layout.head_bytes,
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        rotary_dim // 2,
        0 if layout is None else layout.page_size.bit_length() - 1,
        0 if pages is None else pages.shape[0],
        0 if page_table is None else page_table.shape[0],
        0 if page_table is None else page_table.shape[1],
        eps,
    )
    whole = head_dim in HEAD_DIMS and rotary_dim == head_dim
    fixed = whole and allows_vectors(qkv[:, :head_dim], angles, pages, query_norm, key_norm, value_norm)
    variant_dim = head_dim if fixed else 0
    heads = num_heads + (0 if layout is None else 2 * num_kv_heads)
    kernel = loader.kernel(SPEC, (qkv.dtype, layout is not None and layout.is_fp8, variant_dim))
    kernel.launch(launch_config(num_tokens, heads, variant_dim, qkv.dtype), params, pdl=True)


def _check_pages(pages: torch.Tensor | None, dtype: torch.dtype, head_dim: int, num_kv_heads: int) -> KVLayout | None:
    if pages is None:
        return None
    layout = kv_layout(pages, head_dim)
    if layout.kv_heads != num_kv_heads:
        raise InvalidArgumentError(f"pages have {layout.kv_heads} kv heads; num_kv_heads is {num_kv_heads}")
    if layout.dtype != dtype and not (layout.is_fp8 and dtype in (torch.float16, torch.bfloat16)):
        raise InvalidArgumentError(
            f"pages are {layout.dtype} and qkv is {dtype}; the same type, or fp8 pages of 16-bit rows, are needed"
        )
    return layout


def _check_rows(qkv: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """The number of rows."""
    if num_heads < 0 or num_kv_heads < 0 or num_heads + num_kv_heads < 1 or head_dim < 2 or head_dim % 2:
        raise InvalidArgumentError(
            f"{num_heads} query and {num_kv_heads} kv heads of {head_dim}; at least one head of an even size is needed"
        )
    check_rows("qkv", qkv, dtype=ROW_TYPES, min_width=(num_heads + 2 * num_kv_heads) * head_dim)
    return qkv.shape[0]


def _check_angles(angles: torch.Tensor | None, num_tokens: int, rotary_dim: int, head_dim: int) -> None:
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise InvalidArgumentError(f"rotary_dim is {rotary_dim}; an even number up to head_dim, {head_dim}, is needed")
    if angles is not None:
        check_shape("angles", angles, (2, num_tokens, rotary_dim // 2), torch.float32)


def _check_places(
    layout: KVLayout | None,
    page_table: torch.Tensor | None,
    slots: torch.Tensor | None,
    token_seq: torch.Tensor | None,
    positions: torch.Tensor | None,
    num_tokens: int,
) -> None:
    shapes = {
        "page_table": (page_table, (-1, -1)),
        "slots": (slots, (-1,)),
        "token_seq": (token_seq, (num_tokens,)),
        "positions": (positions, (num_tokens,)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is not None:
            check_shape(name, tensor, shape, torch.int32)
        elif layout is not None:
            raise InvalidArgumentError(f"{name} is None; with pages it is needed, to know where K and V go")
