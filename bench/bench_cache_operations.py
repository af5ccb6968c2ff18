"""Single operations of the cache manager, against plain Python, and how they grow with the number of records.

    pytest -o python_files='bench_*.py' bench/bench_cache_operations.py -s       # times; ratios in extra_info
    pytest -o python_files='bench_*.py' bench/bench_cache_operations.py --benchmark-disable       # smoke test

Each operation runs in three managers that keep 100, 1,000 and 10,000 records besides, and in a plain-Python peer that
keeps none.  The rounds of all four alternate in one process.  `ratio_to_peer`: the peer's median time over ours
at 10,000 records; `growth`: ours at 10,000 over ours at 100.  What was reused is compared first.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from bench.checkpoint_rules import Rules
from bench.comparison import PAGE_SIZE, report, timed, whole_pages
from bench.peers.plain_checkpoints import PlainCheckpointCache
from bench.peers.plain_records import PlainPairs, PlainRecords
from bench.peers.ref_python import Ref
from bench.workloads import random_tokens
from edgellm._core.block_hash import TokenChain
from edgellm._core.cache_manager import CacheRequestLease, ContextCacheManager
from edgellm.cache.types import (
    BaseStateKind,
    CheckpointKind,
    ResourceDemand,
    RetentionPriority,
    SpecReuseContract,
)

PROMPT_TOKENS = 32_768
PROMPT_PAGES = PROMPT_TOKENS // PAGE_SIZE
RECORD_TOKENS = 4 * PAGE_SIZE  # of each record that is only there
RECORDS = (100, 1_000, 10_000)
FUTURE_TOKENS = 1
ROUNDS = 20
BATCH = 50  # of operations too short to be timed alone
GROWING = 32  # sequences of the growth case
NO_ENDS = Rules(ends=False)


def chain_of(tokens: array[int]) -> TokenChain:
    chain = TokenChain(PAGE_SIZE)
    chain.extend(tokens)
    return chain


class Ours(ABC):
    """A manager with `records` short prompts that nobody uses, kept apart from what is timed by their priority."""

    def __init__(self, records: int, spare_pages: int) -> None:
        self.manager = self.make(records * RECORD_TOKENS // PAGE_SIZE + spare_pages, records)
        rng = Random(records)
        for _ in range(records):
            chain = chain_of(random_tokens(rng, RECORD_TOKENS))
            lease = self.manager.acquire(self.plan(chain), priority=RetentionPriority.HIGH).lease
            self.keep(lease, chain)
            lease.release()

    @abstractmethod
    def make(self, num_pages: int, records: int) -> ContextCacheManager: ...

    def plan(self, chain: TokenChain) -> Any:
        return self.manager.plan(chain)

    def publish(self, lease: CacheRequestLease, chain: TokenChain) -> None:
        self.manager.publish(lease, chain, chain.num_tokens, make_record=True)

    def keep(self, lease: CacheRequestLease, chain: TokenChain) -> None:
        """Publish a prompt that stays."""
        self.publish(lease, chain)

    def admit(self, prompt: array[int]) -> tuple[CacheRequestLease, TokenChain, int]:
        """Hash, match, lease and publish: what the floor's `admit` does."""
        chain = chain_of(prompt)
        result = self.manager.acquire(self.plan(chain))
        self.publish(result.lease, chain)
        return result.lease, chain, result.plan.reuse_token_length

    def admit_ns(self, prompt: array[int], reused: int) -> float:
        out: list[tuple[CacheRequestLease, TokenChain, int]] = []
        spent = timed(lambda: out.append(self.admit(prompt)))
        lease, _, reuse = out[0]
        assert whole_pages(reuse) == reused
        lease.release()
        return spent


class OurAttention(Ours):
    def make(self, num_pages: int, records: int) -> ContextCacheManager:
        return ContextCacheManager(PAGE_SIZE, ResourceDemand(base_kv_pages=num_pages))


class OurPairs(Ours):
    def make(self, num_pages: int, records: int) -> ContextCacheManager:
        contract = SpecReuseContract(owns_paged_spec_state=True, future_dependency_tokens=FUTURE_TOKENS)
        capacities = ResourceDemand(base_kv_pages=num_pages, draft_kv_pages=num_pages)
        return ContextCacheManager(PAGE_SIZE, capacities, spec_reuse_contract=contract)

    def plan(self, chain: TokenChain) -> Any:
        return self.manager.plan(chain, speculative=True)

    def publish(self, lease: CacheRequestLease, chain: TokenChain) -> None:
        self.manager.publish_spec(lease, chain, chain.num_tokens, make_record=True)


class OurCheckpoints(Ours):
    """Records are checkpoints; there are slots for them and `SPARE_SLOTS` more."""

    SPARE_SLOTS = 1

    def make(self, num_pages: int, records: int) -> ContextCacheManager:
        capacities = ResourceDemand(
            base_kv_pages=num_pages, recurrent_snapshot_slots=records + self.SPARE_SLOTS, partial_kv_snapshot_slots=1
        )
        return ContextCacheManager(PAGE_SIZE, capacities, base_state_kind=BaseStateKind.HYBRID)

    def publish(self, lease: CacheRequestLease, chain: TokenChain) -> None:
        self.manager.release_restored_hybrid_snapshots(lease)
        self.manager.publish(lease, chain, chain.num_tokens, make_record=False)

    def keep(self, lease: CacheRequestLease, chain: TokenChain) -> None:
        self.publish(lease, chain)
        self.checkpoint(lease, chain, chain.num_tokens, self.reserve(lease))

    def reserve(self, lease: CacheRequestLease) -> Any:
        reservation = self.manager.reserve_hybrid_snapshots(lease, False)
        assert reservation is not None
        return reservation

    def checkpoint(self, lease: CacheRequestLease, chain: TokenChain, length: int, reservation: Any) -> None:
        self.manager.mark_snapshots_written(lease, reservation)
        self.manager.publish_hybrid(lease, chain, length, reservation, kind=CheckpointKind.BRANCH)
        self.manager.retire_hybrid_snapshot_reservation(lease, reservation)


class FullCheckpoints(OurCheckpoints):
    SPARE_SLOTS = 0


def compare(
    benchmark: Any,
    sizes: dict[int, Callable[[], float]],
    peer: Callable[[], float],
    *,
    rounds: int = ROUNDS,
    per: int = 1,
) -> None:
    """Alternate all managers and the peer; each call returns the nanoseconds of `per` operations."""
    spent: dict[int, list[float]] = {size: [] for size in sizes}
    peer_ns: list[float] = []
    largest = max(sizes)

    def others() -> None:
        peer_ns.append(peer() / per)
        for size, call in sizes.items():
            if size != largest:
                spent[size].append(call() / per)

    benchmark.pedantic(
        lambda: spent[largest].append(sizes[largest]() / per), setup=others, rounds=rounds, warmup_rounds=3
    )
    if benchmark.stats is None:  # --benchmark-disable, which leaves the setup out
        others()
        return
    for times in (peer_ns, *spent.values()):
        del times[:3]
    medians = {size: statistics.median(times) for size, times in spent.items()}
    growth = round(medians[largest] / medians[min(sizes)], 2)
    by_records = {str(size): round(median / 1e3, 2) for size, median in medians.items()}
    ratio = report(benchmark, peer_ns, spent[largest], growth=growth, us_by_records=by_records)
    print(f"\n{benchmark.name}: ours {by_records} us, growth {growth}, peer {ratio:.1f} times ours")


def sizes_of(benchmark: Any) -> tuple[int, ...]:
    return RECORDS[:2] if benchmark.disabled else RECORDS


def floor_admit_ns(floor: Ref, prompt: array[int], reused: int) -> float:
    out: list[int] = []
    spent = timed(lambda: out.append(floor.admit(1, prompt, 0)))
    assert out == [reused]
    floor.release(1)
    return spent


def test_admit_full_hit(benchmark: Any) -> None:
    """A 32k prompt of which everything is cached."""
    prompt = random_tokens(Random(3), PROMPT_TOKENS)
    spare = PROMPT_PAGES + 8
    managers = {size: OurAttention(size, spare) for size in sizes_of(benchmark)}
    floor = Ref(spare, PAGE_SIZE, 0)
    reused = PROMPT_TOKENS - PAGE_SIZE
    for manager in managers.values():
        manager.admit_ns(prompt, 0)
    floor_admit_ns(floor, prompt, 0)
    compare(
        benchmark,
        {size: lambda one=one: one.admit_ns(prompt, reused) for size, one in managers.items()},
        lambda: floor_admit_ns(floor, prompt, reused),
    )
    check(managers)


def check(managers: dict[int, Any]) -> None:
    for one in managers.values():
        one.manager.check_invariants()


class FreshPrompts:
    """The same endless list of prompts for everybody: `head`, then tokens that nobody has seen."""

    def __init__(self, head: array[int], seed: int) -> None:
        self.head, self.rng = head, Random(seed)

    def next(self) -> array[int]:
        return self.head + random_tokens(self.rng, PROMPT_TOKENS - len(self.head))


def compare_fresh(
    benchmark: Any,
    managers: dict[int, Any],
    peer: Callable[[array[int], int], float],
    head: array[int],
    reused: int,
) -> None:
    """Admission of prompts that share `head` and go on in their own way; the pool is full, the rest evicts."""
    mine = {size: FreshPrompts(head, 9) for size in managers}
    peers = FreshPrompts(head, 9)
    for size, one in managers.items():
        for expected in (0, reused, reused):  # fills the pool
            one.admit_ns(mine[size].next(), expected)
    for expected in (0, reused, reused):
        peer(peers.next(), expected)
    compare(
        benchmark,
        {size: lambda one=one, size=size: one.admit_ns(mine[size].next(), reused) for size, one in managers.items()},
        lambda: peer(peers.next(), reused),
    )
    for one in managers.values():
        assert one.manager.metrics().reclaimed_base_kv_pages > 0
    check(managers)


@pytest.mark.parametrize("cached_tokens", [PROMPT_TOKENS // 2, 0], ids=["partial hit", "miss"])
def test_admit_with_eviction(benchmark: Any, cached_tokens: int) -> None:
    """A 32k prompt, half or nothing of it cached; the pool is full, so each of its other pages evicts one."""
    head = random_tokens(Random(4), cached_tokens)
    spare = PROMPT_PAGES + 64
    managers = {size: OurAttention(size, spare) for size in sizes_of(benchmark)}
    floor = Ref(spare, PAGE_SIZE, 0)
    compare_fresh(benchmark, managers, lambda prompt, reused: floor_admit_ns(floor, prompt, reused), head, len(head))


@pytest.mark.parametrize("cached_tokens", [PROMPT_TOKENS // 2, 0], ids=["partial hit", "miss"])
def test_admit_pairs_with_eviction(benchmark: Any, cached_tokens: int) -> None:
    """The same for a drafter that owns its pages: base and draft are matched, leased, evicted and published."""
    head = random_tokens(Random(4), cached_tokens)
    spare = PROMPT_PAGES + 64
    managers = {size: OurPairs(size, spare) for size in sizes_of(benchmark)}
    plain = PlainPairs(spare, PAGE_SIZE, FUTURE_TOKENS)

    reused = whole_pages(max(cached_tokens - FUTURE_TOKENS, 0))  # the prompts go on with different tokens
    compare_fresh(benchmark, managers, lambda prompt, shared: floor_admit_ns(plain, prompt, shared), head, reused)


def test_publish(benchmark: Any) -> None:
    """The 2,048 blocks of a 32k prompt enter the index."""
    prompt = random_tokens(Random(5), PROMPT_TOKENS)
    managers = {size: OurAttention(size, PROMPT_PAGES + 8) for size in sizes_of(benchmark)}
    floor = Ref(PROMPT_PAGES + 8, PAGE_SIZE, 0)
    hashes = floor.chain_hash(prompt)
    chain = chain_of(prompt)

    def ours(one: OurAttention) -> float:
        manager = one.manager
        lease = manager.acquire(manager.plan(chain)).lease
        assert lease.shared_block_count == 0
        out: list[Any] = []
        spent = timed(lambda: out.append(manager.publish(lease, chain, PROMPT_TOKENS, make_record=True)))
        assert out[0].new_block_count == PROMPT_PAGES
        lease.release()
        manager.evict_record(out[0].record)
        return spent

    def plain() -> float:
        held = [floor._take() for _ in hashes]
        spent = timed(lambda: [floor._publish(name, page) for name, page in zip(hashes, held, strict=True)])
        assert len(floor.map) == PROMPT_PAGES
        floor.map.clear()
        for page in held:
            floor.hash_of[page] = None
            floor._drop(page)
        return spent

    compare(benchmark, {size: lambda one=one: ours(one) for size, one in managers.items()}, plain)
    check(managers)


def test_grow(benchmark: Any) -> None:
    """One token for each of 32 running sequences, averaged over four pages of growth."""
    rng = Random(6)
    steps = 4 * PAGE_SIZE
    prompts = [random_tokens(rng, 500 + i % PAGE_SIZE) for i in range(GROWING)]
    tokens = [random_tokens(rng, GROWING) for _ in range(steps)]
    spare = GROWING * (540 + steps) // PAGE_SIZE
    managers = {size: OurAttention(size, spare) for size in sizes_of(benchmark)}
    floor = Ref(spare, PAGE_SIZE, 0)
    keys = list(range(GROWING))

    def ours(one: OurAttention) -> float:
        admitted = [one.admit(prompt) for prompt in prompts]
        leases, chains = [lease for lease, _, _ in admitted], [chain for _, chain, _ in admitted]
        pages = sum(lease.num_base_pages for lease in leases)
        append = one.manager.append_tokens
        spent = timed(lambda: [append(leases, chains, step, True, lookahead=0) for step in tokens])
        assert sum(lease.num_base_pages for lease in leases) == pages + GROWING * steps // PAGE_SIZE
        for lease in leases:
            lease.release()
        return spent

    def plain() -> float:
        for key in keys:
            floor.admit(key, prompts[key], 0)
        rows = [list(step) for step in tokens]
        spent = timed(lambda: [floor.grow(keys, row) for row in rows])
        for key in keys:
            floor.release(key)
        return spent

    compare(benchmark, {size: lambda one=one: ours(one) for size, one in managers.items()}, plain, per=steps)
    check(managers)


def test_evict_record(benchmark: Any) -> None:
    """A record goes, with the four blocks that only it kept."""
    rng = Random(7)
    prompts = [random_tokens(rng, RECORD_TOKENS) for _ in range(BATCH)]
    sizes = sizes_of(benchmark)
    managers = {size: OurAttention(size, BATCH * RECORD_TOKENS // PAGE_SIZE + 8) for size in sizes}
    floor = Ref(1, PAGE_SIZE, 0)
    plain = PlainRecords()
    for record in range(max(sizes)):
        plain.publish(-record - 1, floor.chain_hash(random_tokens(rng, RECORD_TOKENS)))

    def ours(one: OurAttention) -> float:
        manager, records = one.manager, []
        for prompt in prompts:
            chain = chain_of(prompt)
            lease = manager.acquire(manager.plan(chain)).lease
            records.append(manager.publish(lease, chain, RECORD_TOKENS, make_record=True).record)
            lease.release()
        before = manager.metrics().reclaimed_base_kv_pages
        spent = timed(lambda: [manager.evict_record(record) for record in records])
        assert manager.metrics().reclaimed_base_kv_pages - before == BATCH * RECORD_TOKENS // PAGE_SIZE
        return spent

    def peer() -> float:
        for record, prompt in enumerate(prompts):
            plain.publish(record, floor.chain_hash(prompt))
        plain.free_pages = 0
        spent = timed(lambda: [plain.evict(record) for record in range(BATCH)])
        assert plain.free_pages == BATCH * RECORD_TOKENS // PAGE_SIZE
        return spent

    compare(benchmark, {size: lambda one=one: ours(one) for size, one in managers.items()}, peer, per=BATCH)
    check(managers)


CHECKPOINT_AT = (PROMPT_TOKENS - 1) // Rules().interval * Rules().interval


def test_admit_checkpoint_hit(benchmark: Any) -> None:
    """Hybrid: a 32k prompt whose last checkpoint lies 512 tokens before its end; the rest is published anew."""
    prompt = random_tokens(Random(8), PROMPT_TOKENS)
    spare = 2 * PROMPT_PAGES
    managers = {size: OurCheckpoints(size, spare) for size in sizes_of(benchmark)}
    for one in managers.values():
        lease, chain, _ = one.admit(prompt)
        one.checkpoint(lease, chain, CHECKPOINT_AT, one.reserve(lease))
        lease.release()
    plain = PlainCheckpointCache(spare, 8, 1, PAGE_SIZE, NO_ENDS)

    def peer() -> float:
        out: list[int] = []
        spent = timed(lambda: out.append(plain.admit(1, prompt)))
        assert out == [CHECKPOINT_AT]
        plain.release(1)
        return spent

    plain.admit(1, prompt)
    plain.release(1)
    compare(
        benchmark, {size: lambda one=one: one.admit_ns(prompt, CHECKPOINT_AT) for size, one in managers.items()}, peer
    )
    check(managers)


def test_evict_checkpoint(benchmark: Any) -> None:
    """Hybrid: all slots are taken; a reservation evicts a checkpoint with the four blocks that only it kept."""
    rng = Random(9)
    sizes = sizes_of(benchmark)
    managers = {size: FullCheckpoints(size, 64) for size in sizes}
    pages = max(sizes) * RECORD_TOKENS // PAGE_SIZE + 64
    plain = PlainCheckpointCache(pages, max(sizes), 1, PAGE_SIZE, Rules(interval=RECORD_TOKENS, branch=False))
    filled = [0]

    def fill_plain() -> None:
        while plain.free_snapshots:
            filled[0] += 1
            plain.admit(filled[0], random_tokens(rng, RECORD_TOKENS))
            plain.release(filled[0])

    def ours(one: OurCheckpoints) -> float:
        spent, manager = 0.0, one.manager
        for _ in range(BATCH):
            chain = chain_of(random_tokens(rng, RECORD_TOKENS))
            lease = manager.acquire(manager.plan(chain)).lease
            manager.publish(lease, chain, RECORD_TOKENS, make_record=False)
            out: list[Any] = []
            spent += timed(lambda out=out, lease=lease: out.append(manager.reserve_hybrid_snapshots(lease, False)))
            one.checkpoint(lease, chain, RECORD_TOKENS, out[0])
            lease.release()
        return spent

    def peer() -> float:
        spent = 0.0
        for _ in range(BATCH):
            spent += timed(plain.evict_checkpoint)
            fill_plain()
        return spent

    fill_plain()
    before = {size: one.manager.metrics().reclaimed_recurrent_snapshots for size, one in managers.items()}
    compare(benchmark, {size: lambda one=one: ours(one) for size, one in managers.items()}, peer, per=BATCH)
    for size, one in managers.items():
        assert one.manager.metrics().reclaimed_recurrent_snapshots - before[size] >= BATCH
    check(managers)
