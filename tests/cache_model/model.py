"""The context-cache manager once more, in plain Python, written to be obvious.

No hashes, no arrays, no linked lists: a block is found by comparing its namespace and everything up to its end, and
lists are searched from one end to the other.  Written from the rules, it predicts plans, pages, free-list order,
victims in order, records and counters exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from cache_model.parts import (
    EXPIRED,
    LOW,
    SUPERSEDED,
    DraftNode,
    Lease,
    Node,
    Plan,
    Pool,
    Record,
    Shelf,
    Symbols,
)
from edgellm.cache.types import ResourceDemand, ReusePlanKind, ReusePlanMode, ReuseStopReason
from edgellm.testing.cache_workout import CacheFlavour

MAX_SIBLINGS = 64


def common_prefix(a: Symbols, b: Symbols) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def text_of(symbols: Symbols) -> Symbols:
    """Up to the first media position."""
    return tuple(takewhile(lambda symbol: symbol >= 0, symbols))


class Memory:
    """Of many prefixes the newest one in each place."""

    def __init__(self, place: Callable[[int, Symbols], int]) -> None:
        self.place = place
        self.newest: dict[int, tuple[int, Symbols]] = {}

    def add(self, namespace: int, symbols: Symbols) -> None:
        self.newest[self.place(namespace, symbols)] = namespace, symbols

    def forget(self, namespace: int, symbols: Symbols) -> None:
        if self.holds(namespace, symbols):
            del self.newest[self.place(namespace, symbols)]

    def holds(self, namespace: int, symbols: Symbols) -> bool:
        return self.newest.get(self.place(namespace, symbols)) == (namespace, symbols)


class TreeModel:
    """What is stored and what is unused, with the moves that everything else is made of."""

    def __init__(
        self,
        flavour: CacheFlavour,
        page_size: int,
        capacities: ResourceDemand,
        max_records: int | None,
        memory_place: Callable[[int, Symbols], int],
    ) -> None:
        self.flavour = flavour
        self.page_size = page_size
        self.max_records = max_records
        self.base, self.draft, self.recurrent, self.partial = map(Pool, capacities.as_tuple())
        self.nodes: list[Node] = []
        self.drafts: list[DraftNode] = []
        self.records: list[Record] = []
        self.leases: list[Lease] = []
        self.unused: Shelf[Node] = Shelf()
        self.unused_drafts: Shelf[DraftNode] = Shelf()
        self.unused_records: Shelf[Record] = Shelf()
        self.now = 0
        self.last_record = 0
        self.evicted_records = 0
        self.evicted = Memory(memory_place)
        self.withheld = Memory(memory_place)

    # Looking

    def node_at(self, page: int) -> Node | None:
        return next((n for n in self.nodes if n.page == page), None)

    def draft_at(self, page: int) -> DraftNode | None:
        return next((d for d in self.drafts if d.page == page), None)

    def children(self, namespace: int, parent: Node | None) -> list[Node]:
        """Full children, newest first."""
        return [n for n in self.below(namespace, parent) if len(n.block) == self.page_size]

    def tails(self, namespace: int, parent: Node | None) -> list[Node]:
        return [n for n in self.below(namespace, parent) if len(n.block) < self.page_size]

    def below(self, namespace: int, parent: Node | None) -> Iterator[Node]:
        return (n for n in reversed(self.nodes) if n.parent is parent and n.namespace == namespace)

    def drafts_of(self, node: Node) -> list[DraftNode]:
        """Newest first."""
        return [d for d in reversed(self.drafts) if d.base is node]

    def records_at(self, namespace: int, node: Node | None) -> list[Record]:
        """Newest first."""
        found = [r for r in self.records if r.node is node and (node is not None or r.namespace == namespace)]
        return sorted(found, key=lambda record: -record.id)

    def is_leaf(self, node: Node) -> bool:
        return not any(self.below(node.namespace, node))

    def match(self, namespace: int, symbols: Sequence[int], limit: int | None = None) -> list[Node]:
        """Full blocks from the start, as far as they are known."""
        found: list[Node] = []
        blocks = len(symbols) // self.page_size if limit is None else limit
        while len(found) < blocks:
            end = (len(found) + 1) * self.page_size
            block = tuple(symbols[end - self.page_size : end])
            parent = found[-1] if found else None
            node = next((n for n in self.children(namespace, parent) if n.block == block), None)
            if node is None:
                break
            found.append(node)
        return found

    def partial_matches(self, namespace: int, parent: Node | None, wanted: Symbols) -> list[tuple[int, Node]]:
        """(common tokens, node) of children and tails that begin like `wanted`: children before tails, newest first."""
        wanted = text_of(wanted)[: self.page_size]
        siblings = self.children(namespace, parent)[:MAX_SIBLINGS] + self.tails(namespace, parent)[:MAX_SIBLINGS]
        lengths = [(common_prefix(n.block, wanted), n) for n in siblings if min(n.block) >= 0]
        return [(length, node) for length, node in lengths if length]

    def knows_namespace(self, namespace: int) -> bool:
        return any(n.namespace == namespace for n in self.nodes) or any(r.namespace == namespace for r in self.records)

    def is_draft_leaf(self, draft: DraftNode) -> bool:
        return not any(d.parent is draft for d in self.drafts)

    # Holding and letting go

    def class_of(self, priority: int, expiry: int | None) -> int:
        return EXPIRED if expiry and expiry <= self.now else LOW + max(0, priority)

    def pin(self, node: Node) -> None:
        if self.base.active[node.page] == 0:
            self.unused.remove(node)
        self.base.active[node.page] += 1

    def unpin(self, node: Node) -> None:
        """In checkpoint deployments, what has neither child nor record serves nobody."""
        if self.base.active[node.page] == 1 and self.flavour.checkpoints and self.serves_nobody(node):
            self.base.active[node.page] -= 1
            self.unused.add(node, EXPIRED)
            self.drop_node(node, False)
            return
        self.base.drop_active(node.page)
        if self.base.active[node.page] == 0:
            which = self.class_of(node.priority, node.expiry)
            self.unused.add(node, which)
            if which == EXPIRED:
                self.expire_drafts_of(node)

    def expire_drafts_of(self, node: Node) -> None:
        for draft in self.drafts_of(node):
            if self.draft.active[draft.page] == 0 and draft not in self.unused_drafts.classes[EXPIRED]:
                self.unused_drafts.remove(draft)
                self.unused_drafts.add(draft, EXPIRED)

    def pin_draft(self, draft: DraftNode) -> None:
        if self.draft.active[draft.page] == 0:
            self.unused_drafts.remove(draft)
        self.draft.active[draft.page] += 1

    def unpin_draft(self, draft: DraftNode) -> None:
        self.draft.drop_active(draft.page)
        if self.draft.active[draft.page] == 0:
            self.unused_drafts.add(draft, LOW + max(0, draft.priority))
            if self.flavour.checkpoints and self.is_draft_leaf(draft) and not self.is_claimed(draft):
                self.drop_draft(draft, False)

    def pin_snapshots(self, record: Record) -> None:
        assert record.recurrent is not None
        if self.recurrent.active[record.recurrent] == 0:
            self.unused_records.remove(record)
        self.recurrent.active[record.recurrent] += 1
        if record.partial is not None:
            self.partial.active[record.partial] += 1

    def unpin_snapshots(self, recurrent: int, partial: int | None, priority: int, expiry: int) -> None:
        """Slots without a checkpoint are free; a checkpoint that nobody holds is evictable."""
        if partial is not None:
            self.partial.drop_active(partial)
        self.recurrent.drop_active(recurrent)
        record = next((r for r in self.records if r.recurrent == recurrent), None)
        if record is not None:
            record.stamp(priority, expiry)
            if self.recurrent.active[recurrent] == 0:
                self.shelve_record(record)

    def shelve_record(self, record: Record) -> None:
        which = self.class_of(record.priority, record.expiry)
        self.unused_records.add(record, SUPERSEDED if record.superseded and which != EXPIRED else which)

    # Adding

    def add_node(self, namespace: int, parent: Node | None, block: Symbols, page: int) -> Node:
        symbols = (*(parent.symbols if parent else ()), *block)
        node = Node(page=page, namespace=namespace, symbols=symbols, block=block, parent=parent)
        self.nodes.append(node)
        self.base.cached.add(page)
        return node

    def add_draft(self, base: Node, parent: DraftNode | None, successor: int, page: int) -> DraftNode:
        draft = DraftNode(page=page, base=base, parent=parent, successor=successor)
        self.drafts.append(draft)
        self.draft.cached.add(page)
        return draft

    # Forgetting.  *Counted* is what an eviction gave back; what nobody could use any more is not

    def is_claimed(self, draft: DraftNode) -> bool:
        return any(r.draft is draft for r in self.records)

    def drop_draft(self, draft: DraftNode, counted: bool) -> None:
        """Checkpoints that need it serve plain requests from now on."""
        assert self.is_draft_leaf(draft), "only leaves go"
        if self.draft.active[draft.page] == 0:
            self.unused_drafts.remove(draft)
        for record in self.records:
            if record.draft is draft:
                record.draft, record.mtp = None, False
        self.drafts.remove(draft)
        self.draft.reclaimed += self.draft.drop_cached(draft.page) and counted

    def drop_node(self, node: Node, counted: bool) -> None:
        """Out of the tree, with its draft nodes; free at once when nobody holds it."""
        assert self.is_leaf(node), "only leaves go"
        for draft in self.drafts_of(node):
            above = draft.parent
            self.drop_draft(draft, counted)
            if self.flavour.checkpoints:
                self.trim_drafts(above)
        if self.base.active[node.page] == 0:
            self.unused.remove(node)
        self.nodes.remove(node)
        self.base.reclaimed += self.base.drop_cached(node.page) and counted
        if len(node.block) == self.page_size:
            self.withheld.forget(node.namespace, node.symbols)
            if counted:
                self.evicted.add(node.namespace, node.symbols)

    def erase_record(self, record: Record, counted: bool = True) -> None:
        """The record, its snapshots and its claim on a draft node; slots that somebody restores from stay held."""
        self.records.remove(record)
        self.evicted_records += counted
        if record.recurrent is None:
            return
        if self.recurrent.active[record.recurrent] == 0:
            self.unused_records.remove(record)
        self.recurrent.reclaimed += self.recurrent.drop_cached(record.recurrent) and counted
        if record.partial is not None:
            self.partial.reclaimed += self.partial.drop_cached(record.partial) and counted
        self.trim_drafts(record.draft)

    def trim_drafts(self, draft: DraftNode | None) -> None:
        """From this draft node upwards, what leads to no checkpoint and nobody holds."""
        while draft is not None and not self.draft.active[draft.page] and not self.is_claimed(draft):
            if not self.is_draft_leaf(draft):
                break
            above = draft.parent
            self.drop_draft(draft, True)
            draft = above

    def serves_nobody(self, node: Node) -> bool:
        return self.is_leaf(node) and not self.records_at(node.namespace, node)

    def trim(self, node: Node | None) -> None:
        """From this node upwards, what leads to no checkpoint and nobody holds."""
        while node is not None and not self.base.active[node.page] and self.serves_nobody(node):
            above = node.parent
            self.drop_node(node, True)
            node = above

    def evict_node(self, node: Node) -> None:
        for record in self.records_at(node.namespace, node):
            self.erase_record(record)
        above = node.parent
        self.drop_node(node, True)
        if self.flavour.checkpoints:
            self.trim(above)

    def evict_draft(self, draft: DraftNode) -> None:
        above = draft.parent
        self.drop_draft(draft, True)
        if self.flavour.checkpoints:
            self.trim_drafts(above)

    # Taking units, with whatever must go for them

    def take_base(self, count: int) -> list[int]:
        while len(self.base.free) < count:
            self.evict_node(self.unused.front())
        return [self.base.take() for _ in range(count)]

    def take_draft(self, count: int) -> list[int]:
        while len(self.draft.free) < count:
            self.evict_draft(self.unused_drafts.front())
        return [self.draft.take() for _ in range(count)]


def reuse_kind(num_tokens: int, matched: int, reuse: int) -> ReusePlanKind:
    if num_tokens == 0:
        return ReusePlanKind.STANDARD
    if matched == num_tokens:
        return ReusePlanKind.FULL_INPUT_REWIND
    return ReusePlanKind.STANDARD if reuse else ReusePlanKind.NO_REUSABLE_PREFIX


class PlannerModel(TreeModel):
    """What is reused: pure, changes nothing."""

    def plan(self, namespace: int, symbols: Symbols, speculative: bool, bypass: bool) -> Plan:
        paired = speculative and self.flavour.owns_draft
        if self.flavour.checkpoints:
            mode = ReusePlanMode.HYBRID_MTP if paired else ReusePlanMode.HYBRID
        else:
            mode = ReusePlanMode.SPEC if paired else ReusePlanMode.VANILLA
        plan = Plan(mode, len(symbols), namespace_known=not bypass and self.knows_namespace(namespace))
        plan.kind = reuse_kind(len(symbols), -1, 0)
        if bypass:
            plan.reason = ReuseStopReason.BYPASS
        elif self.flavour.checkpoints:
            self.plan_checkpoint(plan, namespace, symbols)
        elif paired:
            self.plan_paired(plan, namespace, symbols)
        else:
            self.plan_base(plan, namespace, symbols, self.flavour.future_tokens if speculative else 0)
        return plan

    def plan_base(self, plan: Plan, namespace: int, symbols: Symbols, future: int) -> None:
        nodes = self.match(namespace, symbols)
        length, node = self.best_partial(namespace, nodes, symbols)
        known = len(nodes) * self.page_size + length
        self.settle(plan, namespace, symbols, nodes, (length, node), known, max(0, known - future))

    def best_partial(self, namespace: int, nodes: list[Node], symbols: Symbols) -> tuple[int, Node | None]:
        """The longest partial match behind `nodes`; of equal ones the first."""
        rest = symbols[len(nodes) * self.page_size :]
        found = self.partial_matches(namespace, nodes[-1] if nodes else None, rest)
        return max(found, key=lambda match: match[0], default=(0, None))

    def plan_paired(self, plan: Plan, namespace: int, symbols: Symbols) -> None:
        nodes = self.match(namespace, symbols)
        deepest = next((i for i in reversed(range(len(nodes))) if self.drafts_of(nodes[i])), None)
        path = self.drafts_of(nodes[deepest])[0].path if deepest is not None else []
        length, node, draft = 0, None, None
        if len(path) == len(nodes):
            length, node, draft = self.best_pair(namespace, nodes, path, symbols)
        known = len(path) * self.page_size + length
        usable = max(0, known - self.flavour.future_tokens)
        if self.flavour.future_tokens == 1 and known:
            last = draft if draft is not None else path[-1]
            ends = length == 0 or length == len(last.base.block)
            if ends and known < len(symbols) and last.successor == symbols[known] >= 0:
                usable = known
        self.settle(plan, namespace, symbols, nodes[: len(path)], (length, node), known, usable, path, draft)
        plan.known = max(known, len(nodes) * self.page_size)
        if len(path) < len(nodes) and plan.reason not in (ReuseStopReason.FULL, ReuseStopReason.LOOKAHEAD_REPLAY):
            plan.reason = ReuseStopReason.NO_RECORD  # the base tree goes on, the draft state does not

    def best_pair(
        self, namespace: int, nodes: list[Node], path: list[DraftNode], symbols: Symbols
    ) -> tuple[int, Node | None, DraftNode | None]:
        """The longest partial match that has draft state which continues the path."""
        rest = symbols[len(nodes) * self.page_size :]
        parent = path[-1] if path else None
        best: tuple[int, Node | None, DraftNode | None] = (0, None, None)
        for length, node in self.partial_matches(namespace, nodes[-1] if nodes else None, rest):
            draft = next((d for d in self.drafts_of(node) if d.parent is parent), None)
            if draft is not None and length > best[0]:
                best = length, node, draft
        return best

    def settle(
        self,
        plan: Plan,
        namespace: int,
        symbols: Symbols,
        nodes: list[Node],
        partial: tuple[int, Node | None],
        known: int,
        usable: int,
        path: list[DraftNode] | None = None,
        partial_draft: DraftNode | None = None,
    ) -> None:
        """From what is known and usable to what is shared and copied."""
        path = path or []
        n = len(symbols)
        reuse = max(0, min(usable, n - 1))
        shared, count = divmod(reuse, self.page_size)
        plan.matched, plan.reuse, plan.known, plan.replayed = known, reuse, known, known - usable
        plan.kind = reuse_kind(n, known, reuse)
        plan.nodes, plan.drafts = nodes[:shared], path[:shared]
        if count:
            plan.tail_count = count
            plan.tail = nodes[shared] if shared < len(nodes) else partial[1]
            if plan.mode is ReusePlanMode.SPEC:
                plan.draft_tail = path[shared] if shared < len(path) else partial_draft
        plan.position = known
        if reuse == max(0, n - 1):
            plan.reason = ReuseStopReason.FULL
        elif usable < known:
            plan.reason = ReuseStopReason.LOOKAHEAD_REPLAY
        else:
            plan.reason = self.why_stopped(namespace, symbols, known, nodes, partial)

    def why_stopped(
        self, namespace: int, symbols: Symbols, known: int, nodes: list[Node], partial: tuple[int, Node | None]
    ) -> ReuseStopReason:
        start = known // self.page_size * self.page_size
        end = start + self.page_size
        if end <= len(symbols) and self.withheld.holds(namespace, symbols[:end]):
            return ReuseStopReason.POLICY
        if end <= len(symbols) and self.evicted.holds(namespace, symbols[:end]):
            return ReuseStopReason.EVICTED
        if self.is_volatile(namespace, nodes[-1] if nodes else None, partial):
            return ReuseStopReason.TEMPLATE_TAIL
        if any(symbol < 0 for symbol in symbols[start:end]):
            return ReuseStopReason.MEDIA
        return ReuseStopReason.NO_RECORD

    def is_volatile(self, namespace: int, last: Node | None, partial: tuple[int, Node | None]) -> bool:
        """The walk ended where a volatile template tail begins, or in it; without a partial match the newest child
        (or tail) behind a block that is not volatile itself decides."""
        length, node = partial
        if node is None:
            if last is not None and last.volatile_from >= 0:
                return False
            branches = self.children(namespace, last) or self.tails(namespace, last)
            node = branches[0] if branches else None
        return node is not None and 0 <= node.volatile_from <= length

    def plan_checkpoint(self, plan: Plan, namespace: int, symbols: Symbols) -> None:
        n, size = len(symbols), self.page_size
        nodes = self.match(namespace, symbols)
        length, node = self.best_partial(namespace, nodes, symbols)
        plan.known = len(nodes) * size + max(length, self.common_tail(namespace, nodes, symbols))
        record = next((r for r in self.usable_checkpoints(plan.mode, namespace, nodes, symbols)), None)
        if record is not None:
            plan.record, plan.matched, plan.reuse = record, record.length, record.length
            plan.kind = ReusePlanKind.STANDARD
            plan.nodes = record.node.path if record.node else []
            plan.drafts = record.draft.path if record.draft and plan.mode is ReusePlanMode.HYBRID_MTP else []
        plan.known = max(plan.known, plan.reuse)
        plan.position = plan.known
        if plan.reuse == max(0, n - 1):
            plan.reason = ReuseStopReason.FULL
        elif plan.known > plan.reuse:
            plan.reason = ReuseStopReason.NO_CHECKPOINT
        else:
            plan.reason = self.why_stopped(namespace, symbols, plan.known, nodes, (length, node))

    def common_tail(self, namespace: int, nodes: list[Node], symbols: Symbols) -> int:
        """How many text tokens behind `nodes` the checkpoints there have in common with the prompt."""
        start = len(nodes) * self.page_size
        rest = symbols[start : start + self.page_size]
        best = 0
        for record in self.records_at(namespace, nodes[-1] if nodes else None):
            if record.length:
                tail = zip(record.symbols[start:], rest, strict=False)
                best = max(best, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] >= 0, tail)))
        return best

    def usable_checkpoints(
        self, mode: ReusePlanMode, namespace: int, nodes: list[Node], symbols: Symbols
    ) -> Iterator[Record]:
        """Deepest node first; at one node the longest, of equal ones the newest."""
        for count in range(len(nodes), -1, -1):
            found = self.records_at(namespace, nodes[count - 1] if count else None)
            for record in sorted(found, key=lambda r: -r.length):  # stable: of equal ones the newest first
                if not 0 < record.length < len(symbols) or symbols[: record.length] != record.symbols:
                    continue
                if mode is not ReusePlanMode.HYBRID_MTP or record.mtp:
                    yield record
