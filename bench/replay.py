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

from bench.checkpoint_rules import Prompt, Rules
from bench.peers.ref_python import Ref
from bench.workloads import Turn
from edgellm._core.block_hash import TokenChain
from edgellm._core.cache_manager import CacheRequestLease, ContextCacheManager
from edgellm.cache.types import BaseStateKind, CheckpointKind, ResourceDemand

SNAPSHOT_PAGES = 34  # a recurrent snapshot has the bytes of 544 tokens of the hybrid's KV, at 16 tokens a page


class PageCache(Protocol):
    def admit(self, key: int, prompt: array[int], boundaries: tuple[int, ...] = ()) -> int: ...
    def grow(self, keys: list[int], tokens: list[int]) -> None: ...
    def release(self, key: int) -> None: ...


class OurCache:
    """`ContextCacheManager` as a session drives it: chain, plan, lease, publication, one batched call a step.

    The floor publishes a block as soon as its last token is known, so the replay does too (`lookahead=0`), and it
    reuses whole pages only, while ours reuses the tokens behind them as well.

    Args:
        tails: keep the unfilled last page of what ended, as a session does.
    """

    def __init__(self, num_pages: int, page_size: int, *, tails: bool = True) -> None:
        self.tails = tails
        self.manager = ContextCacheManager(page_size, ResourceDemand(base_kv_pages=num_pages))
        self.page_size = page_size
        self.leases: dict[int, CacheRequestLease] = {}
        self.chains: dict[int, TokenChain] = {}

    def admit(self, key: int, prompt: array[int], boundaries: tuple[int, ...] = ()) -> int:
        chain = TokenChain(self.page_size)
        chain.extend(prompt)
        result = self.manager.acquire_vanilla(chain)
        if result.lease is None:
            return -1
        if chain.num_blocks:
            self.manager.publish(result.lease, chain, len(prompt), make_record=True)
        self.manager.release_tail_source(result.lease)  # its copy is on the stream
        self.leases[key], self.chains[key] = result.lease, chain
        return result.plan.reuse_token_length

    def grow(self, keys: list[int], tokens: list[int]) -> None:
        leases = [self.leases[key] for key in keys]
        chains = [self.chains[key] for key in keys]
        refused = self.manager.append_tokens(leases, chains, array("i", tokens), True, lookahead=0)
        if refused >= 0:
            raise MemoryError(f"no page for sequence {keys[refused]}")

    def release(self, key: int) -> None:
        lease, chain = self.leases.pop(key), self.chains.pop(key)
        if chain.num_blocks:
            self.manager.publish(lease, chain, chain.num_tokens, make_record=True, retain_tail=self.tails)
        lease.release()


@dataclass(frozen=True, slots=True)
class Split:
    """One budget, counted in attention pages, shared out between pages and the two kinds of snapshot slots.

    A recurrent snapshot counts as `SNAPSHOT_PAGES` pages of the hybrid's KV, a partial slot as the page it holds;
    every second snapshot can have one.
    """

    pages: int
    snapshots: int
    partials: int

    @classmethod
    def of(cls, budget: int, share: float) -> Split:
        snapshots = int(budget * share / SNAPSHOT_PAGES)
        return cls(budget - SNAPSHOT_PAGES * snapshots - snapshots // 2, snapshots, snapshots // 2)


class Placement(Protocol):
    """Lengths of a prompt's checkpoints: the plugin's rules, or those rules with one of them switched off."""

    def __call__(self, prompt: Prompt, /) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class HybridSequence:
    lease: CacheRequestLease
    chain: TokenChain
    prompt: Prompt
    places: tuple[int, ...]


class HybridCache:
    """`ContextCacheManager` in the hybrid flavour, as `edgellm-hybrid` drives it; snapshots have no bytes here."""

    def __init__(self, split: Split, page_size: int, rules: Rules, place: Placement) -> None:
        capacities = ResourceDemand(
            base_kv_pages=split.pages,
            recurrent_snapshot_slots=split.snapshots,
            partial_kv_snapshot_slots=split.partials,
        )
        self.manager = ContextCacheManager(page_size, capacities, base_state_kind=BaseStateKind.HYBRID)
        self.page_size, self.rules, self.place = page_size, rules, place
        self.live: dict[int, HybridSequence] = {}
        self.placed = 0
        self.refused = 0

    def admit(self, key: int, prompt: array[int], boundaries: tuple[int, ...] = ()) -> int:
        manager, size = self.manager, self.page_size
        chain = TokenChain(size)
        chain.extend(prompt)
        result = manager.acquire(manager.plan(chain))
        lease, plan = result.lease, result.plan
        if lease is None:
            return -1
        manager.release_restored_hybrid_snapshots(lease)
        if chain.num_blocks:
            manager.publish(lease, chain, len(prompt), make_record=False)
        reuse = int(plan.reuse_token_length)
        about = Prompt(len(prompt), reuse, plan.known_token_length, boundaries, size)
        sequence = self.live[key] = HybridSequence(lease, chain, about, self.place(about))
        for length in sequence.places:
            if length > reuse:
                self._checkpoint(sequence, length, self.rules.kind_of(length, about))
        return reuse

    def _checkpoint(self, sequence: HybridSequence, length: int, kind: CheckpointKind) -> None:
        lease, chain = sequence.lease, sequence.chain
        reservation = self.manager.reserve_hybrid_snapshots(lease, length % self.page_size != 0)
        if reservation is None:
            self.refused += 1
            return
        self.placed += 1
        self.manager.mark_snapshots_written(lease, reservation)
        if not self.rules.supersede:
            kind = CheckpointKind.BRANCH  # a kind that is never superseded
        keep = self.rules.wanted(sequence.places, sequence.prompt)
        self.manager.publish_hybrid(lease, chain, length, reservation, kind=kind, keep_lengths=keep)
        self.manager.retire_hybrid_snapshot_reservation(lease, reservation)

    def grow(self, keys: list[int], tokens: list[int]) -> None:
        """The appended token's state is written in the next step, so blocks are published one token late."""
        live = [self.live[key] for key in keys]
        leases, chains = [one.lease for one in live], [one.chain for one in live]
        refused = self.manager.append_tokens(leases, chains, array("i", tokens), True, lookahead=1)
        if refused >= 0:
            raise MemoryError(f"no page for sequence {keys[refused]}")

    def release(self, key: int) -> None:
        sequence = self.live.pop(key)
        end = sequence.chain.num_tokens - 1
        if self.rules.wants_reply_end(end, sequence.places, sequence.prompt):
            self._checkpoint(sequence, end, CheckpointKind.TAIL)
        sequence.lease.release()


class FloorCache:
    """The plain-Python floor behind the same interface."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.floor = Ref(num_pages, page_size, 0)

    def admit(self, key: int, prompt: array[int], boundaries: tuple[int, ...] = ()) -> int:
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
    cached = engine.admit(key, turn.prompt, turn.boundaries)
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
