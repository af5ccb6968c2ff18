"""The graph of Granite 4 on CPU rows: Mamba-2 mixers and attention in turn, each followed by an MLP and experts.

Embeddings, branches, attention scores and logits are scaled by constants of the config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from edgellm.kernels.cpu.elementwise import rms_norm, rope_, silu_mul
from edgellm.kernels.cpu.linear import linear
from edgellm.models.mamba2_mixer import Mamba2Mixer
from edgellm.models.moe import add_experts, choose_experts
from edgellm.models.rope import RotaryAngles
from edgellm.models.row_buffers import RowBuffers
from edgellm.models.step import GraphOutput, HiddenRows

if TYPE_CHECKING:
    from edgellm.models.families.granite_hybrid import GraniteHybridConfig
    from edgellm.models.loader import LoadedModel
    from edgellm.models.mamba2_mixer import MixerWeights
    from edgellm.models.step import HiddenRequest, StepState


@dataclass(slots=True)
class AttentionWeights:
    """D hidden, Q = heads * head_dim, K = kv heads * head_dim.

    Attributes:
        qkv: (Q + 2K, D), rows q, k, v.  qkv_bias: (Q + 2K,) or None.
        o: (D, Q).  o_bias: (D,) or None.
    """

    qkv: torch.Tensor
    o: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None


@dataclass(slots=True)
class ExpertWeights:
    """E experts, D hidden, F inner size of an expert.

    Attributes:
        router: (E, D).
        gate_up: (E, 2F, D), rows gate, up.
        down: (E, D, F).
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(slots=True)
class GraniteLayerWeights:
    """One layer; S inner size of the MLP that every token passes.

    Attributes:
        norm, mlp_norm: (D,).
        gate_up: (2S, D), rows gate, up.
        down: (D, S).
        mixer, attention: one of them.
        experts: None in models without.
    """

    norm: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    mixer: MixerWeights | None = None
    attention: AttentionWeights | None = None
    experts: ExpertWeights | None = None


class GraniteHybridGraph:
    """Forward pass over rows.  Owns its scratch, so one pass at a time."""

    def __init__(self, model: LoadedModel) -> None:
        self.config: GraniteHybridConfig = model.config  # type: ignore[assignment]
        self._weights = model.weights
        self._final_norm = model.weights.final_norm.float()
        self._angles = RotaryAngles(self.config.rope, self.config.head_dim) if self.config.rotary else None
        self._layers = _make_layers(self.config, model.weights.layers)
        self._buffers = RowBuffers(_buffer_widths(self.config), model.weights.dtype)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_index: torch.Tensor,
        step: StepState,
        hidden_request: HiddenRequest | None = None,
    ) -> GraphOutput:
        """One pass; see `edgellm.models.step.Graph`."""
        config = self.config
        self._buffers.resize(len(token_ids))
        hidden, normed = self._buffers["hidden"], self._buffers["normed"]
        torch.index_select(self._weights.embedding, 0, token_ids, out=hidden)
        hidden.mul_(config.embedding_multiplier)
        angles = None if self._angles is None else self._angles(positions)
        wanted = HiddenRows(hidden_request, len(token_ids), config.hidden_size, hidden.dtype)
        for idx, layer in enumerate(self._layers):
            wanted.enters(idx, hidden)
            rms_norm(hidden, layer.norm, config.rms_norm_eps, normed)
            hidden.add_(layer.mix(normed, angles, step, self._buffers), alpha=config.residual_multiplier)
            rms_norm(hidden, layer.mlp_norm, config.rms_norm_eps, normed)
            hidden.add_(layer.mlp(normed, self._buffers), alpha=config.residual_multiplier)
        wanted.enters(config.num_layers, hidden)
        if wanted.wants_normed:
            rms_norm(hidden, self._final_norm, config.rms_norm_eps, normed)
            wanted.normed(normed)
        return GraphOutput(self._logits(hidden[logits_index]), wanted.rows)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = torch.empty((len(rows), self.config.vocab_size), dtype=torch.float32)
        if not len(rows):
            return logits
        rms_norm(rows, self._final_norm, self.config.rms_norm_eps, rows)
        return linear(rows, self._weights.lm_head, logits).div_(self.config.logits_scaling)


class _Attention:
    """Attention of one layer, with or without rotated positions."""

    def __init__(self, config: GraniteHybridConfig, weights: AttentionWeights, kv_layer: int) -> None:
        self._config = config
        self._weights = weights
        self._kv_layer = kv_layer

    def __call__(
        self, normed: torch.Tensor, angles: torch.Tensor | None, step: StepState, buffers: RowBuffers
    ) -> torch.Tensor:
        config, weights = self._config, self._weights
        qkv = linear(normed, weights.qkv, buffers["qkv"], bias=weights.qkv_bias)
        if angles is not None:
            rope_(qkv, angles, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
        attended = buffers["attended"]
        step.attend(self._kv_layer, qkv, attended)
        return linear(attended, weights.o, buffers["branch"], bias=weights.o_bias)


class _Mixer:
    """The Mamba-2 mixer of one layer."""

    def __init__(self, config: GraniteHybridConfig, weights: MixerWeights, layer: int) -> None:
        self._mixer = Mamba2Mixer(config.mixer_shape(), weights, layer)

    def __call__(
        self, normed: torch.Tensor, angles: torch.Tensor | None, step: StepState, buffers: RowBuffers
    ) -> torch.Tensor:
        return self._mixer.project(self._mixer.forward(normed, step.recurrent, buffers), buffers["branch"])


class _Layer:
    """One decoder layer, bound to its weights."""

    def __init__(self, config: GraniteHybridConfig, weights: GraniteLayerWeights, mix: _Attention | _Mixer) -> None:
        self.mix = mix
        self.norm = weights.norm.float()
        self.mlp_norm = weights.mlp_norm.float()
        self._config = config
        self._weights = weights

    def mlp(self, normed: torch.Tensor, buffers: RowBuffers) -> torch.Tensor:
        """(T, hidden_size): the MLP of every token, and its experts where the model has any."""
        weights = self._weights
        activated = buffers["activated"]
        silu_mul(linear(normed, weights.gate_up, buffers["gate_up"]), activated)
        branch = linear(activated, weights.down, buffers["branch"])
        if weights.experts is not None:
            branch.add_(self._experts(normed, weights.experts))
        return branch

    def _experts(self, normed: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
        """(T, hidden_size) float32: the softmax over a token's best experts weights what they make of it."""
        scores = torch.empty((len(normed), self._config.num_experts), dtype=torch.float32)
        shares, experts = choose_experts(
            linear(normed, weights.router, scores), self._config.experts_per_token, normalise=True
        )
        total = torch.zeros(normed.shape, dtype=torch.float32)
        add_experts(normed, shares, experts, weights.gate_up, weights.down, total)
        return total


def _make_layers(config: GraniteHybridConfig, layers: list[GraniteLayerWeights]) -> list[_Layer]:
    made: list[_Layer] = []
    kv_layer = 0
    for idx, weights in enumerate(layers):
        mix: _Attention | _Mixer
        if weights.attention is not None:
            mix = _Attention(config, weights.attention, kv_layer)
            kv_layer += 1
        elif weights.mixer is not None:
            mix = _Mixer(config, weights.mixer, idx)
        made.append(_Layer(config, weights, mix))
    return made


def _buffer_widths(config: GraniteHybridConfig) -> dict[str, int]:
    widths = dict.fromkeys(("hidden", "normed", "branch"), config.hidden_size)
    widths |= {"gate_up": 2 * config.shared_size, "activated": config.shared_size}
    if config.num_kv_layers:
        widths |= {"qkv": config.q_size + 2 * config.kv_size, "attended": config.q_size}
    return widths if config.mixer is None else widths | config.mixer.buffer_widths()
