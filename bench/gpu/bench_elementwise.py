"""Row-wise kernels against torch: microseconds a call and GB/s of the bytes that must move.

Calls are replayed from CUDA graphs, over buffers that together exceed the L2 cache where a call moves enough; ours and
torch's alternate.  Run by hand: `python bench/gpu/bench_elementwise.py`; it first checks that both compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch.nn import functional

from edgellm.kernels.cu.rms_norm import rms_norm
from edgellm.kernels.cu.rope_kv_write import rope_kv_write
from edgellm.kernels.cu.silu_mul import silu_mul

EPS = 1e-6
DTYPE = torch.bfloat16
TOKENS = (1, 8, 64, 2048)
PAGE_SIZE = 16
ROTATED_BYTES = 256 << 20  # more than any L2
MAX_SETS = 64
REPLAYS = 20


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model matters here."""

    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128


SHAPES = (Shape("0.6B", 1024, 3072, 16, 8), Shape("8B", 4096, 12288, 32, 8))


@dataclass(slots=True)
class Call:
    """One set of buffers: how each side works on it, what each leaves behind, and the bytes that must move."""

    ours: Callable[[], None]
    theirs: Callable[[], None]
    our_result: Callable[[], torch.Tensor]
    their_result: Callable[[], torch.Tensor]
    num_bytes: int


def norm_call(shape: Shape, tokens: int) -> Call:
    """residual += x, out = norm(residual)."""
    x, ours, theirs = (torch.randn(tokens, shape.hidden, device="cuda", dtype=DTYPE) for _ in range(3))
    theirs.copy_(ours)
    weight = torch.rand(shape.hidden, device="cuda")
    narrow, out, their_out = weight.to(DTYPE), torch.empty_like(x), torch.empty_like(x)

    def torch_norm() -> None:
        theirs.add_(x)
        their_out.copy_(functional.rms_norm(theirs, (shape.hidden,), narrow, EPS))

    return Call(
        lambda: rms_norm(x, weight, EPS, out, residual=ours),
        torch_norm,
        lambda: out,
        lambda: their_out,
        4 * x.numel() * x.element_size(),
    )


def silu_call(shape: Shape, tokens: int) -> Call:
    gate_up = torch.randn(tokens, 2 * shape.intermediate, device="cuda", dtype=DTYPE)
    out, theirs = torch.empty(2, tokens, shape.intermediate, device="cuda", dtype=DTYPE)

    def torch_silu() -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(functional.silu(gate), up, out=theirs)

    return Call(
        lambda: silu_mul(gate_up, out), torch_silu, lambda: out, lambda: theirs, 3 * out.numel() * out.element_size()
    )


def rope_call(shape: Shape, tokens: int) -> Call:
    """Head norms, rotation, K and V of one sequence into its pages."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device="cuda", dtype=DTYPE)
    theirs, turns = qkv.clone(), torch.rand(tokens, dim // 2, device="cuda") * 7
    angles = torch.stack((turns.cos(), turns.sin()))
    num_pages = -(-tokens // PAGE_SIZE)
    pages, their_pages = torch.zeros(2, num_pages, 2, kv_heads, PAGE_SIZE, dim, device="cuda", dtype=DTYPE)
    table = torch.randperm(num_pages, device="cuda").int()[None]
    zero, positions = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.arange(tokens, device="cuda").int()
    token_seq, norm = torch.zeros_like(positions), torch.ones(dim, device="cuda")
    page_of, place_of = table[0][positions // PAGE_SIZE].long(), (positions % PAGE_SIZE).long()

    def ours() -> None:
        rope_kv_write(
            qkv,
            angles,
            pages,
            table,
            zero,
            token_seq,
            positions,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            query_norm=norm,
            key_norm=norm,
            eps=EPS,
        )

    def torch_rope() -> None:
        rows = theirs.view(tokens, heads + 2 * kv_heads, dim)
        normed = functional.rms_norm(rows[:, : heads + kv_heads].float(), (dim,), norm, EPS)
        low, high = normed.chunk(2, dim=-1)
        cosine, sine = angles[:, :, None]
        rotated = torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1).to(DTYPE)
        rows[:, :heads] = rotated[:, :heads]
        their_pages[page_of, 0, :, place_of] = rotated[:, heads:]
        their_pages[page_of, 1, :, place_of] = rows[:, heads + kv_heads :]

    return Call(
        ours, torch_rope, lambda: pages, lambda: their_pages, 2 * qkv.numel() * qkv.element_size() + angles.numel() * 4
    )


def graph_of(runs: list[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return 1000 * start.elapsed_time(stop)


def measure(make: Callable[[Shape, int], Call], shape: Shape, tokens: int) -> tuple[float, float, int]:
    """Median microseconds of one call, ours and torch's, and its bytes."""
    first = make(shape, tokens)
    first.ours()
    first.theirs()
    torch.testing.assert_close(first.our_result(), first.their_result(), rtol=2e-2, atol=2e-2)
    num_sets = max(4, min(MAX_SETS, ROTATED_BYTES // first.num_bytes))
    calls = [first, *(make(shape, tokens) for _ in range(num_sets - 1))]
    graphs = [graph_of([call.ours for call in calls]), graph_of([call.theirs for call in calls])]
    times: list[list[float]] = [[], []]
    for replay in range(REPLAYS + 2):
        for side, graph in enumerate(graphs):
            elapsed = replay_us(graph) / num_sets
            if replay >= 2:
                times[side].append(elapsed)
    return median(times[0]), median(times[1]), first.num_bytes


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}, median of {REPLAYS} graph replays")
    print(f"{'kernel':<16}{'model':>6}{'T':>6}{'us':>9}{'GB/s':>8}{'torch us':>10}{'ratio':>7}")
    for name, make in (("rms_norm", norm_call), ("silu_mul", silu_call), ("rope_kv_write", rope_call)):
        for shape in SHAPES:
            for tokens in TOKENS:
                ours, theirs, num_bytes = measure(make, shape, tokens)
                rate = num_bytes / ours / 1000
                print(f"{name:<16}{shape.name:>6}{tokens:>6}{ours:9.2f}{rate:8.0f}{theirs:10.2f}{theirs / ours:7.1f}")


if __name__ == "__main__":
    main()
