"""Causal depthwise convolution over the tokens of each sequence, with its last inputs as state (CPU)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import _ops
from edgellm.kernels.cpu.recurrent_check import (
    check_states,
    check_token_rows,
    check_weight,
    recurrent_threads,
)

if TYPE_CHECKING:
    from edgellm.kernels.cpu.recurrent_rows import RecurrentRows

MAX_WIDTH = _ops.MAX_CONV_WIDTH


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: RecurrentRows,
    out: torch.Tensor,
    *,
    silu: bool,
    checkpoint: torch.Tensor | None = None,
) -> None:
    """out[t] = silu?(bias + sum_j weight[:, j] * window[:, j]); the window ends with x[t].

    Args:
        x: (T, C) float32 or bfloat16; rows may lie apart.
        weight: (C, W) float32, W from 1 to 8.
        bias: (C,) float32 or None.
        state: (slots, C, W - 1) float32, the last inputs of each sequence, oldest first; rows may lie apart.
        rows: which tokens belong to which sequence; rows.num_tokens is T.
        out: (T, C) float32 or bfloat16; may be x.
        checkpoint: (CK, C, W - 1) float32, needed where rows name checkpoints.
    Raises:
        InvalidArgumentError: shapes, dtypes, strides or row numbers that do not fit; nothing was written.
    Effects: writes out, state, checkpoint.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] < 1 or not 1 <= weight.shape[1] <= MAX_WIDTH:
        raise InvalidArgumentError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; (T, C) and (C, W) with W from 1 to {MAX_WIDTH} "
            "are needed"
        )
    channels, width = weight.shape
    check_weight("weight", weight, (x.shape[1], width))
    if bias is not None:
        check_weight("bias", bias, (channels,))
    x_rows = check_token_rows("x", x, (rows.num_tokens, channels))
    out_rows = check_token_rows("out", out, (rows.num_tokens, channels))
    _ops.causal_conv(
        check_states(state, checkpoint, rows, (channels, width - 1)),
        x_rows,
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out_rows,
        channels,
        width,
        silu,
        recurrent_threads(rows),
    )
