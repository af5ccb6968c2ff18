"""The nouns of the model: a page pool, a shelf of unused things, nodes, draft nodes, records, leases, plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from edgellm.cache.types import CheckpointKind, HybridSnapshotReservation, ReusePlanKind, ReusePlanMode, ReuseStopReason

Symbols = tuple[int, ...]

EXPIRED, SUPERSEDED, LOW, NORMAL, HIGH = range(5)


class Pool:
    """Units with active references; `cached` ones are kept when nobody holds them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = deque(range(capacity))
        self.active = [0] * capacity
        self.cached: set[int] = set()
        self.reclaimed = 0

    def take(self) -> int:
        unit = self.free.popleft()
        self.active[unit] = 1
        return unit

    def drop_active(self, unit: int) -> None:
        self.active[unit] -= 1
        if self.active[unit] == 0 and unit not in self.cached:
            self.free.append(unit)

    def drop_cached(self, unit: int) -> bool:
        """Whether it is free now."""
        self.cached.remove(unit)
        if self.active[unit] == 0:
            self.free.append(unit)
            return True
        return False


@dataclass(eq=False)
class Kept:
    """Something that may be worth keeping: `priority` and `expiry` are what its leases asked for so far."""

    priority: int = -1
    expiry: int | None = None  # None: no lease has left it yet; 0: never
    order: int = 0

    def stamp(self, priority: int, expiry: int) -> None:
        """What a lease leaves behind: the higher priority, the later expiry; never is latest."""
        self.priority = max(self.priority, priority)
        if self.expiry is None or (self.expiry != 0 and (expiry == 0 or expiry > self.expiry)):
            self.expiry = expiry


@dataclass(eq=False)
class Node(Kept):
    """A published block, or a tail when shorter: `symbols` is everything from the start up to its end."""

    page: int = -1
    namespace: int = 0
    symbols: Symbols = ()
    block: Symbols = ()
    parent: Node | None = None
    volatile_from: int = -1

    @property
    def path(self) -> list[Node]:
        return [*(self.parent.path if self.parent else []), self]


@dataclass(eq=False)
class DraftNode(Kept):
    """Draft state of one base node's tokens, made by one lineage."""

    page: int = -1
    base: Node = None  # type: ignore[assignment]
    parent: DraftNode | None = None
    successor: int = -1

    @property
    def path(self) -> list[DraftNode]:
        return [*(self.parent.path if self.parent else []), self]


@dataclass(eq=False)
class Record(Kept):
    """An endpoint: a plain one (length 0), or a checkpoint of exactly `length` tokens."""

    id: int = 0
    node: Node | None = None
    namespace: int = 0
    symbols: Symbols = ()
    length: int = 0
    recurrent: int | None = None
    partial: int | None = None
    draft: DraftNode | None = None
    mtp: bool = False
    kind: CheckpointKind = CheckpointKind.TAIL
    owner: Lease | None = None
    superseded: bool = False
    pins: int = 0


T = TypeVar("T", bound=Kept)


class Shelf(Generic[T]):
    """Unused things by class, each class in the order in which its members came."""

    def __init__(self) -> None:
        self.classes: list[list[T]] = [[] for _ in range(5)]

    def __iter__(self) -> Iterator[T]:
        for members in self.classes:
            yield from members

    def __len__(self) -> int:
        return sum(map(len, self.classes))

    def add(self, item: T, which: int) -> None:
        self.classes[which].append(item)

    def remove(self, item: T) -> None:
        next(members for members in self.classes if item in members).remove(item)

    def front(self) -> T:
        return next(iter(self))


@dataclass(eq=False)
class Lease:
    """`pages[:published]` are pages of nodes; `draft_nodes` are the leading draft pages that are draft nodes."""

    mode: ReusePlanMode
    namespace: int
    pages: list[int]
    draft_pages: list[int]
    priority: int
    expiry: int
    shared: int = 0
    shared_draft: int = 0
    published: int = 0
    draft_nodes: list[DraftNode] = field(default_factory=list)
    rebound: int = 0
    rebound_draft: int = 0
    tail: Node | None = None
    draft_tail: DraftNode | None = None
    tail_count: int = 0
    restore: Record | None = None
    reuse: int = 0
    reservations: list[HybridSnapshotReservation] = field(default_factory=list)
    sealed: bool = False
    volatile_from: int = -1


@dataclass
class Plan:
    """What a plan should say."""

    mode: ReusePlanMode
    num_tokens: int
    matched: int = 0
    reuse: int = 0
    known: int = 0
    kind: ReusePlanKind = ReusePlanKind.NO_REUSABLE_PREFIX
    reason: ReuseStopReason = ReuseStopReason.NO_RECORD
    position: int = 0
    nodes: list[Node] = field(default_factory=list)
    drafts: list[DraftNode] = field(default_factory=list)
    tail: Node | None = None
    draft_tail: DraftNode | None = None
    tail_count: int = 0
    replayed: int = 0
    record: Record | None = None
    namespace_known: bool = False
