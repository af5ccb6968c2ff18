"""The decoder-only graph of Llama, Qwen2 and Qwen3 over a table of operators; what differs are flags of the config.

Rows of all sequences of a step stand in one (T, hidden) matrix.  A pass reads its inputs from device tensors, works
in buffers that were allocated before, and never waits: the same calls run eagerly or inside a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from edgellm.models.rope import inverse_frequencies

if TYPE_CHECKING:
    from edgellm.models.config import ModelConfig
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.loader import LoadedModel
    from edgellm.models.weights import LayerWeights
    from edgellm.runtime.step_inputs import StepTensors


class Attend(Protocol):
    def __call__(self, layer: int, qkv: torch.Tensor, angles: torch.Tensor, out: torch.Tensor) -> None:
        """Norm and rotate Q and K, write K and V of the rows to their pages, then attend.

        Args:
            qkv: (T, q_size + 2 * kv_size); Q is rotated in place.
            angles: (2, T, head_dim / 2) float32.
            out: (T, q_size), to be filled.
        """
        ...


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """(head_dim,) float32 norm weights of a layer's query and key heads; None where the model has none."""

    query: torch.Tensor | None
    key: torch.Tensor | None


@dataclass(slots=True)
class StepBuffers:
    """Row buffers of one pass: views into `GraphScratch`, (T, width) of the model's dtype unless said otherwise.

    Attributes:
        angles: (2, T, head_dim / 2) float32.
        selected, selected_normed: (L, hidden).
        logits: (L, vocab_size) float32.
    """

    hidden: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    gate_up: torch.Tensor
    activated: torch.Tensor
    angles: torch.Tensor
    selected: torch.Tensor
    selected_normed: torch.Tensor
    logits: torch.Tensor


class GraphScratch:
    """Memory of the row buffers, allocated for the largest step so far."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._tokens = 0
        self._logits = 0
        self._rows: list[torch.Tensor] = []
        self._angles = torch.empty(0)
        self._selected: list[torch.Tensor] = []
        self._logit_rows = torch.empty(0)

    @staticmethod
    def bytes_for(config: ModelConfig, dtype: torch.dtype, *, tokens: int, logits: int) -> int:
        """Bytes that steps of `tokens` tokens and `logits` logits rows take."""
        token_bytes = sum(_row_widths(config)) * dtype.itemsize + config.head_dim * 4
        logit_bytes = 2 * config.hidden_size * dtype.itemsize + config.vocab_size * 4
        return tokens * token_bytes + logits * logit_bytes

    def reserve(self, *, tokens: int, logits: int) -> bool:
        """Make room; True when buffers moved, so that captured graphs are void."""
        if tokens <= self._tokens and logits <= self._logits:
            return False
        # Old buffers go first: both together may not fit.
        if tokens > self._tokens:
            self._rows, self._angles, self._tokens = [], torch.empty(0), 0
            self._rows = [self._new(tokens, width) for width in _row_widths(self._config)]
            self._angles = torch.empty(tokens * self._config.head_dim, dtype=torch.float32, device=self._device)
            self._tokens = tokens
        if logits > self._logits:
            self._selected, self._logit_rows, self._logits = [], torch.empty(0), 0
            self._selected = [self._new(logits, self._config.hidden_size) for _ in range(2)]
            shape = (logits, self._config.vocab_size)
            self._logit_rows = torch.empty(shape, dtype=torch.float32, device=self._device)
            self._logits = logits
        return True

    def buffers(self, *, tokens: int, logits: int) -> StepBuffers:
        """Views for a step of these sizes; the same memory every time."""
        half = self._config.head_dim // 2
        hidden, normed, qkv, attended, gate_up, activated = (rows[:tokens] for rows in self._rows)
        selected, selected_normed = (rows[:logits] for rows in self._selected)
        angles = self._angles[: 2 * tokens * half].view(2, tokens, half)
        return StepBuffers(
            hidden=hidden,
            normed=normed,
            qkv=qkv,
            attended=attended,
            gate_up=gate_up,
            activated=activated,
            angles=angles,
            selected=selected,
            selected_normed=selected_normed,
            logits=self._logit_rows[:logits],
        )

    def _new(self, rows: int, width: int) -> torch.Tensor:
        return torch.empty((rows, width), dtype=self._dtype, device=self._device)


class DeviceGraph:
    """Forward pass over rows.  Holds weights, no scratch; pure launches.

    Args:
        model: weights on the device that `ops` compute on.
    """

    def __init__(self, model: LoadedModel, ops: DeviceOps) -> None:
        self.config = model.config
        self._ops = ops
        self._weights = model.weights
        self._attn_norms = [layer.attn_norm.float() for layer in model.weights.layers]
        self._mlp_norms = [layer.mlp_norm.float() for layer in model.weights.layers]
        self._final_norm = model.weights.final_norm.float()
        self.head_norms = [_head_norms(layer) for layer in model.weights.layers]
        inv_freq, self._rope_scale = inverse_frequencies(model.config.rope, model.config.head_dim)
        self._inv_freq = inv_freq.to(model.weights.embedding.device)

    def forward(self, step: StepTensors, buffers: StepBuffers, attend: Attend) -> None:
        """One pass; fills `buffers.logits`.  Padding tokens compute rows that nobody reads."""
        ops, eps = self._ops, self.config.rms_norm_eps
        hidden, normed = buffers.hidden, buffers.normed
        ops.embedding(step.token_ids, self._weights.embedding, hidden)
        ops.rotary_angles(step.positions, self._inv_freq, self._rope_scale, buffers.angles)
        for idx, layer in enumerate(self._weights.layers):
            ops.rms_norm(hidden, self._attn_norms[idx], eps, normed)
            ops.linear(normed, layer.qkv, buffers.qkv, layer.qkv_bias)
            attend(idx, buffers.qkv, buffers.angles, buffers.attended)
            ops.linear(buffers.attended, layer.o, hidden, layer.o_bias, residual=hidden)
            ops.rms_norm(hidden, self._mlp_norms[idx], eps, normed)
            ops.gated(normed, layer.gate_up, buffers.activated, layer.gate_up_bias, buffers.gate_up)
            ops.linear(buffers.activated, layer.down, hidden, layer.down_bias, residual=hidden)
        self._logits(step, buffers)

    def _logits(self, step: StepTensors, buffers: StepBuffers) -> None:
        if not len(step.logits_index):
            return
        torch.index_select(buffers.hidden, 0, step.logits_index, out=buffers.selected)
        self._ops.rms_norm(buffers.selected, self._final_norm, self.config.rms_norm_eps, buffers.selected_normed)
        self._ops.linear(buffers.selected_normed, self._weights.lm_head, buffers.logits)


def _row_widths(config: ModelConfig) -> tuple[int, ...]:
    """hidden, normed, qkv, attended, gate_up, activated."""
    return (
        config.hidden_size,
        config.hidden_size,
        config.q_size + 2 * config.kv_size,
        config.q_size,
        2 * config.intermediate_size,
        config.intermediate_size,
    )


def _head_norms(layer: LayerWeights) -> HeadNorms:
    return HeadNorms(
        query=None if layer.q_norm is None else layer.q_norm.float(),
        key=None if layer.k_norm is None else layer.k_norm.float(),
    )
