"""Replay of a workload through a page cache in continuous batching, and our cache behind the peers' interface.

An engine is anything with `admit(key, prompt) -> cached tokens or -1`, `grow(keys, tokens)` and `release(key)`.
"""

from __future__ import annotations

import gc
from array import array
from collections import deque
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

from bench.peers.ref_python import Ref
from bench.workloads import Turn
from edgellm._core.block_hash import TokenChain
from edgellm._core.cache_manager import CacheRequestLease, ContextCacheManager
from edgellm.cache.types import ResourceDemand


class PageCache(Protocol):
    def admit(self, key: int, prompt: array[int]) -> int: ...
    def grow(self, keys: list[int], tokens: list[int]) -> None: ...
    def release(self, key: int) -> None: ...


class OurCache:
    """`ContextCacheManager` as a session drives it: chain, plan, lease, publication, one batched call a step.

    The floor publishes a block as soon as its last token is known, so the replay does too (`lookahead=0`).
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.manager = ContextCacheManager(page_size, ResourceDemand(base_kv_pages=num_pages))
        self.page_size = page_size
        self.leases: dict[int, CacheRequestLease] = {}
        self.chains: dict[int, TokenChain] = {}

    def admit(self, key: int, prompt: array[int]) -> int:
        chain = TokenChain(self.page_size)
        chain.extend(prompt)
        result = self.manager.acquire_vanilla(chain)
        if result.lease is None:
            return -1
        if chain.num_blocks:
            self.manager.publish(result.lease, chain, len(prompt), make_record=True)
        self.leases[key], self.chains[key] = result.lease, chain
        return result.plan.reuse_token_length

    def grow(self, keys: list[int], tokens: list[int]) -> None:
        leases = [self.leases[key] for key in keys]
        chains = [self.chains[key] for key in keys]
        refused = self.manager.append_tokens(leases, chains, array("i", tokens), True, lookahead=0)
        if refused >= 0:
            raise MemoryError(f"no page for sequence {keys[refused]}")

    def release(self, key: int) -> None:
        del self.chains[key]
        self.leases.pop(key).release()


class FloorCache:
    """The plain-Python floor behind the same interface."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.floor = Ref(num_pages, page_size, 0)

    def admit(self, key: int, prompt: array[int]) -> int:
        return self.floor.admit(key, prompt, 0)

    def grow(self, keys: list[int], tokens: list[int]) -> None:
        self.floor.grow(keys, tokens)

    def release(self, key: int) -> None:
        self.floor.release(key)


@dataclass(slots=True)
class ReplayResult:
    """Times are those inside the engine's calls, in nanoseconds."""

    hit_tokens: int = 0
    prompt_tokens: int = 0
    admitted: int = 0
    grown: int = 0
    admit_ns: int = 0
    grow_ns: int = 0
    release_ns: int = 0

    @property
    def busy_ns(self) -> int:
        return self.admit_ns + self.grow_ns + self.release_ns

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens


def replay(engine: PageCache, turns: list[Turn], *, slots: int = 32) -> ReplayResult:
    """Admit in order while a slot is free, then one token for each running sequence, until all is done."""
    out = ReplayResult()
    waiting = deque(range(len(turns)))
    done: dict[int, int] = {}
    gc.collect()
    gc.freeze()  # the workload itself must not be walked by collections inside the clock
    try:
        while waiting or done:
            while waiting and len(done) < slots and _admit(engine, waiting[0], turns[waiting[0]], out):
                done[waiting.popleft()] = 0
            _step(engine, turns, done, out)
    finally:
        gc.unfreeze()
    return out


def _admit(engine: PageCache, key: int, turn: Turn, out: ReplayResult) -> bool:
    start = perf_counter_ns()
    cached = engine.admit(key, turn.prompt)
    out.admit_ns += perf_counter_ns() - start
    if cached < 0:
        return False
    out.admitted += 1
    out.hit_tokens += cached
    out.prompt_tokens += len(turn.prompt)
    return True


def _step(engine: PageCache, turns: list[Turn], done: dict[int, int], out: ReplayResult) -> None:
    if not done:
        raise MemoryError("the pool is too small for one request")
    keys = list(done)
    tokens = [turns[key].reply[count] for key, count in done.items()]
    start = perf_counter_ns()
    engine.grow(keys, tokens)
    out.grow_ns += perf_counter_ns() - start
    out.grown += len(keys)
    for key in keys:
        done[key] += 1
        if done[key] == len(turns[key].reply):
            del done[key]
            start = perf_counter_ns()
            engine.release(key)
            out.release_ns += perf_counter_ns() - start
