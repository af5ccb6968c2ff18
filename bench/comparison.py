"""What the cache benches share: rounds that alternate between us and a peer, and the facts a result carries."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import numpy as np

PAGE_SIZE = 16


def timed(call: Callable[[], object]) -> float:
    """Nanoseconds of one call."""
    start = perf_counter_ns()
    call()
    return perf_counter_ns() - start


def alternate(
    benchmark: Any, peer: Callable[[], float], ours: Callable[[], float], rounds: int
) -> tuple[list[float], list[float]]:
    """Run both in turn, one round of each; each returns its own time in nanoseconds."""
    peer_ns: list[float] = []
    ours_ns: list[float] = []
    benchmark.pedantic(
        lambda: ours_ns.append(ours()), setup=lambda: peer_ns.append(peer()), rounds=rounds, warmup_rounds=1
    )
    return peer_ns, ours_ns


def report(benchmark: Any, peer_ns: list[float], ours_ns: list[float], **facts: object) -> float:
    """Fill `extra_info`; returns how many times faster than the peer ours is, median over median."""
    ratio = statistics.median(peer_ns) / statistics.median(ours_ns)
    benchmark.extra_info.update(
        ratio_to_peer=round(ratio, 2),
        peer_us=round(statistics.median(peer_ns) / 1e3, 2),
        ours_us=round(statistics.median(ours_ns) / 1e3, 2),
        page_size=PAGE_SIZE,
        dtype="int32",
        python=sys.version.split()[0],
        numpy=np.__version__,
        **facts,
    )
    return ratio


def whole_pages(tokens: int) -> int:
    """Reused tokens as a peer that shares whole pages counts them."""
    return tokens // PAGE_SIZE * PAGE_SIZE
