"""The Mamba-2 scan against a peer: decode and verified rows in GB/s of state, prompts in microseconds.

Times are of CUDA graph replays (median of 5) that walk through several layers' states, so that the L2 holds none of
them.  Results are compared with the peer's first.  The peer is mamba_ssm where it can be imported; else the steps of
transformers' torch path, one operator each, and for prompts its chunked form.
Run: PYTHONPATH=. python bench/gpu/bench_mamba2.py [--part decode|verify|prompt|all]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bench_linear import graph_ms

from edgellm.kernels.cu import mamba2 as module
from edgellm.kernels.cu.mamba2 import mamba2
from edgellm.kernels.cu.state_rows import StateRows

READ_GBPS = 4548.0  # measured on one H200: reading 8 GiB
ROTATED_BYTES = 300 << 20
BF16 = torch.bfloat16
BATCHES = (1, 4, 16, 64, 128)
VERIFIED = 5
PROMPTS = (256, 2048, 8192)
PEER_CHUNK = 256


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

    def run(self, **options: Any) -> torch.Tensor:
        mamba2(**self.arguments, **options)
        return self.arguments["out"]

    @property
    def moved_bytes(self) -> int:
        """States read and written, and checkpoints."""
        return self.shape.state_bytes * self.batch * (2 + (self.length if self.keeps else 0))


def torch_step(layer: Layer) -> torch.Tensor:
    """One token of every sequence, as transformers' torch path takes it."""
    a = layer.arguments
    group = layer.shape.heads // layer.shape.groups
    b, c = (a[name].float().repeat_interleave(group, dim=1) for name in ("b", "c"))
    state, x = a["state"], a["x"].float()
    added = (a["dt"][..., None] * x)[..., None] * b[:, :, None, :]
    state.copy_(state * torch.exp(a["dt"] * a["a"])[..., None, None] + added)
    return (torch.matmul(state, c[..., None]).squeeze(-1) + a["d"][:, None] * x).to(BF16)


def torch_verify(layer: Layer) -> torch.Tensor:
    """Token after token, the states kept."""
    a, outs = layer.arguments, []
    for token in range(layer.length):
        part = Layer.__new__(Layer)
        part.shape, part.batch, part.length = layer.shape, layer.batch, 1
        part.arguments = a | {name: a[name][token :: layer.length] for name in ("x", "dt", "b", "c")}
        outs.append(torch_step(part))
        a["checkpoint"][token :: layer.length].copy_(a["state"])
    return torch.stack(outs, dim=1).flatten(0, 1)


def torch_chunks(layer: Layer) -> torch.Tensor:
    """A prompt of one sequence chunk by chunk: products of a chunk at once in BF16, the states one after the other."""
    a, shape = layer.arguments, layer.shape
    size = min(PEER_CHUNK, layer.length)
    chunks, group = layer.length // size, shape.heads // shape.groups
    x = a["x"].view(chunks, size, shape.heads, shape.head_dim).transpose(1, 2)
    b, c = (
        a[name].view(chunks, size, shape.groups, shape.state_dim).transpose(1, 2).repeat_interleave(group, dim=1)
        for name in ("b", "c")
    )
    dt = a["dt"].view(chunks, size, shape.heads).transpose(1, 2)
    sums = (dt * a["a"][:, None]).cumsum(-1)
    decays = torch.exp((sums[..., :, None] - sums[..., None, :]).masked_fill_(_later(size), -torch.inf))
    weights = ((c @ b.transpose(-1, -2)) * decays * dt[..., None, :]).to(BF16)
    kept = ((torch.exp(sums[..., -1:] - sums) * dt)[..., None] * x).to(BF16)
    added = (kept.transpose(-1, -2) @ b).float()
    state, starts = a["state"][0], []
    for chunk in range(chunks):
        starts.append(state.to(BF16))
        state = state * torch.exp(sums[chunk, :, -1])[:, None, None] + added[chunk]
    a["state"][0].copy_(state)
    before = torch.exp(sums)[..., None] * (c @ torch.stack(starts).transpose(-1, -2))
    out = (weights @ x) + before + a["d"][:, None, None] * x
    return out.transpose(1, 2).reshape(layer.length, shape.heads, shape.head_dim).to(BF16)


def _later(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool, device="cuda").triu(1)


def mamba_ssm_step() -> Callable[[Layer], torch.Tensor] | None:
    try:
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    except ImportError:
        return None

    def run(layer: Layer) -> torch.Tensor:
        a, shape = layer.arguments, layer.shape
        wide = (shape.heads, shape.head_dim)
        dt = a["dt"][..., None].expand(-1, *wide)
        rate = a["a"][:, None, None].expand(*wide, shape.state_dim)
        skip = a["d"][:, None].expand(wide)
        return selective_state_update(a["state"], a["x"], dt, rate, a["b"], a["c"], skip)

    return run


def mamba_ssm_prompt() -> Callable[[Layer], torch.Tensor] | None:
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError:
        return None

    def run(layer: Layer) -> torch.Tensor:
        a = layer.arguments
        one = {name: a[name][None] for name in ("x", "dt", "b", "c")}
        out, state = mamba_chunk_scan_combined(
            one["x"],
            one["dt"],
            a["a"],
            one["b"],
            one["c"],
            chunk_size=PEER_CHUNK,
            D=a["d"],
            initial_states=a["state"],
            return_final_states=True,
        )
        a["state"].copy_(state)
        return out[0]

    return run


def check(layer: Layer, peer: Callable[[Layer], torch.Tensor]) -> float:
    """How far apart two calls from one state are; wrong results are not timed."""
    before = layer.arguments["state"].clone()
    ours = layer.run().float().clone()
    ours_state = layer.arguments["state"].clone()
    layer.arguments["state"].copy_(before)
    theirs = peer(layer).float()
    apart = float((ours - theirs).norm() / theirs.norm())
    state_apart = float((ours_state - layer.arguments["state"]).norm() / ours_state.norm())
    if not max(apart, state_apart) < 0.02:
        raise SystemExit(f"{layer.shape.name}: results are {apart:.1e} apart, states {state_apart:.1e}")
    return max(apart, state_apart)


def layers_of(shape: Shape, batch: int, length: int, *, keeps: bool = False) -> list[Layer]:
    count = -(-ROTATED_BYTES // (shape.state_bytes * batch * (1 + (length if keeps else 0))))
    return [Layer(shape, batch, length, keeps) for _ in range(max(2, min(count, 128)))]


def each_us(layers: list[Layer], run: Callable[[Layer], Any]) -> float:
    def all_layers() -> None:
        for layer in layers:
            run(layer)

    return graph_ms(all_layers) * 1e3 / len(layers)


def compare_rows(shape: Shape, batch: int, length: int, peer_name: str, peer: Callable[[Layer], torch.Tensor]) -> None:
    layers = layers_of(shape, batch, length, keeps=length > 1)
    apart = check(layers[0], peer)
    ours, theirs = each_us(layers, Layer.run), each_us(layers, peer)
    gbps = layers[0].moved_bytes / ours / 1e3
    kind = "decode" if length == 1 else "verify"
    print(
        f"{shape.name:5s} {kind} {batch:4d} x {length} ours {ours:8.2f} us {gbps:5.0f} GB/s "
        f"({gbps / READ_GBPS:4.0%})   {peer_name} {theirs:8.2f} us   ratio {theirs / ours:6.2f}  apart {apart:.1e}",
        flush=True,
    )


def compare_prompt(shape: Shape, length: int) -> None:
    layers = [Layer(shape, 1, length) for _ in range(4)]
    peer, name = mamba_ssm_prompt(), "mamba_ssm"
    if peer is None:
        peer, name = torch_chunks, "torch"
    apart = check(layers[0], peer)
    ours, theirs = each_us(layers, Layer.run), each_us(layers, peer)
    by_token = each_us(layers, lambda layer: layer.run(deterministic=True))
    print(
        f"{shape.name:5s} prompt {length:6d} ours {ours:8.1f} us ({by_rows(shape, layers)}; token after token "
        f"{by_token:8.1f})   {name} {theirs:8.1f} us   ratio {theirs / ours:6.2f}  apart {apart:.1e}",
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
    step = mamba_ssm_step()
    peer_name, peer = ("mamba_ssm", step) if step is not None else ("torch", torch_step)
    for shape in SHAPES:
        if options.shape and shape.name not in options.shape:
            continue
        if options.part in ("decode", "all"):
            for batch in BATCHES:
                compare_rows(shape, batch, 1, peer_name, peer)
        if options.part in ("verify", "all"):
            for batch in (1, 16):
                compare_rows(shape, batch, VERIFIED, "torch", torch_verify)
        if options.part in ("prompt", "all"):
            for length in PROMPTS:
                compare_prompt(shape, length)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
