"""`DeviceOps`: the operators that the device graph is written against, as a table.

One table holds the CUDA wrappers (`edgellm.kernels.cu`), one their references (`edgellm.kernels.ref`) in plain torch:
with these everything above the kernels runs on any machine.  Every operator writes into the caller's tensors,
allocates nothing and never waits, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgellm.models.config import ModelConfig

    Op = Callable[..., Any]


class Linear(Protocol):
    """out = x weight^T + bias + residual."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        residual: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            x: (T, K).
            weight: (M, K), dtype of x.
            out: (T, M), dtype of x or float32.
            bias: (M,), dtype of x.
            residual: (T, M), dtype of out; may be `out` itself.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOps:
    """The operators; names, arguments and layouts are those of `edgellm.kernels.ref`.

    Attributes:
        prepare: `(launches)`: whatever kernels that function launches are compiled, all at the same time.
        linear, gated: see `device_linear.Projections`.
        decode_workspace_bytes: `(rows, config)` to the bytes that decode attention wants beside the pool; zeroed once.
        prefill_workspace_bytes: `(rows, keys, config)` to those of ragged attention; in deterministic mode calls of up
            to `rows` rows are spread over the device, for sequences of up to `keys` tokens.
    """

    embedding: Op
    rms_norm: Op
    silu_mul: Op
    rotary_angles: Op
    rope_kv_write: Op
    paged_decode: Op
    paged_prefill: Op
    paged_attention_exact: Op
    update_table: Op
    linear: Linear
    gated: Op
    prepare: Callable[[Callable[[], None]], None]
    decode_workspace_bytes: Callable[[int, ModelConfig], int]
    prefill_workspace_bytes: Callable[[int, int, ModelConfig], int]


def cuda_ops(*, deterministic: bool = False) -> DeviceOps:
    """The CUDA wrappers; kernels are compiled when first launched.

    Args:
        deterministic: linear layers whose sums do not depend on the number of rows.
    """
    from edgellm.kernels.cu import (
        embedding,
        paged_attention_exact,
        paged_decode,
        paged_prefill,
        rms_norm,
        rope_kv_write,
        rotary_angles,
        silu_mul,
        table_update,
    )
    from edgellm.models.device_linear import cuda_projections

    projections = cuda_projections(deterministic=deterministic)
    return DeviceOps(
        embedding=embedding.embedding,
        rms_norm=rms_norm.rms_norm,
        silu_mul=silu_mul.silu_mul,
        rotary_angles=rotary_angles.rotary_angles,
        rope_kv_write=rope_kv_write.rope_kv_write,
        paged_decode=paged_decode.paged_decode,
        paged_prefill=paged_prefill.paged_prefill,
        paged_attention_exact=paged_attention_exact.paged_attention_exact,
        update_table=table_update.table_update,
        linear=projections.linear,
        gated=projections.gated,
        prepare=_compile_together,
        decode_workspace_bytes=_decode_workspace_bytes,
        prefill_workspace_bytes=_prefill_workspace_bytes,
    )


def reference_ops() -> DeviceOps:
    """Plain torch on any device; slow."""
    from edgellm.kernels.ref import (
        embedding,
        paged_attention_exact,
        paged_decode,
        paged_prefill,
        rms_norm,
        rope_kv_write,
        rotary_angles,
        silu_mul,
        table_update,
    )
    from edgellm.models.device_linear import composed, torch_linear

    projections = composed(torch_linear, silu_mul.silu_mul)
    return DeviceOps(
        embedding=embedding.embedding,
        rms_norm=rms_norm.rms_norm,
        silu_mul=silu_mul.silu_mul,
        rotary_angles=rotary_angles.rotary_angles,
        rope_kv_write=rope_kv_write.rope_kv_write,
        paged_decode=paged_decode.paged_decode,
        paged_prefill=paged_prefill.paged_prefill,
        paged_attention_exact=paged_attention_exact.paged_attention_exact,
        update_table=table_update.table_update,
        linear=projections.linear,
        gated=projections.gated,
        prepare=lambda launches: None,
        decode_workspace_bytes=lambda rows, config: 0,
        prefill_workspace_bytes=lambda rows, keys, config: 0,
    )


def _compile_together(launches: Callable[[], None]) -> None:
    from edgellm.kernels.cu import loader

    with loader.collecting() as noted:
        launches()
    loader.warm_up(dict.fromkeys(noted))


def _decode_workspace_bytes(rows: int, config: ModelConfig) -> int:
    from edgellm.kernels.cu.launch import device_limits
    from edgellm.kernels.cu.paged_decode import paged_decode_workspace

    return paged_decode_workspace(rows, config.num_heads, config.head_dim, device_limits(torch.device("cuda")))


def _prefill_workspace_bytes(rows: int, keys: int, config: ModelConfig) -> int:
    from edgellm.kernels.cu.launch import device_limits
    from edgellm.kernels.cu.paged_prefill import paged_prefill_workspace

    limits = device_limits(torch.device("cuda"))
    return paged_prefill_workspace(config.num_heads, config.head_dim, limits, max_rows=rows, max_keys=keys)
