"""The gated delta rule on CUDA (Yang et al., Gated Delta Networks, 2024): token by token, long prompts by chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.delta_params import DeltaOperands, GatedDeltaParams
from edgellm.kernels.cu.gated_delta_chunks import KERNELS, chunks_pay, launch_chunks, workspace_bytes
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.rows import MAX_GRID_YZ, ROW_TYPES
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import type_name

if TYPE_CHECKING:
    import torch

    from edgellm.kernels.cu.state_rows import StateRows

__all__ = ["gated_delta", "gated_delta_workspace"]

COLUMNS = {32: 16, 64: 16, 128: 16, 256: 8}  # of a warp, by the variant's key size: DeltaLanes::kColumns
MAX_WARPS = 4  # kDeltaWarps
MANY_WARPS = 2048  # enough for every multiprocessor, several to a block
SHORT_ROWS = 32  # tokens of a row up to which it goes token by token

SPEC = KernelSpec(
    name="gated_delta",
    entry="gated_delta",
    params=GatedDeltaParams,
    params_name="GatedDeltaParams",
    variants=tuple(
        Variant((dtype, key_dim), f"{type_name(dtype)}, {key_dim}") for dtype in ROW_TYPES for key_dim in COLUMNS
    ),
)
SPECS = (SPEC, *KERNELS)


def launch_config(rows: int, heads: int, width: int, value_dim: int) -> LaunchConfig:
    """A warp for some columns of a state; few warps stand alone, so that they spread over the device.

    Args:
        width: key size of the variant.
    """
    tiles = -(-value_dim // COLUMNS[width])
    warps = min(MAX_WARPS, tiles) if rows * heads * tiles >= MANY_WARPS else 1
    return LaunchConfig((-(-tiles // warps), heads, rows), (32, warps, 1))


def gated_delta_workspace(
    tokens: int, rows: int, *, key_heads: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> int:
    """Bytes that `gated_delta` needs for up to so many tokens and rows of `dtype`; 0 where it goes token by token."""
    return workspace_bytes(tokens, rows, key_heads, heads, key_dim, value_dim, dtype)


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
    *,
    scale: float,
    l2norm: bool,
    checkpoint: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    deterministic: bool = False,
) -> None:
    """S = exp(decay) S; u = beta (v - S^T k); S = S + k u^T; out = scale S^T q, in float32.

    Token by token, a sequence's bits depend neither on how it is cut into steps nor on the rows beside it.  With a
    workspace, rows of more than SHORT_ROWS tokens without checkpoints may go by chunks, which is faster and differs by
    the rounding of products of float16: by less than 0.1 % of the norm of the state and of the unrounded output.

    Args:
        q, k: (T, Hk, dk) float32, float16 or bfloat16, CUDA, dk up to 256; token rows may lie apart.
        v: (T, Hv, dv), dtype of q; Hv is a multiple of Hk, v head h uses k head h // (Hv / Hk).
        decay: (T, Hv) float32 logarithms, 0 or less.
        beta: (T, Hv) float32, 0 to 1.
        state: (slots, Hv, dk, dv) float32; slots may lie apart.
        rows: which tokens belong to which slot, on the device.
        out: (T, Hv, dv), dtype of q; shares no memory with the inputs.
        l2norm: divide each q and k by sqrt(sum of squares + 1e-6) first.
        checkpoint: (CK, Hv, dk, dv) float32; None where no row has checkpoints.
        workspace: uint8, `gated_delta_workspace` bytes; None: token by token.
        deterministic: token by token, whatever the workspace.
    Raises:
        InvalidArgumentError: shapes, types, strides or devices do not fit.  Nothing was launched.
    Effects: writes out, state, checkpoint, workspace.  Ordering: torch's current stream; never waits.
    """
    operands = DeltaOperands(q, k, v, decay, beta, state, rows, out, checkpoint)
    shape = operands.check()
    if shape.heads > MAX_GRID_YZ or shape.rows > MAX_GRID_YZ:
        raise InvalidArgumentError(
            f"{shape.rows} rows of {shape.heads} heads; at most {MAX_GRID_YZ} of each fit a grid"
        )
    if shape.tokens == 0 or shape.rows == 0:
        return
    params = operands.params(shape, scale=scale, l2norm=l2norm)
    if workspace is not None and not deterministic and l2norm and chunks_pay(operands, shape):
        params.longest = SHORT_ROWS
        launch_chunks(params, shape, q.dtype, workspace)
    width = next(size for size in COLUMNS if shape.key_dim <= size)
    config = launch_config(shape.rows, shape.heads, width, shape.value_dim)
    loader.kernel(SPEC, (q.dtype, width)).launch(config, params, pdl=True)
