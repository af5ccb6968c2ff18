"""Checkpoints of hybrid and recurrent deployments: reservations, publication, supersession, victims."""

from __future__ import annotations

from collections.abc import Sequence

from cache_model.manager import ManagerModel, Published
from cache_model.parts import EXPIRED, SUPERSEDED, Lease, Node, Record, Symbols
from edgellm.cache.types import CheckpointKind, HybridSnapshotReservation, PublishStatus, ReusePlanMode


class CacheModel(ManagerModel):
    """The whole manager."""

    # Slots

    def reserve(self, lease: Lease, partial: bool) -> HybridSnapshotReservation | None:
        can_recurrent = self.recurrent.free or len(self.unused_records)
        can_partial = self.partial.free or any(r.partial is not None for r in self.unused_records)
        if not can_recurrent or (partial and not can_partial):
            return None
        while partial and not self.partial.free:
            self.evict_checkpoint(self.snapshot_victim(True))
        while not self.recurrent.free:
            self.evict_checkpoint(self.snapshot_victim(False))
        taken = HybridSnapshotReservation(self.recurrent.take(), self.partial.take() if partial else None)
        lease.reservations.append(taken)
        return taken

    def snapshot_victim(self, need_partial: bool) -> Record:
        """Expired, then superseded ones; then those of the next leaf to go; those within a first block before them."""

        def wanted(record: Record) -> bool:
            return not need_partial or record.partial is not None

        stale = self.unused_records.classes[EXPIRED] + self.unused_records.classes[SUPERSEDED]
        first_stale = next(filter(wanted, stale), None)
        if first_stale is not None:
            return first_stale
        oldest = next(filter(wanted, self.unused_records))
        if oldest.node is None:
            return oldest
        for leaf in self.unused:
            found = [r for r in self.records_at(leaf.namespace, leaf) if wanted(r)]
            if self.is_leaf(leaf) and found:
                return found[-1]
        return oldest

    def retire(self, lease: Lease, reservation: HybridSnapshotReservation) -> None:
        place = lease.reservations.index(reservation)
        lease.reservations[place] = lease.reservations[-1]
        lease.reservations.pop()
        recurrent, partial = reservation.recurrent_snapshot_slot, reservation.partial_kv_snapshot_slot
        self.unpin_snapshots(recurrent, partial, lease.priority, lease.expiry)

    # Publication

    def publish_checkpoint(
        self,
        lease: Lease,
        symbols: Symbols,
        length: int,
        reservation: HybridSnapshotReservation,
        kind: CheckpointKind,
        keep_lengths: Sequence[int],
    ) -> Published:
        mtp = lease.mode is ReusePlanMode.HYBRID_MTP
        count = (length - mtp) // self.page_size
        done = Published()
        if self.flavour.index_only:
            self.grow_to(lease, count, 0)
        if self.max_records == 0 or count > len(lease.pages):
            return done
        own_drafts = lease.draft_pages[len(lease.draft_nodes) : count] if mtp else []
        private = all(self.draft.active[page] == 1 for page in own_drafts)
        done.new = self.publish_blocks(lease, symbols, count)
        if mtp:
            done.new_drafts = self.publish_drafts(lease, symbols, min(count, lease.published))
        done.published = min(count, lease.published)
        if done.published < count or not private:
            return done
        old = next((r for r in self.records if r.namespace == lease.namespace and r.symbols == symbols[:length]), None)
        if old is not None and (old.mtp or not mtp):
            self.touch(old)
            done.status, done.record = PublishStatus.EXISTING_RECORD, old.id
            return done
        node = self.node_at(lease.pages[count - 1]) if count else None
        record = self.new_record(node, lease)
        record.symbols, record.length, record.kind = symbols[:length], length, kind
        record.draft = lease.draft_nodes[count - 1] if mtp and count else None
        self.claim(record, lease, reservation)
        if old is not None:
            self.erase_record(old, counted=False)
            self.trim(old.node)
        self.supersede(record, keep_lengths)
        self.enforce_limit()
        done.record = record.id
        return done

    def claim(self, record: Record, lease: Lease, reservation: HybridSnapshotReservation) -> None:
        """The checkpoint keeps the slots; the reservation still holds them."""
        record.owner, record.mtp = lease, lease.mode is ReusePlanMode.HYBRID_MTP
        record.recurrent, record.partial = reservation.recurrent_snapshot_slot, reservation.partial_kv_snapshot_slot
        record.stamp(lease.priority, lease.expiry)
        self.recurrent.cached.add(record.recurrent)
        if record.partial is not None:
            self.partial.cached.add(record.partial)

    def supersede(self, record: Record, keep_lengths: Sequence[int]) -> None:
        """Shallower checkpoints on the path that it makes less useful, where the path does not branch."""
        for node in [*(reversed(record.node.path) if record.node else []), None]:
            if len(list(self.below(record.namespace, node))) > 1:
                continue
            for other in self.records_at(record.namespace, node):
                if other is not record and self.makes_useless(record, other, keep_lengths):
                    self.mark_superseded(other, True)

    def makes_useless(self, record: Record, other: Record, keep_lengths: Sequence[int]) -> bool:
        if other.length >= record.length or other.length in keep_lengths:
            return False
        if record.symbols[: other.length] != other.symbols:
            return False
        if other.kind not in (CheckpointKind.TAIL, CheckpointKind.LADDER):
            return False
        both_ends = other.kind is CheckpointKind.TAIL and record.kind is CheckpointKind.TAIL
        return other.owner is not record.owner or both_ends

    # Looking again

    def rebind_checkpoint(self, lease: Lease, symbols: Symbols, committed: int) -> int:
        """The deepest usable checkpoint behind `committed` whose pages the lease has room for."""
        paired = lease.mode is ReusePlanMode.HYBRID_MTP
        limit = min((len(symbols) - 1) // self.page_size, len(lease.pages) - 1)
        if paired:
            limit = min(limit, len(lease.draft_pages) - 1)
        if limit < lease.published:
            return committed  # no page of its own behind the published blocks to restore the unfilled one into
        nodes = self.match(lease.namespace, symbols, limit)
        record = next(self.usable_checkpoints(lease.mode, lease.namespace, nodes, symbols), None)
        if record is None or record.length <= committed:
            return committed
        path: list[Node] = record.node.path if record.node else []
        for node in path[lease.published :]:
            self.take_over(lease, node)
        if paired:
            drafts = record.draft.path if record.draft else []
            for block in reversed(range(len(path))):
                self.take_over_draft(lease, block, drafts[block])
            lease.draft_nodes, lease.shared_draft = drafts, len(path)
        lease.shared, lease.reuse = len(path), record.length
        self.hit_record(lease, record)
        return record.length
