"""`AssistantHead`: the assistant as a function of rows, written once for every device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from edgellm.decoding.draft_ops import DraftOps
    from edgellm_shared_kv.assistant_model import (
        AssistantConfig,
        AssistantLayer,
        AssistantLayerWeights,
        AssistantWeights,
    )


class Prefix(Protocol):
    """What the rows of a round see of the base, in every step."""

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, query_norm: torch.Tensor | None) -> None:
        """Norm and rotate the query heads of an assistant's layer, and attend to its donor.

        Args:
            query: (R, num_heads * head_dim); rotated in place.
            out: of the same shape, to be filled.
            query_norm: (head_dim,) float32, or None.
        """
        ...


class AssistantHead:
    """Has no state of its own: a row is a token, a hidden row, and the base's prefix in front of them.

    Borrows the base's embedding.

    Args:
        ops: of the device that the weights are on.
    """

    def __init__(self, config: AssistantConfig, weights: AssistantWeights, ops: DraftOps) -> None:
        self.config = config
        self._weights = weights
        self._ops = ops
        self._rotary = {_turning(layer): ops.rotary(layer.rope, layer.head_dim) for layer in config.layers}

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.pre_projection.dtype

    @property
    def width(self) -> int:
        """Elements of a hidden row, the base's and its own alike."""
        return len(self._weights.post_projection)

    def angles(self, positions: torch.Tensor) -> list[torch.Tensor]:
        """(2, R, rotating elements / 2) of (R,) int32 positions, for each layer."""
        made = {key: rotary(positions) for key, rotary in self._rotary.items()}
        return [made[_turning(layer)] for layer in self.config.layers]

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, prefix: Prefix
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of a round.  Reads nothing back from the device.

        Args:
            token_ids: (R,) int32, the latest token of each row, of the base's vocabulary.
            hidden: (R, base's hidden size) the base's hidden row in front of it, or what the step before returned.
        Returns:
            (R,) int64 the likeliest next tokens; (R, base's hidden size) hidden rows for the next step.
        """
        ops, weights = self._ops, self._weights
        embedded = ops.embed(token_ids, weights.embedding)
        if self.config.embedding_scale != 1.0:
            embedded = embedded * self.config.embedding_scale
        rows = ops.linear(torch.cat((embedded, hidden), dim=1), weights.pre_projection)
        for idx, layer in enumerate(weights.layers):
            rows = self._run_layer(idx, layer, rows, prefix)
        normed = self._norm(rows, weights.final_norm)
        return weights.head.choose(normed, ops), ops.linear(normed, weights.post_projection)

    def _run_layer(self, idx: int, layer: AssistantLayerWeights, rows: torch.Tensor, prefix: Prefix) -> torch.Tensor:
        ops = self._ops
        query = ops.linear(self._norm(rows, layer.attn_norm), layer.q)
        attended = torch.empty_like(query)
        prefix.attend(idx, query, attended, layer.q_norm)
        rows = self._added(rows, attended, layer.o, layer.attn_out_norm)
        activated = ops.gated(self._norm(rows, layer.mlp_norm), layer.gate_up, self.config.activation)
        rows = self._added(rows, activated, layer.down, layer.mlp_out_norm)
        return rows if layer.scale == 1.0 else rows * layer.scale

    def _added(
        self, rows: torch.Tensor, inner: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor | None
    ) -> torch.Tensor:
        """rows and the product of `inner`, which has a norm behind it in some models."""
        if norm is None:
            return self._ops.linear(inner, weight, residual=rows)
        return rows + self._norm(self._ops.linear(inner, weight), norm)

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(rows, weight, self.config.rms_norm_eps)


def _turning(layer: AssistantLayer) -> tuple[object, int]:
    return layer.rope, layer.head_dim
