"""Our linears against torch's: decode shapes of two models in GB/s of weights, deterministic mode in TFLOP/s.

Times are of CUDA graph replays (median of 5) that walk through all layers' weights, so that the L2 holds none of them.
Run: PYTHONPATH=. python bench/gpu/bench_linear.py [--part decode|deterministic|all] [--each] [--sweep]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from edgellm.kernels.cu import deterministic_linear as deterministic
from edgellm.kernels.cu import loader
from edgellm.kernels.cu import skinny_linear as skinny
from edgellm.kernels.cu.launch import device_limits
from edgellm.kernels.cu.rms_norm import rms_norm
from edgellm.kernels.cu.silu_mul import silu_mul

BF16 = torch.bfloat16
DECODE_ROWS = (1, 2, 4, 8, 16)
PREFILL_ROWS = (64, 512, 2048, 4096)
REPLAYS = 5


@dataclass(frozen=True, slots=True)
class Model:
    """Layers, (N, K) of a layer's linears by name, and of the head."""

    name: str
    layers: int
    linears: dict[str, tuple[int, int]]
    head: tuple[int, int]


MODELS = (
    Model(
        "0.6B",
        28,
        {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
        (151936, 1024),
    ),
    Model(
        "8B",
        36,
        {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
        (151936, 4096),
    ),
)


@dataclass(slots=True)
class Call:
    """One linear of the model with its own weight; input and output are shared by all of one width."""

    weight: torch.Tensor
    x: torch.Tensor
    out: torch.Tensor
    torch_out: torch.Tensor


def graph_ms(run: Callable[[], None], count: int = 1) -> float:
    """Milliseconds of one `run`, from replays of a graph that holds it `count` times."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / count)
    return statistics.median(times)


def calls_of(weights: dict[str, list[torch.Tensor]], rows: int) -> dict[str, list[Call]]:
    """The calls of every linear, over `weights`."""
    widths = {weight.shape[1] for same in weights.values() for weight in same}
    inputs = {width: torch.randn(rows, width, device="cuda").to(BF16) for width in widths}
    calls: dict[str, list[Call]] = {}
    for name, same in weights.items():
        out_width, in_width = same[0].shape
        out = torch.empty(rows, out_width, device="cuda", dtype=torch.float32 if name == "head" else BF16)
        torch_out = torch.empty(rows, out_width, device="cuda", dtype=BF16)
        calls[name] = [Call(weight, inputs[in_width], out, torch_out) for weight in same]
    return calls


def random_weights(model: Model) -> dict[str, list[torch.Tensor]]:
    shapes = {name: (shape, model.layers) for name, shape in model.linears.items()} | {"head": (model.head, 1)}
    return {
        name: [torch.empty(shape, device="cuda", dtype=BF16).normal_(std=0.02) for _ in range(count)]
        for name, (shape, count) in shapes.items()
    }


def in_order(calls: dict[str, list[Call]]) -> Iterator[Call]:
    """As a decode step runs them."""
    names = [name for name in calls if name != "head"]
    for layer in zip(*(calls[name] for name in names), strict=True):
        yield from layer
    yield from calls["head"]


def run_ours(calls: list[Call]) -> None:
    for call in calls:
        skinny.skinny_linear(call.x, call.weight, call.out)


def run_torch(calls: list[Call]) -> None:
    for call in calls:
        torch.mm(call.x, call.weight.t(), out=call.torch_out)


def compare(label: str, calls: list[Call], repeats: int = 1) -> None:
    """One line: both times for one pass over `calls`, GB/s of weights and how many times faster ours is."""
    weight_bytes = sum(call.weight.numel() * 2 for call in calls)
    ours = graph_ms(lambda: run_ours(calls), repeats)
    theirs = graph_ms(lambda: run_torch(calls), repeats)
    error = max(float((c.out - c.torch_out).abs().max() / c.torch_out.abs().max()) for c in calls[-4:])
    print(
        f"{label:28s} ours {ours * 1e3 / len(calls):8.2f} us {weight_bytes / ours / 1e6:5.0f} GB/s   "
        f"torch {theirs * 1e3 / len(calls):8.2f} us {weight_bytes / theirs / 1e6:5.0f} GB/s   "
        f"ratio {theirs / ours:5.2f}  apart {error:.1e}  total {ours:.3f} / {theirs:.3f} ms",
        flush=True,
    )


def gated_step(model: Model, weights: dict[str, list[torch.Tensor]], rows: int, *, gated: bool) -> Callable[[], None]:
    """All norms, linears and gates of a decode step, the gate in the linear's kernel or behind it."""
    norm = torch.ones(model.head[1], device="cuda")
    qkv, attended, hidden, normed, gate_up, activated = (
        torch.randn(rows, width, device="cuda").to(BF16)
        for width in (
            model.linears["qkv"][0],
            model.linears["o"][1],
            model.head[1],
            model.head[1],
            model.linears["gate_up"][0],
            model.linears["down"][1],
        )
    )
    logits = torch.empty(rows, model.head[0], device="cuda")

    def step() -> None:
        for idx in range(model.layers):
            rms_norm(hidden, norm, 1e-6, normed)
            skinny.skinny_linear(normed, weights["qkv"][idx], qkv)
            skinny.skinny_linear(attended, weights["o"][idx], hidden, residual=hidden)
            rms_norm(hidden, norm, 1e-6, normed)
            if gated:
                skinny.gated_linear(normed, weights["gate_up"][idx], activated)
            else:
                skinny.skinny_linear(normed, weights["gate_up"][idx], gate_up)
                silu_mul(gate_up, activated)
            skinny.skinny_linear(activated, weights["down"][idx], hidden, residual=hidden)
        rms_norm(hidden, norm, 1e-6, normed)
        skinny.skinny_linear(normed, weights["head"][0], logits)

    return step


def bench_gated(model: Model, rows_wanted: tuple[int, ...]) -> None:
    weights = random_weights(model)
    for rows in rows_wanted:
        apart, gated = (graph_ms(gated_step(model, weights, rows, gated=way)) for way in (False, True))
        print(f"{model.name} M={rows} norms, linears, gates: apart {apart:.3f} ms, gated {gated:.3f} ms", flush=True)


def bench_decode(model: Model, rows_wanted: tuple[int, ...], *, each: bool) -> None:
    weights = random_weights(model)
    for rows in rows_wanted:
        calls = calls_of(weights, rows)
        compare(f"{model.name} M={rows} all", list(in_order(calls)))
        if each:
            for name, same in calls.items():
                compare(f"{model.name} M={rows} {name}", same, 4 if name == "head" else 1)


def sweep(model: Model, rows_wanted: tuple[int, ...]) -> None:
    """Every variant that takes a linear, us a call; the chosen one with a star."""
    weights = random_weights(model)
    limits = device_limits(torch.device("cuda"))
    for rows in rows_wanted:
        for name, same in calls_of(weights, rows).items():
            out_width, in_width = same[0].weight.shape
            chosen = skinny.launch_plan(rows, in_width, out_width, limits)
            results = []
            for variant in skinny.VARIANTS:
                fits = variant.takes(in_width) and variant.shared_bytes <= limits.max_shared_bytes
                if fits and variant.row_tiles == (1 if rows <= 8 else 2):
                    plan = skinny.plan_of(variant, rows, out_width, limits)
                    ms = graph_ms(lambda plan=plan, same=same: run_plan(plan, same), 4 if name == "head" else 1)
                    kind = "walk " if variant.walks else "long " if variant.long else ""
                    kind += "" if variant.shared else "registers "
                    results.append(
                        f"{kind}{variant.tiles}x{variant.blocks}{'*' * (plan == chosen)} {ms * 1e3 / len(same):.2f}"
                    )
            print(f"{model.name} M={rows} {name:8s} " + "  ".join(results), flush=True)


def run_plan(plan: skinny.SkinnyPlan, calls: list[Call]) -> None:
    kernel = loader.kernel(skinny.SPEC, (BF16, plan.variant))
    for call in calls:
        params = skinny.linear_params(call.x, call.weight, call.out, None, None)
        kernel.launch(plan.config, params, pdl=True)


def bench_deterministic(rows_wanted: tuple[int, ...], *, sweep: bool) -> None:
    shapes = {"4096^2": (4096, 4096)}
    for model in MODELS:
        shapes |= {f"{model.name} {name}": shape for name, shape in model.linears.items()}
    for label, (out_width, in_width) in shapes.items():
        count = max(2, min(16, (256 << 20) // (out_width * in_width * 2)))
        weights = [torch.empty(out_width, in_width, device="cuda", dtype=BF16).normal_(std=0.02) for _ in range(count)]
        for rows in rows_wanted:
            x = torch.randn(rows, in_width, device="cuda").to(BF16)
            out = torch.empty(rows, out_width, device="cuda", dtype=BF16)

            def ours(weights=weights, x=x, out=out) -> None:
                for weight in weights:
                    deterministic.deterministic_linear(x, weight, out)

            def theirs(weights=weights, x=x, out=out) -> None:
                for weight in weights:
                    torch.mm(x, weight.t(), out=out)

            flop = 2e-9 * rows * out_width * in_width
            if sweep:
                print(f"{label:14s} M={rows:5d} " + "  ".join(swept_tiles(weights, x, out, flop)), flush=True)
            mine, peer = graph_ms(ours) / count, graph_ms(theirs) / count
            print(
                f"{label:14s} M={rows:5d} ours {mine * 1e3:8.1f} us {flop / mine:5.0f} TFLOP/s   "
                f"torch {peer * 1e3:8.1f} us {flop / peer:5.0f} TFLOP/s   ratio {peer / mine:.2f}",
                flush=True,
            )


def swept_tiles(weights: list[torch.Tensor], x: torch.Tensor, out: torch.Tensor, flop: float) -> Iterator[str]:
    """us and TFLOP/s of every tile, and of the skinny kernel in blocks of 16 rows."""
    limits = device_limits(x.device)
    for variant in (*deterministic.VARIANTS, *deterministic.WARPGROUP_VARIANTS):
        if not variant.takes(x.shape[1], limits):
            continue

        def tiled(variant=variant) -> None:
            for weight in weights:
                deterministic.launch(x, weight, out, None, None, variant)

        ms = graph_ms(tiled) / len(weights)
        kind = "wg" if isinstance(variant, deterministic.WarpgroupVariant) else "mma"
        yield f"{kind} {variant.tile[0]}x{variant.tile[1]} {ms * 1e3:.1f} ({flop / ms:.0f})"
    if x.shape[0] <= 128:

        def skinny_blocks() -> None:
            for weight in weights:
                skinny.launch(x, weight, out, None, None)

        ms = graph_ms(skinny_blocks) / len(weights)
        yield f"skinny {ms * 1e3:.1f} ({flop / ms:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("decode", "deterministic", "all"), default="all")
    parser.add_argument("--model", choices=[model.name for model in MODELS], action="append")
    parser.add_argument("--rows", type=int, action="append", help="rows of x; may be repeated")
    parser.add_argument("--each", action="store_true", help="every linear by itself too")
    parser.add_argument("--sweep", action="store_true", help="every variant of skinny_linear")
    options = parser.parse_args()
    for model in MODELS:
        if options.part != "deterministic" and (not options.model or model.name in options.model):
            rows = tuple(options.rows or DECODE_ROWS)
            bench_decode(model, rows, each=options.each)
            bench_gated(model, rows)
            if options.sweep:
                sweep(model, rows)
            torch.cuda.empty_cache()
    if options.part != "decode":
        bench_deterministic(tuple(options.rows or PREFILL_ROWS), sweep=options.sweep)


if __name__ == "__main__":
    main()
