"""The gated delta rule over the tokens of each sequence, one (dk, dv) matrix of state a head (CPU)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import _ops
from edgellm.kernels.cpu.recurrent_check import FLOAT32, check_states, check_token_rows, recurrent_threads

if TYPE_CHECKING:
    from edgellm.kernels.cpu.recurrent_rows import RecurrentRows

MAX_KEY_DIM = _ops.MAX_KEY_DIM


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    rows: RecurrentRows,
    out: torch.Tensor,
    *,
    scale: float,
    l2norm: bool,
    checkpoint: torch.Tensor | None = None,
) -> None:
    """S = exp(decay) S; u = beta (v - S^T k); S = S + k u^T; out = scale S^T q.

    The rule is that of Yang et al., Gated Delta Networks, 2024.  Tokens are taken one after the other, so the
    result of a sequence depends neither on how it is cut into steps nor on the sequences beside it.

    Args:
        q, k: (T, Hk, dk) float32 or bfloat16, dk up to 512; token rows may lie apart.
        v: (T, Hv, dv), dtype of q; Hv is a multiple of Hk, v head h uses k head h // (Hv / Hk).
        decay: (T, Hv) float32 logarithms, 0 or less.
        beta: (T, Hv) float32.
        state: (slots, Hv, dk, dv) float32; rows may lie apart.
        rows: which tokens belong to which sequence; rows.num_tokens is T.
        out: (T, Hv, dv) float32 or bfloat16; shares no memory with the inputs.
        l2norm: divide each q and k by sqrt(sum of squares + 1e-6) first.
        checkpoint: (CK, Hv, dk, dv) float32, needed where rows name checkpoints.
    Raises:
        InvalidArgumentError: shapes, dtypes, strides or row numbers that do not fit; nothing was written.
    Effects: writes out, state, checkpoint.
    """
    num_tokens = rows.num_tokens
    key_heads, heads, key_dim, value_dim = shape = _delta_shape(q, k, v)
    key_shape, value_shape = (num_tokens, key_heads, key_dim), (num_tokens, heads, value_dim)
    _ops.gated_delta(
        check_states(state, checkpoint, rows, (heads, key_dim, value_dim)),
        check_token_rows("q", q, key_shape),
        check_token_rows("k", k, key_shape),
        check_token_rows("v", v, value_shape),
        check_token_rows("decay", decay, (num_tokens, heads), FLOAT32),
        check_token_rows("beta", beta, (num_tokens, heads), FLOAT32),
        check_token_rows("out", out, value_shape),
        shape,
        l2norm,
        scale,
        recurrent_threads(rows),
    )


def _delta_shape(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, int, int, int]:
    """(Hk, Hv, dk, dv)."""
    if k.dim() != 3 or v.dim() != 3 or 0 in k.shape[1:] or 0 in v.shape[1:] or v.shape[1] % k.shape[1]:
        raise InvalidArgumentError(
            f"k is {tuple(k.shape)} and v {tuple(v.shape)}; (T, Hk, dk) and (T, Hv, dv) with Hv a multiple of Hk are "
            "needed"
        )
    if k.shape[2] > MAX_KEY_DIM:
        raise InvalidArgumentError(f"k has head size {k.shape[2]}; at most {MAX_KEY_DIM} is supported")
    if q.dtype != k.dtype or v.dtype != k.dtype:
        raise InvalidArgumentError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; one dtype is needed")
    return k.shape[1], v.shape[1], k.shape[2], v.shape[2]
