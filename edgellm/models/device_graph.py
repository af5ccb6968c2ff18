"""The decoder-only graph of Llama, Qwen2 and Qwen3 over a table of operators; what differs are flags of the config.

Rows of all sequences of a step stand in one (T, hidden) matrix.  A pass reads its inputs from device tensors, works
in buffers that were allocated before, and never waits: the same calls run eagerly or inside a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from edgellm.models.device_step import HiddenTaps
from edgellm.models.rope import inverse_frequencies

if TYPE_CHECKING:
    from edgellm.models.config import ModelConfig
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import DeviceState, StepBuffers
    from edgellm.models.loader import LoadedModel
    from edgellm.models.step import HiddenRequest
    from edgellm.models.weights import LayerWeights
    from edgellm.runtime.step_inputs import StepTensors


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """(head_dim,) float32 norm weights of a layer's query and key heads; None where the model has none."""

    query: torch.Tensor | None
    key: torch.Tensor | None


class DeviceGraph:
    """Forward pass over rows; see `edgellm.models.device_step.DeviceFamilyGraph`.

    Args:
        model: weights on the device that `ops` compute on.
    """

    def __init__(self, model: LoadedModel, ops: DeviceOps) -> None:
        self.config = config = model.config
        self.row_widths = row_widths(config)
        self.float_widths = {"angles": config.head_dim}
        self._ops = ops
        self._weights = model.weights
        self._attn_norms = [layer.attn_norm.float() for layer in model.weights.layers]
        self._mlp_norms = [layer.mlp_norm.float() for layer in model.weights.layers]
        self._final_norm = model.weights.final_norm.float()
        self._head_norms = [_head_norms(layer) for layer in model.weights.layers]
        inv_freq, self._rope_scale = inverse_frequencies(config.rope, config.head_dim)
        self._inv_freq = inv_freq.to(model.weights.embedding.device)

    def workspace_bytes(self, *, tokens: int, rows: int) -> int:
        return 0

    def forward(
        self,
        step: StepTensors,
        buffers: StepBuffers,
        state: DeviceState,
        hidden: torch.Tensor | None = None,
        request: HiddenRequest | None = None,
    ) -> None:
        ops, eps = self._ops, self.config.rms_norm_eps
        stream, normed, qkv, attended = (buffers[name] for name in ("hidden", "normed", "qkv", "attended"))
        gate_up, activated = buffers["gate_up"], buffers["activated"]
        angles = buffers["angles"].view(2, len(stream), -1)
        taps = HiddenTaps(request, hidden, self.config.hidden_size)
        ops.embedding(step.token_ids, self._weights.embedding, stream)
        ops.rotary_angles(step.positions, self._inv_freq, self._rope_scale, angles)
        for idx, layer in enumerate(self._weights.layers):
            taps.enters(idx, stream)
            norms = self._head_norms[idx]
            ops.rms_norm(stream, self._attn_norms[idx], eps, normed)
            ops.linear(normed, layer.qkv, qkv, layer.qkv_bias)
            state.attend(idx, qkv, angles, attended, query_norm=norms.query, key_norm=norms.key)
            ops.linear(attended, layer.o, stream, layer.o_bias, residual=stream)
            ops.rms_norm(stream, self._mlp_norms[idx], eps, normed)
            ops.gated(normed, layer.gate_up, activated, layer.gate_up_bias, gate_up)
            ops.linear(activated, layer.down, stream, layer.down_bias, residual=stream)
        taps.enters(self.config.num_layers, stream)
        if taps.wants_normed:
            ops.rms_norm(stream, self._final_norm, eps, normed)
            taps.normed(normed)
        self._logits(step, stream, buffers)

    def _logits(self, step: StepTensors, stream: torch.Tensor, buffers: StepBuffers) -> None:
        if not len(step.logits_index):
            return
        torch.index_select(stream, 0, step.logits_index, out=buffers.selected)
        self._ops.rms_norm(buffers.selected, self._final_norm, self.config.rms_norm_eps, buffers.selected_normed)
        self._ops.linear(buffers.selected_normed, self._weights.lm_head, buffers.logits)


def row_widths(config: ModelConfig) -> dict[str, int]:
    """Row buffers of the model's type."""
    return {
        "hidden": config.hidden_size,
        "normed": config.hidden_size,
        "qkv": config.q_size + 2 * config.kv_size,
        "attended": config.q_size,
        "gate_up": 2 * config.intermediate_size,
        "activated": config.intermediate_size,
    }


def _head_norms(layer: LayerWeights) -> HeadNorms:
    return HeadNorms(
        query=None if layer.q_norm is None else layer.q_norm.float(),
        key=None if layer.k_norm is None else layer.k_norm.float(),
    )
