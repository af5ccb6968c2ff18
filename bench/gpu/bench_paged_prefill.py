"""Prefill and append attention over pages, bf16, causal: ours against FlashInfer and torch, in TFLOP/s.

Times are of CUDA graph replays (median of 5) that rotate over three sets of K and V.  Every peer's result is compared
with ours first.  Ratio: our rate over the peer's.
Run: PYTHONPATH=. python bench/gpu/bench_paged_prefill.py [--heads 32] [--page 16] [--head-dim 64]
[--peers fa2,fa3,flash,cudnn]
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from edgellm.kernels.cu.launch import device_limits
from edgellm.kernels.cu.paged_prefill import paged_prefill, paged_prefill_workspace

KV_HEADS = 8
CASES = (
    (1, 512, 0),
    (1, 2048, 0),
    (1, 8192, 0),
    (1, 512, 8192),
    (1, 2048, 8192),
    (1, 8192, 8192),
    (8, 512, 0),
    (8, 512, 8192),
    (1, 93, 16384),
    (1, 32, 16384),
)
SETS = 3
REPLAYS = 5
TARGET_MS = 12.0
MOST_CALLS = 200
WORST_ERROR = 1e-2
PEER_WORKSPACE_BYTES = 256 << 20
# Our other kernels, as peers.
WAYS: dict[str, dict[str, bool]] = {
    "deterministic": {"deterministic": True},
    "mma": {"by_warpgroups": False},
    "mma deterministic": {"by_warpgroups": False, "deterministic": True},
}
Call = Callable[[], torch.Tensor]


@dataclass(slots=True)
class Work:
    """One cell: `batch` sequences of `rows` new tokens behind `past`; K and V of all sets in pages."""

    batch: int
    rows: int
    past: int
    heads: int
    head_dim: int
    page_size: int
    query: torch.Tensor
    pages: list[torch.Tensor]
    page_table: torch.Tensor

    @property
    def keys(self) -> int:
        return self.past + self.rows

    @property
    def flops(self) -> float:
        seen = self.rows * self.past + self.rows * (self.rows + 1) / 2
        return 4.0 * self.batch * self.heads * self.head_dim * seen

    def contiguous(self, index: int, repeats: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a set, each (batch, KV_HEADS * repeats, keys, head_dim)."""
        parts = self.pages[index][self.page_table.long()].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        key, value = parts.repeat_interleave(repeats, dim=2).contiguous()
        return key, value


def make_work(batch: int, rows: int, past: int, heads: int, head_dim: int, page_size: int) -> Work:
    per_sequence = -(-(past + rows) // page_size)
    shape = (batch * per_sequence, 2, KV_HEADS, page_size, head_dim)
    return Work(
        batch=batch,
        rows=rows,
        past=past,
        heads=heads,
        head_dim=head_dim,
        page_size=page_size,
        query=torch.randn(batch * rows, heads * head_dim, device="cuda").bfloat16(),
        pages=[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)],
        page_table=torch.randperm(shape[0], device="cuda").int().view(batch, per_sequence),
    )


def graph_us(calls: list[Call]) -> float:
    """Microseconds of one call."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    each = max(start.elapsed_time(end) / len(calls), 1e-3)
    rounds = max(1, min(MOST_CALLS, int(TARGET_MS / each)) // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times)


def ours(work: Work, **way: bool) -> list[Call]:
    size = paged_prefill_workspace(work.heads, work.head_dim, device_limits(work.query.device))
    out = torch.empty_like(work.query)
    operands: dict[str, Any] = {
        "page_table": work.page_table,
        "slots": torch.arange(work.batch, device="cuda", dtype=torch.int32),
        "query_start": torch.arange(work.batch + 1, device="cuda", dtype=torch.int32) * work.rows,
        "past_len": torch.full((work.batch,), work.past, device="cuda", dtype=torch.int32),
        "out": out,
        "num_heads": work.heads,
        "scale": work.head_dim**-0.5,
        "workspace": torch.empty(size, device="cuda", dtype=torch.uint8),
    }

    def call(pages: torch.Tensor) -> Call:
        def run() -> torch.Tensor:
            paged_prefill(work.query, pages, **operands, **way)
            return out

        return run

    return [call(pages) for pages in work.pages]


def flashinfer_calls(work: Work, backend: str) -> list[Call]:
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    space = torch.zeros(PEER_WORKSPACE_BYTES, device="cuda", dtype=torch.uint8)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(space, "HND", backend=backend)
    per_sequence = work.page_table.shape[1]
    wrapper.plan(
        torch.arange(work.batch + 1, dtype=torch.int32) * work.rows,
        torch.arange(work.batch + 1, dtype=torch.int32) * per_sequence,
        work.page_table.flatten(),
        torch.full((work.batch,), (work.keys - 1) % work.page_size + 1, dtype=torch.int32),
        work.heads,
        KV_HEADS,
        work.head_dim,
        work.page_size,
        causal=True,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    query = work.query.view(-1, work.heads, work.head_dim)
    out = torch.empty_like(query)

    def call(pages: torch.Tensor) -> Call:
        return lambda: wrapper.run(query, pages, out=out).flatten(1)

    return [call(pages) for pages in work.pages]


def torch_calls(work: Work, backend: SDPBackend) -> list[Call]:
    """Torch's attention over contiguous K and V; for a past they are repeated to all heads outside the timing."""
    query = work.query.view(work.batch, work.rows, work.heads, work.head_dim).transpose(1, 2)
    repeats = work.heads // KV_HEADS if work.past else 1
    bias = causal_lower_right(work.rows, work.keys) if work.past else None

    def call(key: torch.Tensor, value: torch.Tensor) -> Call:
        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                if bias is not None:
                    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
                else:
                    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(-1, work.heads * work.head_dim)

        return run

    return [call(*work.contiguous(index, repeats)) for index in range(SETS)]


def peer_calls(work: Work, peer: str) -> list[Call] | None:
    """None where the peer is not installed or has no such form."""
    if peer in ("fa2", "fa3"):
        return flashinfer_calls(work, peer) if importlib.util.find_spec("flashinfer") else None
    if peer == "cudnn":
        return None if work.past else torch_calls(work, SDPBackend.CUDNN_ATTENTION)
    return torch_calls(work, SDPBackend.FLASH_ATTENTION)


def report(work: Work, peers: list[str]) -> None:
    """One line of the table."""
    calls = ours(work)
    expected = calls[0]().float()
    our_us = graph_us(calls)
    cells = [f"{work.flops / our_us / 1e6:5.0f} ({our_us:7.1f} us)"]
    for name, way in WAYS.items():
        cells.append(cell(work, name, ours(work, **way), expected, our_us))
    for peer in peers:
        try:
            theirs = peer_calls(work, peer)
        except Exception as error:  # a peer's failure is a cell of the table
            cells.append(f"{peer} {type(error).__name__}: {str(error)[:60]}")
            continue
        if theirs is not None:
            cells.append(cell(work, peer, theirs, expected, our_us))
    name = f"heads {work.heads} page {work.page_size} batch {work.batch} rows {work.rows} past {work.past}"
    print(f"{name:46s} {' | '.join(cells)}", flush=True)


def cell(work: Work, name: str, calls: list[Call], expected: torch.Tensor, our_us: float) -> str:
    """A peer's rate and our rate over it, or how wrong it is."""
    result = calls[0]().float().view_as(expected)
    error = float((result - expected).norm() / expected.norm())
    if not error < WORST_ERROR:
        return f"{name} WRONG {error:.1e}"
    us = graph_us(calls)
    return f"{name} {work.flops / us / 1e6:4.0f} x{us / our_us:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, action="append")
    parser.add_argument("--head-dim", type=int, default=128, help="64, 128 or 256; FlashInfer is prepared for 128")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--peers", default="fa2,fa3,flash,cudnn")
    parser.add_argument("--case", action="append", help="batch,rows,past")
    arguments = parser.parse_args()
    cases = [tuple(map(int, case.split(","))) for case in arguments.case] if arguments.case else CASES
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ours, then each peer: TFLOP/s, our ratio")
    for heads in arguments.heads or (32, 16):
        for batch, rows, past in cases:
            report(make_work(batch, rows, past, heads, arguments.head_dim, arguments.page), arguments.peers.split(","))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
