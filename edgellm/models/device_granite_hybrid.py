"""The graph of Granite 4 on the device: Mamba-2 mixers and attention in turn, each followed by an MLP and experts.

Embeddings, branches, attention scores and logits are scaled by constants of the config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.models.device_layers import DeviceAngles, OutputHead
from edgellm.models.device_mamba2_mixer import DeviceMamba2Mixer
from edgellm.models.device_moe import RoutedExperts
from edgellm.models.device_step import HiddenTaps

if TYPE_CHECKING:
    import torch

    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import DeviceState, StepBuffers
    from edgellm.models.families.granite_hybrid import GraniteHybridConfig
    from edgellm.models.granite_hybrid import GraniteLayerWeights
    from edgellm.models.loader import LoadedModel
    from edgellm.models.step import HiddenRequest
    from edgellm.runtime.step_inputs import StepTensors


class DeviceGraniteHybridGraph:
    """Forward pass over rows; see `edgellm.models.device_step.DeviceFamilyGraph`.

    Args:
        model: weights on the device that `ops` compute on.
    """

    def __init__(self, model: LoadedModel, ops: DeviceOps) -> None:
        self.config: GraniteHybridConfig = model.config  # type: ignore[assignment]
        config, weights = self.config, model.weights
        self.row_widths = _row_widths(config)
        self.float_widths = _float_widths(config)
        self._ops = ops
        self._embedding = weights.embedding
        self._head = OutputHead(ops, weights.final_norm.float(), config.rms_norm_eps, weights.lm_head)
        self._angles: DeviceAngles | None = None
        if config.rotary:
            self._angles = DeviceAngles(ops, config.rope, config.head_dim, self._embedding.device)
        self._layers: list[_Layer] = []
        kv_layer = 0
        for idx, layer in enumerate(weights.layers):
            self._layers.append(_Layer(ops, config, layer, layer_number=idx, kv_layer=kv_layer))
            kv_layer += layer.attention is not None

    def workspace_bytes(self, *, tokens: int, rows: int) -> int:
        config = self.config
        if not config.num_experts:
            return 0
        return RoutedExperts.workspace_bytes(
            self._ops,
            self._embedding.dtype,
            tokens=tokens,
            num_experts=config.num_experts,
            count=config.experts_per_token,
            hidden_size=config.hidden_size,
            expert_size=config.intermediate_size,
        )

    def forward(
        self,
        step: StepTensors,
        buffers: StepBuffers,
        state: DeviceState,
        hidden: torch.Tensor | None = None,
        request: HiddenRequest | None = None,
    ) -> None:
        config, stream = self.config, buffers["hidden"]
        taps = HiddenTaps(request, hidden, config.hidden_size)
        self._ops.embedding(step.token_ids, self._embedding, stream)
        stream.mul_(config.embedding_multiplier)
        angles = None if self._angles is None else self._angles(step.positions, buffers["angles"])
        for idx, layer in enumerate(self._layers):
            taps.enters(idx, stream)
            layer.run(stream, angles, state, buffers)
        taps.enters(config.num_layers, stream)
        if self._head.run(step, stream, taps, buffers):
            buffers.logits.div_(config.logits_scaling)


class _Layer:
    """One layer: attention or a mixer, then an MLP, and experts where the model has any.

    Args:
        layer_number: in the model, which recurrent state goes by.
        kv_layer: number among the layers that own K and V.
    """

    def __init__(
        self,
        ops: DeviceOps,
        config: GraniteHybridConfig,
        weights: GraniteLayerWeights,
        *,
        layer_number: int,
        kv_layer: int,
    ) -> None:
        self._ops = ops
        self._config = config
        self._weights = weights
        self._kv_layer = kv_layer
        self._norm = weights.norm.float()
        self._mlp_norm = weights.mlp_norm.float()
        self._mixer: DeviceMamba2Mixer | None = None
        if weights.mixer is not None:
            self._mixer = DeviceMamba2Mixer(ops, config.mixer_shape(), weights.mixer, layer_number)
        self._experts: RoutedExperts | None = None
        if weights.experts is not None:
            experts = weights.experts
            self._experts = RoutedExperts(
                ops,
                experts.router,
                experts.gate_up,
                experts.down,
                count=config.experts_per_token,
                normalise=True,
            )

    def run(self, stream: torch.Tensor, angles: torch.Tensor | None, state: DeviceState, buffers: StepBuffers) -> None:
        """Pass the residual stream (T, D) through the layer; angles as `Attend` takes them."""
        ops, eps, factor = self._ops, self._config.rms_norm_eps, self._config.residual_multiplier
        normed, branch = buffers["normed"], buffers["branch"]
        ops.rms_norm(stream, self._norm, eps, normed)
        if self._mixer is not None:
            self._mixer.mix(normed, state, buffers, branch)
        else:
            self._attend(normed, angles, state, buffers, branch)
        stream.add_(branch, alpha=factor)
        ops.rms_norm(stream, self._mlp_norm, eps, normed)
        self._feed_forward(normed, buffers, branch)
        stream.add_(branch, alpha=factor)

    def _attend(
        self,
        rows: torch.Tensor,
        angles: torch.Tensor | None,
        state: DeviceState,
        buffers: StepBuffers,
        out: torch.Tensor,
    ) -> None:
        weights = self._weights.attention
        if weights is None:
            return
        self._ops.linear(rows, weights.qkv, buffers["qkv"], weights.qkv_bias)
        state.attend(self._kv_layer, buffers["qkv"], angles, buffers["attended"])
        self._ops.linear(buffers["attended"], weights.o, out, weights.o_bias)

    def _feed_forward(self, rows: torch.Tensor, buffers: StepBuffers, out: torch.Tensor) -> None:
        weights = self._weights
        self._ops.gated(rows, weights.gate_up, buffers["activated"], None, buffers["gate_up"])
        self._ops.linear(buffers["activated"], weights.down, out)
        if self._experts is not None:
            self._experts.route(rows, buffers)
            out.add_(self._experts.apply(rows, buffers))


def _row_widths(config: GraniteHybridConfig) -> dict[str, int]:
    widths = dict.fromkeys(("hidden", "normed", "branch"), config.hidden_size)
    widths |= {"gate_up": 2 * config.shared_size, "activated": config.shared_size}
    if config.num_kv_layers:
        widths |= {"qkv": config.q_size + 2 * config.kv_size, "attended": config.q_size}
    return widths if config.mixer is None else widths | DeviceMamba2Mixer.widths(config.mixer)


def _float_widths(config: GraniteHybridConfig) -> dict[str, int]:
    widths = {"angles": config.head_dim} if config.rotary else {}
    if config.mixer is not None:
        widths |= DeviceMamba2Mixer.float_widths(config.mixer)
    if config.num_experts:
        widths |= RoutedExperts.float_widths(config.num_experts, config.experts_per_token, config.hidden_size)
    return widths
