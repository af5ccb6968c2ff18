"""The experts of Gemma4 on the device: beside the MLP of a layer, seeing its stream through norms of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.models.device_moe import RoutedExperts

if TYPE_CHECKING:
    import torch

    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import StepBuffers
    from edgellm.models.families.gemma import GemmaConfig
    from edgellm.models.families.gemma_weights import GemmaExpertWeights


class DeviceGemmaExperts:
    """Experts of one layer."""

    def __init__(self, ops: DeviceOps, config: GemmaConfig, weights: GemmaExpertWeights) -> None:
        self._ops = ops
        self._eps = config.rms_norm_eps
        # The router's norm has no weight of its own; its factors take that place.
        self._router_norm = weights.router_scale.float() * config.hidden_size**-0.5
        self._norm = weights.norm.float() + config.norm_offset
        self._out_norm = weights.out_norm.float() + config.norm_offset
        self._mlp_norm = weights.mlp_norm.float() + config.norm_offset
        self._routed = RoutedExperts(
            ops,
            weights.router,
            weights.gate_up,
            weights.down,
            count=config.experts.experts_per_token if config.experts else 0,
            normalise=True,
            factors=weights.expert_scale.float(),
            gelu=True,
        )

    @staticmethod
    def widths(config: GemmaConfig) -> dict[str, int]:
        """The row buffers of the model's type that it needs; none in models without experts."""
        return {"expert rows": config.hidden_size} if config.experts else {}

    @staticmethod
    def float_widths(config: GemmaConfig) -> dict[str, int]:
        """The float32 ones."""
        experts = config.experts
        if experts is None:
            return {}
        return RoutedExperts.float_widths(experts.num_experts, experts.experts_per_token, config.hidden_size)

    @staticmethod
    def workspace_bytes(ops: DeviceOps, config: GemmaConfig, dtype: torch.dtype, *, tokens: int) -> int:
        """Bytes of workspace for up to `tokens` tokens."""
        experts = config.experts
        if experts is None:
            return 0
        return RoutedExperts.workspace_bytes(
            ops,
            dtype,
            tokens=tokens,
            num_experts=experts.num_experts,
            count=experts.experts_per_token,
            hidden_size=config.hidden_size,
            expert_size=experts.expert_size,
        )

    def join(self, stream: torch.Tensor, product: torch.Tensor, buffers: StepBuffers) -> None:
        """product = norm(product) + norm(what the experts make of stream).

        Args:
            stream: (T, D) residual stream in front of the MLP.
            product: (T, D) of the MLP, type of stream.
        """
        ops, eps, rows = self._ops, self._eps, buffers["expert rows"]
        ops.rms_norm(product, self._mlp_norm, eps, product)
        ops.rms_norm(stream, self._router_norm, eps, rows)
        self._routed.route(rows, buffers)
        ops.rms_norm(stream, self._norm, eps, rows)
        total = self._routed.apply(rows, buffers)
        ops.rms_norm(total, self._out_norm, eps, total)
        product.add_(total)
