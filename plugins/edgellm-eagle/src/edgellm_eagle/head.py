"""`Eagle3Head`: the draft model of EAGLE-3 as a function of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from edgellm.decoding.draft_model import DraftStep
    from edgellm.decoding.draft_ops import DraftOps
    from edgellm.models.config import ModelConfig
    from edgellm_eagle.checkpoint import HeadWeights


class Eagle3Head:
    """One decoder layer; see `DraftHead`.  Borrows the target's embedding.

    Args:
        config: the head's own, of one layer.
        ops: of the device that the weights are on.
    """

    def __init__(self, config: ModelConfig, weights: HeadWeights, ops: DraftOps) -> None:
        self.config = config
        self.dtype = weights.embedding.dtype
        self.hidden_width = weights.fc.shape[1]
        self.width = config.hidden_size
        self.num_tokens = len(weights.lm_head)
        self._weights = weights
        self._ops = ops
        self._angles = ops.rotary(config.rope, config.head_dim)

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        step: DraftStep,
        ends: torch.Tensor | None,
        *,
        projected: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftHead.forward`."""
        rows, logits = self._run(token_ids, hidden, step, ends, projected=projected)
        return self._weights.to_target.index_select(0, logits.argmax(dim=1)), rows

    def rank(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        step: DraftStep,
        ends: torch.Tensor | None,
        *,
        projected: bool,
        top_k: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `RankingHead.rank`."""
        rows, logits = self._run(token_ids, hidden, step, ends, projected=projected)
        log_probs, places = logits.float().log_softmax(dim=1).topk(min(top_k, logits.shape[1]), dim=1)
        return self._weights.to_target[places], log_probs, rows

    def _run(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        step: DraftStep,
        ends: torch.Tensor | None,
        *,
        projected: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden rows (N, width) and logits (N, draft vocabulary) of `ends`."""
        ops, weights = self._ops, self._weights
        rows = hidden if projected else ops.linear(hidden, weights.fc)
        embedded = self._norm(ops.embed(token_ids, weights.embedding), weights.input_norm)
        qkv = ops.linear(torch.cat((embedded, self._norm(rows, weights.hidden_norm)), dim=1), weights.qkv)
        attended = rows.new_empty((len(rows), self.config.q_size))
        step.attend(0, qkv, self._angles(step.positions), attended)
        if ends is not None:  # nobody reads what the other rows come to
            rows, attended = rows.index_select(0, ends), attended.index_select(0, ends)
        rows = ops.linear(attended, weights.o, residual=rows)
        activated = ops.gated(self._norm(rows, weights.mlp_norm), weights.gate_up)
        rows = ops.linear(activated, weights.down, residual=rows)
        return rows, ops.linear(self._norm(rows, weights.final_norm), weights.lm_head)

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(rows, weight, self.config.rms_norm_eps)
