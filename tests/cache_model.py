"""The context-cache manager once more, in plain Python, written to be obvious; and a driver that compares the two.

The model has no hashes, no arrays and no linked lists: a block is found by comparing its namespace and all tokens up
to its end.  It predicts page ids, free-list order, eviction order, records and metrics exactly.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edgellm._core.block_hash import TokenChain
from edgellm._core.block_index import DEFAULT_HASH_MASK
from edgellm._core.cache_manager import CacheRequestLease, ContextCacheManager
from edgellm._core.planners import plan_eviction
from edgellm.cache.types import (
    AcquireStatus,
    BlockKeyExtras,
    ContextCacheLookupPolicy,
    Hash128,
    PublishStatus,
    ResourceDemand,
    ReusePlanKind,
)

Block = tuple[int, tuple[int, ...]]  # namespace, every token up to the block's end


@dataclass(eq=False)
class ModelLease:
    """`pages[:published]` are in the index; `rebound` counts pages swapped for canonical ones."""

    pages: list[int]
    published: int
    shared: int
    rebound: int = 0


@dataclass
class ModelPublish:
    status: PublishStatus
    record: int | None
    published: int
    new: int


@dataclass
class CacheModel:
    """What the manager should do, by the rules alone."""

    page_size: int
    capacity: int
    max_records: int | None
    free: deque[int] = field(default_factory=deque)
    active: dict[int, int] = field(default_factory=dict)
    page_of: dict[Block, int] = field(default_factory=dict)
    block_of: dict[int, Block] = field(default_factory=dict)
    lru: list[int] = field(default_factory=list)
    records: OrderedDict[int, int] = field(default_factory=OrderedDict)
    leases: list[ModelLease] = field(default_factory=list)
    last_record: int = 0
    evicted_records: int = 0
    reclaimed: int = 0

    def __post_init__(self) -> None:
        self.free.extend(range(self.capacity))
        self.active = dict.fromkeys(range(self.capacity), 0)

    def block(self, namespace: int, tokens: Sequence[int], index: int) -> Block:
        return namespace, tuple(tokens[: (index + 1) * self.page_size])

    def parent(self, block: Block) -> Block | None:
        return (block[0], block[1][: -self.page_size]) if len(block[1]) > self.page_size else None

    def has_children(self, page: int) -> bool:
        return any(self.parent(b) == self.block_of[page] for b in self.page_of)

    def pin(self, page: int) -> None:
        if self.active[page] == 0:
            self.lru.remove(page)
        self.active[page] += 1

    def unpin(self, page: int) -> None:
        self.active[page] -= 1
        if self.active[page] == 0:
            (self.lru if page in self.block_of else self.free).append(page)

    def drop_node(self, page: int) -> None:
        """Out of the index, with its records; free at once when nobody holds it."""
        for record in [r for r, node in self.records.items() if node == page]:
            del self.records[record]
            self.evicted_records += 1
        del self.page_of[self.block_of.pop(page)]
        if self.active[page] == 0:
            self.lru.remove(page)
            self.free.append(page)
            self.reclaimed += 1

    def take(self, count: int) -> list[int]:
        while len(self.free) < count:
            assert not self.has_children(self.lru[0]), "the next victim must be a leaf"
            self.drop_node(self.lru[0])
        pages = [self.free.popleft() for _ in range(count)]
        for page in pages:
            self.active[page] = 1
        return pages

    def match(self, namespace: int, tokens: Sequence[int]) -> list[int]:
        found = []
        for i in range(len(tokens) // self.page_size):
            page = self.page_of.get(self.block(namespace, tokens, i))
            if page is None:
                break
            found.append(page)
        return found

    def acquire(
        self, namespace: int, tokens: Sequence[int], min_tokens: int, bypass: bool, reserve: int
    ) -> ModelLease | None:
        shared = [] if bypass else self.match(namespace, tokens)
        if tokens and len(shared) * self.page_size == len(tokens):
            shared.pop()
        total = -(-max(len(tokens), min_tokens) // self.page_size)
        evictable = len(self.lru) - sum(self.active[p] == 0 for p in shared)
        if total - len(shared) + reserve > len(self.free) + evictable:
            return None
        for page in shared:
            self.pin(page)
        lease = ModelLease(shared + self.take(total - len(shared)), len(shared), len(shared))
        self.leases.append(lease)
        return lease

    def grow(self, lease: ModelLease, num_pages: int) -> bool:
        short = num_pages - len(lease.pages)
        if short > len(self.free) + len(self.lru):
            return False
        lease.pages += self.take(max(0, short))
        return True

    def take_over(self, lease: ModelLease, page: int) -> None:
        """The next block's page becomes the canonical one; the lease's own copy goes back."""
        own = lease.pages[lease.published]
        self.pin(page)
        lease.pages[lease.published] = page
        self.unpin(own)
        lease.published += 1
        lease.rebound += 1

    def publish(
        self, lease: ModelLease, namespace: int, tokens: Sequence[int], count: int, make_record: bool
    ) -> ModelPublish:
        new = 0
        if self.max_records == 0:
            return ModelPublish(PublishStatus.PUBLISHED, None, 0, 0)
        while lease.published < count:
            block, own = self.block(namespace, tokens, lease.published), lease.pages[lease.published]
            if block in self.page_of:
                self.take_over(lease, self.page_of[block])
            elif self.active[own] != 1:
                break
            else:
                self.page_of[block] = own
                self.block_of[own] = block
                lease.published += 1
                new += 1
        published = min(count, lease.published)
        if not make_record or published < count:
            return ModelPublish(PublishStatus.PUBLISHED, None, published, new)
        node = lease.pages[count - 1]
        for record, where in self.records.items():
            if where == node:
                self.records.move_to_end(record)
                return ModelPublish(PublishStatus.EXISTING_RECORD, record, published, new)
        self.last_record += 1
        self.records[self.last_record] = node
        if self.max_records is not None and len(self.records) > self.max_records:
            self.evict_record(next(iter(self.records)))
        return ModelPublish(PublishStatus.PUBLISHED, self.last_record, published, new)

    def rebind(self, lease: ModelLease, namespace: int, tokens: Sequence[int]) -> int:
        start = lease.published
        limit = min((len(tokens) - 1) // self.page_size, len(lease.pages))
        for page in self.match(namespace, tokens)[start:limit]:
            self.take_over(lease, page)
            lease.shared = lease.published
        return lease.published * self.page_size

    def release(self, lease: ModelLease) -> None:
        self.leases.remove(lease)
        for page in reversed(lease.pages):
            self.unpin(page)

    def trim(self) -> None:
        for lease in self.leases:
            while lease.published and lease.pages[lease.published - 1] not in self.block_of:
                lease.published -= 1

    def evict_record(self, record: int) -> None:
        node: int | None = self.records.pop(record)
        self.evicted_records += 1
        while node is not None and not self.has_children(node) and node not in self.records.values():
            above = self.parent(self.block_of[node])
            self.drop_node(node)
            node = None if above is None else self.page_of[above]
        self.trim()

    def evict_all(self) -> int:
        count = len(self.block_of)
        self.evicted_records += len(self.records)
        self.records.clear()
        for lease in self.leases:
            lease.published = 0
        while self.lru:
            self.drop_node(self.lru[0])
        for page in sorted(self.block_of):
            self.drop_node(page)
        return count


@dataclass
class LiveSequence:
    """One sequence as both sides know it."""

    namespace: int
    tokens: list[int]
    chain: TokenChain
    lease: CacheRequestLease
    model: ModelLease


class CacheDriver:
    """Runs every operation on manager and model and compares the whole state after each."""

    def __init__(
        self, page_size: int, capacity: int, *, max_records: int | None = None, hash_mask: int = DEFAULT_HASH_MASK
    ) -> None:
        self.manager = ContextCacheManager(
            page_size, ResourceDemand(base_kv_pages=capacity), max_records=max_records, hash_mask=hash_mask
        )
        self.model = CacheModel(page_size, capacity, max_records)
        self.live: list[LiveSequence] = []

    def chain(self, namespace: int, tokens: Sequence[int]) -> TokenChain:
        extras = BlockKeyExtras(isolation_digest=Hash128(0, namespace)) if namespace else BlockKeyExtras()
        chain = TokenChain(self.manager.page_size, extras)
        chain.extend(tokens)
        return chain

    def acquire(
        self, namespace: int, tokens: list[int], *, min_tokens: int = 0, bypass: bool = False, reserve: int = 0
    ) -> bool:
        chain = self.chain(namespace, tokens)
        policy = ContextCacheLookupPolicy.BYPASS if bypass else ContextCacheLookupPolicy.USE_CACHE
        matched = [] if bypass else self.model.match(namespace, tokens)
        result = self.manager.acquire_vanilla(chain, lookup_policy=policy, min_tokens=min_tokens, reserve_pages=reserve)
        expected = self.model.acquire(namespace, tokens, min_tokens, bypass, reserve)
        assert (result.lease is not None) == (expected is not None)
        assert (result.status is AcquireStatus.ACQUIRED) == (expected is not None)
        self._check_plan(result.plan, len(tokens), len(matched))
        if result.lease is not None and expected is not None:
            self.live.append(LiveSequence(namespace, list(tokens), chain, result.lease, expected))
        self.check()
        return expected is not None

    def _check_plan(self, plan, num_tokens: int, matched_blocks: int) -> None:  # type: ignore[no-untyped-def]
        page_size = self.manager.page_size
        full = matched_blocks > 0 and matched_blocks * page_size == num_tokens
        shared = matched_blocks - full
        assert plan.matched_token_length == matched_blocks * page_size
        assert plan.reuse_token_length == shared * page_size == len(plan.base_page_bindings) * page_size
        assert plan.reuse_token_length <= plan.matched_token_length <= num_tokens
        assert plan.reuse_token_length < num_tokens or num_tokens == 0
        assert shared + plan.demand.base_kv_pages == -(-num_tokens // page_size)
        if full:
            assert plan.kind is ReusePlanKind.FULL_INPUT_REWIND
        elif matched_blocks or num_tokens == 0:
            assert plan.kind is ReusePlanKind.STANDARD
        else:
            assert plan.kind is ReusePlanKind.NO_REUSABLE_PREFIX

    def grow(self, which: int, additional: int) -> bool:
        sequence = self.live[which]
        before = len(sequence.model.pages)
        forecast = plan_eviction(ResourceDemand(base_kv_pages=additional), self.manager.pools, self.manager.index)
        front = self.manager.index.eviction_order()
        grown = self.manager.grow_base_pages(sequence.lease, additional)
        assert grown == forecast.feasible == self.model.grow(sequence.model, before + additional)
        if grown:
            assert front[: len(forecast.victims)] == list(forecast.victims)
            assert self.manager.index.eviction_order() == front[len(forecast.victims) :]
        self.check()
        return grown

    def ensure_coverage(self, which: Sequence[int], extra: int) -> int:
        sequences = [self.live[i] for i in which]
        lengths = [len(s.tokens) for s in sequences]
        refused = self.manager.ensure_coverage([s.lease for s in sequences], lengths, extra)
        expected = -1
        for k, sequence in enumerate(sequences):
            if not self.model.grow(sequence.model, -(-(lengths[k] + extra) // self.manager.page_size)):
                expected = k
                break
        assert refused == expected
        self.check()
        return refused

    def publish(self, which: int, resident: int, *, make_record: bool) -> ModelPublish | None:
        sequence = self.live[which]
        count = min(resident, len(sequence.tokens)) // self.manager.page_size
        if not 0 < count <= len(sequence.model.pages):
            return None
        done = self.manager.publish(sequence.lease, sequence.chain, resident, make_record=make_record)
        expected = self.model.publish(sequence.model, sequence.namespace, sequence.tokens, count, make_record)
        actual = ModelPublish(done.status, done.record, done.published_block_count, done.new_block_count)
        assert actual == expected
        self.check()
        return expected

    def append(self, which: Sequence[int], token: int, *, publish: bool, lookahead: int) -> int:
        sequences = [self.live[i] for i in which]
        refused = self.manager.append_tokens(
            [s.lease for s in sequences],
            [s.chain for s in sequences],
            np.full(len(sequences), token, dtype=np.int32),
            publish,
            lookahead=lookahead,
        )
        expected = -1
        for k, sequence in enumerate(sequences):
            if not self.model.grow(sequence.model, len(sequence.tokens) // self.manager.page_size + 1):
                expected = k
                break
            sequence.tokens.append(token)
            count = max(0, len(sequence.tokens) - lookahead) // self.manager.page_size
            if publish and count > sequence.model.published:
                self.model.publish(sequence.model, sequence.namespace, sequence.tokens, count, False)
        assert refused == expected
        self.check()
        return refused

    def rebind(self, which: int) -> int:
        sequence = self.live[which]
        length = self.manager.rebind(sequence.lease, sequence.chain)
        assert length == self.model.rebind(sequence.model, sequence.namespace, sequence.tokens)
        self.check()
        return length

    def release(self, which: int) -> None:
        sequence = self.live.pop(which)
        sequence.lease.release()
        sequence.lease.release()
        self.model.release(sequence.model)
        self.check()

    def evict_record(self, which: int) -> None:
        record = list(self.model.records)[which]
        self.manager.evict_record(record)
        self.model.evict_record(record)
        self.check()

    def evict_all(self) -> None:
        assert self.manager.evict_all() == self.model.evict_all()
        self.check()

    def finish(self) -> None:
        """Release everything and forget everything: every page must be free."""
        while self.live:
            self.release(len(self.live) // 2)
        self.evict_all()
        assert self.manager.pools.base.free_count == self.model.capacity
        assert self.manager.index.size == self.manager.records.size == self.manager.index.num_namespaces == 0

    def check(self) -> None:
        """Recount the manager, then compare every observable with the model."""
        manager, model = self.manager, self.model
        manager.check_invariants()
        assert manager.pools.base.free_list() == list(model.free)
        assert manager.index.eviction_order() == model.lru
        assert manager.available_pages == len(model.free) + len(model.lru)
        assert manager.num_live_leases == len(model.leases)
        for page in range(model.capacity):
            assert manager.pools.base.active_ref(page) == model.active[page]
            assert (page in manager.index) == (page in model.block_of)
            if page in model.block_of:
                last = model.block_of[page][1][-model.page_size :]
                assert tuple(manager.index.tokens_of(page)) == last
        assert manager.records.lru_to_mru() == list(model.records)
        for record, node in model.records.items():
            assert manager.record(record).base_page_path[-1] == node
        metrics = manager.metrics()
        assert (metrics.evicted_records, metrics.reclaimed_base_kv_pages) == (model.evicted_records, model.reclaimed)
        for sequence in self.live:
            assert list(sequence.lease.base_pages) == sequence.model.pages
            assert sequence.lease.published_block_count == sequence.model.published
            assert sequence.lease.rebound_page_count == sequence.model.rebound
            assert sequence.lease.shared_block_count == sequence.model.shared
            assert sequence.chain.num_tokens == len(sequence.tokens)
        self._check_writable_pages_are_exclusive()

    def _check_writable_pages_are_exclusive(self) -> None:
        """A page that its sequence may still write is in no other lease and not in the index."""
        for sequence in self.live:
            first_private = max(sequence.model.published, sequence.model.shared)
            for page in sequence.model.pages[first_private:]:
                if self.model.active[page] == 1:
                    continue
                # Held by several leases without being indexed: it was published once, so nobody writes it any more.
                holders = [s for s in self.live if page in s.model.pages]
                assert len(holders) == self.model.active[page] > 1
