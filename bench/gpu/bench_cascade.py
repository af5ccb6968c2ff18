"""Decode attention of rows that share a prefix: each row by itself, and in a group; microseconds a call from graphs.

    python bench/gpu/bench_cascade.py                                  # the whole grid
    python bench/gpu/bench_cascade.py --batch 64 --shared 16384 --fp8
    python bench/gpu/bench_cascade.py --parts --batch 64 --shared 16384    # where the time goes

Every row has the shared keys in the same pages and `--own` keys behind them in pages of its own.  A graph holds calls
on many layers' pages, together larger than the L2 cache; replays of the two alternate.  First results are compared:
with each other, and with float64 attention on the first and the last row.  `pays` is what the executor decides, which
shares where it says yes; `us` is what the three launches take, the ratio plain / in a group.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from statistics import median

import torch
from bench_paged_decode import (
    ALLOWED_ERROR,
    DTYPE,
    KV_HEADS,
    MAX_LAYERS,
    REPLAYS,
    ROTATED_BYTES,
    Run,
    elapsed_us,
    geometric_mean,
    graph_of,
    random_pages,
)

from edgellm.kernels.cu.launch import device_limits
from edgellm.kernels.cu.paged_cascade import MAX_GROUPS, paged_cascade, paged_cascade_workspace
from edgellm.kernels.cu.paged_decode import paged_decode
from edgellm.kernels.ref import paged_decode as ref
from edgellm.runtime.shared_prefix import sharing_pays

PAGE_SIZE = 16
CHECKED_KEYS = 20_000


@dataclass(slots=True)
class SharedCase:
    """Rows of one group over layers of K and V that one page table addresses."""

    layers: list[torch.Tensor]
    table: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    shared: torch.Tensor
    members: torch.Tensor
    group_start: torch.Tensor
    query: torch.Tensor
    out: torch.Tensor
    workspace: torch.Tensor
    num_heads: int
    head_dim: int


def make_case(batch: int, shared: int, own: int, num_heads: int, head_dim: int, *, fp8: bool) -> SharedCase:
    """Random K, V and page order."""
    common, private = shared // PAGE_SIZE, -(-own // PAGE_SIZE)
    pages = common + batch * private
    layers = [random_pages(pages, PAGE_SIZE, head_dim, fp8=fp8)]
    layer_bytes = layers[0].numel() * layers[0].element_size()
    count = max(1, min(MAX_LAYERS, math.ceil(ROTATED_BYTES / layer_bytes)))
    layers += [random_pages(pages, PAGE_SIZE, head_dim, fp8=fp8) for _ in range(count - 1)]
    order = torch.randperm(pages, device="cuda").int()
    table = torch.cat((order[:common].expand(batch, common), order[common:].view(batch, private)), 1).contiguous()
    starts = torch.full((MAX_GROUPS + 1,), batch, device="cuda", dtype=torch.int32)
    starts[0] = 0
    size = paged_cascade_workspace(batch, num_heads, KV_HEADS, head_dim, device_limits(table.device))
    width = num_heads * head_dim
    return SharedCase(
        layers=layers,
        table=table,
        slots=torch.arange(batch, device="cuda").int(),
        lengths=torch.full((batch,), common * PAGE_SIZE + own, device="cuda", dtype=torch.int32),
        shared=torch.full((batch,), common * PAGE_SIZE, device="cuda", dtype=torch.int32),
        members=torch.randperm(batch, device="cuda").int(),
        group_start=starts,
        query=torch.randn(batch, width, device="cuda", dtype=DTYPE),
        out=torch.full((batch, width), float("nan"), device="cuda", dtype=DTYPE),
        workspace=torch.zeros(size, dtype=torch.uint8, device="cuda"),
        num_heads=num_heads,
        head_dim=head_dim,
    )


def plain(case: SharedCase) -> Run:
    def run(pages: torch.Tensor) -> None:
        paged_decode(
            case.query,
            pages,
            case.table,
            case.slots,
            case.lengths,
            case.out,
            case.workspace,
            num_heads=case.num_heads,
            scale=case.head_dim**-0.5,
        )

    return run


def grouped(case: SharedCase) -> Run:
    def run(pages: torch.Tensor) -> None:
        paged_cascade(
            case.query,
            pages,
            case.table,
            case.slots,
            case.lengths,
            case.shared,
            case.members,
            case.group_start,
            case.out,
            case.workspace,
            num_heads=case.num_heads,
            scale=case.head_dim**-0.5,
        )

    return run


def result_of(case: SharedCase, run: Run) -> torch.Tensor:
    case.out.fill_(float("nan"))
    run(case.layers[0])
    return case.out.double()


def check(case: SharedCase) -> float:
    """How far the two are apart, relative in the norm.

    Raises:
        SystemExit: they differ by more than rounding, or plain decode attention differs from the reference.
    """
    expected, actual = result_of(case, plain(case)), result_of(case, grouped(case))
    error = float((actual - expected).norm() / expected.norm())
    rows = torch.tensor([0, len(case.slots) - 1], device="cuda")
    exact = torch.empty(2, expected.shape[1], device="cuda", dtype=torch.float64)
    keys = int(case.lengths[0])
    off = 0.0
    if keys <= CHECKED_KEYS:
        arguments = (case.query[rows], case.layers[0], case.table, case.slots[rows], case.lengths[rows], exact, None)
        ref.paged_decode(*arguments, num_heads=case.num_heads, scale=case.head_dim**-0.5)
        off = max(float((found[rows] - exact).norm() / exact.norm()) for found in (expected, actual))
    if not max(error, off) < ALLOWED_ERROR:
        raise SystemExit(f"wrong: {error} from plain decode attention, which is {off} from the reference")
    return error


def measure(case: SharedCase) -> tuple[float, float]:
    """Median microseconds of a call by itself, and in a group; replays alternate."""
    graphs = [graph_of(case, run) for run in (plain(case), grouped(case))]  # type: ignore[arg-type]
    times: list[list[float]] = [[], []]
    for _ in range(REPLAYS):
        for found, (graph, calls) in zip(times, graphs, strict=True):
            found.append(elapsed_us(graph.replay) / calls)
    return median(times[0]), median(times[1])


def print_parts(case: SharedCase) -> None:
    """Microseconds of each kernel, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    run = grouped(case)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for pages in case.layers:
            run(pages)
        torch.cuda.synchronize()
    for event in profiler.key_averages():
        name = event.key.split("<")[0].split("::")[-1]
        print(f"    {name:<24}{event.device_time_total / event.count:8.1f} us", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[8, 64, 256])
    parser.add_argument("--shared", type=int, nargs="*", default=[2048, 16384])
    parser.add_argument("--own", type=int, default=256)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128, help="64, 128 or 256")
    parser.add_argument("--fp8", action="store_true", help="fp8 pages")
    parser.add_argument("--parts", action="store_true", help="also what each kernel takes")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    shape = f"{options.heads} heads of {options.head_dim}, {KV_HEADS} kv heads{', fp8 pages' if options.fp8 else ''}"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}, {shape}, {options.own} own keys a row")
    print(f"{'batch':>6}{'shared':>8}{'pays':>6}{'plain us':>10}{'us':>9}{'ratio':>7}{'apart':>10}")
    ratios = []
    for batch in options.batch:
        for shared in options.shared:
            case = make_case(batch, shared, options.own, options.heads, options.head_dim, fp8=options.fp8)
            error = check(case)
            by_itself, together = measure(case)
            ratios.append(by_itself / together)
            pays = "yes" if sharing_pays(batch, shared) else "no"
            print(
                f"{batch:>6}{shared:>8}{pays:>6}{by_itself:10.1f}{together:9.1f}{ratios[-1]:7.2f}{error:10.1e}",
                flush=True,
            )
            if options.parts:
                print_parts(case)
            del case
    print(f"geometric mean of the ratios: {geometric_mean(ratios):.2f}")


if __name__ == "__main__":
    main()
