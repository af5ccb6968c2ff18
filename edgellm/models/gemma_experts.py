"""The experts of Gemma4: beside the MLP of a layer, seeing its residual stream through norms of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.kernels.cpu.elementwise import gelu_mul, rms_norm
from edgellm.kernels.cpu.linear import linear
from edgellm.models.moe import add_experts, choose_experts

if TYPE_CHECKING:
    from edgellm.models.families.gemma import GemmaConfig
    from edgellm.models.families.gemma_weights import GemmaExpertWeights


class GemmaExpertBlock:
    """Experts of one layer."""

    def __init__(self, config: GemmaConfig, weights: GemmaExpertWeights) -> None:
        self._weights = weights
        self._eps = config.rms_norm_eps
        self._count = config.experts.experts_per_token if config.experts else 0
        # The router's norm has no weight of its own; its factors take that place.
        self._router_norm = weights.router_scale.float() * config.hidden_size**-0.5
        self._expert_scale = weights.expert_scale.float()
        self._norm = weights.norm.float() + config.norm_offset
        self._out_norm = weights.out_norm.float() + config.norm_offset
        self._mlp_norm = weights.mlp_norm.float() + config.norm_offset

    def join(self, hidden: torch.Tensor, product: torch.Tensor) -> None:
        """product = norm(product) + norm(what the experts make of hidden).

        Args:
            hidden: (T, D) residual stream in front of the MLP, float32 or bfloat16.
            product: (T, D) of the MLP, dtype of hidden.
        Effects: writes product.
        """
        rms_norm(product, self._mlp_norm, self._eps, product)
        normed = torch.empty_like(hidden)
        rms_norm(hidden, self._router_norm, self._eps, normed)
        scores = hidden.new_empty((len(hidden), len(self._expert_scale)), dtype=torch.float32)
        shares, experts = choose_experts(linear(normed, self._weights.router, scores), self._count, normalise=True)
        shares = shares * self._expert_scale[experts]
        rms_norm(hidden, self._norm, self._eps, normed)
        total = torch.zeros(hidden.shape, dtype=torch.float32)
        add_experts(normed, shares, experts, self._weights.gate_up, self._weights.down, total, _gelu_mul)
        rms_norm(total, self._out_norm, self._eps, total)
        product.add_(total)


def _gelu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    width = out.shape[1]
    gelu_mul(gate_up[:, :width], gate_up[:, width:], out)
