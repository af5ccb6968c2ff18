"""Decode attention against FlashInfer and the read ceiling: microseconds a call from CUDA graphs, by batch and context.

    python bench/gpu/bench_paged_decode.py                       # the whole grid
    python bench/gpu/bench_paged_decode.py --batch 1 --context 1024 --page 64 --heads 32
    python bench/gpu/bench_paged_decode.py --fp8 --peers         # fp8 pages, ours alone

A graph holds calls on many layers' pages, together larger than the L2 cache, and is replayed; ours and the peers'
replays alternate.  Results are compared first: ours and each peer with float64 attention on the first and the last
row.  `early` is ours with `early_reads`, where a launch may read keys before the one in front has ended.  The
ceiling is what plain 16-byte loads read (GB/s, `--ceiling`); the fraction is of K and V bytes alone.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from edgellm.kernels.cu.launch import device_limits
from edgellm.kernels.cu.paged_decode import paged_decode, paged_decode_workspace
from edgellm.kernels.ref import paged_decode as ref
from edgellm.kernels.ref.fp8_pages import head_block_bytes, split_pages

KV_HEADS = 8
DTYPE = torch.bfloat16
ROTATED_BYTES = 600 << 20  # ten times the L2 cache of an H200
MAX_LAYERS = 24
MAX_CALLS = 300
GRAPH_US = 8000.0
REPLAYS = 5
CHECKED_TOKENS = 300_000
ALLOWED_ERROR = 1e-2
CEILING_GBPS = 4548.0
SPACE_BYTES = 256 << 20
OURS = ("ours", "early")


@dataclass(slots=True)
class Case:
    """Layers of K and V that one page table addresses, and one query."""

    layers: list[torch.Tensor]  # (pages, 2, KV_HEADS, page_size, head_dim) each, or fp8 pages
    table: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    query: torch.Tensor
    out: torch.Tensor
    page_size: int
    num_heads: int
    head_dim: int
    context: int

    @property
    def kv_bytes(self) -> int:
        """What a call must read of K and V."""
        pages = self.layers[0]
        return len(self.slots) * self.context * pages[0].numel() * pages.element_size() // self.page_size


Run = Callable[[torch.Tensor], None]


def random_pages(pages: int, page_size: int, head_dim: int, *, fp8: bool) -> torch.Tensor:
    """Normal numbers; as fp8, any finite values with one scale."""
    if not fp8:
        return torch.empty(pages, 2, KV_HEADS, page_size, head_dim, device="cuda", dtype=DTYPE).normal_()
    shape = (pages, 2, KV_HEADS, head_block_bytes(page_size, head_dim))
    storage = torch.randint(0, 0x7F, shape, device="cuda", dtype=torch.uint8)
    split_pages(storage, page_size, head_dim)[1].fill_(2.0**-7)
    return storage


def make_case(batch: int, context: int, page_size: int, num_heads: int, head_dim: int, *, fp8: bool = False) -> Case:
    """Random K, V and page order."""
    per_row = -(-context // page_size)
    pages = per_row * batch
    layers = [random_pages(pages, page_size, head_dim, fp8=fp8)]
    layer_bytes = layers[0].numel() * layers[0].element_size()
    count = max(1, min(MAX_LAYERS, math.ceil(ROTATED_BYTES / layer_bytes)))
    layers += [random_pages(pages, page_size, head_dim, fp8=fp8) for _ in range(count - 1)]
    width = num_heads * head_dim
    return Case(
        layers=layers,
        table=torch.randperm(pages, device="cuda").int().view(batch, per_row),
        slots=torch.arange(batch, device="cuda").int(),
        lengths=torch.full((batch,), context, device="cuda", dtype=torch.int32),
        query=torch.randn(batch, width, device="cuda", dtype=DTYPE),
        out=torch.full((batch, width), float("nan"), device="cuda", dtype=DTYPE),
        page_size=page_size,
        num_heads=num_heads,
        head_dim=head_dim,
        context=context,
    )


def ours(case: Case, *, early: bool = False) -> Run:
    limits = device_limits(case.query.device)
    size = paged_decode_workspace(len(case.slots), case.num_heads, case.head_dim, limits)
    workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")

    def run(pages: torch.Tensor) -> None:
        paged_decode(
            case.query,
            pages,
            case.table,
            case.slots,
            case.lengths,
            case.out,
            workspace,
            num_heads=case.num_heads,
            scale=case.head_dim**-0.5,
            early_reads=early,
        )

    return run


def flashinfer_fa2(case: Case, space: torch.Tensor) -> Run:
    """FlashInfer's paged decode on tensor cores, planned once on the host."""
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    batch, per_row = case.table.shape
    wrapper = BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=True, backend="fa2")
    last_page = torch.full((batch,), case.context - (per_row - 1) * case.page_size, dtype=torch.int32)
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32) * per_row,
        case.table.flatten(),
        last_page,
        case.num_heads,
        KV_HEADS,
        case.head_dim,
        case.page_size,
        pos_encoding_mode="NONE",
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
    )
    query, out = (part.view(batch, case.num_heads, case.head_dim) for part in (case.query, case.out))
    return lambda pages: wrapper.run(query, pages, out=out)


def flashinfer_xqa(case: Case, space: torch.Tensor) -> Run:
    """FlashInfer's xqa, which plans on the device as ours does, with its overlap of launches on."""
    from flashinfer.xqa import xqa

    batch = len(case.slots)
    query, out = (part.view(batch, 1, case.num_heads, case.head_dim) for part in (case.query, case.out))
    semaphores = torch.zeros(1 << 20, device="cuda", dtype=torch.int32).view(torch.uint32)
    lengths = case.lengths.view(batch, 1).view(torch.uint32)
    blocks = torch.cuda.get_device_properties(0).multi_processor_count

    def run(pages: torch.Tensor) -> None:
        xqa(
            query,
            pages[:, 0],
            pages[:, 1],
            case.table,
            lengths,
            out,
            space,
            semaphores,
            KV_HEADS,
            case.page_size,
            kv_layout="HND",
            sm_count=blocks,
            enable_pdl=True,
        )

    return run


def runs_of(case: Case, peers: list[str], space: torch.Tensor) -> dict[str, Run]:
    """Everything to be timed; a peer that does not load is named once and left out from then on."""
    made = {"ours": ours(case), "early": ours(case, early=True)}
    makers = {"fa2": flashinfer_fa2, "xqa": flashinfer_xqa}
    for peer in list(peers):
        try:
            made[peer] = makers[peer](case, space)
            made[peer](case.layers[0])
            torch.cuda.synchronize()
        except Exception as error:  # whatever a peer's import or compiler raises
            print(f"without {peer}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            made.pop(peer, None)
            peers.remove(peer)
    return made


def check(case: Case, name: str, run: Run) -> None:
    """Compare with the reference on the first and last row."""
    case.out.fill_(float("nan"))
    run(case.layers[0])
    if len(case.slots) * case.context > CHECKED_TOKENS:
        return
    rows = torch.tensor(sorted({0, len(case.slots) - 1}), device="cuda")
    expected = torch.empty(len(rows), case.out.shape[1], device="cuda", dtype=torch.float64)
    arguments = (case.query[rows], case.layers[0], case.table, case.slots[rows], case.lengths[rows], expected, None)
    ref.paged_decode(*arguments, num_heads=case.num_heads, scale=case.head_dim**-0.5)
    error = float((case.out[rows].double() - expected).norm() / expected.norm())
    if not error < ALLOWED_ERROR:
        raise SystemExit(f"{name} is wrong: relative error {error}")


def elapsed_us(work: Callable[[], Any]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return 1000 * start.elapsed_time(stop)


def graph_of(case: Case, run: Run) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of calls on the layers in turn, about GRAPH_US long, and how many calls it holds."""

    def all_layers() -> None:
        for pages in case.layers:
            run(pages)

    all_layers()
    torch.cuda.synchronize()
    estimate = max(elapsed_us(all_layers) / len(case.layers), 2.0)
    rounds = max(1, min(MAX_CALLS, int(GRAPH_US / estimate)) // len(case.layers))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            all_layers()
    return graph, rounds * len(case.layers)


def measure(case: Case, runs: dict[str, Run]) -> dict[str, float]:
    """Median microseconds of a call, by name; replays alternate."""
    graphs = {}
    for name, run in runs.items():
        check(case, name, run)
        graphs[name] = graph_of(case, run)
        graphs[name][0].replay()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPLAYS):
        for name, (graph, calls) in graphs.items():
            times[name].append(elapsed_us(graph.replay) / calls)
    return {name: median(found) for name, found in times.items()}


def report(case: Case, times: dict[str, float], ceiling: float) -> tuple[float, float]:
    """Print one line; returns best peer / ours, and fraction of the ceiling."""
    peers = {name: us for name, us in times.items() if name not in OURS}
    best = min(peers, key=lambda name: peers[name]) if peers else ""
    ratio = peers[best] / times["ours"] if best else math.nan
    fraction = case.kv_bytes / times["ours"] / 1000 / ceiling
    others = " ".join(f"{name} {us:8.1f}" for name, us in peers.items())
    print(
        f"{case.num_heads:>5}{case.page_size:>5}{len(case.slots):>6}{case.context:>8}{times['ours']:9.1f}"
        f"{times['early']:9.1f}{fraction:7.2f}{ratio:7.3f} {best:<5} {others}",
        flush=True,
    )
    return ratio, fraction


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, nargs="*", default=[1024, 8192, 32768])
    parser.add_argument("--page", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--heads", type=int, nargs="*", default=[32, 16])
    parser.add_argument("--peers", nargs="*", default=["fa2", "xqa"])
    parser.add_argument("--fp8", action="store_true", help="fp8 pages; leave the peers out")
    parser.add_argument("--head-dim", type=int, default=128, help="64, 128 or 256; peers are prepared for 128")
    parser.add_argument("--ceiling", type=float, default=CEILING_GBPS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    shape = f"head_dim {options.head_dim}, {KV_HEADS} kv heads{', fp8 pages' if options.fp8 else ''}"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}, {shape}")
    print(f"{'heads':>5}{'page':>5}{'batch':>6}{'context':>8}{'us':>9}{'early':>9}{'frac':>7}{'ratio':>7} best peer")
    space = torch.zeros(SPACE_BYTES, device="cuda", dtype=torch.uint8)
    ratios, fractions, peers = [], [], list(options.peers)
    for heads in options.heads:
        for page in options.page:
            for batch in options.batch:
                for context in options.context:
                    case = make_case(batch, context, page, heads, options.head_dim, fp8=options.fp8)
                    ratio, fraction = report(case, measure(case, runs_of(case, peers, space)), options.ceiling)
                    ratios.append(ratio)
                    fractions.append(fraction)
                    del case
    print(f"geometric mean: {geometric_mean(fractions):.3f} of the ceiling", end="")
    print(f", best peer / ours {geometric_mean(ratios):.3f}" if peers else "")


if __name__ == "__main__":
    main()
