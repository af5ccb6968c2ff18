"""The graph of Qwen3-Next and Qwen3.5 text on CPU rows: gated delta nets and gated attention, MLPs or experts.

Norms of the residual stream are zero-centred: the file holds the weight minus one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.kernels.cpu.elementwise import rms_norm, silu_mul
from edgellm.kernels.cpu.linear import linear
from edgellm.models.delta_net import DeltaNet
from edgellm.models.gated_attention import GatedAttention
from edgellm.models.moe import MoeBlock, MoeWeights
from edgellm.models.qwen_hybrid_weights import GatedAttentionWeights, hybrid
from edgellm.models.rope import RotaryAngles
from edgellm.models.row_buffers import RowBuffers
from edgellm.models.step import GraphOutput, HiddenRows

if TYPE_CHECKING:
    from edgellm.models.loader import LoadedModel
    from edgellm.models.moe import MlpWeights
    from edgellm.models.qwen_hybrid_config import QwenHybridConfig
    from edgellm.models.qwen_hybrid_weights import HybridLayerWeights
    from edgellm.models.step import HiddenRequest, StepState


class QwenHybridGraph:
    """Forward pass over rows.  Owns its scratch, so one pass at a time."""

    def __init__(self, model: LoadedModel) -> None:
        self.config = config = hybrid(model.config)
        self._weights = model.weights
        self._angles = RotaryAngles(config.rope, config.rotary_dim)
        self._buffers = hybrid_buffers(config, model.weights.dtype)
        self._final_norm = 1.0 + model.weights.final_norm.float()
        self._layers: list[HybridLayer] = []
        kv_layer = 0
        for idx, weights in enumerate(model.weights.layers):
            self._layers.append(HybridLayer(config, weights, layer=idx, kv_layer=kv_layer))
            kv_layer += isinstance(weights.mixer, GatedAttentionWeights)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_index: torch.Tensor,
        step: StepState,
        hidden_request: HiddenRequest | None = None,
    ) -> GraphOutput:
        """One pass; see `edgellm.models.step.Graph`."""
        buffers = self._buffers
        buffers.resize(len(token_ids))
        stream, normed = buffers["stream"], buffers["normed"]
        torch.index_select(self._weights.embedding, 0, token_ids, out=stream)
        angles = self._angles(positions)
        wanted = HiddenRows(hidden_request, len(token_ids), self.config.hidden_size, stream.dtype)
        for idx, layer in enumerate(self._layers):
            wanted.enters(idx, stream)
            layer.run(stream, angles, step, buffers)
        wanted.enters(self.config.num_layers, stream)
        if wanted.wants_normed:
            rms_norm(stream, self._final_norm, self.config.rms_norm_eps, normed)
            wanted.normed(normed)
        return GraphOutput(self._logits(stream[logits_index]), wanted.rows)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = torch.empty((len(rows), self.config.vocab_size), dtype=torch.float32)
        if not len(rows):
            return logits
        rms_norm(rows, self._final_norm, self.config.rms_norm_eps, rows)
        return linear(rows, self._weights.lm_head, logits)


def hybrid_buffers(config: QwenHybridConfig, dtype: torch.dtype) -> RowBuffers:
    """What the layers of a hybrid work in."""
    widths = {
        "stream": config.hidden_size,
        "normed": config.hidden_size,
        "gate_up": 2 * config.intermediate_size,
        "activated": config.intermediate_size,
    }
    return RowBuffers(widths | GatedAttention.widths(config) | DeltaNet.widths(config.delta), dtype)


class HybridLayer:
    """One layer: a mixer over the sequence, then an MLP or experts.

    Args:
        layer: number in the model, which recurrent state goes by.
        kv_layer: number among the layers that own K and V.
    """

    def __init__(self, config: QwenHybridConfig, weights: HybridLayerWeights, *, layer: int, kv_layer: int) -> None:
        self._eps = config.rms_norm_eps
        self._mixer_norm = 1.0 + weights.mixer_norm.float()
        self._mlp_norm = 1.0 + weights.mlp_norm.float()
        self._attention: GatedAttention | None = None
        self._delta_net: DeltaNet | None = None
        if isinstance(weights.mixer, GatedAttentionWeights):
            self._attention = GatedAttention(config, weights.mixer, kv_layer)
        else:
            self._delta_net = DeltaNet(config, weights.mixer, layer)
        self._mlp: MlpWeights | None = None
        self._moe: MoeBlock | None = None
        if not isinstance(weights.mlp, MoeWeights):
            self._mlp = weights.mlp
        elif config.moe is not None:
            self._moe = MoeBlock(config.moe, weights.mlp)

    def run(self, stream: torch.Tensor, angles: torch.Tensor, step: StepState, buffers: RowBuffers) -> None:
        """Pass the residual stream through the layer.

        Args:
            stream: (T, D), updated in place.
            angles: (2, T, rotary_dim / 2) float32.
        """
        normed = buffers["normed"]
        rms_norm(stream, self._mixer_norm, self._eps, normed)
        if self._attention is not None:
            self._attention.add(normed, stream, angles, step, buffers)
        elif self._delta_net is not None:
            self._delta_net.add(normed, stream, step.recurrent, buffers)
        rms_norm(stream, self._mlp_norm, self._eps, normed)
        if self._moe is not None:
            self._moe.add(normed, stream)
        elif self._mlp is not None:
            activated = buffers["activated"]
            silu_mul(linear(normed, self._mlp.gate_up, buffers["gate_up"]), activated)
            linear(activated, self._mlp.down, stream, accumulate=True)
