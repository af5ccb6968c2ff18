"""Log-softmax of rows of logits, at the chosen token and at the most likely ones."""

from __future__ import annotations

import ctypes

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import MAX_GRID_YZ
from edgellm.kernels.cu.sample import CHUNK, LOGIT_TYPES, THREADS, check_logits, check_workspace, logit_type_name
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_rows, check_shape, check_vector

MAX_TOP = 64  # kMaxTop

_HEADER_BYTES = 128
_CHUNK_BYTES = 16 + MAX_TOP * 12


class LogprobsParams(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("row_index", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("token_index", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("top_values", ctypes.c_void_p),
        ("top_ids", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("vocab", ctypes.c_int32),
        ("num_top", ctypes.c_int32),
    )


SPEC = KernelSpec(
    name="logprobs",
    entry="logprobs",
    params=LogprobsParams,
    params_name="LogprobsParams",
    variants=tuple(Variant((dtype,), logit_type_name(dtype)) for dtype in LOGIT_TYPES),
)


def launch_config(num_rows: int, vocab_size: int) -> LaunchConfig:
    """Chunks of a row along x, rows along y: a function of the shape alone."""
    return LaunchConfig((-(-vocab_size // CHUNK), num_rows, 1), (THREADS, 1, 1))


def logprobs_workspace(num_rows: int, vocab_size: int) -> int:
    """Bytes of workspace for so many rows: zeroed once by its owner, then used by one stream at a time."""
    return num_rows * _row_bytes(vocab_size)


def _row_bytes(vocab_size: int) -> int:
    return -(-(_HEADER_BYTES + -(-vocab_size // CHUNK) * _CHUNK_BYTES) // 128) * 128


def logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    chosen: torch.Tensor,
    top_values: torch.Tensor,
    top_ids: torch.Tensor,
    workspace: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    token_index: torch.Tensor | None = None,
) -> None:
    """chosen[l] = log-softmax at a row's token; top_values[l], top_ids[l] the most likely tokens, descending.

    Of equal values the lower id comes first.  Sums are float64 in an order that the vocabulary's size fixes.

    Args:
        logits: (R, vocab_size) float32, float16, bfloat16 or float64, CUDA; rows may be apart; without NaN or +inf.
        token_ids: (T,) int32.
        chosen: (L,) float64; NaN where the row's token id is negative.
        top_values, top_ids: (L, n) float64 and int32, n from 0 to 64.  Entries beyond what has a chance have value
            -inf; beyond the vocabulary also id -1.
        workspace: at least `logprobs_workspace(L, vocab_size)` bytes, 16-byte aligned; see there.
        row_index, token_index: (L,) int32, the logits row and the place in token_ids of each row; None: l itself.
            Not checked on the device.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Ordering: torch's current stream; never waits.
    """
    num_rows, num_top = _check_operands(logits, token_ids, chosen, top_values, top_ids, workspace)
    for name, index in (("row_index", row_index), ("token_index", token_index)):
        if index is not None:
            check_vector(name, index, num_rows, torch.int32)
    if num_rows == 0:
        return
    vocab_size = logits.shape[1]
    params = LogprobsParams(
        logits.data_ptr(),
        address(row_index),
        token_ids.data_ptr(),
        address(token_index),
        chosen.data_ptr(),
        top_values.data_ptr(),
        top_ids.data_ptr(),
        workspace.data_ptr(),
        logits.stride(0),
        _row_bytes(vocab_size),
        vocab_size,
        num_top,
    )
    loader.kernel(SPEC, (logits.dtype,)).launch(launch_config(num_rows, vocab_size), params, pdl=True)


def _check_operands(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    chosen: torch.Tensor,
    top_values: torch.Tensor,
    top_ids: torch.Tensor,
    workspace: torch.Tensor,
) -> tuple[int, int]:
    check_logits(logits)
    check_shape("token_ids", token_ids, (-1,), torch.int32)
    check_shape("chosen", chosen, (-1,), torch.float64)
    num_rows, num_top, vocab_size = chosen.shape[0], top_ids.shape[-1], logits.shape[1]
    check_rows("top_values", top_values, dtype=torch.float64, rows=num_rows, width=num_top, contiguous=True)
    check_rows("top_ids", top_ids, dtype=torch.int32, rows=num_rows, width=num_top, contiguous=True)
    most = min(MAX_TOP, CHUNK // -(-vocab_size // CHUNK))  # the last block of a row merges those of all chunks
    if num_top > most:
        raise InvalidArgumentError(f"{num_top} most likely of {vocab_size} tokens are asked for; the limit is {most}")
    if num_rows > MAX_GRID_YZ:
        raise InvalidArgumentError(f"{num_rows} rows have log-probabilities, the limit is {MAX_GRID_YZ}; split them")
    check_workspace(workspace, logprobs_workspace(num_rows, vocab_size))
    return num_rows, num_top
