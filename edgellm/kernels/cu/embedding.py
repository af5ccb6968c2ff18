"""Embedding lookup, with rows of media (images, audio) put in by index."""

from __future__ import annotations

import ctypes

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import ROW_TYPES, access_elements, allows_vectors
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_rows, check_shape, check_vector, type_name

THREADS = 128  # kEmbedThreads


class EmbeddingParams(ctypes.Structure):
    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("media", ctypes.c_void_p),
        ("media_index", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("media_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("num_ids", ctypes.c_int32),
        ("num_media", ctypes.c_int32),
    )


SPEC = KernelSpec(
    name="embedding",
    entry="embedding",
    params=EmbeddingParams,
    params_name="EmbeddingParams",
    variants=tuple(
        Variant((dtype, step), f"{type_name(dtype)}, {step}")
        for dtype in ROW_TYPES
        for step in (access_elements(dtype), 1)
    ),
)


def launch_config(num_tokens: int, width: int, step: int) -> LaunchConfig:
    """A token along x, its columns along y, `step` a thread."""
    return LaunchConfig((num_tokens, -(-width // (step * THREADS)), 1), (THREADS, 1, 1))


def embedding(
    ids: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    *,
    media: torch.Tensor | None = None,
    media_index: torch.Tensor | None = None,
    error: torch.Tensor | None = None,
) -> None:
    """out[t] = media[media_index[t]] where that index is not -1, else table[ids[t]].

    Id -1 is padding: a row of zeros.  An id or media index out of range: a row of zeros, and error[0] becomes 1.

    Args:
        ids: (T,) int32, CUDA.
        table: (V, D) float32, float16 or bfloat16; rows may be apart.
        out: (T, D), dtype of table.
        media: (M, D), dtype of table.  media_index: (T,) int32.  Both or neither.
        error: (1,) int32, set and never cleared here.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Effects: writes out, and error.  Ordering: torch's current stream; never waits.
    """
    _check_operands(ids, table, out, media, media_index, error)
    num_tokens, width = out.shape
    if num_tokens == 0:
        return
    params = EmbeddingParams(
        address(ids),
        address(table),
        address(media),
        address(media_index),
        address(error),
        address(out),
        table.stride(0),
        0 if media is None else media.stride(0),
        out.stride(0),
        width,
        table.shape[0],
        0 if media is None else media.shape[0],
    )
    step = access_elements(out.dtype) if allows_vectors(table, out, media) else 1
    loader.kernel(SPEC, (out.dtype, step)).launch(launch_config(num_tokens, width, step), params, pdl=True)


def _check_operands(
    ids: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    media: torch.Tensor | None,
    media_index: torch.Tensor | None,
    error: torch.Tensor | None,
) -> None:
    check_shape("ids", ids, (-1,), torch.int32)
    check_rows("table", table, dtype=ROW_TYPES)
    check_rows("out", out, dtype=table.dtype, rows=ids.shape[0], width=table.shape[1])
    if (media is None) != (media_index is None):
        raise InvalidArgumentError("media and media_index belong together; pass both or neither")
    if media is not None and media_index is not None:
        check_rows("media", media, dtype=table.dtype, width=table.shape[1])
        check_vector("media_index", media_index, ids.shape[0], torch.int32)
    if error is not None:
        check_vector("error", error, 1, torch.int32)
