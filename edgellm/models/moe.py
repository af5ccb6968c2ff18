"""Mixture of experts on CPU rows: a router chooses experts for every token, a shared expert serves them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from edgellm.kernels.cpu.elementwise import silu_mul
from edgellm.kernels.cpu.experts import few_experts
from edgellm.kernels.cpu.gates import gate_
from edgellm.kernels.cpu.linear import SKINNY_ROWS, linear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Activation = Callable[[torch.Tensor, torch.Tensor], None]

MAX_EXPERTS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Shape of a layer's experts.

    Attributes:
        expert_size, shared_size: inner size of a routed expert and of the shared one.
        normalise: the weights of the chosen experts are divided by their sum.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int
    normalise: bool


@dataclass(slots=True)
class MlpWeights:
    """D hidden, F inner size.

    Attributes:
        gate_up: (2F, D), rows gate, up.
        down: (D, F).
    """

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(slots=True)
class MoeWeights:
    """E experts, D hidden, F inner size of an expert.

    Attributes:
        router: (E + 1, D); the last row is the gate of the shared expert.
        gate_up: (E, 2F, D), rows gate, up.
        down: (E, D, F).
        shared: the shared expert.
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: MlpWeights


class MoeBlock:
    """The experts of one layer."""

    def __init__(self, config: MoeConfig, weights: MoeWeights) -> None:
        self._config = config
        self._weights = weights

    def add(self, rows: torch.Tensor, hidden: torch.Tensor) -> None:
        """hidden += what the experts make of rows.

        Args:
            rows: (T, D) float32 or bfloat16.
            hidden: (T, D), dtype of rows.
        Effects: writes hidden.
        """
        num_experts = self._config.num_experts
        scores = rows.new_empty((len(rows), num_experts + 1), dtype=torch.float32)
        scores = linear(rows, self._weights.router, scores)
        weights, experts = choose_experts(
            scores[:, :num_experts], self._config.experts_per_token, normalise=self._config.normalise
        )
        total = torch.zeros(rows.shape, dtype=torch.float32)
        add_experts(rows, weights, experts, self._weights.gate_up, self._weights.down, total)
        shared = self._weights.shared
        product = apply_mlp(rows, shared.gate_up, shared.down, total.dtype)
        gate_(product, scores[:, num_experts:])
        hidden.add_(total.add_(product))


def choose_experts(scores: torch.Tensor, count: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` experts of highest probability for each token.

    Args:
        scores: (T, E) float32 logits of the router.
        normalise: divide the chosen probabilities by their sum.
    Returns:
        (weights (T, count) float32, experts (T, count) int64), most probable first.
    """
    weights, experts = scores.softmax(dim=-1).topk(count, dim=-1)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


def add_experts(
    rows: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    total: torch.Tensor,
    activate: Activation = silu_mul,
) -> None:
    """total[t] += sum over j of weights[t, j] * expert experts[t, j] of rows[t].

    Experts run one after the other, each on all of its tokens at once.  A token's sum is taken in the order of expert
    numbers, so it depends on no other token.

    Args:
        rows: (T, D) float32 or bfloat16.
        weights: (T, k) float32.
        experts: (T, k) int64, each at most once in a row.
        gate_up: (E, 2F, D), rows gate, up.  down: (E, D, F).  Both of the dtype of rows.
        total: (T, D) float32.
        activate: of gate and up.
    Effects: writes total.
    """
    if len(rows) <= SKINNY_ROWS and activate is silu_mul:  # the only activation of that kernel
        few_experts(rows, weights, experts, gate_up, down, total)
        return
    for expert, tokens, shares in _by_expert(weights, experts, len(gate_up)):
        product = apply_mlp(rows.index_select(0, tokens), gate_up[expert], down[expert], total.dtype, activate)
        total.index_add_(0, tokens, product.mul_(shares))


def apply_mlp(
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    dtype: torch.dtype,
    activate: Activation = silu_mul,
) -> torch.Tensor:
    """down(silu(gate) * up) of rows, or with another activation.

    Args:
        rows: (N, D).  gate_up: (2F, D), rows gate, up.  down: (D, F).  All of one dtype.
        dtype: of the result; float32 or that of rows.
    Returns:
        (N, D), a new tensor.
    """
    inner = linear(rows, gate_up, rows.new_empty((len(rows), len(gate_up))))
    activated = rows.new_empty((len(rows), down.shape[1]))
    activate(inner, activated)
    return linear(activated, down, rows.new_empty((len(rows), len(down)), dtype=dtype))


def _by_expert(
    weights: torch.Tensor, experts: torch.Tensor, num_experts: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """For each expert that is chosen, in ascending order: its number, its tokens (n,), their weights (n, 1)."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    tokens = order // experts.shape[1]
    shares = weights.flatten()[order, None]
    start = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=num_experts).tolist()):
        if count:
            yield expert, tokens[start : start + count], shares[start : start + count]
            start += count
