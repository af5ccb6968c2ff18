"""`Eagle3Head`: the draft model of EAGLE-3 on CPU rows, over pages of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.decoding.paged_draft import draft_batch
from edgellm.kernels.cpu.elementwise import rms_norm, rope_, silu_mul
from edgellm.kernels.cpu.linear import linear
from edgellm.models.rope import RotaryAngles
from edgellm.runtime.attention_cpu import AttentionStep

if TYPE_CHECKING:
    from edgellm.decoding.paged_draft import DraftRows
    from edgellm.models.config import ModelConfig
    from edgellm.runtime.kv_cache import KVCache
    from edgellm_eagle.checkpoint import HeadWeights


class Eagle3Head:
    """One decoder layer.  Borrows its pages and the target's embedding.

    Args:
        config: the head's own, of one layer.
        kv_cache: pages of that shape.
    """

    def __init__(self, config: ModelConfig, weights: HeadWeights, kv_cache: KVCache) -> None:
        self._config = config
        self._weights = weights
        self._kv_cache = kv_cache
        self._angles = RotaryAngles(config.rope, config.head_dim)

    @torch.inference_mode()
    def forward(self, rows: DraftRows) -> tuple[list[int], torch.Tensor]:
        """See `DraftModel.forward`."""
        batch = draft_batch(rows)
        weights, config = self._weights, self._config
        hidden = rows.hidden if rows.projected else _product(rows.hidden, weights.fc)
        embedded = weights.embedding[torch.from_numpy(rows.token_ids).long()]
        normed = torch.cat((self._norm(embedded, weights.input_norm), self._norm(hidden, weights.hidden_norm)), dim=1)
        qkv = _product(normed, weights.qkv)
        rope_(
            qkv,
            self._angles(torch.from_numpy(batch.positions)),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        attended = hidden.new_empty((len(hidden), config.q_size))
        AttentionStep(batch, config, self._kv_cache, hidden.dtype).attend(0, qkv, attended)
        ends = torch.from_numpy(batch.logits_index)
        hidden = hidden[ends] + _product(attended[ends], weights.o)  # nobody reads what the other rows come to
        hidden = hidden + self._mlp(self._norm(hidden, weights.mlp_norm))
        logits = _product(self._norm(hidden, weights.final_norm), weights.lm_head)
        return weights.to_target[logits.argmax(dim=1)].tolist(), hidden

    def _mlp(self, normed: torch.Tensor) -> torch.Tensor:
        gate_up = _product(normed, self._weights.gate_up)
        activated = normed.new_empty((len(normed), self._config.intermediate_size))
        silu_mul(gate_up, activated)
        return _product(activated, self._weights.down)

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(rows)
        rms_norm(rows, weight, self._config.rms_norm_eps, out)
        return out


def _product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(rows, weight, rows.new_empty((len(rows), len(weight))))
