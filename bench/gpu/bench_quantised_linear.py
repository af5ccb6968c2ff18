"""Linears on packed weights against bfloat16 ones: decode and prefill shapes of two models, in GB/s of stored bytes.

The peer is what a bfloat16 model would use: our own kernel for few rows where it is the faster one, else cuBLAS.
Times are of CUDA graph replays (median of 5) that walk through all layers' weights, so that the L2 holds none of them.
Run: PYTHONPATH=.:bench/gpu python bench/gpu/bench_quantised_linear.py [--model 8B] [--rows 1] [--kind int4] [--sweep]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from bench_linear import BF16, MODELS, Model, graph_ms

from edgellm.kernels.cu import loader
from edgellm.kernels.cu import quantised_linear as quantised
from edgellm.kernels.cu.launch import device_limits
from edgellm.kernels.cu.rms_norm import rms_norm
from edgellm.kernels.cu.spec import KernelSpec, Variant
from edgellm.kernels.cu.tensors import type_name
from edgellm.kernels.packed_weight import WORKSPACE_ELEMENTS, PackedKind, PackedWeight, empty_packed
from edgellm.models.device_ops import DeviceOps, cuda_ops

ROWS = (1, 4, 8, 16, 64, 2048)
GROUP = 128
# Tried by --sweep beside those that serve.
MORE_VARIANTS = tuple(
    quantised.QuantisedVariant(*sizes)
    for sizes in (
        (1, 1, 8, 6, 4),
        (2, 1, 8, 4, 3),
        (2, 1, 16, 3, 2),
        (4, 1, 16, 3, 1),
        (1, 2, 8, 6, 3),
        (2, 2, 8, 4, 2),
        (2, 2, 16, 3, 1),
        (4, 2, 16, 2, 1),
    )
)

Weight = torch.Tensor | PackedWeight
Weights = dict[str, list[Weight]]


@dataclass(slots=True)
class Buffers:
    """Rows of every width that a model's linears read, and of every width that they write."""

    inputs: dict[int, torch.Tensor]
    outputs: dict[int, torch.Tensor]

    @classmethod
    def of(cls, model: Model, rows: int) -> Buffers:
        shapes = model.linears.values()
        return cls(
            {width: torch.randn(rows, width, device="cuda").to(BF16) for _, width in shapes},
            {width: torch.empty(rows, width, device="cuda", dtype=BF16) for width, _ in shapes},
        )


def dense_weight(shape: tuple[int, int]) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=BF16).normal_(std=0.02)


def packed_weight(shape: tuple[int, int], kind: PackedKind, workspace: torch.Tensor) -> PackedWeight:
    """Random bytes with scales that make results of ordinary size."""
    shares = kind is PackedKind.FP8
    weight = empty_packed(kind, *shape, group_columns=GROUP, shares_scales=shares, workspace=workspace)
    weight.packed.random_(0, 256)
    if weight.zeros is None:
        weight.packed.bitwise_and_(0xBF)  # no NaN, magnitudes below 2
    else:
        weight.zeros.random_(0, 256)
    weight.scales.uniform_(0.002, 0.004)
    return weight


def weights_of(model: Model, make: Callable[[tuple[int, int]], Weight]) -> Weights:
    return {name: [make(shape) for _ in range(model.layers)] for name, shape in model.linears.items()}


def layers(weights: Weights) -> Iterator[tuple[Weight, ...]]:
    return zip(weights["qkv"], weights["o"], weights["gate_up"], weights["down"], strict=True)


def stored_bytes(weights: Weights) -> int:
    return sum(weight.nbytes for same in weights.values() for weight in same)


def linears(ops: DeviceOps, weights: Weights, buffers: Buffers) -> Callable[[], None]:
    """Every linear of every layer in the order of a step."""

    def run() -> None:
        for layer in layers(weights):
            for weight in layer:
                ops.linear(buffers.inputs[weight.shape[1]], weight, buffers.outputs[weight.shape[0]])

    return run


def step(ops: DeviceOps, model: Model, weights: Weights, head: torch.Tensor, rows: int) -> Callable[[], None]:
    """Norms, linears, gates and logits of a step; no attention."""
    hidden_size, inner = model.head[1], model.linears["down"][1]
    widths = (hidden_size, hidden_size, model.linears["qkv"][0], model.linears["o"][1], 2 * inner, inner)
    hidden, normed, mixed, attended, gate_up, activated = (
        torch.randn(rows, width, device="cuda").to(BF16) for width in widths
    )
    norm, logits = torch.ones(hidden_size, device="cuda"), torch.empty(rows, model.head[0], device="cuda")

    def run() -> None:
        for qkv, o, gate, down in layers(weights):
            rms_norm(hidden, norm, 1e-6, normed)
            ops.linear(normed, qkv, mixed)
            ops.linear(attended, o, hidden, residual=hidden)
            rms_norm(hidden, norm, 1e-6, normed)
            ops.gated(normed, gate, activated, None, gate_up)
            ops.linear(activated, down, hidden, residual=hidden)
        rms_norm(hidden, norm, 1e-6, normed)
        ops.linear(normed, head, logits)

    return run


def compare(model: Model, kinds: list[PackedKind], rows_wanted: tuple[int, ...]) -> None:
    """One line a kind and row count, then the same of whole steps."""
    ops, dense, head = cuda_ops(), weights_of(model, dense_weight), dense_weight(model.head)
    workspace = torch.empty(WORKSPACE_ELEMENTS, device="cuda", dtype=BF16)
    packed = {kind: weights_of(model, lambda shape, kind=kind: packed_weight(shape, kind, workspace)) for kind in kinds}
    for rows in rows_wanted:
        buffers = Buffers.of(model, rows)
        plain = graph_ms(linears(ops, dense, buffers))
        whole = graph_ms(step(ops, model, dense, head, rows)) if rows <= 64 else 0.0
        for kind, weights in packed.items():
            ours = graph_ms(linears(ops, weights, buffers))
            rates = [stored_bytes(each) / ms / 1e6 for each, ms in ((weights, ours), (dense, plain))]
            line = (
                f"{model.name:5s} {kind.value} M={rows:5d} linears {ours:8.3f} ms {rates[0]:5.0f} GB/s   "
                f"bf16 {plain:8.3f} ms {rates[1]:5.0f} GB/s   ratio {plain / ours:5.2f}"
            )
            if whole:
                mine = graph_ms(step(ops, model, weights, head, rows))
                line += f"   norms, linears, gates, logits {mine:7.3f} / {whole:7.3f} ms   ratio {whole / mine:5.2f}"
            print(line, flush=True)


def sweep(model: Model, kinds: list[PackedKind], rows_wanted: tuple[int, ...]) -> None:
    """Every linear by every variant; the chosen one with a star."""
    workspace = torch.empty(WORKSPACE_ELEMENTS, device="cuda", dtype=BF16)
    for kind in kinds:
        weights = weights_of(model, lambda shape, kind=kind: packed_weight(shape, kind, workspace))
        for rows in rows_wanted:
            buffers = Buffers.of(model, rows)
            for name, same in weights.items():
                print(
                    f"{model.name} {kind.value} M={rows} {name:8s} " + "  ".join(swept(same, rows, buffers)), flush=True
                )


def swept(weights: list[Weight], rows: int, buffers: Buffers) -> Iterator[str]:
    """us a linear (GB/s): a block a group, and as many blocks as run at once, which walk."""
    limits, (out_width, in_width) = device_limits(torch.device("cuda")), weights[0].shape
    chosen = quantised.launch_plan(weights[0].kind, rows, in_width, out_width, limits)
    for variant in (*quantised.VARIANTS, *MORE_VARIANTS):
        if variant.row_tiles != (1 if rows <= 8 else 2) or variant.shared_bytes > limits.max_shared_bytes:
            continue
        resident = limits.sm_count * min(variant.blocks_per_sm, 228 * 1024 // (variant.shared_bytes + 1024))
        for walks, most in (("", quantised.MAX_GRID), ("walks ", resident)):
            plan = quantised.plan_of(variant, rows, out_width, max_groups=most)
            if walks and plan.config.grid[1] < most:
                continue
            us = graph_ms(lambda plan=plan: run_plan(plan, weights, buffers)) * 1e3 / len(weights)
            label = f"{walks}{variant.panels}x{variant.warps}x{variant.places}{'*' * (plan == chosen)}"
            yield f"{label} {us:.2f} ({weights[0].nbytes / us / 1e3:.0f})"


def with_more_variants(spec: KernelSpec) -> KernelSpec:
    more = tuple(Variant((BF16, each), f"{type_name(BF16)}, {each.arguments(gated=False)}") for each in MORE_VARIANTS)
    return replace(spec, name=f"{spec.name}_sweep", variants=(*spec.variants, *more))


def run_plan(plan: quantised.QuantisedPlan, weights: list[Weight], buffers: Buffers) -> None:
    for weight in weights:
        x, out = buffers.inputs[weight.shape[1]], buffers.outputs[weight.shape[0]]
        quantised.launch(x, weight, out, None, None, plan=plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[model.name for model in MODELS], action="append")
    parser.add_argument("--rows", type=int, action="append", help="rows of x; may be repeated")
    parser.add_argument("--kind", choices=[kind.value for kind in PackedKind], action="append")
    parser.add_argument("--sweep", action="store_true", help="every variant instead")
    options = parser.parse_args()
    kinds = [PackedKind(kind) for kind in options.kind] if options.kind else list(PackedKind)
    if options.sweep:
        for kind in kinds:
            quantised.LINEAR[kind, False] = with_more_variants(quantised.LINEAR[kind, False])
    specs = [*quantised.LINEAR.values(), *quantised.EXPAND.values()]
    loader.warm_up((spec, variant.key) for spec in specs for variant in spec.variants if variant.key[0] == BF16)
    for model in MODELS:
        if options.model and model.name not in options.model:
            continue
        if options.sweep:
            sweep(model, kinds, tuple(options.rows or (1, 16)))
        else:
            compare(model, kinds, tuple(options.rows or ROWS))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
