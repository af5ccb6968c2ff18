"""Record store: endpoints, checkpoints, orders, ids (behaviours 26 to 28 and 30).

The tree changes three of them.  A record names its node instead of carrying pages, so 26 (pages) becomes "node and
block count", "the same key again" (27) means the same node, and candidate lengths (28) are those of one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest

from edgellm._core.block_hash import TokenChain
from edgellm._core.records import RecordStore
from edgellm.cache.types import (
    BlockKeyExtras,
    CacheRecordKey,
    CheckpointKind,
    Hash128,
    HybridCheckpointKey,
    RetentionPriority,
)
from edgellm.errors import InvalidArgumentError

P = 4
ROOT = -2
LOW, NORMAL, HIGH = RetentionPriority


def key(value: int, count: int = 1) -> CacheRecordKey:
    return CacheRecordKey(Hash128(value, value + 1), count)


def chain(tokens: Sequence[int], media: Sequence[Hash128 | None] = ()) -> TokenChain:
    out = TokenChain(P, BlockKeyExtras(), media)
    out.extend(tokens)
    return out


def checkpoints(*lengths: int, partial: Sequence[int] = ()) -> RecordStore:
    """Checkpoints of the chain 0, 1, 2, ... with those lengths, ids and recurrent slots in order.

    The record of slot s has partial slot s when `partial` names it.
    """
    store = RecordStore(checkpoint_capacity=8, page_size=P)
    for slot, length in enumerate(lengths):
        blocks = length // P
        added = store.insert_checkpoint(
            blocks - 1 if blocks else ROOT,
            chain(range(length)),
            length,
            block_count=blocks,
            recurrent_slot=slot,
            partial_slot=slot if slot in partial else -1,
        )
        assert added == (slot + 1, True)
    store.check_invariants()
    return store


def test_ids_count_from_one_in_lru_order() -> None:
    store = RecordStore()
    assert [store.insert(node, key(node)) for node in (5, 3, 8)] == [(1, True), (2, True), (3, True)]
    assert store.lru_to_mru() == [1, 2, 3]
    assert (store.size, len(store), store.max_records) == (3, 3, None)
    assert (store.node(2), store.key(2)) == (3, key(3))
    store.touch(1)
    assert store.lru_to_mru() == [2, 3, 1]
    store.check_invariants()


def test_26_record_without_an_endpoint_is_refused() -> None:
    store = RecordStore()
    with pytest.raises(InvalidArgumentError, match="at least one full block"):
        store.insert(0, key(1, 0))
    with pytest.raises(InvalidArgumentError, match="0 or more"):
        store.insert(-1, key(1))
    with pytest.raises(InvalidArgumentError, match="at least one full block"):
        store.insert(ROOT, key(1))
    with pytest.raises(InvalidArgumentError, match="use insert_checkpoint"):
        store.insert(0, key(1), exact_length=6, recurrent_slot=0)
    with pytest.raises(InvalidArgumentError, match="0 or more"):
        store.insert(0, key(1, -1))
    with pytest.raises(InvalidArgumentError, match="needs a recurrent snapshot"):
        store.insert(0, key(1), exact_length=6)
    with pytest.raises(InvalidArgumentError, match="only a recurrent checkpoint has snapshots"):
        store.insert(0, key(1), recurrent_slot=0)
    assert (store.size, store.lru_to_mru()) == (0, [])
    store.check_invariants()


def test_27_same_endpoint_again_is_only_touched() -> None:
    store = RecordStore()
    store.insert(4, key(4, 2))
    store.insert(5, key(5))
    assert store.insert(4, key(4, 2)) == (1, False)
    assert store.lru_to_mru() == [2, 1]
    assert (store.size, store.node(1), store.key(1)) == (2, 4, key(4, 2))


def test_same_node_with_another_hash_is_refused() -> None:
    store = RecordStore()
    store.insert(4, key(4))
    with pytest.raises(InvalidArgumentError, match="another terminal hash"):
        store.insert(4, key(7))
    assert store.key(1) == key(4)


def test_endpoint_and_checkpoints_of_one_node_live_side_by_side() -> None:
    store = RecordStore(checkpoint_capacity=2, page_size=P)
    store.insert(0, key(2))
    for slot, length in enumerate((6, 7)):
        store.insert_checkpoint(0, chain(range(length)), length, block_count=1, recurrent_slot=slot)
    assert store.records_at(0) == [3, 2, 1]
    assert [store.exact_length(r) for r in (1, 2, 3)] == [None, 6, 7]
    assert (store.size, store.checkpoint_count) == (3, 2)
    store.erase(2)
    assert store.records_at(0) == [3, 1]
    assert store.records_at(99) == []
    assert store.checkpoint_count == 1
    store.check_invariants()


def test_30_ids_are_never_used_again() -> None:
    store = RecordStore()
    store.insert(0, key(0))
    store.insert(1, key(1))
    store.erase(2)
    assert store.insert(1, key(1)) == (3, True)
    assert 2 not in store
    assert 3 in store
    assert store.lru_to_mru() == [1, 3]


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_erasing_keeps_the_order_of_the_others(victim: int) -> None:
    store = RecordStore()
    for node in range(3):
        store.insert(node, key(node))
    store.erase(victim)
    assert store.lru_to_mru() == [r for r in (1, 2, 3) if r != victim]
    store.check_invariants()


@pytest.mark.parametrize("bad", [0, 2, -1, "1", None])
def test_unknown_id_is_refused(bad: object) -> None:
    store = RecordStore()
    store.insert(0, key(0))
    for call in (store.erase, store.touch, store.key, store.node):
        with pytest.raises(InvalidArgumentError, match="not in the store"):
            call(bad)  # type: ignore[arg-type]
    assert store.lru_to_mru() == [1]


@pytest.mark.parametrize("limit", [-1, 1.5, "3"])
def test_bad_limit_is_refused(limit: object) -> None:
    with pytest.raises(InvalidArgumentError, match="max_records"):
        RecordStore(limit)  # type: ignore[arg-type]


def test_store_does_not_enforce_its_limit() -> None:
    store = RecordStore(1)
    store.insert(0, key(0))
    store.insert(1, key(1))
    assert (store.size, store.max_records) == (2, 1)


# Checkpoints


def test_checkpoint_shows_what_it_was_given() -> None:
    store = RecordStore(checkpoint_capacity=4, page_size=P)
    tokens = chain([*range(8), 40, 41, 42], media=[None] * 9 + [Hash128(5, 6)])
    store.insert_checkpoint(
        7,
        tokens,
        11,
        block_count=2,
        recurrent_slot=3,
        partial_slot=1,
        draft_node=9,
        mtp=True,
        kind=CheckpointKind.ANCHOR,
        owner=77,
    )
    assert (store.node(1), store.exact_length(1), store.recurrent_slot(1), store.partial_slot(1)) == (7, 11, 3, 1)
    assert (store.draft_node(1), store.mtp(1), store.kind(1), store.owner(1)) == (9, True, CheckpointKind.ANCHOR, 77)
    assert store.tail_tokens(1).tolist() == [40, -1, 42]
    assert len(store.tail_media(1)) == 24
    assert store.hybrid_key(1) == HybridCheckpointKey(tokens.prefix_hash(11), 11)
    assert store.key(1) == CacheRecordKey(tokens.prefix_hash(11), 2)
    assert (store.superseded(1), store.priority_of(1), store.expiry_of(1), store.class_of(1)) == (
        False,
        LOW,
        None,
        None,
    )
    store.insert(7, key(3))
    assert (store.hybrid_key(2), store.recurrent_slot(2), store.partial_slot(2), store.draft_node(2)) == (None,) * 4
    with pytest.raises(InvalidArgumentError, match="record 2 is an endpoint"):
        store.mtp(2)


def test_28_candidate_lengths_are_strictly_below_and_descending() -> None:
    store = RecordStore(checkpoint_capacity=4, page_size=P)
    for slot, tokens in enumerate(([0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 9], [0, 1, 2, 3, 4, 5, 6])):
        store.insert_checkpoint(0, chain(tokens), len(tokens), block_count=1, recurrent_slot=slot)
    assert store.candidate_lengths(0, 7) == [6, 4]
    assert store.candidate_lengths(0, 8) == [7, 6, 4]
    assert store.candidate_lengths(1, 8) == []


def test_longest_usable_checkpoint_of_a_node() -> None:
    store = RecordStore(checkpoint_capacity=5, page_size=P)
    for slot, (tokens, mtp) in enumerate((([4], True), ([4, 5], False), ([4, 9], True), ([], False))):
        store.insert_checkpoint(
            0, chain([*range(4), *tokens]), 4 + len(tokens), block_count=1, recurrent_slot=slot, mtp=mtp
        )

    def best(tokens: Sequence[int], below: int = 99, need_mtp: bool = False) -> int | None:
        prompt = chain([*range(4), *tokens])
        return store.best_checkpoint(0, prompt, block_count=1, below=below, need_mtp=need_mtp)

    assert best([4, 5, 6]) == 2
    assert best([4, 9]) == 3
    assert best([4, 9], below=6) == 1
    assert best([4, 5, 6], need_mtp=True) == 1
    assert best([8]) == 4
    assert best([8], need_mtp=True) is None
    assert best([4, 5], below=4) is None
    assert store.best_checkpoint(3, chain(range(6)), block_count=1, below=99) is None
    assert store.checkpoint_at(0, chain([*range(4), 4, 9, 1]), 6, block_count=1) == 3
    assert store.checkpoint_at(0, chain([*range(4), 4, 8, 1]), 6, block_count=1) is None


def test_tail_media_are_compared() -> None:
    store = RecordStore(checkpoint_capacity=2, page_size=P)
    cat, dog = Hash128(1, 1), Hash128(2, 2)
    media = [None, None, None, None, None]
    for slot, digest in enumerate((cat, None)):
        store.insert_checkpoint(0, chain([*range(4), 7, 0], [*media, digest]), 6, block_count=1, recurrent_slot=slot)

    def best(*digests: Hash128 | None) -> int | None:
        return store.best_checkpoint(0, chain([*range(4), 7, 0, 1], [*media, *digests]), block_count=1, below=7)

    assert best(cat) == 1
    assert best(cat, dog) == 1
    assert best(dog) is None
    assert best() == 2
    assert best(None, cat) == 2


def test_checkpoint_within_the_first_block_hangs_at_the_root() -> None:
    store = RecordStore(checkpoint_capacity=4, page_size=P)
    for root, slot in ((ROOT, 0), (ROOT - 3, 1)):
        store.insert_checkpoint(root, chain([1, 2, 3]), 3, block_count=0, recurrent_slot=slot)
    assert (store.records_at(ROOT), store.records_at(ROOT - 3), store.records_at(ROOT - 1)) == ([1], [2], [])
    assert store.best_checkpoint(ROOT - 3, chain([1, 2, 3, 4]), block_count=0, below=4) == 2
    assert store.best_checkpoint(ROOT - 9, chain([1, 2, 3, 4]), block_count=0, below=4) is None
    store.check_invariants()
    store.erase(2)
    assert store.records_at(ROOT - 3) == []
    store.check_invariants()


def test_whole_last_page_may_be_the_tail() -> None:
    """MTP: a checkpoint at a page boundary hangs one block higher, with a full page of tokens after it."""
    store = RecordStore(checkpoint_capacity=1, page_size=P)
    store.insert_checkpoint(0, chain(range(8)), 8, block_count=1, recurrent_slot=0, partial_slot=0, mtp=True)
    assert store.tail_tokens(1).tolist() == [4, 5, 6, 7]
    assert store.best_checkpoint(0, chain(range(9)), block_count=1, below=9, need_mtp=True) == 1
    assert store.best_checkpoint(0, chain(range(8)), block_count=1, below=8, need_mtp=True) is None


def test_bad_checkpoints_are_refused() -> None:
    store = checkpoints(6)
    prompt = chain(range(12))
    for node, length, blocks, slot, message in (
        (1, 8, 2, 0, "belongs to another checkpoint"),
        (1, 8, 2, 8, "must be below 8"),
        (1, 8, 2, -1, "needs a recurrent snapshot"),
        (0, 9, 1, 1, "tokens after the last block"),
        (2, 9, 3, 1, "tokens after the last block"),
        (2, 13, 3, 1, "must be 1 to 12"),
        (0, 0, 1, 1, "must be 1 to 12"),
        (ROOT, 6, 1, 1, "does not fit 1 blocks"),
        (0, 3, 0, 1, "does not fit 0 blocks"),
        (-1, 8, 2, 1, "needs a node"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            store.insert_checkpoint(node, prompt, length, block_count=blocks, recurrent_slot=slot)
    assert (store.lru_to_mru(), store.checkpoint_count) == ([1], 1)
    store.check_invariants()
    for arguments in ({"checkpoint_capacity": -1}, {"page_size": 0}):
        with pytest.raises(InvalidArgumentError, match="must be 0 or more"):
            RecordStore(None, **arguments)


def test_same_checkpoint_again_is_only_touched() -> None:
    store = checkpoints(4, 6)
    for record in (1, 2):
        store.unpin_checkpoint(record)
    assert store.insert_checkpoint(0, chain(range(5)), 4, block_count=1, recurrent_slot=5) == (1, False)
    assert (store.lru_to_mru(), store.checkpoint_order()) == ([2, 1], [2, 1])
    assert store.size == 2
    store.check_invariants()


def test_victims_of_either_pool() -> None:
    store = checkpoints(4, 5, 8, 9, partial=(1, 3))
    assert (store.checkpoint_order(), store.partial_order(), store.stale_checkpoint) == ([], [], None)
    for record, priority in ((4, NORMAL), (3, NORMAL), (2, HIGH), (1, LOW)):
        store.unpin_checkpoint(record, priority=priority)
    assert store.checkpoint_order() == [1, 4, 3, 2]
    assert store.partial_order() == [4, 2]
    assert store.checkpoint_class_sizes == (0, 0, 1, 2, 1)
    store.supersede(2)
    assert (store.checkpoint_order(), store.partial_order()) == ([2, 1, 4, 3], [2, 4])
    assert (store.stale_checkpoint, store.stale_partial) == (2, 2)
    store.supersede(3)
    assert (store.stale_checkpoint, store.checkpoint_order()) == (2, [2, 3, 1, 4])
    store.supersede(2, False)
    assert (store.stale_checkpoint, store.stale_partial) == (3, None)
    assert (store.checkpoint_order(), store.partial_order()) == ([3, 1, 4, 2], [4, 2])
    store.check_invariants()
    store.erase(4)
    assert (store.checkpoint_order(), store.partial_order()) == ([3, 1, 2], [2])
    store.check_invariants()


def test_held_checkpoint_is_no_victim_and_keeps_its_mark() -> None:
    store = checkpoints(4, 8)
    store.unpin_checkpoint(1)
    store.unpin_checkpoint(2)
    store.pin_checkpoint(1)
    store.supersede(1)
    assert (store.checkpoint_order(), store.class_of(1), store.superseded(1)) == ([2], None, True)
    store.unpin_checkpoint(1)
    assert (store.checkpoint_order(), store.class_of(1)) == ([1, 2], 1)
    with pytest.raises(InvalidArgumentError, match="must be pinned"):
        store.unpin_checkpoint(1)
    store.pin_checkpoint(1)
    with pytest.raises(InvalidArgumentError, match="is not evictable"):
        store.pin_checkpoint(1)
    store.check_invariants()


def test_expired_checkpoints_go_first() -> None:
    store = checkpoints(4, 5, 8, 9, partial=(1,))
    for record, expiry in ((1, 50), (2, 30), (3, 0), (4, 60)):
        store.unpin_checkpoint(record, expiry=expiry)
    store.supersede(3)
    assert store.set_now(29) == []
    assert store.set_now(50) == [2, 1]
    assert (store.checkpoint_order(), store.partial_order()) == ([2, 1, 3, 4], [2])
    assert (store.stale_checkpoint, store.stale_partial) == (2, 2)
    store.pin_checkpoint(1)
    store.unpin_checkpoint(1, expiry=40)  # never shortened, but over all the same
    assert (store.expiry_of(1), store.class_of(1)) == (50, 0)
    store.pin_checkpoint(1)
    store.unpin_checkpoint(1, expiry=70)
    assert (store.class_of(1), store.set_now(70)) == (3, [4, 1])
    assert store.expiry_of(3) == 0
    store.check_invariants()


def test_slot_of_an_erased_checkpoint_can_be_used_again() -> None:
    store = checkpoints(6, 7)
    store.unpin_checkpoint(1, priority=HIGH, expiry=9)
    store.supersede(1)
    store.erase(1)
    assert store.checkpoint_order() == []
    store.insert_checkpoint(0, chain([*range(4), 9]), 5, block_count=1, recurrent_slot=0)
    assert (store.priority_of(3), store.expiry_of(3), store.superseded(3)) == (LOW, None, False)
    assert store.tail_tokens(3).tolist() == [9]
    store.check_invariants()


# The same against a plain model


@dataclass
class ModelRecord:
    node: int
    tokens: tuple[int, ...]  # of a checkpoint, or () for an endpoint
    blocks: int
    slot: int = -1
    partial: int = -1
    mtp: bool = False
    held: bool = True
    superseded: bool = False
    priority: int = 0
    expiry: float | None = None

    def class_at(self, now: int) -> int:
        if self.expiry is not None and self.expiry <= now:
            return 0
        return 1 if self.superseded else 2 + self.priority


class Driver:
    """Random operations on a store and on a dict of records with two lists."""

    SLOTS = 6

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.store = RecordStore(checkpoint_capacity=self.SLOTS, page_size=P)
        self.records: dict[int, ModelRecord] = {}
        self.lru: list[int] = []
        self.classes: list[list[int]] = [[] for _ in range(5)]
        self.now = 0
        self.last = 0

    def list_again(self, record_id: int) -> None:
        for members in self.classes:
            if record_id in members:
                members.remove(record_id)
        if record_id in self.records and not self.records[record_id].held:
            self.classes[self.records[record_id].class_at(self.now)].append(record_id)

    def touched(self, record_id: int) -> None:
        self.lru.remove(record_id)
        self.lru.append(record_id)
        if record_id in self.order():
            self.list_again(record_id)

    def added(self, record: ModelRecord) -> None:
        self.last += 1
        self.records[self.last] = record
        self.lru.append(self.last)

    def insert(self) -> None:
        node = self.random.randrange(3)
        known = [r for r, m in self.records.items() if m.node == node and not m.tokens]
        got = self.store.insert(node, key(node))
        if known:
            assert got == (known[0], False)
            self.touched(known[0])
        else:
            self.added(ModelRecord(node, (), 1))
            assert got == (self.last, True)

    def insert_checkpoint(self) -> None:
        tokens = tuple(self.random.choice((1, 2)) for _ in range(self.random.randrange(1, 2 * P)))
        blocks = len(tokens) // P
        # One node a block content: the store believes the caller.
        node = int("".join(map(str, tokens[:P])), 3) if blocks else ROOT
        known = [r for r, m in self.records.items() if m.tokens == tokens]
        free = [s for s in range(self.SLOTS) if s not in {m.slot for m in self.records.values()}]
        if not known and not free:
            return
        slot = self.random.choice(free) if free else 0
        partial = self.random.choice((slot, -1))
        mtp = self.random.random() < 0.5
        got = self.store.insert_checkpoint(
            node, chain(tokens), len(tokens), block_count=blocks, recurrent_slot=slot, partial_slot=partial, mtp=mtp
        )
        if known:
            assert got == (known[0], False)
            self.touched(known[0])
        else:
            self.added(ModelRecord(node, tokens, blocks, slot, partial, mtp))
            assert got == (self.last, True)

    def some_checkpoint(self) -> int | None:
        ids = [r for r, m in self.records.items() if m.tokens]
        return self.random.choice(ids) if ids else None

    def pin_or_unpin(self) -> None:
        record_id = self.some_checkpoint()
        if record_id is None:
            return
        record = self.records[record_id]
        if not record.held:
            self.store.pin_checkpoint(record_id)
            record.held = True
        else:
            priority = self.random.choice((LOW, NORMAL, HIGH))
            expiry = self.random.choice((0, self.now + self.random.randrange(1, 30)))
            self.store.unpin_checkpoint(record_id, priority=priority, expiry=expiry)
            record.held = False
            record.priority = max(record.priority, priority)
            until = expiry or float("inf")
            record.expiry = until if record.expiry is None else max(record.expiry, until)
        self.list_again(record_id)

    def supersede(self) -> None:
        record_id = self.some_checkpoint()
        if record_id is not None:
            mark = self.random.random() < 0.7
            moves = self.records[record_id].superseded != mark
            self.store.supersede(record_id, mark)
            self.records[record_id].superseded = mark
            if moves:
                self.list_again(record_id)

    def touch(self) -> None:
        if self.lru:
            record_id = self.random.choice(self.lru)
            self.store.touch(record_id)
            self.touched(record_id)

    def erase(self) -> None:
        if self.lru:
            record_id = self.random.choice(self.lru)
            self.store.erase(record_id)
            del self.records[record_id]
            self.lru.remove(record_id)
            self.list_again(record_id)

    def tick(self) -> None:
        self.now += self.random.randrange(15)
        over = [r for c in self.classes[1:] for r in c if (self.records[r].expiry or 0) <= self.now]
        over.sort(key=lambda r: (self.records[r].expiry, self.records[r].slot))
        assert self.store.set_now(self.now) == over
        for record_id in over:
            self.list_again(record_id)

    def look(self) -> None:
        tokens = tuple(self.random.choice((1, 2)) for _ in range(self.random.randrange(1, 2 * P)))
        below = self.random.randrange(1, 2 * P)
        for blocks in range(len(tokens) // P + 1):
            node = int("".join(map(str, tokens[:P])), 3) if blocks else ROOT
            for need in (False, True):
                usable = [
                    r
                    for r, m in self.records.items()
                    if m.tokens
                    and m.node == node
                    and tokens[: len(m.tokens)] == m.tokens
                    and len(m.tokens) < below
                    and (m.mtp or not need)
                ]
                best = max(usable, key=lambda r: len(self.records[r].tokens), default=None)
                found = self.store.best_checkpoint(node, chain(tokens), block_count=blocks, below=below, need_mtp=need)
                assert found == best

    def order(self) -> list[int]:
        return [r for c in self.classes for r in c]

    def compare(self) -> None:
        self.store.check_invariants()
        assert self.store.lru_to_mru() == self.lru
        assert self.store.checkpoint_order() == self.order()
        assert self.store.partial_order() == [r for r in self.order() if self.records[r].partial >= 0]
        for node in {m.node for m in self.records.values()}:
            assert self.store.records_at(node) == [
                r for r in sorted(self.records, reverse=True) if self.records[r].node == node
            ]


@pytest.mark.parametrize("seed", range(25))
def test_random_operations_agree_with_the_model(seed: int) -> None:
    driver = Driver(seed)
    steps = [
        driver.insert,
        driver.insert_checkpoint,
        driver.insert_checkpoint,
        driver.pin_or_unpin,
        driver.pin_or_unpin,
        driver.supersede,
        driver.touch,
        driver.erase,
        driver.tick,
        driver.look,
    ]
    for _ in range(150):
        driver.random.choice(steps)()
        driver.compare()
