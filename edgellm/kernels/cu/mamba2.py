"""The Mamba-2 selective scan on CUDA: token after token, or chunk by chunk on tensor cores for long prompts."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import DeviceLimits, LaunchConfig, device_limits
from edgellm.kernels.cu.rows import ACCESS_BYTES, MAX_GRID_YZ, ROW_TYPES
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import address, check_device, check_vector, describe, type_name

if TYPE_CHECKING:
    from edgellm.kernels.cu.state_rows import StateRows

# As in mamba2.cu and mamba2_chunks.cu.
SCAN_ROWS = 32
SCAN_THREADS = 128
CHUNK = 64
CHUNK_THREADS = 128
SCAN_COLUMNS = (16, 32, 64, 128, 256)  # a state's columns, or those that hold them
CHUNK_COLUMNS = (64, 128)
CHUNK_ROWS = (64, 32)
HALF_TYPES = (torch.float16, torch.bfloat16)
NO_LIMIT = 2**31 - 1


class Mamba2Params(ctypes.Structure):
    """Arguments of both kernels; strides in elements."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("dt", ctypes.c_void_p),
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
        ("d", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("checkpoint", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("checkpoint_start", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("dt_stride", ctypes.c_int64),
        ("b_stride", ctypes.c_int64),
        ("c_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("state_stride", ctypes.c_int64),
        ("checkpoint_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("state_dim", ctypes.c_int32),
        ("num_groups", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("num_checkpoints", ctypes.c_int32),
        ("longest_scan", ctypes.c_int32),
    )


SCAN = KernelSpec(
    name="mamba2",
    entry="mamba2",
    params=Mamba2Params,
    params_name="Mamba2Params",
    variants=tuple(
        Variant((dtype, columns, whole), f"{type_name(dtype)}, {columns}, {str(whole).lower()}")
        for dtype in ROW_TYPES
        for columns in SCAN_COLUMNS
        for whole in (True, False)
    ),
)
CHUNKS = KernelSpec(
    name="mamba2_chunks",
    entry="mamba2_chunks",
    source="mamba2_chunks.cu",
    params=Mamba2Params,
    params_name="Mamba2Params",
    variants=tuple(
        Variant((dtype, columns, rows), f"{type_name(dtype)}, {columns}, {rows}")
        for dtype in HALF_TYPES
        for columns in CHUNK_COLUMNS
        for rows in CHUNK_ROWS
    ),
)
SPECS = (SCAN, CHUNKS)


def scan_columns(state_dim: int) -> int:
    """Columns of the scan's variant for a state that wide.

    Raises:
        InvalidArgumentError: wider than every variant.
    """
    for columns in SCAN_COLUMNS:
        if state_dim <= columns:
            return columns
    raise InvalidArgumentError(f"the state has {state_dim} columns; at most {SCAN_COLUMNS[-1]} are supported on CUDA")


def launch_config(num_rows: int, num_heads: int, head_dim: int) -> LaunchConfig:
    """Of the scan: a block for SCAN_ROWS rows of every head and sequence."""
    return LaunchConfig((num_heads * -(-head_dim // SCAN_ROWS), num_rows, 1), (SCAN_THREADS, 1, 1))


def chunk_shared_bytes(columns: int, rows: int) -> int:
    """Shared memory of a block that takes chunks: two of them, the rounded state and the decays of both."""
    wide, narrow = 2 * columns + ACCESS_BYTES, 2 * rows + ACCESS_BYTES
    return 2 * CHUNK * (2 * wide + narrow) + rows * wide + 2 * 3 * CHUNK * 4


def chunk_rows(num_heads: int, head_dim: int, state_dim: int, limits: DeviceLimits) -> int | None:
    """Rows of the state a block holds: many, unless that leaves multiprocessors without work; None: no variant fits.

    The bits of the result do not depend on it.
    """
    if state_dim not in CHUNK_COLUMNS:
        return None
    fitting = [
        rows
        for rows in CHUNK_ROWS
        if head_dim % rows == 0 and chunk_shared_bytes(state_dim, rows) <= limits.max_shared_bytes
    ]
    for rows in fitting:
        if 2 * num_heads * (head_dim // rows) >= limits.sm_count:
            return rows
    return fitting[-1] if fitting else None


def chunk_config(num_rows: int, num_heads: int, head_dim: int, state_dim: int, rows: int) -> LaunchConfig:
    """Of the chunked form: a block for `rows` rows of every head and sequence."""
    grid = (num_heads * (head_dim // rows), num_rows, 1)
    return LaunchConfig(grid, (CHUNK_THREADS, 1, 1), chunk_shared_bytes(state_dim, rows))


def mamba2(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
    checkpoint: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> None:
    """S = exp(dt a) S + dt x b^T; out = S c + d x (Dao and Gu, Transformers are SSMs, 2024).

    Sequences of up to CHUNK tokens, those with checkpoints, and all in float32 or in deterministic mode are taken token
    after token: their bits depend neither on how a sequence is cut into steps nor on the sequences beside it.  Longer
    ones go chunk by chunk where the sizes allow it, with operands of products rounded to x's type.

    Args:
        x: (T, H, P) float32, float16 or bfloat16; token rows may lie apart.
        dt: (T, H) float32 step sizes, after softplus and limits.
        a: (H,) float32, negative.
        b, c: (T, G, N), dtype of x, N up to 256; H is a multiple of G, head h uses group h // (H / G).
        d: (H,) float32.
        state: (slots, H, P, N) float32; rows may lie apart.
        rows: which tokens belong to which sequence, on the device; neither slots nor starts are checked.
        out: (T, H, P), dtype of x; shares no memory with x, b and c.  Tokens of no sequence are not written.
        checkpoint: (CK, H, P, N) float32; None: nobody keeps any, whatever `rows` says.
        deterministic: token after token, always.
    Raises:
        InvalidArgumentError: shapes, types, strides or devices do not fit.  Nothing was launched.
    Effects: writes out, state, checkpoint.  Ordering: torch's current stream; never waits.
    """
    _check_operands(x, dt, a, b, c, d, out)
    _check_states(x, b, state, checkpoint)
    num_rows = _check_state_rows(rows)
    if num_rows == 0 or x.numel() == 0:
        return
    params = _params(x, dt, a, b, c, d, state, rows, out, checkpoint)
    _, heads, head_dim = x.shape
    state_dim = b.shape[2]
    chunked = None
    if not deterministic and _may_be_long(x, num_rows) and _allows_chunks(x, b, c, out, state):
        chunked = chunk_rows(heads, head_dim, state_dim, device_limits(x.device))
    params.longest_scan = NO_LIMIT if chunked is None else CHUNK
    columns = scan_columns(state_dim)
    whole = columns == state_dim and _states_are_aligned(state, checkpoint)
    scan = loader.kernel(SCAN, (x.dtype, columns, whole))
    scan.launch(launch_config(num_rows, heads, head_dim), params, pdl=True)
    if chunked is not None:
        config = chunk_config(num_rows, heads, head_dim, state_dim, chunked)
        loader.kernel(CHUNKS, (x.dtype, state_dim, chunked)).launch(config, params, pdl=True)


def _may_be_long(x: torch.Tensor, num_rows: int) -> bool:
    """Whether a sequence may have more than CHUNK tokens if none is empty.  Where one is, the scan takes it."""
    return x.dtype in HALF_TYPES and x.shape[0] - num_rows >= CHUNK


def _allows_chunks(*tensors: torch.Tensor) -> bool:
    """Whether 16-byte pieces can be copied from (and rows of pairs stored to) these."""
    return all(
        tensor.data_ptr() % ACCESS_BYTES == 0 and tensor.stride(0) * tensor.element_size() % ACCESS_BYTES == 0
        for tensor in tensors
    )


def _states_are_aligned(state: torch.Tensor, checkpoint: torch.Tensor | None) -> bool:
    return _allows_chunks(state) and (checkpoint is None or _allows_chunks(checkpoint))


def _params(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
    checkpoint: torch.Tensor | None,
) -> Mamba2Params:
    tensors = (x, dt, a, b, c, d, state, checkpoint, rows.query_start, rows.slots, rows.checkpoint_start, out)
    strided = (x, dt, b, c, out, state)
    return Mamba2Params(
        *(address(tensor) for tensor in tensors),
        *(tensor.stride(0) for tensor in strided),
        0 if checkpoint is None else checkpoint.stride(0),
        x.shape[1],
        x.shape[2],
        b.shape[2],
        b.shape[1],
        len(state),
        0 if checkpoint is None else len(checkpoint),
    )


def _check_operands(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    out: torch.Tensor,
) -> None:
    if x.dim() != 3 or b.dim() != 3 or 0 in x.shape[1:] or 0 in b.shape[1:] or x.shape[1] % b.shape[1]:
        raise InvalidArgumentError(
            f"x is {describe(x)} and b {describe(b)}; (T, H, P) and (T, G, N) with H a multiple of G are needed"
        )
    if x.dtype not in ROW_TYPES:
        raise InvalidArgumentError(f"x is {x.dtype}; one of {', '.join(map(str, ROW_TYPES))} is needed")
    num_tokens, heads, _ = x.shape
    scan_columns(b.shape[2])
    _check_packed("x", x, tuple(x.shape), x.dtype)
    _check_packed("dt", dt, (num_tokens, heads), torch.float32)
    _check_packed("b", b, (num_tokens, *b.shape[1:]), x.dtype)
    _check_packed("c", c, tuple(b.shape), x.dtype)
    _check_packed("out", out, tuple(x.shape), x.dtype)
    check_vector("a", a, heads, torch.float32)
    check_vector("d", d, heads, torch.float32)


def _check_states(x: torch.Tensor, b: torch.Tensor, state: torch.Tensor, checkpoint: torch.Tensor | None) -> None:
    shape = (*x.shape[1:], b.shape[2])
    _check_packed("state", state, (len(state), *shape), torch.float32)
    if checkpoint is not None:
        _check_packed("checkpoint", checkpoint, (len(checkpoint), *shape), torch.float32)


def _check_state_rows(rows: StateRows) -> int:
    """How many there are."""
    num_rows = rows.num_rows
    if num_rows > MAX_GRID_YZ:
        raise InvalidArgumentError(f"the step has {num_rows} sequences; at most {MAX_GRID_YZ} are supported")
    check_vector("slots", rows.slots, num_rows, torch.int32)
    check_vector("query_start", rows.query_start, num_rows + 1, torch.int32)
    if rows.checkpoint_start is not None:
        check_vector("checkpoint_start", rows.checkpoint_start, num_rows, torch.int32)
    return num_rows


def _check_packed(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse anything but `shape`, each row contiguous; rows may lie apart."""
    fits = tensor.shape == shape and tensor.dtype == dtype
    if not fits or not (tensor.is_contiguous() or _rows_are_packed(tensor)):
        raise InvalidArgumentError(f"{name} is {describe(tensor)}; {shape} {dtype}, each row contiguous, is needed")
    check_device(name, tensor)


def _rows_are_packed(tensor: torch.Tensor) -> bool:
    """Whether no row has gaps and no two overlap.  The stride of an axis of size 1 means nothing."""
    width = 1
    for axis in range(tensor.dim() - 1, 0, -1):
        if tensor.stride(axis) != width and tensor.shape[axis] != 1:
            return False
        width *= tensor.shape[axis]
    return tensor.stride(0) >= width or tensor.shape[0] == 1
