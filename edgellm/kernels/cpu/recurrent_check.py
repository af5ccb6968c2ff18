"""Argument checks that the kernels of recurrent layers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu.linear import SKINNY_ROWS
from edgellm.kernels.cpu.threads import helper_threads, kernel_threads

if TYPE_CHECKING:
    from edgellm.kernels.cpu._ops import Sequences, TokenRows
    from edgellm.kernels.cpu.recurrent_rows import RecurrentRows

FLOAT32 = (torch.float32,)
ROW_DTYPES = (torch.float32, torch.bfloat16)


def check_token_rows(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = ROW_DTYPES
) -> TokenRows:
    """Address, row stride and element type for the kernels; refuses anything that they would misread.

    Args:
        shape: what is needed; the first axis is tokens, all others lie side by side in memory.
    Raises:
        InvalidArgumentError: another shape, dtype, device, or rows with gaps inside.
    """
    if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_cpu:
        raise InvalidArgumentError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; a CPU tensor {shape} of "
            f"{' or '.join(map(str, dtypes))} is needed"
        )
    stride = tensor.stride()
    if not tensor.is_contiguous() and not _rows_are_packed(stride, shape):
        raise InvalidArgumentError(
            f"{name} {shape} has strides {stride}; each row must be contiguous, one after the other: call contiguous()"
        )
    return tensor.data_ptr(), stride[0], tensor.dtype == torch.bfloat16


def check_weight(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a weight that is not contiguous float32 of this shape on the CPU."""
    if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous() or not tensor.is_cpu:
        raise InvalidArgumentError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; contiguous {shape} float32 is needed"
        )


def check_states(
    state: torch.Tensor, checkpoint: torch.Tensor | None, rows: RecurrentRows, shape: tuple[int, ...]
) -> Sequences:
    """The sequences for the kernels; state and checkpoint hold all rows that are named.

    Args:
        shape: of one sequence's state.
    Raises:
        InvalidArgumentError: shapes that do not fit, too few rows, or checkpoints asked for and no tensor for them.
    """
    state_at, state_stride = _check_state_rows("state", state, shape, rows.min_slots)
    checkpoint_at, checkpoint_stride = 0, 0
    if checkpoint is not None:
        checkpoint_at, checkpoint_stride = _check_state_rows("checkpoint", checkpoint, shape, rows.min_checkpoints)
    elif rows.min_checkpoints:
        raise InvalidArgumentError(
            f"the rows name {rows.min_checkpoints} checkpoint rows, but checkpoint is None; give a tensor "
            f"{(rows.min_checkpoints, *shape)}"
        )
    return (
        *rows.addresses,
        rows.num_sequences,
        state_at,
        state_stride,
        checkpoint_at,
        checkpoint_stride,
    )


def recurrent_threads(rows: RecurrentRows) -> int:
    """Steps of few rows run their linear layers on the helper threads, so these kernels do as well."""
    return helper_threads() if rows.num_tokens <= SKINNY_ROWS else kernel_threads()


def _check_state_rows(name: str, tensor: torch.Tensor, shape: tuple[int, ...], min_rows: int) -> tuple[int, int]:
    if tensor.dim() != len(shape) + 1 or tensor.shape[0] < min_rows:
        raise InvalidArgumentError(
            f"{name} is {tuple(tensor.shape)}; the rows need at least {(min_rows, *shape)}: make it larger"
        )
    at, stride, _ = check_token_rows(name, tensor, (tensor.shape[0], *shape), FLOAT32)
    return at, stride


def _rows_are_packed(stride: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether no row has gaps and no two overlap.  The stride of an axis of size 1 means nothing."""
    width = 1
    for axis in range(len(shape) - 1, 0, -1):
        if stride[axis] != width and shape[axis] != 1:
            return False
        width *= shape[axis]
    return stride[0] >= width or shape[0] == 1
