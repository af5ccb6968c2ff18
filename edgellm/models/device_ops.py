"""`DeviceOps`: the operators that the device graph is written against, as a table.

One table holds the CUDA wrappers (`edgellm.kernels.cu`), one their references (`edgellm.kernels.ref`) in plain torch:
with these everything above the kernels runs on any machine.  Every operator writes into the caller's tensors,
allocates nothing and never waits, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Op = Callable[..., Any]


class Linear(Protocol):
    """out = x weight^T + bias + residual."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: Any,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        residual: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            x: (T, K).
            weight: (M, K), dtype of x; packed ones expand to it.
            out: (T, M), dtype of x or float32.
            bias: (M,), dtype of x.
            residual: (T, M), dtype of out; may be `out` itself.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOps:
    """The operators; names, arguments and layouts are those of `edgellm.kernels.ref`.

    Attributes:
        prepare: `(launches)`: whatever kernels that function launches are compiled, all at the same time,
            and those that requests ask for beside them.
        linear, gated: see `device_linear.Projections`.
        decode_workspace_bytes: `(rows, num_heads, head_dim)` to the bytes that decode attention wants beside the pool;
            zeroed once.
        prefill_workspace_bytes: `(rows, keys, num_heads, head_dim)` to those of ragged attention; in deterministic mode
            calls of up to `rows` rows are spread over the device, for sequences of up to `keys` tokens.
        cascade_workspace_bytes: `(rows, num_heads, num_kv_heads, head_dim)` to those of decode attention in groups.
        causal_conv, gated_delta, mamba2: rows of a step and their state by slot; `rows` is a `StateRows`.
        delta_gates: `(a, b, rate, bias, decay, beta)`, into the last two.
        scatter_state: state put back to checkpoints after verification.
        commit_rows: K and V of accepted branches moved together.
        advance_rows: inputs of a decode step moved on to the next one.
        keep_rows: the latest rows of each slot, in a ring by place.
        gated_delta_workspace, experts_workspace: bytes that these want, by the arguments that their modules document.
    """

    embedding: Op
    rms_norm: Op
    silu_mul: Op
    rotary_angles: Op
    rope_kv_write: Op
    paged_decode: Op
    paged_cascade: Op
    paged_prefill: Op
    paged_attention_exact: Op
    paged_attention_wide: Op
    update_table: Op
    linear: Linear
    gated: Op
    causal_conv: Op
    gated_delta: Op
    mamba2: Op
    delta_gates: Op
    gate_: Op
    scatter_state: Op
    commit_rows: Op
    advance_rows: Op
    keep_rows: Op
    choose_experts: Op
    experts: Op
    gated_norm: Op
    gelu_mul: Op
    group_norm_gate: Op
    step_sizes: Op
    gated_delta_workspace: Callable[..., int]
    experts_workspace: Callable[..., int]
    prepare: Callable[[Callable[[], None]], None]
    decode_workspace_bytes: Callable[[int, int, int], int]
    prefill_workspace_bytes: Callable[[int, int, int, int], int]
    cascade_workspace_bytes: Callable[[int, int, int, int], int]


def cuda_ops(*, deterministic: bool = False) -> DeviceOps:
    """The CUDA wrappers; kernels are compiled when first launched.

    Args:
        deterministic: linear and recurrent layers whose sums depend neither on the number of rows nor on chunks.
    """
    from edgellm.kernels.cu import (
        advance_rows,
        embedding,
        paged_attention_exact,
        paged_cascade,
        paged_decode,
        paged_prefill,
        rms_norm,
        rope_kv_write,
        rotary_angles,
        silu_mul,
        table_update,
    )
    from edgellm.models.device_linear import cuda_projections
    from edgellm.models.packed_linear import cuda_packed_ops, with_packed

    dense, packed = cuda_projections(deterministic=deterministic), cuda_packed_ops(deterministic=deterministic)
    projections = with_packed(dense, packed, silu_mul.silu_mul, one_kernel=not deterministic)
    return DeviceOps(
        embedding=embedding.embedding,
        rms_norm=rms_norm.rms_norm,
        silu_mul=silu_mul.silu_mul,
        rotary_angles=rotary_angles.rotary_angles,
        rope_kv_write=rope_kv_write.rope_kv_write,
        paged_decode=paged_decode.paged_decode,
        paged_cascade=paged_cascade.paged_cascade,
        paged_prefill=paged_prefill.paged_prefill,
        paged_attention_exact=paged_attention_exact.paged_attention_exact,
        paged_attention_wide=_of_module("paged_attention_wide", "paged_attention_wide"),
        update_table=table_update.table_update,
        linear=projections.linear,
        gated=projections.gated,
        causal_conv=_of_module("causal_conv", "causal_conv"),
        gated_delta=partial(_of_module("gated_delta", "gated_delta"), deterministic=deterministic),
        mamba2=partial(_of_module("mamba2", "mamba2"), deterministic=deterministic),
        delta_gates=_of_module("gates", "delta_gates"),
        gate_=_of_module("gates", "gate_"),
        scatter_state=_of_module("scatter_state", "scatter_state"),
        commit_rows=_of_module("commit_rows", "commit_rows"),
        advance_rows=advance_rows.advance_rows,
        keep_rows=_of_module("keep_rows", "keep_rows"),
        choose_experts=_of_module("choose_experts", "choose_experts"),
        experts=_of_module("experts", "experts"),
        gated_norm=_of_module("gated_norm", "gated_norm"),
        gelu_mul=_of_module("gelu_mul", "gelu_mul"),
        group_norm_gate=_of_module("group_norm_gate", "group_norm_gate"),
        step_sizes=_of_module("step_sizes", "step_sizes"),
        gated_delta_workspace=_of_module("gated_delta", "gated_delta_workspace"),
        experts_workspace=_of_module("experts", "experts_workspace"),
        prepare=_compile_together,
        decode_workspace_bytes=_decode_workspace_bytes,
        prefill_workspace_bytes=_prefill_workspace_bytes,
        cascade_workspace_bytes=_cascade_workspace_bytes,
    )


def reference_ops() -> DeviceOps:
    """Plain torch on any device; slow."""
    from edgellm.kernels.ref import (
        advance_rows,
        causal_conv,
        choose_experts,
        commit_rows,
        embedding,
        experts,
        gated_delta,
        gated_norm,
        gates,
        gelu_mul,
        group_norm_gate,
        keep_rows,
        mamba2,
        paged_attention_exact,
        paged_attention_wide,
        paged_cascade,
        paged_decode,
        paged_prefill,
        rms_norm,
        rope_kv_write,
        rotary_angles,
        scatter_state,
        silu_mul,
        step_sizes,
        table_update,
    )
    from edgellm.models.device_linear import composed, torch_linear
    from edgellm.models.packed_linear import reference_packed_ops, with_packed

    dense, packed = composed(torch_linear, silu_mul.silu_mul), reference_packed_ops()
    projections = with_packed(dense, packed, silu_mul.silu_mul, one_kernel=True)
    return DeviceOps(
        embedding=embedding.embedding,
        rms_norm=rms_norm.rms_norm,
        silu_mul=silu_mul.silu_mul,
        rotary_angles=rotary_angles.rotary_angles,
        rope_kv_write=rope_kv_write.rope_kv_write,
        paged_decode=paged_decode.paged_decode,
        paged_cascade=paged_cascade.paged_cascade,
        paged_prefill=paged_prefill.paged_prefill,
        paged_attention_exact=paged_attention_exact.paged_attention_exact,
        paged_attention_wide=paged_attention_wide.paged_attention_wide,
        update_table=table_update.table_update,
        linear=projections.linear,
        gated=projections.gated,
        causal_conv=causal_conv.causal_conv,
        gated_delta=gated_delta.gated_delta,
        mamba2=mamba2.mamba2,
        delta_gates=gates.delta_gates,
        gate_=gates.gate_,
        scatter_state=scatter_state.scatter_state,
        commit_rows=commit_rows.commit_rows,
        advance_rows=advance_rows.advance_rows,
        keep_rows=keep_rows.keep_rows,
        choose_experts=choose_experts.choose_experts,
        experts=experts.experts,
        gated_norm=gated_norm.gated_norm,
        gelu_mul=gelu_mul.gelu_mul,
        group_norm_gate=group_norm_gate.group_norm_gate,
        step_sizes=step_sizes.step_sizes,
        gated_delta_workspace=_no_bytes,
        experts_workspace=_no_bytes,
        prepare=lambda launches: None,
        decode_workspace_bytes=lambda rows, num_heads, head_dim: 0,
        prefill_workspace_bytes=lambda rows, keys, num_heads, head_dim: 0,
        cascade_workspace_bytes=lambda rows, num_heads, num_kv_heads, head_dim: 0,
    )


def _of_module(module: str, name: str) -> Op:
    """A CUDA wrapper that is imported when first called: most models have no such layer."""

    def call(*args: Any, **options: Any) -> Any:
        return getattr(import_module(f"edgellm.kernels.cu.{module}"), name)(*args, **options)

    return call


def _no_bytes(*args: Any, **options: Any) -> int:
    return 0


def _compile_together(launches: Callable[[], None]) -> None:
    from edgellm.kernels.cu import loader
    from edgellm.kernels.cu.serving import serving_kernels

    with loader.collecting() as noted:
        launches()
    loader.warm_up(dict.fromkeys([*noted, *serving_kernels()]))


def _decode_workspace_bytes(rows: int, num_heads: int, head_dim: int) -> int:
    from edgellm.kernels.cu.launch import device_limits
    from edgellm.kernels.cu.paged_decode import paged_decode_workspace

    return paged_decode_workspace(rows, num_heads, head_dim, device_limits(torch.device("cuda")))


def _cascade_workspace_bytes(rows: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    from edgellm.kernels.cu.launch import device_limits
    from edgellm.kernels.cu.paged_cascade import paged_cascade_workspace

    return paged_cascade_workspace(rows, num_heads, num_kv_heads, head_dim, device_limits(torch.device("cuda")))


def _prefill_workspace_bytes(rows: int, keys: int, num_heads: int, head_dim: int) -> int:
    from edgellm.kernels.cu.launch import device_limits
    from edgellm.kernels.cu.paged_prefill import paged_prefill_workspace

    limits = device_limits(torch.device("cuda"))
    return paged_prefill_workspace(num_heads, head_dim, limits, max_rows=rows, max_keys=keys)
