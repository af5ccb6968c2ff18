"""The decoder-only graph of Llama, Qwen2 and Qwen3 on CPU rows; what differs between them are flags of the config.

Rows of all sequences of a step stand in one (T, hidden) matrix.  Attention is the step's: the graph hands it the
rotated Q, K, V rows of a layer and gets the attended rows back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from edgellm.kernels.cpu.elementwise import rms_norm, rope_, silu_mul
from edgellm.kernels.cpu.linear import linear
from edgellm.models.rope import RotaryAngles
from edgellm.models.step import GraphOutput, HiddenRows

if TYPE_CHECKING:
    from edgellm.models.config import ModelConfig
    from edgellm.models.loader import LoadedModel
    from edgellm.models.step import HiddenRequest, StepState
    from edgellm.models.weights import LayerWeights

_ROW_STEP = 64


@dataclass(slots=True)
class _Norms:
    """Norm weights of a layer in float32, as the kernels take them."""

    attn: torch.Tensor
    mlp: torch.Tensor
    query: torch.Tensor | None
    key: torch.Tensor | None


class _Scratch:
    """Row buffers of one forward pass, grown to the largest step seen and reused."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._widths = (
            config.hidden_size,
            config.hidden_size,
            config.q_size + 2 * config.kv_size,
            config.q_size,
            2 * config.intermediate_size,
            config.intermediate_size,
        )
        self._dtype = dtype
        self._buffers: list[torch.Tensor] = []
        self._capacity = 0

    def rows(self, num_tokens: int) -> list[torch.Tensor]:
        """hidden, normed, qkv, attended, gate_up, activated: each (num_tokens, its width)."""
        if num_tokens > self._capacity:
            self._capacity = -(-num_tokens // _ROW_STEP) * _ROW_STEP
            self._buffers = [torch.empty((self._capacity, width), dtype=self._dtype) for width in self._widths]
        return [buffer[:num_tokens] for buffer in self._buffers]


class LlamaGraph:
    """Forward pass over rows.  Owns its scratch, so one pass at a time."""

    def __init__(self, model: LoadedModel) -> None:
        self.config = model.config
        self._weights = model.weights
        self._norms = [_norms(layer) for layer in model.weights.layers]
        self._final_norm = model.weights.final_norm.float()
        self._angles = RotaryAngles(model.config.rope, model.config.head_dim)
        self._scratch = _Scratch(model.config, model.weights.dtype)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_index: torch.Tensor,
        step: StepState,
        hidden_request: HiddenRequest | None = None,
    ) -> GraphOutput:
        """One pass; see `edgellm.models.step.Graph`."""
        hidden, normed, qkv, attended, gate_up, activated = self._scratch.rows(len(token_ids))
        torch.index_select(self._weights.embedding, 0, token_ids, out=hidden)
        angles = self._angles(positions)
        wanted = HiddenRows(hidden_request, len(token_ids), self.config.hidden_size, hidden.dtype)
        for idx, (layer, norms) in enumerate(zip(self._weights.layers, self._norms, strict=True)):
            wanted.enters(idx, hidden)
            rms_norm(hidden, norms.attn, self.config.rms_norm_eps, normed)
            rotated = linear(normed, layer.qkv, qkv, bias=layer.qkv_bias)
            self._rotate(rotated, angles, norms)
            step.attend(idx, rotated, attended)
            linear(attended, layer.o, hidden, bias=layer.o_bias, accumulate=True)
            rms_norm(hidden, norms.mlp, self.config.rms_norm_eps, normed)
            silu_mul(linear(normed, layer.gate_up, gate_up, bias=layer.gate_up_bias), activated)
            linear(activated, layer.down, hidden, bias=layer.down_bias, accumulate=True)
        wanted.enters(self.config.num_layers, hidden)
        if wanted.wants_normed:
            rms_norm(hidden, self._final_norm, self.config.rms_norm_eps, normed)
            wanted.normed(normed)
        return GraphOutput(self._logits(hidden[logits_index]), wanted.rows)

    def _rotate(self, qkv: torch.Tensor, angles: torch.Tensor, norms: _Norms) -> None:
        rope_(
            qkv,
            angles,
            num_heads=self.config.num_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            query_norm=norms.query,
            key_norm=norms.key,
            eps=self.config.rms_norm_eps,
        )

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = torch.empty((len(rows), self.config.vocab_size), dtype=torch.float32)
        if not len(rows):
            return logits
        rms_norm(rows, self._final_norm, self.config.rms_norm_eps, rows)
        return linear(rows, self._weights.lm_head, logits)


def _norms(layer: LayerWeights) -> _Norms:
    return _Norms(
        attn=layer.attn_norm.float(),
        mlp=layer.mlp_norm.float(),
        query=None if layer.q_norm is None else layer.q_norm.float(),
        key=None if layer.k_norm is None else layer.k_norm.float(),
    )
