"""Out of memory at every place that allocates, and random operations with all invariants (behaviours 89 and 96)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from manager_rig import (
    A,
    B,
    C,
    Run,
    cached,
    chain,
    checkpointed,
    hybrid,
    lease_state,
    mtp,
    pure,
    snapshot,
    spec,
    vanilla,
)

from edgellm._core.block_index import DEFAULT_HASH_MASK
from edgellm._core.cache_manager import ContextCacheManager
from edgellm.cache.types import (
    BaseStateKind,
    CheckpointKind,
    ContextCacheLookupPolicy,
    Hash128,
    ResourceDemand,
    RetentionPriority,
    ReusePlanMode,
    SpecReuseContract,
)
from edgellm.errors import ContractViolation, InvalidArgumentError

CAT = Hash128(1, 1)

# Builds a state and returns its manager, the leases to watch and the call under test.
Case = Callable[[], tuple[ContextCacheManager, list[Run], Callable[[], Any]]]


def acquire_spec_hit() -> tuple[ContextCacheManager, list[Run], Callable[[], Any]]:
    manager = spec(4)
    cached(manager, [*A, *B, 5], speculative=True)
    return manager, [], lambda: manager.acquire_spec(chain([*A, *B, 6]))


def acquire_checkpoint() -> tuple[ContextCacheManager, list[Run], Callable[[], Any]]:
    manager = mtp(6)
    checkpointed(manager, [*A, *B, 5], speculative=True)
    return manager, [], lambda: manager.acquire_hybrid_mtp(chain([*A, *B, 5, 6]))


def grow_pairs() -> tuple[ContextCacheManager, list[Run], Callable[[], Any]]:
    manager = spec(6)
    run = Run(manager, [*A, 1], speculative=True)
    cached(manager, [*B, 1], speculative=True)
    return manager, [run], lambda: manager.grow_spec_pages(run.lease, 4, 4)


def cover() -> tuple[ContextCacheManager, list[Run], Callable[[], Any]]:
    manager = vanilla(6)
    run = Run(manager, A)
    return manager, [run], lambda: manager.ensure_coverage([run.lease], [4], 1)


def publish_cold() -> tuple[ContextCacheManager, list[Run], Callable[[], Any]]:
    manager = vanilla(6)
    run = Run(manager, [*A, *B, 1])
    return manager, [run], run.publish


def publish_below() -> tuple[ContextCacheManager, list[Run], Callable[[], Any]]:
    manager = vanilla(8)
    run = Run(manager, [*A, *B, 1])
    cached(manager, A)
    return manager, [run], lambda: run.publish(tail=True)


def publish_media() -> tuple[ContextCacheManager, list[Run], Callable[[], Any]]:
    manager = vanilla(6)
    run = Run(manager, chain([*A, 0, 1, 2, 3, 0, 1, 2, 3], media=[None] * 4 + [CAT, None, None, None] * 2))
    return manager, [run], run.publish


def publish_short_tail() -> tuple[ContextCacheManager, list[Run], Callable[[], Any]]:
    manager = vanilla(4)
    run = Run(manager, [1, 2])
    return manager, [run], lambda: run.publish(tail=True)


def publish_pairs() -> tuple[ContextCacheManager, list[Run], Callable[[], Any]]:
    manager = spec(10)
    run = Run(manager, [*A, *B, 1], speculative=True)
    cached(manager, [*A, 11], speculative=True)
    return manager, [run], lambda: run.publish(tail=True)


def rebind_pairs() -> tuple[ContextCacheManager, list[Run], Callable[[], Any]]:
    manager = spec(10)
    run = Run(manager, [*A, *B, 1], speculative=True)
    cached(manager, [*A, *B, 1], speculative=True)
    return manager, [run], lambda: manager.rebind(run.lease, run.chain)


def reserve() -> tuple[ContextCacheManager, list[Run], Callable[[], Any]]:
    manager = hybrid(6, 1, 1)
    checkpointed(manager, [*A, 1])
    run = Run(manager, [*B, 1])
    return manager, [run], lambda: manager.reserve_hybrid_snapshots(run.lease, True)


def publish_checkpoint(make: Callable[[int], ContextCacheManager], length: int) -> Case:
    def case() -> tuple[ContextCacheManager, list[Run], Callable[[], Any]]:
        manager = make(10)
        both = manager.drafts.capacity > 0
        checkpointed(manager, [*A, *B], 4)
        run = Run(manager, [*A, *B, *C, 1], speculative=both)
        reservation = run.reserve(length)
        return manager, [run], lambda: run.publish_reserved(length, reservation, keep_lengths=(1, 2))

    return case


def rebind_checkpoint() -> tuple[ContextCacheManager, list[Run], Callable[[], Any]]:
    manager = mtp(10)
    run = Run(manager, [*A, *B, 1], speculative=True)
    checkpointed(manager, [*A, *B], 6, speculative=True)
    return manager, [run], lambda: manager.rebind_checkpoint(run.lease, run.chain, 0)


CASES: dict[str, Case] = {
    "acquire, spec": acquire_spec_hit,
    "acquire, checkpoint": acquire_checkpoint,
    "grow pairs": grow_pairs,
    "cover": cover,
    "publish": publish_cold,
    "publish below others": publish_below,
    "publish media": publish_media,
    "publish a tail alone": publish_short_tail,
    "publish pairs": publish_pairs,
    "rebind pairs": rebind_pairs,
    "reserve": reserve,
    "publish hybrid": publish_checkpoint(hybrid, 13),
    "publish hybrid at the root": publish_checkpoint(hybrid, 2),
    "publish mtp": publish_checkpoint(mtp, 12),
    "publish pure recurrent": publish_checkpoint(pure, 9),
    "rebind checkpoint": rebind_checkpoint,
}


@pytest.mark.parametrize("name", CASES)
def test_89_out_of_memory_at_any_place_changes_nothing(name: str) -> None:
    manager, _, call = CASES[name]()
    start = manager._allocation_points
    call()
    points = manager._allocation_points - start
    assert points > 0
    for place in range(1, points + 1):
        manager, runs, call = CASES[name]()
        before = (snapshot(manager), [lease_state(run.lease) for run in runs])
        manager._fail_after(place)
        with pytest.raises(MemoryError, match="injected fault"):
            call()
        assert (snapshot(manager), [lease_state(run.lease) for run in runs]) == before, place
        call()  # and nothing is in the way of another try
        manager.check_invariants()


def test_89_the_fault_can_be_taken_back() -> None:
    manager = vanilla(4)
    manager._fail_after(1)
    manager._fail_after(0)
    Run(manager, A)
    with pytest.raises(InvalidArgumentError, match="must be 0 or more"):
        manager._fail_after(-1)


# Random operations


class Player:
    """One manager of a random flavour and size, driven by random calls; what is refused must change nothing."""

    CALLS = (
        *("acquire", "publish") * 4,
        *("release", "append", "reserve") * 2,
        *("grow", "cover", "rebind", "tail", "restore", "retire", "evict", "now", "expire", "volatile", "withhold"),
    )

    def __init__(self, rng: random.Random, flavour: str) -> None:
        self.rng = rng
        self.page_size = rng.choice([1, 2, 4])
        contract = {"spec0": (True, 0), "spec1": (True, 1), "spec3": (True, 3), "mtp": (True, 1), "lookup": (False, 0)}
        kinds = {"hybrid": BaseStateKind.HYBRID, "mtp": BaseStateKind.HYBRID, "pure": BaseStateKind.PURE_RECURRENT}
        self.contract = SpecReuseContract(*contract[flavour]) if flavour in contract else None
        kind = kinds.get(flavour, BaseStateKind.ATTENTION_ONLY)
        self.checkpoints = kind is not BaseStateKind.ATTENTION_ONLY
        self.partial = kind is BaseStateKind.HYBRID
        self.manager = ContextCacheManager(
            self.page_size,
            ResourceDemand(rng.randint(8, 32), rng.randint(8, 32), rng.randint(1, 6), rng.randint(1, 6)),
            max_records=rng.choice([None, None, None, None, 0, 1, 4]),
            base_state_kind=kind,
            spec_reuse_contract=self.contract,
            hash_mask=rng.choice([DEFAULT_HASH_MASK, 0, 1]),
        )
        self.live: list[Run] = []
        self.reserved: dict[Run, list[tuple[int, Any]]] = {}
        self.history: list[list[int]] = [[]]
        self.hits = 0
        self.now = 0

    def tokens(self, most: int) -> list[int]:
        return [self.rng.randint(0, 1) for _ in range(self.rng.randint(0, most))]

    def acquire(self) -> None:
        """A new prompt, or an old one, cut or continued: the next turn, a branch, a repetition."""
        prompt = self.tokens(14)
        if self.rng.random() < 0.7:
            old = self.rng.choice(self.history)
            prompt = old[: self.rng.choice([len(old), self.rng.randint(0, 14)])] + self.tokens(4)
        self.history = [*self.history[-5:], prompt]
        media = [CAT if self.rng.random() < 0.01 else None for _ in prompt]
        self.acquire_chain(chain(prompt, self.page_size, media if any(media) else ()))

    def acquire_chain(self, prompt: Any) -> None:
        speculative = self.contract is not None and self.rng.random() < 0.8
        policy = self.rng.choice(list(ContextCacheLookupPolicy) + [ContextCacheLookupPolicy.USE_CACHE] * 4)
        before = snapshot(self.manager)
        plan = self.manager.plan(prompt, policy, speculative=speculative)
        assert snapshot(self.manager) == before
        self.check_plan(plan)
        length = plan.num_tokens
        options = {"min_tokens": length + self.rng.randint(0, 3), "draft_min_tokens": length + self.rng.randint(0, 3)}
        expiry = self.rng.choice([0, 0, self.now + self.rng.randint(0, 30)])
        result = self.manager.acquire(
            plan, priority=RetentionPriority(self.rng.randint(0, 2)), expiry=expiry, **options
        )
        if result.lease is None:
            assert snapshot(self.manager) == before
            cold = self.manager.plan(prompt, ContextCacheLookupPolicy.BYPASS, speculative=speculative)
            assert self.manager.acquire(cold, **options).lease is None  # a hit is never less feasible than a cold run
            return
        self.hits += result.plan.reuse_token_length > 0
        run = Run.__new__(Run)
        run.manager, run.chain, run.result, run.lease = self.manager, prompt, result, result.lease
        self.live.append(run)
        self.reserved[run] = []

    def check_plan(self, plan: Any) -> None:
        """I10 and I11 in terms of tokens."""
        n, size = plan.num_tokens, self.page_size
        assert 0 <= plan.reuse_token_length <= plan.matched_token_length <= n
        assert plan.matched_token_length <= plan.known_token_length <= n
        assert n == 0 or plan.reuse_token_length < n
        if not self.checkpoints:
            assert len(plan.base_page_bindings) * size + plan.tail_token_count == plan.reuse_token_length
            assert plan.tail_token_count < size
        if plan.demand.draft_kv_pages or len(plan.draft_page_bindings):
            assert len(plan.draft_page_bindings) == len(plan.base_page_bindings)
            assert (plan.tail_source is None) == (plan.draft_tail_source is None)

    def publish(self, run: Run) -> None:
        length = self.rng.choice([run.chain.num_tokens, self.rng.randint(0, run.chain.num_tokens)])
        if self.reserved[run] and self.rng.random() < 0.8:
            length, reservation = self.rng.choice(self.reserved[run])
            run.publish_reserved(length, reservation, kind=self.rng.choice(list(CheckpointKind)))
        else:
            keep = not self.checkpoints
            run.publish(length, make_record=keep and self.rng.random() < 0.5, tail=keep and self.rng.random() < 0.4)

    def release(self, run: Run) -> None:
        run.release()
        self.live.remove(run)
        del self.reserved[run]

    def grow(self, run: Run) -> None:
        if run.lease.mode in (ReusePlanMode.SPEC, ReusePlanMode.HYBRID_MTP):
            self.manager.grow_spec_pages(run.lease, self.rng.randint(0, 2), self.rng.randint(0, 2))
        else:
            self.manager.grow_base_pages(run.lease, self.rng.randint(0, 3))

    def append(self, run: Run) -> None:
        publish = run.lease.mode is not ReusePlanMode.SPEC and self.rng.random() < 0.7
        self.manager.append_tokens([run.lease], [run.chain], np.array([self.rng.randint(0, 1)], np.int32), publish)

    def rebind(self, run: Run) -> None:
        if self.checkpoints:
            self.manager.rebind_checkpoint(run.lease, run.chain, self.rng.randint(0, run.chain.num_tokens))
        else:
            self.manager.rebind(run.lease, run.chain)

    def tail(self, run: Run) -> None:
        self.manager.release_tail_source(run.lease)

    def restore(self, run: Run) -> None:
        self.manager.release_restored_hybrid_snapshots(run.lease)

    def reserve(self, run: Run) -> None:
        length = self.rng.randint(1, max(1, run.chain.num_tokens))
        both = run.lease.mode is ReusePlanMode.HYBRID_MTP
        reservation = self.manager.reserve_hybrid_snapshots(
            run.lease, both or (self.partial and length % self.page_size != 0)
        )
        if reservation is not None:
            self.reserved[run].append((length, reservation))
            if self.rng.random() < 0.9:
                self.manager.mark_snapshots_written(run.lease, reservation)
            if self.rng.random() < 0.7:
                self.publish(run)
                self.retire(run)

    def retire(self, run: Run) -> None:
        if self.reserved[run]:
            self.manager.retire_hybrid_snapshot_reservation(run.lease, self.reserved[run].pop()[1])

    def cover(self, run: Run) -> None:
        self.manager.ensure_coverage([run.lease], [run.chain.num_tokens], 1, self.rng.randint(0, 2))

    def volatile(self, run: Run) -> None:
        self.manager.set_volatile_from(run.lease, self.rng.randint(-1, 10))

    def withhold(self, run: Run) -> None:
        self.manager.note_withheld(run.chain, 0)

    def evict(self) -> None:
        if self.rng.random() < 0.03:
            self.manager.evict_all()
        elif len(self.manager.records) and self.rng.random() < 0.3:
            self.manager.evict_record(self.rng.choice(self.manager.records.lru_to_mru()))

    def now_(self) -> None:
        self.now += self.rng.randint(0, 10)
        self.manager.set_now(self.now)

    def step(self) -> None:
        call = self.rng.choice(self.CALLS)
        before = snapshot(self.manager)
        leases = [lease_state(run.lease) for run in self.live]
        if self.rng.random() < 0.3:
            self.manager._fail_after(self.rng.randint(1, 6))
        try:
            self.do(call)
        except (MemoryError, InvalidArgumentError, ContractViolation):
            # `append` may have its page or token already, `reserve` goes on to publish; all else is one transaction.
            if call not in ("append", "reserve"):
                assert snapshot(self.manager) == before, call
                assert [lease_state(run.lease) for run in self.live] == leases, call
        self.manager._fail_after(0)
        self.manager.check_invariants()

    def do(self, call: str) -> None:
        if call == "now":
            self.now_()
        elif call in ("acquire", "evict"):
            getattr(self, call)()
        elif call == "expire":
            self.manager.expire()
        elif self.live:
            getattr(self, call)(self.rng.choice(self.live))

    def finish(self) -> None:
        """I14: everything released and evicted, everything free."""
        for run in self.live:
            run.release()
        self.manager.check_invariants()
        self.manager.evict_all()
        self.manager.check_invariants()
        pools = self.manager.pools
        assert all(p.free_count == p.capacity for p in (pools.base, pools.draft, pools.recurrent, pools.partial))
        assert (self.manager.index.size, self.manager.drafts.size, len(self.manager.records)) == (0, 0, 0)
        assert self.manager.index.num_namespaces == 0


FLAVOURS = ["vanilla", "spec0", "spec1", "spec3", "lookup", "hybrid", "pure", "mtp"]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_96_random_operations_keep_every_invariant(flavour: str) -> None:
    hits = 0
    for seed in range(12):
        player = Player(random.Random(f"{flavour} {seed}"), flavour)
        for _ in range(400):
            player.step()
        player.finish()
        hits += player.hits
    assert hits >= 20  # else the operations would say little
