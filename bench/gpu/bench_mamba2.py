"""The Mamba-2 scan against a peer: decode and verified rows in GB/s of state, prompts in microseconds.

Times are of CUDA graph replays (median of 5) that walk through several layers' states, so that the L2 holds none of
them.  Peers are mamba_ssm's Triton kernels where they can be imported, and the steps of transformers' torch path, one
operator each, for prompts its chunked form.  Outputs and states are compared with each peer's first, as the norm of
the difference over the norm, within 2 %.  mamba_ssm tunes a kernel at its first call, whatever the prompt's length.
Run: PYTHONPATH=. python bench/gpu/bench_mamba2.py [--part decode|verify|prompt|all]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from bench_linear import graph_ms
from mamba2_peer import Run, peers

from edgellm.kernels.cu import mamba2 as module
from edgellm.kernels.cu.mamba2 import mamba2
from edgellm.kernels.cu.state_rows import StateRows

READ_GBPS = 4548.0  # measured on one H200: reading 8 GiB
ROTATED_BYTES = 300 << 20
BF16 = torch.bfloat16
BATCHES = (1, 4, 16, 64, 128)
VERIFIED = 5
PROMPTS = (2048, 8192, 256)
CLOSE = 0.02
PEERS = peers()


@dataclass(frozen=True)
class Shape:
    """G groups, H heads, P head_dim, N state_dim of a model's layers."""

    name: str
    groups: int
    heads: int
    head_dim: int
    state_dim: int

    @property
    def state_bytes(self) -> int:
        return 4 * self.heads * self.head_dim * self.state_dim


SHAPES = (Shape("2.7B", 1, 80, 64, 128), Shape("130M", 1, 24, 64, 128), Shape("N=64", 2, 64, 64, 64))


@dataclass
class Layer:
    """Operands of one layer for `batch` sequences of `length` tokens, by the operator's argument names."""

    shape: Shape
    batch: int
    length: int
    keeps: bool = False
    held: object = field(default=None, init=False)

    def __post_init__(self) -> None:
        shape, tokens = self.shape, self.batch * self.length
        half: dict[str, Any] = {"device": "cuda", "dtype": BF16}
        inner, group = shape.heads * shape.head_dim, shape.groups * shape.state_dim
        wide = torch.randn(tokens, inner + 2 * group, **half)
        x, b, c = torch.split(wide, [inner, group, group], dim=1)
        states = (self.batch, shape.heads, shape.head_dim, shape.state_dim)
        starts = torch.arange(0, tokens + 1, self.length, dtype=torch.int32, device="cuda")
        slots = torch.arange(self.batch, dtype=torch.int32, device="cuda")
        self.arguments: dict[str, Any] = {
            "x": x.view(tokens, shape.heads, shape.head_dim),
            "dt": torch.rand(tokens, shape.heads, device="cuda") * 0.1,
            "a": -4 * torch.rand(shape.heads, device="cuda"),
            "b": b.view(tokens, shape.groups, shape.state_dim),
            "c": c.view(tokens, shape.groups, shape.state_dim),
            "d": torch.randn(shape.heads, device="cuda"),
            "state": torch.randn(states, device="cuda"),
            "rows": StateRows(starts, slots, starts[:-1].clone() if self.keeps else None),
            "out": torch.empty(tokens, shape.heads, shape.head_dim, **half),
            "checkpoint": torch.empty(tokens, *states[1:], device="cuda") if self.keeps else None,
        }
        self.no_bias = torch.zeros(shape.heads, device="cuda")

    def run(self, **options: Any) -> torch.Tensor:
        mamba2(**self.arguments, **options)
        return self.arguments["out"]

    def results(self, out: torch.Tensor, state: torch.Tensor) -> list[torch.Tensor]:
        """Copies of what a call left behind, kept states included."""
        kept = self.arguments["checkpoint"]
        return [part.float().clone() for part in (out, state, kept) if part is not None]

    @property
    def moved_bytes(self) -> int:
        """States read and written, and checkpoints."""
        return self.shape.state_bytes * self.batch * (2 + (self.length if self.keeps else 0))


def check(layer: Layer, name: str, peer: Run) -> float:
    """How far apart two calls from one state are; wrong results are not timed."""
    a = layer.arguments
    before = a["state"].clone()
    ours = layer.results(layer.run(), a["state"])
    a["state"].copy_(before)
    theirs = layer.results(*peer(layer))
    a["state"].copy_(before)
    pairs = zip(ours, theirs, strict=True)
    apart = max(float((one - other).norm() / other.norm()) for one, other in pairs)
    if not apart < CLOSE:
        raise SystemExit(f"{layer.shape.name}, {layer.batch} x {layer.length}, {name}: {apart:.1e} apart")
    return apart


def layers_of(shape: Shape, batch: int, length: int, *, keeps: bool = False) -> list[Layer]:
    count = -(-ROTATED_BYTES // (shape.state_bytes * batch * (1 + (length if keeps else 0))))
    return [Layer(shape, batch, length, keeps) for _ in range(max(2, min(count, 128)))]


def each_us(layers: list[Layer], run: Callable[[Layer], object]) -> float:
    """Microseconds a layer; each keeps its results, so that calls of one graph write to different memory."""

    def all_layers() -> None:
        for layer in layers:
            layer.held = run(layer)

    elapsed = graph_ms(all_layers) * 1e3 / len(layers)
    for layer in layers:
        layer.held = None
    return elapsed


def against_peers(layers: list[Layer], kind: str, ours: float) -> str:
    """A column a peer."""
    columns = []
    for name, peer in PEERS.items():
        if peer is None:
            columns.append(f"{name} absent")
            continue
        run = getattr(peer, kind)
        apart = check(layers[0], name, run)
        theirs = each_us(layers, run)
        columns.append(f"{name} {theirs:8.2f} us ratio {theirs / ours:6.2f} apart {apart:.1e}")
    return "   ".join(columns)


def compare_rows(shape: Shape, batch: int, length: int) -> None:
    layers = layers_of(shape, batch, length, keeps=length > 1)
    ours = each_us(layers, Layer.run)
    gbps = layers[0].moved_bytes / ours / 1e3
    kind = "decode" if length == 1 else "verify"
    print(
        f"{shape.name:5s} {kind:6s} {batch:4d} x {length} ours {ours:8.2f} us {gbps:5.0f} GB/s "
        f"({gbps / READ_GBPS:4.0%})   {against_peers(layers, kind, ours)}",
        flush=True,
    )


def compare_prompt(shape: Shape, length: int) -> None:
    layers = [Layer(shape, 1, length) for _ in range(4)]
    ours = each_us(layers, Layer.run)
    by_token = each_us(layers, lambda layer: layer.run(deterministic=True))
    print(
        f"{shape.name:5s} prompt {length:6d} ours {ours:8.1f} us ({by_rows(shape, layers)}; token after token "
        f"{by_token:8.1f})   {against_peers(layers, 'prompt', ours)}",
        flush=True,
    )


def by_rows(shape: Shape, layers: list[Layer]) -> str:
    """Times by the rows of a block."""
    chosen, times = module.chunk_rows, []
    for rows in module.CHUNK_ROWS:
        module.chunk_rows = lambda *_shape, rows=rows: rows
        times.append(f"{rows} rows {each_us(layers, Layer.run):.1f}")
    module.chunk_rows = chosen
    return ", ".join(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("decode", "verify", "prompt", "all"), default="all")
    parser.add_argument("--shape", choices=[shape.name for shape in SHAPES], action="append")
    options = parser.parse_args()
    torch.manual_seed(0)
    for shape in SHAPES:
        if options.shape and shape.name not in options.shape:
            continue
        if options.part in ("decode", "all"):
            for batch in BATCHES:
                compare_rows(shape, batch, 1)
        if options.part in ("verify", "all"):
            for batch in (1, 16):
                compare_rows(shape, batch, VERIFIED)
        if options.part in ("prompt", "all"):
            for length in PROMPTS:
                compare_prompt(shape, length)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
