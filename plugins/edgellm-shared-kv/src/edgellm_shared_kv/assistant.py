"""`SharedKvAssistant`: the assistant's forward pass on CPU rows, over pages of the base model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.kernels.cpu.elementwise import gelu_mul, rms_norm, rope_, silu_mul
from edgellm.models.rope import RotaryAngles
from edgellm_shared_kv.base_prefix import BasePrefix
from edgellm_shared_kv.proposal_head import product

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from edgellm.runtime.kv_cache import KVCache
    from edgellm_shared_kv.assistant_model import (
        AssistantConfig,
        AssistantLayer,
        AssistantLayerWeights,
        AssistantWeights,
    )

    Int32Array = npt.NDArray[np.int32]


class SharedKvAssistant:
    """Has no state of its own: a row is a token, a hidden row, and the base's prefix in front of them.

    Borrows the base's embedding.
    """

    def __init__(self, config: AssistantConfig, weights: AssistantWeights) -> None:
        self._config = config
        self._weights = weights
        self._rotary = {
            (layer.rope, layer.head_dim): RotaryAngles(layer.rope, layer.head_dim) for layer in config.layers
        }

    def prefix(self, kv_cache: KVCache, *, slots: Int32Array, lengths: Int32Array, page_rows: Int32Array) -> BasePrefix:
        """What (R,) sequences have committed; see `BasePrefix`."""
        positions = torch.from_numpy(lengths)
        angles = {key: rotary(positions) for key, rotary in self._rotary.items()}
        return BasePrefix(
            self._config,
            kv_cache,
            slots=slots,
            lengths=lengths,
            page_rows=page_rows,
            query_dtype=self._weights.pre_projection.dtype,
            angles=[angles[layer.rope, layer.head_dim] for layer in self._config.layers],
        )

    @torch.inference_mode()
    def forward(
        self, token_ids: Sequence[int], hidden: torch.Tensor, prefix: BasePrefix
    ) -> tuple[list[int], torch.Tensor]:
        """One step of a round.

        Args:
            token_ids: (R,) the latest token of each row, of the base's vocabulary.
            hidden: (R, base's hidden size) the base's hidden row in front of it, or what the step before returned.
        Returns:
            (R,) the likeliest next tokens; (R, base's hidden size) hidden rows for the next step.
        """
        weights = self._weights
        embedded = weights.embedding[torch.tensor(token_ids)] * self._config.embedding_scale
        rows = product(torch.cat((embedded, hidden), dim=1), weights.pre_projection)
        for idx, layer in enumerate(weights.layers):
            rows = self._run_layer(idx, layer, rows, prefix)
        normed = self._norm(rows, weights.final_norm)
        return weights.head.choose(normed), product(normed, weights.post_projection)

    def _run_layer(
        self, idx: int, layer: AssistantLayerWeights, rows: torch.Tensor, prefix: BasePrefix
    ) -> torch.Tensor:
        query = product(self._norm(rows, layer.attn_norm), layer.q)
        self._rotate(self._config.layers[idx], layer, query, prefix.angles[idx])
        attended = torch.empty_like(query)
        prefix.attend(idx, query, attended)
        rows = rows + self._out(product(attended, layer.o), layer.attn_out_norm)
        rows = rows + self._out(self._mlp(layer, self._norm(rows, layer.mlp_norm)), layer.mlp_out_norm)
        return rows if layer.scale == 1.0 else rows * layer.scale

    def _rotate(
        self, shape: AssistantLayer, layer: AssistantLayerWeights, query: torch.Tensor, angles: torch.Tensor
    ) -> None:
        rope_(
            query,
            angles,
            num_heads=self._config.num_heads,
            num_kv_heads=0,
            head_dim=shape.head_dim,
            query_norm=layer.q_norm,
            eps=self._config.rms_norm_eps,
        )

    def _mlp(self, layer: AssistantLayerWeights, normed: torch.Tensor) -> torch.Tensor:
        gate_up = product(normed, layer.gate_up)
        inner = layer.down.shape[1]
        activated = normed.new_empty((len(normed), inner))
        if self._config.activation == "gelu":
            gelu_mul(gate_up[:, :inner], gate_up[:, inner:], activated)
        else:
            silu_mul(gate_up, activated)
        return product(activated, layer.down)

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(rows)
        rms_norm(rows, weight, self._config.rms_norm_eps, out)
        return out

    def _out(self, rows: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return rows if weight is None else self._norm(rows, weight)
