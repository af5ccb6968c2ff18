"""Draft index: lineages, paths, order of eviction (behaviours 23 and 25 as far as they concern the tree).

A draft node follows one draft node of the block in front, so a path is of one producer by construction (23), and each
node is added by itself, below one that is there (25).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from edgellm._core.draft_index import DraftIndex
from edgellm.cache.types import RetentionPriority
from edgellm.errors import InvalidArgumentError

P = 4
LOW, NORMAL, HIGH = RetentionPriority


def two_lineages() -> DraftIndex:
    """Blocks 0, 1, 2 below one another; producer A has drafts 10, 11 of the first two, B 20, 21, 22 of all."""
    index = DraftIndex(32, 8)
    index.insert(10, 0, token_count=P, successor=4)
    index.insert(11, 1, token_count=P, parent=10, successor=50)
    index.insert(20, 0, token_count=P, successor=-1)
    index.insert(21, 1, token_count=P, parent=20, successor=60)
    index.insert(22, 2, token_count=3, parent=21)
    index.check_invariants()
    return index


def test_23_newest_lineage_and_after_its_end_the_older_one() -> None:
    index = two_lineages()
    assert (index.drafts_of(1), index.path_of(21), index.path_of(11)) == ([21, 11], [20, 21], [10, 11])
    index.erase(22)
    index.erase(21)
    assert index.drafts_of(1) == [11]
    assert index.path_of(11) == [10, 11]
    assert index.path_of(21) == []
    index.check_invariants()


def test_node_shows_what_it_was_given() -> None:
    index = two_lineages()
    assert (index.size, len(index), index.capacity) == (5, 5, 32)
    assert (22 in index, 23 in index) == (True, False)
    assert (index.base_of(22), index.parent_of(22), index.token_count_of(22)) == (2, 21, 3)
    assert (index.successor_of(22), index.successor_of(21), index.successor_of(10)) == (None, 60, 4)
    assert (index.child_count(20), index.child_count(22)) == (1, 0)
    assert (index.base_of(5), index.parent_of(5), index.parent_of(10)) == (None, None, None)
    assert (index.priority_of(22), index.class_of(22)) == (LOW, None)
    assert index.drafts_of(7) == []


def test_lineage_is_parent_and_successor() -> None:
    index = two_lineages()
    assert index.find_draft(0, successor=4) == 10
    assert index.find_draft(0) == 20
    assert index.find_draft(0, successor=5) is None
    assert index.find_draft(1, parent=10, successor=50) == 11
    assert index.find_draft(1, parent=20, successor=50) is None
    with pytest.raises(InvalidArgumentError, match="block 1 has draft page 11 for that lineage"):
        index.insert(25, 1, token_count=P, parent=10, successor=50)
    index.insert(25, 1, token_count=P, parent=10, successor=51)
    assert index.drafts_of(1) == [25, 21, 11]


def test_25_what_does_not_fit_is_refused() -> None:
    index = two_lineages()
    for arguments, message in (
        ((22, 3, {"token_count": P}), "describes another block"),
        ((25, 3, {"token_count": P, "parent": 26}), "describes no block"),
        ((25, 1, {"token_count": P, "parent": 21}), "cannot be in front"),
        ((25, 3, {"token_count": 0}), "must be 1 or more"),
        ((25, 3, {"token_count": P, "successor": -2}), "-1 or more"),
        ((32, 3, {"token_count": P}), "from 0 to 31"),
        ((25, 8, {"token_count": P}), "from 0 to 7"),
        ((25, "1", {"token_count": P}), "from 0 to 7"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            index.insert(arguments[0], arguments[1], **arguments[2])  # type: ignore[arg-type]
    assert index.size == 5
    index.check_invariants()
    for capacities in ((-1, 4), (4, -1)):
        with pytest.raises(InvalidArgumentError, match="must be 0 or more pages"):
            DraftIndex(*capacities)


def test_only_leaves_are_erased() -> None:
    index = two_lineages()
    with pytest.raises(InvalidArgumentError, match="1 draft nodes follow draft page 20"):
        index.erase(20)
    index.erase(30)
    for draft in (22, 21, 20, 11, 10):
        index.erase(draft)
        index.check_invariants()
    assert (index.size, index.drafts_of(0)) == (0, [])


def test_eviction_order_by_class() -> None:
    index = two_lineages()
    for draft, priority in ((22, NORMAL), (21, NORMAL), (20, HIGH), (11, LOW), (10, HIGH)):
        index.unpin_draft(draft, priority=priority)
    assert index.eviction_order() == [11, 22, 21, 20, 10]
    assert (index.class_sizes, index.lru_size) == ((0, 0, 1, 2, 2), 5)
    index.pin_draft(11)
    index.pin_draft(10)
    index.unpin_draft(11)
    index.unpin_draft(10, priority=LOW)  # never lowered
    assert index.eviction_order() == [22, 21, 11, 20, 10]
    index.expire_base(2)
    index.expire_base(1)
    index.expire_base(1)
    assert index.eviction_order() == [22, 21, 11, 20, 10]
    assert index.class_sizes == (3, 0, 0, 0, 2)
    index.check_invariants()


def test_held_drafts_do_not_expire() -> None:
    index = two_lineages()
    index.unpin_draft(11)
    index.expire_base(1)
    assert (index.class_of(11), index.class_of(21)) == (0, None)
    index.unpin_draft(22, priority=HIGH, expired=True)
    assert index.eviction_order() == [11, 22]
    with pytest.raises(InvalidArgumentError, match="is evictable; pin it first"):
        index.unpin_draft(22)
    with pytest.raises(InvalidArgumentError, match="is not evictable; unpin it first"):
        index.pin_draft(21)
    with pytest.raises(InvalidArgumentError, match="describes no block"):
        index.pin_draft(5)
    index.check_invariants()


def test_lineages_compared_are_bounded() -> None:
    index = DraftIndex(128, 2)
    for draft in range(65):
        index.insert(draft, 0, token_count=P, successor=draft)
    assert index.find_draft(0, successor=1) == 1
    assert index.find_draft(0, successor=0) is None
    index.insert(100, 0, token_count=P, successor=0)
    index.check_invariants()


@dataclass
class ModelDraft:
    base: int
    parent: int | None
    successor: int
    held: bool = True
    priority: int = 0


class Driver:
    """Random lineages over the binary tree of blocks 0 (root), 1, 2, ...: block b follows block (b - 1) // 2."""

    BLOCKS = 15
    CAPACITY = 20

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.index = DraftIndex(self.CAPACITY, self.BLOCKS)
        self.drafts: dict[int, ModelDraft] = {}
        self.age: list[int] = []
        self.classes: list[list[int]] = [[] for _ in range(5)]

    def insert(self) -> None:
        base = self.random.randrange(self.BLOCKS)
        before = [d for d in self.drafts if base > 0 and self.drafts[d].base == (base - 1) // 2 and self.drafts[d].held]
        free = [d for d in range(self.CAPACITY) if d not in self.drafts]
        if not free or (base > 0 and not before):
            return
        parent = self.random.choice(before) if before else None
        successor = self.random.choice((-1, 1, 2))
        same = [d for d, m in self.drafts.items() if (m.base, m.parent, m.successor) == (base, parent, successor)]
        assert self.index.find_draft(base, parent=parent, successor=successor) == (same[0] if same else None)
        if not same:
            draft = self.random.choice(free)
            self.index.insert(draft, base, token_count=P, parent=parent, successor=successor)
            self.drafts[draft] = ModelDraft(base, parent, successor)
            self.age.append(draft)

    def children(self, draft: int) -> list[int]:
        return [d for d, m in self.drafts.items() if m.parent == draft]

    def unpin(self) -> None:
        """Let go of a node whose children nobody holds, and of ancestors likewise: never below their rank."""
        ready = [d for d, m in self.drafts.items() if m.held and not any(self.drafts[c].held for c in self.children(d))]
        if not ready:
            return
        draft = self.random.choice(ready)
        priority = self.random.choice((LOW, NORMAL, HIGH))
        for page in self.index.path_of(draft):
            self.drafts[page].priority = max(self.drafts[page].priority, priority)
        self.index.unpin_draft(draft, priority=RetentionPriority(self.drafts[draft].priority))
        self.drafts[draft].held = False
        self.classes[2 + self.drafts[draft].priority].append(draft)

    def pin_path(self) -> None:
        if self.drafts:
            for page in self.index.path_of(self.random.choice(list(self.drafts))):
                if not self.drafts[page].held:
                    self.index.pin_draft(page)
                    self.drafts[page].held = True
                    self.unlist(page)

    def unlist(self, draft: int) -> None:
        for members in self.classes:
            if draft in members:
                members.remove(draft)

    def evict(self) -> None:
        order = self.order()
        if order:
            assert not self.children(order[0])
            self.index.erase(order[0])
            self.unlist(order[0])
            self.age.remove(order[0])
            del self.drafts[order[0]]

    def expire(self) -> None:
        """A subtree of blocks expires, the deepest first."""
        top = self.random.randrange(self.BLOCKS)
        for base in range(self.BLOCKS - 1, top - 1, -1):
            above = base
            while above > top:
                above = (above - 1) // 2
            if above != top:
                continue
            self.index.expire_base(base)
            for draft in reversed(self.age):
                if self.drafts[draft].base == base and not self.drafts[draft].held and draft not in self.classes[0]:
                    self.unlist(draft)
                    self.classes[0].append(draft)

    def order(self) -> list[int]:
        return [d for c in self.classes for d in c]

    def compare(self) -> None:
        self.index.check_invariants()
        assert self.index.eviction_order() == self.order()
        for base in range(self.BLOCKS):
            assert self.index.drafts_of(base) == [d for d in reversed(self.age) if self.drafts[d].base == base]
        for draft, model in self.drafts.items():
            assert (self.index.base_of(draft), self.index.parent_of(draft)) == (model.base, model.parent)
            assert self.index.child_count(draft) == len(self.children(draft))


@pytest.mark.parametrize("seed", range(25))
def test_random_operations_agree_with_the_model(seed: int) -> None:
    driver = Driver(seed)
    steps = [driver.insert, driver.insert, driver.insert, driver.unpin, driver.unpin, driver.pin_path, driver.evict]
    for _ in range(150):
        driver.random.choice([*steps, driver.expire])()
        driver.compare()
