"""The Mamba-2 selective scan over the tokens of each sequence, one (P, N) matrix of state a head (CPU)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import _ops
from edgellm.kernels.cpu.recurrent_check import (
    FLOAT32,
    check_states,
    check_token_rows,
    check_weight,
    recurrent_threads,
)

if TYPE_CHECKING:
    from edgellm.kernels.cpu.recurrent_rows import RecurrentRows

MAX_STATE_DIM = _ops.MAX_STATE_DIM


def mamba2(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
    rows: RecurrentRows,
    out: torch.Tensor,
    checkpoint: torch.Tensor | None = None,
) -> None:
    """S = exp(dt a) S + dt x b^T; out = S c + d x (Dao and Gu, Transformers are SSMs, 2024).

    Tokens are taken one after the other, so the result of a sequence depends neither on how it is cut into steps nor
    on the sequences beside it.

    Args:
        x: (T, H, P) float32 or bfloat16; token rows may lie apart.
        dt: (T, H) float32 step sizes, after softplus and limits.
        a: (H,) float32, negative.
        b, c: (T, G, N), dtype of x, N up to 1024; H is a multiple of G, head h uses group h // (H / G).
        d: (H,) float32.
        state: (slots, H, P, N) float32; rows may lie apart.
        rows: which tokens belong to which sequence; rows.num_tokens is T.
        out: (T, H, P) float32 or bfloat16; may be x, shares no memory with b and c.
        checkpoint: (CK, H, P, N) float32, needed where rows name checkpoints.
    Raises:
        InvalidArgumentError: shapes, dtypes, strides or row numbers that do not fit; nothing was written.
    Effects: writes out, state, checkpoint.
    """
    num_tokens = rows.num_tokens
    groups, heads, head_dim, state_dim = shape = _mamba_shape(x, b, c)
    check_weight("a", a, (heads,))
    check_weight("d", d, (heads,))
    _ops.mamba2(
        check_states(state, checkpoint, rows, (heads, head_dim, state_dim)),
        check_token_rows("x", x, (num_tokens, heads, head_dim)),
        check_token_rows("dt", dt, (num_tokens, heads), FLOAT32),
        a.data_ptr(),
        check_token_rows("b", b, (num_tokens, groups, state_dim)),
        check_token_rows("c", c, (num_tokens, groups, state_dim)),
        d.data_ptr(),
        check_token_rows("out", out, (num_tokens, heads, head_dim)),
        shape,
        recurrent_threads(rows),
    )


def _mamba_shape(x: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[int, int, int, int]:
    """(G, H, P, N)."""
    if x.dim() != 3 or b.dim() != 3 or 0 in x.shape[1:] or 0 in b.shape[1:] or x.shape[1] % b.shape[1]:
        raise InvalidArgumentError(
            f"x is {tuple(x.shape)} and b {tuple(b.shape)}; (T, H, P) and (T, G, N) with H a multiple of G are needed"
        )
    if b.shape[2] > MAX_STATE_DIM:
        raise InvalidArgumentError(f"b has state size {b.shape[2]}; at most {MAX_STATE_DIM} is supported")
    if b.dtype != x.dtype or c.dtype != x.dtype:
        raise InvalidArgumentError(f"x, b, c are {x.dtype}, {b.dtype}, {c.dtype}; one dtype is needed")
    return b.shape[1], x.shape[1], x.shape[2], b.shape[2]
