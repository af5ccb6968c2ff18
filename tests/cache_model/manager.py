"""The operations of the model manager; each says what the real one must have done."""

from __future__ import annotations

from dataclasses import dataclass

from cache_model.model import PlannerModel, reuse_kind
from cache_model.parts import EXPIRED, DraftNode, Lease, Node, Plan, Pool, Record, Symbols
from edgellm.cache.types import PublishStatus, ReusePlanMode

PAIRED = (ReusePlanMode.SPEC, ReusePlanMode.HYBRID_MTP)


@dataclass
class Published:
    status: PublishStatus = PublishStatus.PUBLISHED
    record: int | None = None
    published: int = 0
    new: int = 0
    new_drafts: int = 0


class ManagerModel(PlannerModel):
    """What the manager should do, by the rules alone."""

    # Acquire

    def acquire(
        self, namespace: int, plan: Plan, tokens: int, draft_tokens: int, reserve: int, priority: int, expiry: int
    ) -> Lease | None:
        """Pages for one plan: with its copied tail if that fits, else without."""
        lease = self.acquire_exactly(namespace, plan, tokens, draft_tokens, reserve, priority, expiry)
        if lease is None and plan.tail is not None:
            plan.tail = plan.draft_tail = None
            plan.reuse -= plan.tail_count
            plan.tail_count = 0
            plan.kind = reuse_kind(plan.num_tokens, plan.matched, plan.reuse)
            lease = self.acquire_exactly(namespace, plan, tokens, draft_tokens, reserve, priority, expiry)
        return lease

    def acquire_exactly(
        self, namespace: int, plan: Plan, tokens: int, draft_tokens: int, reserve: int, priority: int, expiry: int
    ) -> Lease | None:
        nodes = plan.nodes + ([plan.tail] if plan.tail else [])
        drafts = plan.drafts + ([plan.draft_tail] if plan.draft_tail else [])
        total = -(-max(plan.num_tokens, tokens) // self.page_size)
        draft_total = -(-max(plan.num_tokens, draft_tokens) // self.page_size) if plan.mode in PAIRED else 0
        own, own_draft = total - len(plan.nodes), max(0, draft_total - len(plan.drafts))
        unused = sum(self.base.active[n.page] == 0 for n in nodes)
        unused_draft = sum(self.draft.active[d.page] == 0 for d in drafts)
        if own + reserve > len(self.base.free) + len(self.unused) - unused:
            return None
        if own_draft > len(self.draft.free) + len(self.unused_drafts) - unused_draft:
            return None
        for node in nodes:
            self.pin(node)
        for draft in drafts:
            self.pin_draft(draft)
        lease = Lease(
            plan.mode, namespace, [n.page for n in plan.nodes], [d.page for d in plan.drafts], priority, expiry
        )
        lease.shared, lease.shared_draft, lease.published = len(plan.nodes), len(plan.drafts), len(plan.nodes)
        lease.draft_nodes, lease.reuse = list(plan.drafts), plan.reuse
        lease.tail, lease.draft_tail, lease.tail_count = plan.tail, plan.draft_tail, plan.tail_count
        if plan.record is not None:
            self.hit_record(lease, plan.record)
        self.leases.append(lease)
        lease.pages += self.take_base(own)
        lease.draft_pages += self.take_draft(own_draft)
        return lease

    def hit_record(self, lease: Lease, record: Record) -> None:
        """Its snapshots are restored from; a hit shows that it is wanted."""
        self.mark_superseded(record, False)
        self.pin_snapshots(record)
        lease.restore = record
        self.touch(record)

    # Letting go

    def release_tail(self, lease: Lease) -> None:
        draft, node = lease.draft_tail, lease.tail
        lease.tail = lease.draft_tail = None
        if draft in self.drafts:
            self.leave_draft(draft, lease)
        elif draft is not None:
            self.draft.drop_active(draft.page)
        if node in self.nodes:
            self.leave_node(node, lease)
        elif node is not None:
            self.base.drop_active(node.page)

    def leave_node(self, node: Node, lease: Lease) -> None:
        node.stamp(lease.priority, lease.expiry)
        self.unpin(node)

    def leave_draft(self, draft: DraftNode, lease: Lease) -> None:
        draft.stamp(lease.priority, lease.expiry)
        self.unpin_draft(draft)

    def mark_superseded(self, record: Record, superseded: bool) -> None:
        if record.superseded == superseded:
            return
        unused = self.recurrent.active[record.recurrent or 0] == 0
        if unused:
            self.unused_records.remove(record)
        record.superseded = superseded
        if unused:
            self.shelve_record(record)

    def release_restored(self, lease: Lease) -> None:
        record, lease.restore = lease.restore, None
        if record is not None:
            assert record.recurrent is not None
            self.unpin_snapshots(record.recurrent, record.partial, lease.priority, lease.expiry)

    def release(self, lease: Lease) -> None:
        """Deepest first."""
        self.leases.remove(lease)
        self.release_restored(lease)
        for kept in lease.reservations:
            self.unpin_snapshots(
                kept.recurrent_snapshot_slot, kept.partial_kv_snapshot_slot, lease.priority, lease.expiry
            )
        self.release_tail(lease)
        for page in reversed(lease.draft_pages):
            draft = self.draft_at(page)
            if draft is not None:
                self.leave_draft(draft, lease)
            else:
                self.draft.drop_active(page)
        for page in reversed(lease.pages):
            node = self.node_at(page)
            if node is not None:
                self.leave_node(node, lease)
            else:
                self.base.drop_active(page)

    # Growth

    def grow_to(self, lease: Lease, pages: int, draft_pages: int) -> bool:
        """Both pools or neither."""
        short = max(0, pages - len(lease.pages))
        short_draft = max(0, draft_pages - len(lease.draft_pages)) if lease.mode in PAIRED else 0
        if short > len(self.base.free) + len(self.unused):
            return False
        if short_draft > len(self.draft.free) + len(self.unused_drafts):
            return False
        lease.pages += self.take_base(short)
        lease.draft_pages += self.take_draft(short_draft)
        return True

    # Publication

    def publish(
        self, lease: Lease, symbols: Symbols, resident: int, make_record: bool, retain_tail: bool = False
    ) -> Published:
        """Full blocks of `symbols[:resident]`, then the tail, then the record."""
        done = Published()
        if self.max_records == 0:
            return done
        count = resident // self.page_size
        if self.flavour.index_only:
            self.grow_to(lease, count, 0)  # such pages only index; they come as they are needed
            count = min(count, len(lease.pages))
        had_drafts = set(self.drafts)
        done.new = self.publish_blocks(lease, symbols, count)
        if lease.mode is ReusePlanMode.SPEC:
            done.new_drafts = self.publish_drafts(lease, symbols, min(count, lease.published))
        done.published = min(count, lease.published)
        if retain_tail:
            self.retain_tail(lease, symbols, resident)
        if make_record and count and done.published == count:
            self.remember(lease, count, done, had_drafts)
        return done

    def publish_blocks(self, lease: Lease, symbols: Symbols, count: int) -> int:
        new = 0
        while lease.published < count:
            parent = self.node_at(lease.pages[lease.published - 1]) if lease.published else None
            end = (lease.published + 1) * self.page_size
            block = symbols[end - self.page_size : end]
            found = next((n for n in self.children(lease.namespace, parent) if n.block == block), None)
            own = lease.pages[lease.published]
            if found is not None:
                self.take_over(lease, found)
            elif self.base.active[own] != 1:
                break
            else:
                self.supersede_tails(lease.namespace, parent, block)
                node = self.add_node(lease.namespace, parent, block, own)
                self.mark_volatile(lease, node)
                lease.published += 1
                new += 1
        return new

    def take_over(self, lease: Lease, node: Node) -> None:
        """The next block's page becomes the canonical one; the lease's own copy goes back."""
        own = lease.pages[lease.published]
        if own != node.page:
            self.pin(node)
            lease.pages[lease.published] = node.page
            self.base.drop_active(own)
            lease.rebound += 1
        lease.published += 1

    def mark_volatile(self, lease: Lease, node: Node) -> None:
        start = len(node.symbols) - len(node.block)
        if 0 <= lease.volatile_from < len(node.symbols):
            node.volatile_from = max(0, lease.volatile_from - start)

    def supersede_tails(self, namespace: int, parent: Node | None, block: Symbols) -> None:
        """Unused tails that say nothing which `block` does not say; a block with media is not looked at for text."""
        if min(block) < 0:
            return
        for tail in self.tails(namespace, parent):
            unused = self.base.active[tail.page] == 0
            if unused and len(tail.block) < len(block) and block[: len(tail.block)] == tail.block:
                self.drop_node(tail, False)

    def publish_drafts(self, lease: Lease, symbols: Symbols, count: int) -> int:
        new = 0
        while len(lease.draft_nodes) < count:
            block = len(lease.draft_nodes)
            base = self.node_at(lease.pages[block])
            parent = lease.draft_nodes[-1] if block else None
            own = lease.draft_pages[block]
            assert base is not None
            successor = self.successor(symbols, (block + 1) * self.page_size)
            draft = self.find_draft(base, parent, successor)
            if draft is not None:
                self.take_over_draft(lease, block, draft)
            elif self.draft.active[own] != 1:
                break
            else:
                draft = self.add_draft(base, parent, successor, own)
                new += 1
            lease.draft_nodes.append(draft)
        return new

    def successor(self, symbols: Symbols, position: int) -> int:
        """The token that draft state in front of `position` was made with, when that matters and it is text."""
        if self.flavour.future_tokens != 1 or position >= len(symbols) or symbols[position] < 0:
            return -1
        return symbols[position]

    def find_draft(self, base: Node, parent: DraftNode | None, successor: int) -> DraftNode | None:
        """A draft node whose state was made with the same tokens behind it, as far as one token can tell."""
        if self.flavour.future_tokens and successor < 0:
            return None
        return next((d for d in self.drafts_of(base) if d.parent is parent and d.successor == successor), None)

    def take_over_draft(self, lease: Lease, block: int, draft: DraftNode) -> None:
        own = lease.draft_pages[block]
        if own == draft.page:
            return
        self.pin_draft(draft)
        lease.draft_pages[block] = draft.page
        other = self.draft_at(own)
        if other is not None:
            self.unpin_draft(other)
        else:
            self.draft.drop_active(own)
        lease.rebound_draft += 1

    def retain_tail(self, lease: Lease, symbols: Symbols, resident: int) -> None:
        """Keep the unfilled last page and seal the lease, unless what is stored says as much."""
        count, length = divmod(resident, self.page_size)
        block = symbols[count * self.page_size : resident]
        if not length or min(block) < 0 or not self.tail_is_private(lease, count):
            return
        parent = self.node_at(lease.pages[count - 1]) if count else None
        if any(n.block[:length] == block and min(n.block) >= 0 for n in self.below(lease.namespace, parent)):
            return
        node = self.add_node(lease.namespace, parent, block, lease.pages[count])
        self.mark_volatile(lease, node)
        self.supersede_tails(lease.namespace, parent, block)
        if lease.mode is ReusePlanMode.SPEC:
            above = lease.draft_nodes[-1] if count else None
            self.add_draft(node, above, self.successor(symbols, resident), lease.draft_pages[count])
        lease.sealed = True

    def tail_is_private(self, lease: Lease, count: int) -> bool:
        if lease.published != count or len(lease.pages) <= count or self.base.active[lease.pages[count]] != 1:
            return False
        if lease.mode is not ReusePlanMode.SPEC:
            return True
        if len(lease.draft_nodes) != count or len(lease.draft_pages) <= count:
            return False
        return self.draft.active[lease.draft_pages[count]] == 1

    def remember(self, lease: Lease, count: int, done: Published, had_drafts: set[DraftNode]) -> None:
        """The endpoint record of `count` blocks; one with base state only that gets draft state is as good as new."""
        node = self.node_at(lease.pages[count - 1])
        assert node is not None
        record = next((r for r in self.records if r.node is node and r.length == 0), None)
        if record is None:
            done.record = self.new_record(node, lease).id
            self.enforce_limit()
            return
        self.touch(record)
        done.record = record.id
        upgraded = done.new_drafts and not had_drafts.intersection(self.drafts_of(node))
        if not upgraded:
            done.status = PublishStatus.EXISTING_RECORD

    def touch(self, record: Record) -> None:
        self.records.remove(record)
        self.records.append(record)
        if record in self.unused_records:
            self.unused_records.remove(record)
            self.shelve_record(record)

    def new_record(self, node: Node | None, lease: Lease) -> Record:
        self.last_record += 1
        record = Record(id=self.last_record, node=node, namespace=lease.namespace)
        self.records.append(record)
        return record

    def enforce_limit(self) -> None:
        if self.max_records is None or len(self.records) <= self.max_records:
            return
        if self.flavour.checkpoints:
            self.evict_checkpoint(self.records[0])
        else:
            self.evict_record(self.records[0].id)

    # Looking again

    def rebind(self, lease: Lease, symbols: Symbols) -> int:
        """Share what others published since, base and draft alike; the last token stays to be computed."""
        paired = lease.mode is ReusePlanMode.SPEC
        limit = min((len(symbols) - 1) // self.page_size, len(lease.pages))
        if paired:
            limit = min(limit, len(lease.draft_pages))
        path = self.match(lease.namespace, symbols)[:limit]
        drafts: list[DraftNode] = []
        if paired:
            drafts = self.lineage(lease, symbols, path)
            path = path[: len(lease.draft_nodes) + len(drafts)]
        found = path[lease.published :]
        for node in found:
            self.take_over(lease, node)
        for draft in drafts:
            self.take_over_draft(lease, len(lease.draft_nodes), draft)
            lease.draft_nodes.append(draft)
        if paired:
            lease.shared_draft = len(lease.draft_nodes)
        if found or drafts:
            lease.shared = lease.published
        blocks = len(lease.draft_nodes) if paired else lease.published
        return max(blocks * self.page_size, lease.reuse)

    def lineage(self, lease: Lease, symbols: Symbols, path: list[Node]) -> list[DraftNode]:
        """Draft nodes that go on with the lease's lineage along `path`."""
        found: list[DraftNode] = []
        start = len(lease.draft_nodes)
        parent = lease.draft_nodes[-1] if start else None
        for block in range(start, len(path)):
            parent = self.find_draft(path[block], parent, self.successor(symbols, (block + 1) * self.page_size))
            if parent is None:
                break
            found.append(parent)
        return found

    # Eviction and time

    def evict_record(self, record_id: int) -> None:
        """Blocks that no record and no child needs any more leave the tree with it, held or not."""
        record = next(r for r in self.records if r.id == record_id)
        self.erase_record(record)
        node = record.node
        while node is not None and self.serves_nobody(node):
            above = node.parent
            self.drop_node(node, True)
            node = above
        self.forget_unpublished()

    def forget_unpublished(self) -> None:
        """Blocks that left the tree are not published any more; their pages stay leased."""
        for lease in self.leases:
            while lease.published and self.node_at(lease.pages[lease.published - 1]) is None:
                lease.published -= 1
            lease.draft_nodes = [d for d in lease.draft_nodes if d in self.drafts]

    def evict_all(self) -> int:
        count = len(self.nodes)
        for record in list(self.records):
            self.erase_record(record)
        while len(self.unused):
            self.evict_node(self.unused.front())
        for leaf in sorted(self.nodes, key=lambda n: n.page):  # what is left is held: from each leaf upwards
            node: Node | None = leaf
            while node in self.nodes and self.is_leaf(node):
                above = node.parent
                self.drop_node(node, True)
                node = above
        self.forget_unpublished()
        return count

    def set_now(self, now: int) -> None:
        self.now = max(self.now, now)
        due = [n for n in self.unused if n not in self.unused.classes[EXPIRED] and n.expiry and n.expiry <= self.now]
        for node in sorted(due, key=lambda n: (n.expiry, -len(n.path), n.page)):
            self.unused.remove(node)
            self.unused.add(node, EXPIRED)
            self.expire_drafts_of(node)
        waiting = [r for r in self.unused_records if r not in self.unused_records.classes[EXPIRED]]
        over = [r for r in waiting if r.expiry and r.expiry <= self.now]
        for record in sorted(over, key=lambda r: (r.expiry, r.recurrent)):
            self.unused_records.remove(record)
            self.unused_records.add(record, EXPIRED)

    def expire(self) -> int:
        """Everything past its time, at once: how many blocks and checkpoints."""
        before = len(self.nodes) + sum(r.length > 0 for r in self.records)
        while self.unused_records.classes[EXPIRED]:
            self.evict_checkpoint(self.unused_records.classes[EXPIRED][0])
        while self.unused.classes[EXPIRED]:
            self.evict_node(self.unused.classes[EXPIRED][0])
        while self.unused_drafts.classes[EXPIRED]:
            self.evict_draft(self.unused_drafts.classes[EXPIRED][0])
        return before - len(self.nodes) - sum(r.length > 0 for r in self.records)

    def evict_checkpoint(self, record: Record) -> None:
        """With the blocks that lead to it only and that nobody holds."""
        self.erase_record(record)
        self.trim(record.node)

    def note_withheld(self, namespace: int, symbols: Symbols) -> None:
        self.withheld.add(namespace, symbols)
        self.evicted.forget(namespace, symbols)

    def pools(self) -> tuple[Pool, Pool, Pool, Pool]:
        return self.base, self.draft, self.recurrent, self.partial
