"""Routed experts against torch: microseconds a layer, and GB/s of the weights of the experts that were chosen.

Times are of CUDA graph replays (median of 5) that walk through several layers, so that the L2 holds none of them.
The peer is transformers' torch path, one expert after the other, its routing already read by the host and its launches
in a graph: better than it runs there.  Results are compared first.
Run: PYTHONPATH=. python bench/gpu/bench_experts.py [--model NAME] [--rows N]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from bench_linear import graph_ms
from torch.nn import functional

from edgellm.kernels.cu import experts as module
from edgellm.kernels.cu.experts import experts, experts_workspace
from edgellm.kernels.cu.launch import device_limits

READ_GBPS = 4548.0  # measured on one H200: reading 8 GiB
BF16 = torch.bfloat16
ROWS = (1, 2, 4, 8, 16, 32, 128, 512, 2048)


@dataclass(frozen=True)
class Model:
    """E experts, k of a token; D hidden and F inner size; layers that are walked through."""

    name: str
    num_experts: int
    count: int
    hidden: int
    inner: int
    layers: int

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.inner * 2


MODELS = (
    Model("30B-A3B", 128, 8, 2048, 768, 4),
    Model("80B-A3B", 512, 10, 2048, 512, 4),
    Model("8x7B", 8, 2, 4096, 14336, 2),
)


@dataclass
class Weights:
    model: Model
    gate_up: torch.Tensor = field(init=False)
    down: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        model = self.model
        half = {"device": "cuda", "dtype": BF16}
        self.gate_up = torch.empty(model.num_experts, 2 * model.inner, model.hidden, **half).normal_(std=0.02)
        self.down = torch.empty(model.num_experts, model.hidden, model.inner, **half).normal_(std=0.02)


@dataclass
class Call:
    """One layer's call; what the host knows of its routing is for the peer."""

    weights: Weights
    num_rows: int

    def __post_init__(self) -> None:
        model = self.weights.model
        self.rows = torch.randn(self.num_rows, model.hidden, device="cuda").to(BF16)
        scores = torch.randn(self.num_rows, model.num_experts, device="cuda")
        shares, chosen = scores.softmax(-1).topk(model.count, dim=-1)
        self.shares, self.chosen = shares.contiguous(), chosen.int().contiguous()
        self.total = torch.zeros(self.num_rows, model.hidden, device="cuda")
        flat = self.chosen.flatten()
        self.routed = []
        for expert in flat.unique().tolist():
            pairs = (flat == expert).nonzero().flatten()
            self.routed.append((expert, pairs // model.count, self.shares.flatten()[pairs, None]))

    def ours(self, workspace: torch.Tensor) -> torch.Tensor:
        weights = self.weights
        operands = (self.rows, self.shares, self.chosen, weights.gate_up, weights.down, self.total)
        experts(*operands, accumulate=False, workspace=workspace)
        return self.total

    def peer(self) -> torch.Tensor:
        total = torch.zeros_like(self.total)
        for expert, tokens, shares in self.routed:
            gate, up = functional.linear(self.rows[tokens], self.weights.gate_up[expert]).chunk(2, dim=-1)
            product = functional.linear(functional.silu(gate) * up, self.weights.down[expert])
            total.index_add_(0, tokens, product * shares)
        return total

    @property
    def weight_bytes(self) -> int:
        return len(self.routed) * self.weights.model.expert_bytes


def workspace_of(model: Model, rows: int) -> torch.Tensor:
    size = experts_workspace(rows, model.count, model.num_experts, model.hidden, model.inner, BF16)
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def each_us(calls: list[Call], run: Callable[[Call], object]) -> float:
    def all_calls() -> None:
        for call in calls:
            run(call)

    return graph_ms(all_calls) * 1e3 / len(calls)


def compare(model: Model, layers: list[Weights], rows: int) -> None:
    calls = [Call(weights, rows) for weights in layers for _ in range(2 if rows <= 4 else 1)]
    workspace = workspace_of(model, rows)
    theirs, ours = calls[0].peer(), calls[0].ours(workspace)
    apart = float((ours - theirs).norm() / theirs.norm())
    if not apart < 0.02:
        raise SystemExit(f"{model.name} rows {rows}: results are {apart:.1e} apart")
    us, peer_us = each_us(calls, lambda call: call.ours(workspace)), each_us(calls, Call.peer)
    shape = module.ExpertsShape(rows, model.count, model.num_experts, model.hidden, model.inner)
    plan = module.launch_plan(shape, BF16, device_limits(workspace.device))
    gbps = sum(call.weight_bytes for call in calls) / len(calls) / us / 1e3
    tflops = 2e-6 * shape.pairs * 3 * model.hidden * model.inner / us
    way = "stream" if plan.tile is None else f"tile {plan.tile.tile[0]}"
    print(
        f"{model.name:8s} rows {rows:5d} experts {len(calls[0].routed):4d} {way:8s} ours {us:9.1f} us {gbps:5.0f} GB/s "
        f"({gbps / READ_GBPS:4.0%}) {tflops:5.0f} TFLOP/s   torch {peer_us:9.1f} us   ratio {peer_us / us:6.2f}  "
        f"apart {apart:.1e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[model.name for model in MODELS], action="append")
    parser.add_argument("--rows", type=int, action="append")
    options = parser.parse_args()
    torch.manual_seed(0)
    for model in MODELS:
        if options.model and model.name not in options.model:
            continue
        layers = [Weights(model) for _ in range(model.layers)]
        for rows in options.rows or ROWS:
            compare(model, layers, rows)
        del layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
