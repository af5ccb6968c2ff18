"""Attention of ragged rows over pages by plain loops in float32, sums in a fixed order.

For float32 models, and for heads of 16-bit ones that the tensor-core kernels do not take.
"""

from __future__ import annotations

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu import loader
from edgellm.kernels.cu.launch import LaunchConfig
from edgellm.kernels.cu.prefill_operands import PagedPrefillParams, RaggedOperands
from edgellm.kernels.cu.rows import ROW_TYPES
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import type_name

WARPS = 8  # kExactWarps
COLUMNS = (256, 512)  # head_dim at most, by variant
MAX_HEAD_DIM = COLUMNS[-1]
HEAD_DIM_STEP = 8


def _variants() -> tuple[Variant, ...]:
    return tuple(
        Variant(
            (dtype, is_fp8, columns),
            f"{type_name(dtype)}, {type_name(torch.float8_e4m3fn if is_fp8 else dtype)}, {columns}",
        )
        for dtype in ROW_TYPES
        for is_fp8 in ((False,) if dtype == torch.float32 else (False, True))
        for columns in COLUMNS
    )


SPEC = KernelSpec(
    name="paged_attention_exact",
    entry="paged_attention_exact",
    params=PagedPrefillParams,
    params_name="PagedPrefillParams",
    variants=_variants(),
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
    """`paged_prefill` with float32 arithmetic throughout: float32 rows too, head_dim any multiple of 8 up to 512.

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
    layout = operands.check(ROW_TYPES)
    if layout.head_dim % HEAD_DIM_STEP or layout.head_dim > MAX_HEAD_DIM:
        raise InvalidArgumentError(
            f"head_dim is {layout.head_dim}; a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM} is needed"
        )
    if query.shape[0] and slots.shape[0]:
        columns = next(most for most in COLUMNS if layout.head_dim <= most)
        kernel = loader.kernel(SPEC, (query.dtype, layout.is_fp8, columns))
        kernel.launch(launch_config(query.shape[0], num_heads), operands.params(layout), pdl=True)
