"""Choosing a token for every row of logits on the device: greedy, or temperature, top-k, top-p, min-p and one draw.

The semantics, ties included, are those of `edgellm/sampling/filters.py` and `philox.py`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import MAX_GRID_YZ
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_device, check_rows, check_vector, type_name

CHUNK = 8192  # kChunk
THREADS = 512  # kLogitThreads
MAX_VOCAB = CHUNK * THREADS  # a block scans the chunks of a row
LOGIT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

_STATE_BYTES = 128
_BINS = 2048  # kBins
_BIN_BYTES = 20
_FEW = 512  # kFew
_TOKEN_BYTES = 12
_CHUNK_BYTES = 36


class SampleStatus(IntEnum):
    """What became of a row; `-status` stands in place of the token id where none was chosen."""

    CHOSEN = 0
    NAN = 1
    INFINITY = 2
    NOTHING_LEFT = 3


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Parameters of L rows; contiguous vectors on the device of the logits.

    Attributes:
        temperature: (L,) float64, >= 0; 0 is greedy, whatever else is set.
        top_k: (L,) int32; below 1, or at least the vocabulary's size: no limit.
        top_p, min_p: (L,) float64; 1 and 0 are off.
        seed: (L,) int64, the bits of the unsigned seed.  position: (L,) int64, of the token that is chosen.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor


class SampleParams(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("row_index", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("seed", ctypes.c_void_p),
        ("position", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("vocab", ctypes.c_int32),
    )


def logit_type_name(dtype: torch.dtype) -> str:
    """The C++ name of a logit type; float64 holds rows that biases or penalties have changed."""
    return "double" if dtype == torch.float64 else type_name(dtype)


def _spec(name: str) -> KernelSpec:
    return KernelSpec(
        name=name,
        entry=name,
        source="sample.cu",
        params=SampleParams,
        params_name="SampleParams",
        variants=tuple(Variant((dtype,), logit_type_name(dtype)) for dtype in LOGIT_TYPES),
    )


ARGMAX, FILTER, DRAW = _spec("sample_argmax"), _spec("sample_filter"), _spec("sample_draw")
SPECS = (ARGMAX, FILTER, DRAW)


def launch_config(num_rows: int, vocab_size: int) -> LaunchConfig:
    """Chunks of a row along x, rows along y: a function of the shape alone."""
    return LaunchConfig((-(-vocab_size // CHUNK), num_rows, 1), (THREADS, 1, 1))


def sample_workspace(num_rows: int, vocab_size: int) -> int:
    """Bytes of workspace for so many rows: zeroed once by its owner, then used by one stream at a time."""
    return num_rows * _row_bytes(vocab_size)


def _row_bytes(vocab_size: int) -> int:
    num_chunks = -(-vocab_size // CHUNK)
    size = _STATE_BYTES + _BINS * _BIN_BYTES + _FEW * _TOKEN_BYTES + num_chunks * _CHUNK_BYTES
    return -(-size // 128) * 128


def sample(
    logits: torch.Tensor,
    rows: SampleRows | None,
    token_ids: torch.Tensor,
    workspace: torch.Tensor,
    *,
    status: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    filters: bool = True,
    draws: bool = True,
) -> None:
    """One token for each row.  Nothing of a row depends on the others, nor on how many there are.

    Sums of weights are exact to 2^-56 of the largest weight.  The host's round otherwise: a token may differ where
    the random number is within 1e-12 of a boundary.

    Args:
        logits: (R, vocab_size) float32, float16, bfloat16 or float64, CUDA; rows may be apart.  -inf excludes.
        rows: parameters of the L rows; None: every row is greedy.
        token_ids: (L,) int32, written: the id, or `-SampleStatus` where the logits allow no choice.
        workspace: uint8, at least `sample_workspace(L, vocab_size)` bytes, 16-byte aligned; see there.
        status: (L,) int32, written when given: `SampleStatus`.
        row_index: (L,) int32, the logits row of each; None: row l is logits row l.  Not checked on the device.
        filters, draws: False promises that no row has top-k or top-p, or that every row is greedy: saves a launch.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    Ordering: torch's current stream; never waits, reads nothing on the host, so a graph may hold it.
    """
    num_rows, vocab_size = _check_operands(logits, rows, token_ids, workspace, status, row_index)
    if num_rows == 0:
        return
    params = _params(logits, rows, token_ids, workspace, status, row_index)
    config, key = launch_config(num_rows, vocab_size), (logits.dtype,)
    loader.kernel(ARGMAX, key).launch(config, params, pdl=True)
    if rows is None or not draws:
        return
    if filters:
        loader.kernel(FILTER, key).launch(config, params, pdl=True)
    loader.kernel(DRAW, key).launch(config, params, pdl=True)


def _params(
    logits: torch.Tensor,
    rows: SampleRows | None,
    token_ids: torch.Tensor,
    workspace: torch.Tensor,
    status: torch.Tensor | None,
    row_index: torch.Tensor | None,
) -> SampleParams:
    return SampleParams(
        logits.data_ptr(),
        address(row_index),
        None if rows is None else rows.temperature.data_ptr(),
        None if rows is None else rows.top_k.data_ptr(),
        None if rows is None else rows.top_p.data_ptr(),
        None if rows is None else rows.min_p.data_ptr(),
        None if rows is None else rows.seed.data_ptr(),
        None if rows is None else rows.position.data_ptr(),
        token_ids.data_ptr(),
        address(status),
        workspace.data_ptr(),
        logits.stride(0),
        _row_bytes(logits.shape[1]),
        logits.shape[1],
    )


def _check_operands(
    logits: torch.Tensor,
    rows: SampleRows | None,
    token_ids: torch.Tensor,
    workspace: torch.Tensor,
    status: torch.Tensor | None,
    row_index: torch.Tensor | None,
) -> tuple[int, int]:
    check_logits(logits)
    num_rows, vocab_size = (logits if row_index is None else row_index).shape[0], logits.shape[1]
    if num_rows > MAX_GRID_YZ:
        raise InvalidArgumentError(f"{num_rows} rows are sampled at once, the limit is {MAX_GRID_YZ}; split them")
    check_vector("token_ids", token_ids, num_rows, torch.int32)
    if status is not None:
        check_vector("status", status, num_rows, torch.int32)
    if row_index is not None:
        check_vector("row_index", row_index, num_rows, torch.int32)
    if rows is not None:
        check_vector("top_k", rows.top_k, num_rows, torch.int32)
        for name in ("temperature", "top_p", "min_p"):
            check_vector(name, getattr(rows, name), num_rows, torch.float64)
        for name in ("seed", "position"):
            check_vector(name, getattr(rows, name), num_rows, torch.int64)
    check_workspace(workspace, sample_workspace(num_rows, vocab_size))
    return num_rows, vocab_size


def check_logits(logits: torch.Tensor) -> None:
    """Refuse logits that the kernels cannot read.

    Raises:
        InvalidArgumentError: their type, layout, device or width.
    """
    check_rows("logits", logits, dtype=LOGIT_TYPES, min_width=1)
    if logits.shape[1] > MAX_VOCAB:
        raise InvalidArgumentError(f"logits have {logits.shape[1]} columns, the limit is {MAX_VOCAB}")


def check_workspace(workspace: torch.Tensor, num_bytes: int) -> None:
    """Refuse a workspace that is elsewhere, too small or not aligned to 16 bytes."""
    check_device("workspace", workspace)
    size = workspace.numel() * workspace.element_size()
    if size < num_bytes or not workspace.is_contiguous() or workspace.data_ptr() % 16:
        raise InvalidArgumentError(
            f"workspace has {size} bytes at {workspace.data_ptr():#x}, contiguous={workspace.is_contiguous()}; "
            f"{num_bytes} contiguous bytes, aligned to 16, are needed"
        )
