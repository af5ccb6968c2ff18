"""Attention of ragged rows over float32 pages, for float32 models: plain loops, sums in a fixed order."""

from __future__ import annotations

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.prefill_operands import PagedPrefillParams, RaggedOperands
from edgellm.kernels.cu.spec import KernelSpec, Variant

WARPS = 8
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8

SPEC = KernelSpec(
    name="paged_attention_exact",
    entry="paged_attention_exact",
    params=PagedPrefillParams,
    params_name="PagedPrefillParams",
    variants=(Variant((WARPS,), str(WARPS)),),
)


def launch_config(num_rows: int, num_heads: int) -> LaunchConfig:
    """A block for each row and query head."""
    return LaunchConfig((num_rows * num_heads, 1, 1), (WARPS * 32, 1, 1))


def paged_attention_exact(
    query: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    past_len: torch.Tensor,
    out: torch.Tensor,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
) -> None:
    """`paged_prefill` in float32: query, pages and out are float32, head_dim any multiple of 8 up to 256.

    Decode rows are sequences of one row.  A row's bits depend on its query and its keys alone.

    Args, effects and ordering: as `paged_prefill`.
    Raises:
        InvalidArgumentError: shapes, types or devices do not fit.  Nothing was launched.
    """
    operands = RaggedOperands(
        query=query,
        pages=pages,
        page_table=page_table,
        slots=slots,
        query_start=query_start,
        past_len=past_len,
        out=out,
        num_heads=num_heads,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        tree_mask=tree_mask,
    )
    layout = operands.check((torch.float32,))
    if layout.head_dim % HEAD_DIM_STEP or layout.head_dim > MAX_HEAD_DIM:
        raise InvalidArgumentError(
            f"head_dim is {layout.head_dim}; a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM} is needed"
        )
    if query.shape[0] and slots.shape[0]:
        kernel = loader.kernel(SPEC, (WARPS,))
        kernel.launch(launch_config(query.shape[0], num_heads), operands.params(layout), pdl=True)
