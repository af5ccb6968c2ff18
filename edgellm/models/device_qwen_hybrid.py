"""The graph of Qwen3-Next and Qwen3.5 text on the device: gated delta nets and gated attention, MLPs or experts.

Norms of the residual stream are zero-centred: the file holds the weight minus one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.models.device_delta_net import DeviceDeltaNet
from edgellm.models.device_layers import DeviceAngles, OutputHead
from edgellm.models.device_moe import DeviceMoe
from edgellm.models.device_step import HiddenTaps
from edgellm.models.moe import MoeWeights
from edgellm.models.qwen_hybrid_config import DELTA
from edgellm.models.qwen_hybrid_weights import GatedAttentionWeights, hybrid

if TYPE_CHECKING:
    import torch

    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import DeviceState, StepBuffers
    from edgellm.models.loader import LoadedModel
    from edgellm.models.moe import MlpWeights
    from edgellm.models.qwen_hybrid_config import QwenHybridConfig
    from edgellm.models.qwen_hybrid_weights import HybridLayerWeights
    from edgellm.models.step import HiddenRequest
    from edgellm.runtime.step_inputs import StepTensors


class DeviceQwenHybridGraph:
    """Forward pass over rows; see `edgellm.models.device_step.DeviceFamilyGraph`.

    Args:
        model: weights on the device that `ops` compute on.
    """

    def __init__(self, model: LoadedModel, ops: DeviceOps) -> None:
        self.config = config = hybrid(model.config)
        self.row_widths = hybrid_widths(config)
        self.float_widths = hybrid_float_widths(config)
        self._ops = ops
        self._embedding = model.weights.embedding
        final_norm = 1.0 + model.weights.final_norm.float()
        self._head = OutputHead(ops, final_norm, config.rms_norm_eps, model.weights.lm_head)
        self._angles = DeviceAngles(ops, config.rope, config.rotary_dim, self._embedding.device)
        self._layers: list[DeviceHybridLayer] = []
        kv_layer = 0
        for idx, weights in enumerate(model.weights.layers):
            self._layers.append(DeviceHybridLayer(ops, config, weights, layer=idx, kv_layer=kv_layer))
            kv_layer += isinstance(weights.mixer, GatedAttentionWeights)

    def workspace_bytes(self, *, tokens: int, rows: int) -> int:
        return hybrid_workspace(self._ops, self.config, self._embedding.dtype, tokens=tokens, rows=rows)

    def forward(
        self,
        step: StepTensors,
        buffers: StepBuffers,
        state: DeviceState,
        hidden: torch.Tensor | None = None,
        request: HiddenRequest | None = None,
    ) -> None:
        stream = buffers["hidden"]
        taps = HiddenTaps(request, hidden, self.config.hidden_size)
        self._ops.embedding(step.token_ids, self._embedding, stream)
        angles = self._angles(step.positions, buffers["angles"])
        for idx, layer in enumerate(self._layers):
            taps.enters(idx, stream)
            layer.run(stream, angles, state, buffers)
        taps.enters(self.config.num_layers, stream)
        self._head.run(step, stream, taps, buffers)


class DeviceHybridLayer:
    """One layer: a mixer over the sequence, then an MLP or experts.

    Args:
        layer: number in the model, which recurrent state goes by.
        kv_layer: number among the layers that own K and V.
    """

    def __init__(
        self, ops: DeviceOps, config: QwenHybridConfig, weights: HybridLayerWeights, *, layer: int, kv_layer: int
    ) -> None:
        self._ops = ops
        self._eps = config.rms_norm_eps
        self._mixer_norm = 1.0 + weights.mixer_norm.float()
        self._mlp_norm = 1.0 + weights.mlp_norm.float()
        self._attention: DeviceGatedAttention | None = None
        self._delta_net: DeviceDeltaNet | None = None
        if isinstance(weights.mixer, GatedAttentionWeights):
            self._attention = DeviceGatedAttention(ops, config, weights.mixer, kv_layer)
        else:
            self._delta_net = DeviceDeltaNet(ops, config, weights.mixer, layer)
        self._mlp: MlpWeights | None = None
        self._moe: DeviceMoe | None = None
        if not isinstance(weights.mlp, MoeWeights):
            self._mlp = weights.mlp
        elif config.moe is not None:
            self._moe = DeviceMoe(ops, config.moe, weights.mlp)

    def run(self, stream: torch.Tensor, angles: torch.Tensor, state: DeviceState, buffers: StepBuffers) -> None:
        """Pass the residual stream through the layer.

        Args:
            stream: (T, D), updated in place.
            angles: (2, T, rotary_dim / 2) float32.
        """
        ops, normed = self._ops, buffers["normed"]
        ops.rms_norm(stream, self._mixer_norm, self._eps, normed)
        if self._attention is not None:
            self._attention.add(normed, stream, angles, state, buffers)
        elif self._delta_net is not None:
            self._delta_net.add(normed, stream, state, buffers)
        ops.rms_norm(stream, self._mlp_norm, self._eps, normed)
        if self._moe is not None:
            self._moe.add(normed, stream, buffers)
        elif self._mlp is not None:
            ops.gated(normed, self._mlp.gate_up, buffers["activated"], None, buffers["gate_up"])
            ops.linear(buffers["activated"], self._mlp.down, stream, residual=stream)


class DeviceGatedAttention:
    """Attention whose output is scaled by a sigmoid gate."""

    def __init__(self, ops: DeviceOps, config: QwenHybridConfig, weights: GatedAttentionWeights, kv_layer: int) -> None:
        self._ops = ops
        self._kv_layer = kv_layer
        self._q_size = config.q_size
        self._weights = weights
        self._query_norm = 1.0 + weights.q_norm.float()
        self._key_norm = 1.0 + weights.k_norm.float()

    @staticmethod
    def widths(config: QwenHybridConfig) -> dict[str, int]:
        """Row buffers it needs."""
        return {"gate_qkv": 2 * config.q_size + 2 * config.kv_size, "attended": config.q_size}

    def add(
        self,
        rows: torch.Tensor,
        stream: torch.Tensor,
        angles: torch.Tensor,
        state: DeviceState,
        buffers: StepBuffers,
    ) -> None:
        """stream += what attention makes of rows, both (T, D)."""
        ops, weights, attended = self._ops, self._weights, buffers["attended"]
        fused = buffers["gate_qkv"]
        ops.linear(rows, weights.gate_qkv, fused, weights.gate_qkv_bias)
        gate, qkv = fused[:, : self._q_size], fused[:, self._q_size :]
        state.attend(self._kv_layer, qkv, angles, attended, query_norm=self._query_norm, key_norm=self._key_norm)
        ops.gate_(attended, gate)
        ops.linear(attended, weights.o, stream, weights.o_bias, residual=stream)


def hybrid_widths(config: QwenHybridConfig) -> dict[str, int]:
    """The row buffers of the model's type that the layers of a hybrid work in."""
    widths = {
        "hidden": config.hidden_size,
        "normed": config.hidden_size,
        "gate_up": 2 * config.intermediate_size,
        "activated": config.intermediate_size,
    }
    widths |= DeviceGatedAttention.widths(config) | DeviceDeltaNet.widths(config.delta)
    return widths if config.moe is None else widths | DeviceMoe.widths(config.moe)


def hybrid_float_widths(config: QwenHybridConfig) -> dict[str, int]:
    """The float32 ones."""
    widths = {"angles": config.rotary_dim} | DeviceDeltaNet.float_widths(config.delta)
    return widths if config.moe is None else widths | DeviceMoe.float_widths(config.moe, config.hidden_size)


def hybrid_workspace(ops: DeviceOps, config: QwenHybridConfig, dtype: torch.dtype, *, tokens: int, rows: int) -> int:
    """Bytes that operators of the layers want beside the buffers; see `DeviceFamilyGraph.workspace_bytes`."""
    needed = 0
    if DELTA in config.layer_kinds:
        needed = DeviceDeltaNet.workspace_bytes(ops, config.delta, dtype, tokens=tokens, rows=rows)
    if config.moe is not None:
        needed = max(needed, DeviceMoe.workspace_bytes(ops, config.moe, config.hidden_size, dtype, tokens=tokens))
    return needed
