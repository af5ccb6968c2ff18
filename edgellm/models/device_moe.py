"""Mixture of experts on the device: a router chooses experts for every token; see `edgellm.models.moe`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import StepBuffers
    from edgellm.models.moe import MoeConfig, MoeWeights


class RoutedExperts:
    """The experts of one layer that a router chooses; E experts, D hidden, F inner size of an expert.

    Args:
        router: (E, D), or with more rows, whose scores are the caller's.
        gate_up: (E, 2F, D).  down: (E, D, F).
        count: experts of a token.
        normalise: shares of the chosen sum up to one.
        factors: (E,) float32 of the shares, or None.
        gelu: the activation is gelu in its tanh form, not silu.
    """

    def __init__(
        self,
        ops: DeviceOps,
        router: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        count: int,
        normalise: bool,
        factors: torch.Tensor | None = None,
        gelu: bool = False,
    ) -> None:
        self._ops = ops
        self._router = router
        self._gate_up = gate_up
        self._down = down
        self._count = count
        self._normalise = normalise
        self._factors = factors
        self._gelu = gelu

    @staticmethod
    def float_widths(scores: int, count: int, hidden_size: int) -> dict[str, int]:
        """The float32 row buffers it needs; `scores`: rows of the router."""
        return {"scores": scores, "shares": count, "chosen": count, "expert_total": hidden_size}

    @staticmethod
    def workspace_bytes(
        ops: DeviceOps,
        dtype: torch.dtype,
        *,
        tokens: int,
        num_experts: int,
        count: int,
        hidden_size: int,
        expert_size: int,
    ) -> int:
        """Bytes of workspace for up to `tokens` tokens."""
        return ops.experts_workspace(tokens, count, num_experts, hidden_size, expert_size, dtype)

    def route(self, rows: torch.Tensor, buffers: StepBuffers) -> torch.Tensor:
        """(T, rows of the router) float32 scores; shares and numbers of the chosen experts stay in the buffers."""
        scores = buffers["scores"]
        self._ops.linear(rows, self._router, scores)
        self._ops.choose_experts(
            scores[:, : len(self._gate_up)],
            buffers["shares"],
            buffers["chosen"].view(torch.int32),
            normalise=self._normalise,
            factors=self._factors,
        )
        return scores

    def apply(self, rows: torch.Tensor, buffers: StepBuffers) -> torch.Tensor:
        """(T, D) float32: what the experts that `route` chose make of rows (T, D)."""
        total, chosen = buffers["expert_total"], buffers["chosen"].view(torch.int32)
        self._ops.experts(
            rows,
            buffers["shares"],
            chosen,
            self._gate_up,
            self._down,
            total,
            gelu=self._gelu,
            accumulate=False,
            workspace=buffers.workspace,
        )
        return total


class DeviceMoe:
    """Routed experts, and a shared one that serves every token, scaled by a gate of its own."""

    def __init__(self, ops: DeviceOps, config: MoeConfig, weights: MoeWeights) -> None:
        self._ops = ops
        self._weights = weights
        self._routed = RoutedExperts(
            ops,
            weights.router,
            weights.gate_up,
            weights.down,
            count=config.experts_per_token,
            normalise=config.normalise,
        )

    @staticmethod
    def widths(config: MoeConfig) -> dict[str, int]:
        """The row buffers of the model's type that it needs."""
        return {"shared_gate_up": 2 * config.shared_size, "shared": config.shared_size}

    @staticmethod
    def float_widths(config: MoeConfig, hidden_size: int) -> dict[str, int]:
        """The float32 ones."""
        routed = RoutedExperts.float_widths(config.num_experts + 1, config.experts_per_token, hidden_size)
        return routed | {"shared_total": hidden_size}

    @staticmethod
    def workspace_bytes(ops: DeviceOps, config: MoeConfig, hidden_size: int, dtype: torch.dtype, *, tokens: int) -> int:
        """Bytes of workspace for up to `tokens` tokens."""
        return RoutedExperts.workspace_bytes(
            ops,
            dtype,
            tokens=tokens,
            num_experts=config.num_experts,
            count=config.experts_per_token,
            hidden_size=hidden_size,
            expert_size=config.expert_size,
        )

    def add(self, rows: torch.Tensor, stream: torch.Tensor, buffers: StepBuffers) -> None:
        """stream += what the experts make of rows, both (T, D)."""
        ops, shared = self._ops, self._weights.shared
        scores = self._routed.route(rows, buffers)
        total = self._routed.apply(rows, buffers)
        product = buffers["shared_total"]
        ops.gated(rows, shared.gate_up, buffers["shared"], None, buffers["shared_gate_up"])
        ops.linear(buffers["shared"], shared.down, product)
        ops.gate_(product, scores[:, -1:])
        stream.add_(total.add_(product))
