"""Cache records: remembered endpoints and recurrent checkpoints in the block tree, with orders of their own.

An *endpoint* names the node of a last full block.  A *checkpoint* stands for an exact number of tokens: it hangs at the
node of its last whole block (or at the namespace root) and holds the tokens after that, so that a hit can compare
them, beside the snapshot slots.  A record owns no page: the node does.  So the number of records is bounded by pages
and snapshot slots, and `max_records` is an option.

All records stand in one LRU order.  Checkpoints that no lease holds stand in LRU lists by class as well (see
`lru.pxd`), once among all and once among those with a partial slot, so that a victim for either pool is at hand.
"""

cimport cython
from cython.operator cimport dereference as deref
from libc.stdint cimport UINT64_MAX, int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcmp, memcpy
from libcpp.pair cimport pair
from libcpp.string cimport string
from libcpp.unordered_map cimport unordered_map

from edgellm._core.block_hash cimport TokenChain, from_hash128, hash_equal, to_hash128
from edgellm._core.block_index cimport media_range, media_range_equal
from edgellm._core.expiry_heap cimport heap_push, heap_remove
from edgellm._core.lru cimport (
    CLASS_EXPIRED,
    CLASS_SUPERSEDED,
    LIFETIME_FOREVER,
    LIFETIME_TIMED,
    LIFETIME_UNSET,
    NUM_CLASSES,
    UNLISTED,
    lru_append,
    lru_class,
    lru_front,
    lru_init,
    lru_links_agree,
    lru_listed,
    lru_next,
    lru_unlink,
    retention_class,
)
from edgellm._core.types cimport node_id_t, page_id_t, token_t

import numpy as np

from edgellm.cache.types import CacheRecordKey, CheckpointKind, HybridCheckpointKey, RetentionPriority
from edgellm.errors import ContractViolation, InvalidArgumentError, InvariantError

_TAIL = CheckpointKind.TAIL


cdef int _raise_unknown(object record_id) except -1:
    raise InvalidArgumentError(f"record {record_id!r} is not in the store; it was evicted or never existed")


cdef int _validate(record_t* record) except -1:
    """The rules that every record keeps: an endpoint, and snapshots exactly when it is a checkpoint."""
    if record.node == -1 or record.block_count < 0 or record.exact_length < 0:
        raise InvalidArgumentError(
            f"a record needs a node, a block count and a length of 0 or more, got {record.node}, "
            f"{record.block_count}, {record.exact_length}")
    if record.exact_length == 0:
        if record.block_count == 0 or record.node < 0:
            raise InvalidArgumentError("a record without a checkpoint needs at least one full block")
        if record.recurrent_slot >= 0 or record.partial_slot >= 0 or record.mtp or record.draft_node >= 0:
            raise InvalidArgumentError("only a recurrent checkpoint has snapshots; give its exact length as well")
    elif record.recurrent_slot < 0:
        raise InvalidArgumentError(f"the checkpoint at {record.exact_length} tokens needs a recurrent snapshot")
    if (record.node < 0) != (record.block_count == 0):
        raise InvalidArgumentError(
            f"node {record.node} does not fit {record.block_count} blocks; only a root has none in front")
    return 0


@cython.final
cdef class RecordStore:
    """Records by node and by id, least recently used first.  Single writer; not thread safe.

    The store does not enforce `max_records` (the manager does) and never touches pools or indices.

    Args:
        max_records: kept for the manager.
        checkpoint_capacity: recurrent snapshot slots; also the most checkpoints there can be.
        page_size: tokens per page; the most that a checkpoint holds after its last whole block.
    """

    def __cinit__(self, max_records=None, *, checkpoint_capacity=0, page_size=1):
        if max_records is not None and (not isinstance(max_records, int) or max_records < 0):
            raise InvalidArgumentError(f"max_records {max_records!r} must be 0 or more, or None for no limit")
        if not 0 <= checkpoint_capacity < 2**30 or not 0 < page_size < 2**31:
            raise InvalidArgumentError(
                f"checkpoint capacity {checkpoint_capacity} must be 0 or more and page size {page_size} 1 or more")
        cdef int32_t slot
        self.max_records = max_records
        self.limit = -1 if max_records is None else max_records
        self._unused = self._lru_front = self._lru_back = NO_RECORD
        self.checkpoint_capacity = checkpoint_capacity
        self.page_size = page_size
        self._checkpoints.resize(self.checkpoint_capacity)
        self._links.resize(<size_t>self.checkpoint_capacity + NUM_CLASSES)
        self._partial_links.resize(<size_t>self.checkpoint_capacity + NUM_CLASSES)
        self._tails.resize(<size_t>self.checkpoint_capacity * <size_t>self.page_size)
        self._tail_media.resize(self.checkpoint_capacity)
        self._expiries.resize(self.checkpoint_capacity)
        self._expiry_places.resize(self.checkpoint_capacity)
        self.expiries.entries = self._expiries.data()
        self.expiries.places = self._expiry_places.data()
        for slot in range(self.checkpoint_capacity):
            self._checkpoints[slot].place = NO_RECORD
        lru_init(&self.checkpoints, self._links.data(), self.checkpoint_capacity)
        lru_init(&self.partials, self._partial_links.data(), self.checkpoint_capacity)

    # Looking

    cdef int32_t find_at(self, node_id_t node, int64_t exact_length) noexcept nogil:
        """Place of the newest record with that node and length (0: an endpoint), or NO_RECORD."""
        cdef int32_t place = self.head_at(node)
        while place != NO_RECORD and self._records[place].exact_length != exact_length:
            place = self._records[place].node_next
        return place

    cdef bint _tail_matches(self, int32_t place, TokenChain chain, Py_ssize_t first) noexcept nogil:
        """Whether a checkpoint's tokens after its last block are those of the chain from `first` on, media included."""
        cdef int32_t slot = self._records[place].recurrent_slot
        cdef Py_ssize_t count = self._checkpoints[slot].tail_count
        if self._records[place].exact_length != first + count or first + count > chain.token_count():
            return False
        if count == 0:
            return True
        return (memcmp(self._tails.data() + <size_t>slot * self.page_size, chain.tokens.data() + first,
                       count * sizeof(token_t)) == 0
                and media_range_equal(chain, first, count, &self._tail_media[slot]))

    cdef int32_t find_checkpoint(
        self, node_id_t node, TokenChain chain, int64_t exact_length, Py_ssize_t first
    ) noexcept nogil:
        """The checkpoint at `node` for exactly the chain's leading `exact_length` tokens, or NO_RECORD.

        Args:
            node: node of the chain's block before `first`, or its namespace root.
            first: tokens up to and including that block.
        """
        cdef int32_t place = self.head_at(node)
        cdef int32_t seen = 0
        while place != NO_RECORD and seen < MAX_RECORDS_AT_NODE:
            if (exact_length > 0 and self._records[place].exact_length == exact_length
                    and self._tail_matches(place, chain, first)):
                return place
            place = self._records[place].node_next
            seen += 1
        return NO_RECORD

    cdef int32_t longest_checkpoint(
        self, node_id_t node, TokenChain chain, Py_ssize_t first, int64_t below, bint need_mtp
    ) noexcept nogil:
        """The usable checkpoint at `node` with most tokens, the newest of equal ones, or NO_RECORD.

        Usable: shorter than `below`, a prefix of the chain, and with the draft side when `need_mtp`.
        """
        cdef int32_t place = self.head_at(node)
        cdef int32_t best = NO_RECORD
        cdef int32_t seen = 0
        cdef int64_t length = 0
        cdef record_t* record
        while place != NO_RECORD and seen < MAX_RECORDS_AT_NODE:
            record = &self._records[place]
            if (length < record.exact_length < below and (record.mtp or not need_mtp)
                    and self._tail_matches(place, chain, first)):
                best = place
                length = record.exact_length
            place = record.node_next
            seen += 1
        return best

    cdef int32_t common_tail(self, node_id_t node, const token_t* tokens, int32_t limit) noexcept nogil:
        """Most leading tokens that those behind the blocks of a checkpoint at `node` have in common with `tokens`.

        Args:
            limit: tokens to compare; all of them text.
        """
        cdef int32_t place = self.head_at(node)
        cdef int32_t best = 0
        cdef int32_t seen = 0
        cdef int32_t count, slot
        cdef const token_t* tail
        while place != NO_RECORD and seen < MAX_RECORDS_AT_NODE:
            slot = self._records[place].recurrent_slot
            if slot != NO_SLOT:
                tail = self._tails.data() + <size_t>slot * self.page_size
                count = 0
                while count < limit and count < self._checkpoints[slot].tail_count and tail[count] == tokens[count]:
                    count += 1
                best = max(best, count)
            place = self._records[place].node_next
            seen += 1
        return best

    cdef int32_t place_of(self, uint64_t record_id) noexcept nogil:
        cdef unordered_map[uint64_t, int32_t].iterator found = self._place_of.find(record_id)
        return NO_RECORD if found == self._place_of.end() else deref(found).second

    # Adding

    cdef int reserve_nodes(self, Py_ssize_t count) except -1:
        """Room for node ids below `count`."""
        if <Py_ssize_t>self._head_at_node.size() < count:
            self._head_at_node.resize(count, NO_RECORD)
        return 0

    cdef int32_t* _head(self, node_id_t node) noexcept nogil:
        """Where the list of a node or root begins; there is room for it."""
        return &self._head_at_node[node] if node >= 0 else &self._head_at_root[-2 - node]

    cdef int32_t add(self, record_t record) except -1:
        """Insert at the MRU end under the next id and return the place; nothing changes when it fails.

        The caller made sure that no record has this endpoint.  A checkpoint is added by `add_checkpoint`.
        """
        cdef int32_t place = self._unused
        cdef int32_t* head
        _validate(&record)
        if record.node >= 0:
            self.reserve_nodes(record.node + 1)
        elif <Py_ssize_t>self._head_at_root.size() < -1 - record.node:
            self._head_at_root.resize(-1 - record.node, NO_RECORD)
        record.id = self._last_id + 1
        if place == NO_RECORD:
            place = <int32_t>self._records.size()
            self._records.push_back(record)
            self._records[place].id = 0
            self._records[place].node_next = self._unused
            self._unused = place
        self._place_of.insert(pair[uint64_t, int32_t](record.id, place))
        self._unused = self._records[place].node_next
        head = self._head(record.node)
        record.node_next = head[0]
        record.node_newer = NO_RECORD
        if head[0] != NO_RECORD:
            self._records[head[0]].node_newer = place
        head[0] = place
        self._records[place] = record
        self._last_id = record.id
        self.size += 1
        self._link_back(place)
        return place

    cdef int32_t add_checkpoint(self, record_t record, TokenChain chain, Py_ssize_t first) except -1:
        """`add` for a checkpoint: keeps the chain's tokens [first, exact_length) and their media beside it.

        Unlisted, not superseded, with nobody's retention yet.  The caller made sure that no checkpoint has this key
        and that no other one has its slots.
        """
        cdef int32_t slot = record.recurrent_slot
        cdef int64_t count = record.exact_length - first
        cdef checkpoint_t* entry
        cdef string media
        cdef int32_t place
        _validate(&record)
        if not 0 <= slot < self.checkpoint_capacity or not 0 <= count <= self.page_size:
            raise InvalidArgumentError(
                f"recurrent slot {slot} must be below {self.checkpoint_capacity}, and the {count} tokens after the "
                f"last block from 0 to {self.page_size}")
        if record.exact_length > chain.token_count():
            raise InvalidArgumentError(
                f"a checkpoint at {record.exact_length} tokens does not fit a chain of {chain.token_count()}")
        if self._checkpoints[slot].place != NO_RECORD:
            raise InvalidArgumentError(f"recurrent slot {slot} belongs to another checkpoint; erase that one first")
        media_range(chain, first, count, &media)
        place = self.add(record)
        entry = &self._checkpoints[slot]
        entry.place = place
        entry.tail_count = <int32_t>count
        entry.partial_slot = record.partial_slot
        entry.priority = 0
        entry.lifetime = LIFETIME_UNSET
        entry.superseded = entry.expiring = 0
        if count > 0:
            memcpy(self._tails.data() + <size_t>slot * self.page_size, chain.tokens.data() + first,
                   count * sizeof(token_t))
        self._tail_media[slot].swap(media)
        self.checkpoint_count += 1
        return place

    # Moves that cannot fail

    cdef void _link_back(self, int32_t place) noexcept nogil:
        cdef record_t* record = &self._records[place]
        record.lru_prev = self._lru_back
        record.lru_next = NO_RECORD
        if self._lru_back == NO_RECORD:
            self._lru_front = place
        else:
            self._records[self._lru_back].lru_next = place
        self._lru_back = place

    cdef void _unlink(self, int32_t place) noexcept nogil:
        cdef record_t* record = &self._records[place]
        if record.lru_prev == NO_RECORD:
            self._lru_front = record.lru_next
        else:
            self._records[record.lru_prev].lru_next = record.lru_next
        if record.lru_next == NO_RECORD:
            self._lru_back = record.lru_prev
        else:
            self._records[record.lru_next].lru_prev = record.lru_prev

    cdef void touch_at(self, int32_t place) noexcept nogil:
        """Make a record the most recently used one, in the order of all and, when evictable, in its class."""
        cdef int32_t slot = self._records[place].recurrent_slot
        self._unlink(place)
        self._link_back(place)
        if slot >= 0 and lru_listed(&self.checkpoints, slot):
            self._unlist_slot(slot)
            self._list_slot(slot)

    cdef void _drop_checkpoint(self, int32_t slot) noexcept nogil:
        """Forget what is kept by slot."""
        if lru_listed(&self.checkpoints, slot):
            self._unlist_slot(slot)
        self._checkpoints[slot].place = NO_RECORD
        self._tail_media[slot].clear()
        self.checkpoint_count -= 1

    cdef void erase_at(self, int32_t place) noexcept nogil:
        """Forget a record; its slots, pages and namespace are the caller's business."""
        cdef record_t* record = &self._records[place]
        if record.recurrent_slot >= 0:
            self._drop_checkpoint(record.recurrent_slot)
        if record.node_next != NO_RECORD:
            self._records[record.node_next].node_newer = record.node_newer
        if record.node_newer != NO_RECORD:
            self._records[record.node_newer].node_next = record.node_next
        else:
            self._head(record.node)[0] = record.node_next
        self._unlink(place)
        self._place_of.erase(record.id)
        record.id = 0
        record.node_next = self._unused
        self._unused = place
        self.size -= 1

    cdef int32_t erase_node(self, node_id_t node) noexcept nogil:
        """Erase all records of a node or root; returns how many there were."""
        cdef int32_t count = 0
        while self.head_at(node) != NO_RECORD:
            self.erase_at(self.head_at(node))
            count += 1
        return count

    cdef void clear(self) noexcept nogil:
        while self._lru_front != NO_RECORD:
            self.erase_at(self._lru_front)

    cdef void raise_retention(self, int32_t place, int priority, int64_t expiry) noexcept nogil:
        """Keep an unlisted checkpoint at least as long as asked: higher priority, later expiry (0: for ever)."""
        cdef checkpoint_t* entry = &self._checkpoints[self._records[place].recurrent_slot]
        if priority > entry.priority:
            entry.priority = <uint8_t>priority
        if entry.lifetime == LIFETIME_FOREVER:
            return
        if expiry == 0:
            entry.lifetime = LIFETIME_FOREVER
        elif entry.lifetime == LIFETIME_UNSET or expiry > entry.expiry:
            entry.lifetime = LIFETIME_TIMED
            entry.expiry = expiry

    cdef void _list_slot(self, int32_t slot) noexcept nogil:
        cdef checkpoint_t* entry = &self._checkpoints[slot]
        cdef int cls = retention_class(entry.priority, entry.lifetime, entry.expiry, self.now)
        if cls != CLASS_EXPIRED:
            if entry.lifetime == LIFETIME_TIMED:
                heap_push(&self.expiries, slot, entry.expiry, 0)
                entry.expiring = 1
            if entry.superseded:
                cls = CLASS_SUPERSEDED
        lru_append(&self.checkpoints, slot, cls)
        if entry.partial_slot >= 0:
            lru_append(&self.partials, slot, cls)

    cdef void _unlist_slot(self, int32_t slot) noexcept nogil:
        cdef checkpoint_t* entry = &self._checkpoints[slot]
        if entry.expiring:
            heap_remove(&self.expiries, slot)
            entry.expiring = 0
        lru_unlink(&self.checkpoints, slot)
        if entry.partial_slot >= 0:
            lru_unlink(&self.partials, slot)

    cdef void list_checkpoint(self, int32_t place) noexcept nogil:
        """No lease holds the checkpoint any more: evictable, as the most recently used one of its class."""
        self._list_slot(self._records[place].recurrent_slot)

    cdef void unlist_checkpoint(self, int32_t place) noexcept nogil:
        """A lease holds the listed checkpoint."""
        self._unlist_slot(self._records[place].recurrent_slot)

    cdef void set_superseded(self, int32_t place, bint superseded) noexcept nogil:
        """Mark a checkpoint, listed or not, as less useful than the others, or take that back."""
        cdef int32_t slot = self._records[place].recurrent_slot
        if (self._checkpoints[slot].superseded != 0) == superseded:
            return
        self._checkpoints[slot].superseded = superseded
        if lru_listed(&self.checkpoints, slot):
            self._unlist_slot(slot)
            self._list_slot(slot)

    cdef int32_t demote_next(self, int64_t now) noexcept nogil:
        """Tell the time, and move the next listed checkpoint whose time is over to the EXPIRED class.

        Returns:
            Its place; call it until it returns NO_RECORD.  A time before the last one told counts as that.
        """
        cdef int32_t slot
        if now > self.now:
            self.now = now
        if self.expiries.size == 0 or self.expiries.entries[0].expiry > self.now:
            return NO_RECORD
        slot = self.expiries.entries[0].item
        self._unlist_slot(slot)
        self._list_slot(slot)
        return self._checkpoints[slot].place

    # Python interface

    cdef int32_t _checked(self, object record_id) except -1:
        if not isinstance(record_id, int) or not 0 <= record_id <= UINT64_MAX:
            _raise_unknown(record_id)
        cdef int32_t place = self.place_of(record_id)
        if place == NO_RECORD:
            _raise_unknown(record_id)
        return place

    cdef int32_t _checked_checkpoint(self, object record_id) except -1:
        cdef int32_t place = self._checked(record_id)
        if not self.is_checkpoint(place):
            raise InvalidArgumentError(f"record {record_id} is an endpoint; only a checkpoint has that")
        return place

    cdef int _check_mutable(self) except -1:
        if self.sealed:
            raise ContractViolation("this store belongs to a manager, which alone may change it; read it only")
        return 0

    def __len__(self):
        return self.size

    def __contains__(self, record_id):
        return (isinstance(record_id, int) and 0 <= record_id <= UINT64_MAX
                and self.place_of(record_id) != NO_RECORD)

    def insert(self, node, key, *, exact_length=0, recurrent_slot=-1, partial_slot=-1):
        """Remember an endpoint at the MRU end; an endpoint that is known already is only touched.

        Args:
            node: tree node of the last full block.
            key: `CacheRecordKey`.
            exact_length, recurrent_slot, partial_slot: of a checkpoint; those are inserted by `insert_checkpoint`.
        Returns:
            `(record id, inserted)`.
        Raises:
            InvalidArgumentError: no full block, a checkpoint, a negative number, or a node with another hash.  Nothing
                was changed.
        """
        cdef record_t record = empty_record()
        self._check_mutable()
        record.terminal = from_hash128(key.terminal_hash)
        record.block_count = key.full_block_count
        record.node = node
        record.exact_length = exact_length
        record.recurrent_slot = recurrent_slot
        record.partial_slot = partial_slot
        _validate(&record)
        if record.exact_length:
            raise InvalidArgumentError("a checkpoint needs its tokens as well; use insert_checkpoint")
        cdef int32_t place = self.find_at(record.node, 0)
        if place != NO_RECORD:
            if not hash_equal(self._records[place].terminal, record.terminal):
                raise InvalidArgumentError(f"node {node} has a record with another terminal hash; erase that one first")
            self.touch_at(place)
            return self._records[place].id, False
        return self._records[self.add(record)].id, True

    def insert_checkpoint(
        self, node, TokenChain chain not None, exact_length, *, block_count, recurrent_slot, partial_slot=-1,
        draft_node=-1, mtp=False, kind=_TAIL, owner=0
    ):
        """Remember a checkpoint of the chain's leading tokens; one that is known already is only touched.

        Args:
            node: tree node of block `block_count - 1`, or the namespace root (-2 - namespace) for 0 blocks.
            exact_length: tokens it stands for; at most one page more than its blocks.
            recurrent_slot, partial_slot: snapshot slots; -1 for no partial one.
            draft_node, mtp: draft node at `node`, and whether the draft side is complete.
            kind: `CheckpointKind`.
            owner: serial number of the lease.
        Returns:
            `(record id, inserted)`.
        Raises:
            InvalidArgumentError: what does not fit together.  Nothing was changed.
        """
        cdef record_t record = empty_record()
        cdef Py_ssize_t first = block_count * self.page_size
        self._check_mutable()
        if chain.page_size != self.page_size or not 0 < exact_length <= chain.token_count():
            raise InvalidArgumentError(
                f"length {exact_length} and page size {chain.page_size} must be 1 to {chain.token_count()} and "
                f"{self.page_size}")
        record.terminal = from_hash128(chain.prefix_hash(exact_length))
        record.exact_length = exact_length
        record.node = node
        record.block_count = block_count
        record.recurrent_slot = recurrent_slot
        record.partial_slot = partial_slot
        record.draft_node = draft_node
        record.mtp = bool(mtp)
        record.kind = CheckpointKind(kind)
        record.owner = owner
        _validate(&record)
        cdef int32_t place = self.find_checkpoint(record.node, chain, record.exact_length, first)
        if place != NO_RECORD:
            self.touch_at(place)
            return self._records[place].id, False
        return self._records[self.add_checkpoint(record, chain, first)].id, True

    def pin_checkpoint(self, record_id):
        """A lease holds an evictable checkpoint.  Raises InvalidArgumentError when it is not evictable."""
        self._check_mutable()
        cdef int32_t place = self._checked_checkpoint(record_id)
        if not self.is_listed(place):
            raise InvalidArgumentError(f"checkpoint {record_id} is not evictable; unpin it first")
        self.unlist_checkpoint(place)

    def unpin_checkpoint(self, record_id, *, priority=RetentionPriority.NORMAL, expiry=0):
        """No lease holds a checkpoint any more; kept at least as long as asked (`expiry` in ns, 0 is never).

        Raises InvalidArgumentError when it is evictable already, or the expiry is negative.
        """
        self._check_mutable()
        cdef int32_t place = self._checked_checkpoint(record_id)
        cdef int64_t until = expiry
        if self.is_listed(place) or until < 0:
            raise InvalidArgumentError(
                f"checkpoint {record_id} must be pinned before it is unpinned, and expiry {expiry} 0 or more")
        self.raise_retention(place, RetentionPriority(priority), until)
        self.list_checkpoint(place)

    def supersede(self, record_id, superseded=True):
        """Mark a checkpoint as less useful than the others, or take that back."""
        self._check_mutable()
        self.set_superseded(self._checked_checkpoint(record_id), bool(superseded))

    def set_now(self, now):
        """Tell the time in ns; returns the ids of the evictable checkpoints that expired, in that order."""
        self._check_mutable()
        expired = []
        cdef int32_t place = self.demote_next(now)
        while place != NO_RECORD:
            expired.append(self._records[place].id)
            place = self.demote_next(now)
        return expired

    def touch(self, record_id):
        """Make a record the most recently used one."""
        self._check_mutable()
        self.touch_at(self._checked(record_id))

    def erase(self, record_id):
        """Forget a record; its id is never used again."""
        self._check_mutable()
        self.erase_at(self._checked(record_id))

    # Reading

    def node(self, record_id):
        """The tree node a record hangs at, or a namespace root below -1."""
        return self._records[self._checked(record_id)].node

    def key(self, record_id):
        """The `CacheRecordKey` of a record."""
        cdef int32_t place = self._checked(record_id)
        return CacheRecordKey(to_hash128(self._records[place].terminal), self._records[place].block_count)

    def hybrid_key(self, record_id):
        """The `HybridCheckpointKey` of a checkpoint, or None for an endpoint."""
        cdef int32_t place = self._checked(record_id)
        if not self.is_checkpoint(place):
            return None
        return HybridCheckpointKey(to_hash128(self._records[place].terminal), self._records[place].exact_length)

    def exact_length(self, record_id):
        """Tokens of a checkpoint, or None for an endpoint."""
        return self._records[self._checked(record_id)].exact_length or None

    def recurrent_slot(self, record_id):
        """Recurrent snapshot of a checkpoint, or None for an endpoint."""
        cdef int32_t slot = self._records[self._checked(record_id)].recurrent_slot
        return None if slot < 0 else slot

    def partial_slot(self, record_id):
        """Partial snapshot of a checkpoint, or None."""
        cdef int32_t slot = self._records[self._checked(record_id)].partial_slot
        return None if slot < 0 else slot

    def draft_node(self, record_id):
        """Draft page at the node of an MTP checkpoint, or None."""
        cdef page_id_t draft = self._records[self._checked(record_id)].draft_node
        return None if draft < 0 else draft

    def mtp(self, record_id):
        """Whether a checkpoint carries the draft side as well."""
        return bool(self._records[self._checked_checkpoint(record_id)].mtp)

    def kind(self, record_id):
        """`CheckpointKind`."""
        return CheckpointKind(self._records[self._checked_checkpoint(record_id)].kind)

    def owner(self, record_id):
        """Serial number of the lease that published a checkpoint."""
        return self._records[self._checked_checkpoint(record_id)].owner

    def superseded(self, record_id):
        """Whether a checkpoint is marked as less useful than the others."""
        return bool(self.is_superseded(self._checked_checkpoint(record_id)))

    def priority_of(self, record_id):
        """`RetentionPriority` of a checkpoint."""
        cdef int32_t place = self._checked_checkpoint(record_id)
        return RetentionPriority(self._checkpoints[self._records[place].recurrent_slot].priority)

    def expiry_of(self, record_id):
        """When a checkpoint expires, ns; 0 is never; None when nobody has asked yet."""
        cdef int32_t place = self._checked_checkpoint(record_id)
        cdef checkpoint_t* entry = &self._checkpoints[self._records[place].recurrent_slot]
        if entry.lifetime == LIFETIME_UNSET:
            return None
        return entry.expiry if entry.lifetime == LIFETIME_TIMED else 0

    def class_of(self, record_id):
        """Class of an evictable checkpoint (0 expired, 1 superseded, 2 low, 3 normal, 4 high), or None when held."""
        cdef int32_t place = self._checked_checkpoint(record_id)
        return lru_class(&self.checkpoints, self._records[place].recurrent_slot) if self.is_listed(place) else None

    def tail_tokens(self, record_id):
        """(n,) int32: the tokens of a checkpoint after its last whole block, -1 at media positions; a copy."""
        cdef int32_t place = self._checked_checkpoint(record_id)
        cdef int32_t slot = self._records[place].recurrent_slot
        cdef size_t first = <size_t>slot * self.page_size
        return np.array([self._tails[first + i] for i in range(self._checkpoints[slot].tail_count)], dtype=np.int32)

    def tail_media(self, record_id):
        """Media identity of those tokens, in the form of `TokenChain.block_media`."""
        cdef int32_t place = self._checked_checkpoint(record_id)
        return bytes(self._tail_media[self._records[place].recurrent_slot])

    def records_at(self, node):
        """Ids of the records at a node (or root below -1), newest first; none for a node that does not exist."""
        cdef int32_t place = self.head_at(node)
        out = []
        while place != NO_RECORD:
            out.append(self._records[place].id)
            place = self._records[place].node_next
        return out

    def checkpoint_at(self, node, TokenChain chain not None, exact_length, *, block_count):
        """Id of the checkpoint at `node` for exactly the chain's leading tokens, or None."""
        cdef int32_t place = self.find_checkpoint(node, chain, exact_length, block_count * self.page_size)
        return None if place == NO_RECORD else self._records[place].id

    def best_checkpoint(self, node, TokenChain chain not None, *, block_count, below, need_mtp=False):
        """Id of the longest checkpoint at `node` that a prompt of `below` tokens can start from, or None."""
        cdef int32_t place = self.longest_checkpoint(
            node, chain, block_count * self.page_size, below, bool(need_mtp))
        return None if place == NO_RECORD else self._records[place].id

    def candidate_lengths(self, node, below):
        """Distinct lengths of the checkpoints at `node` that are shorter than `below`, longest first."""
        lengths = {self.exact_length(r) for r in self.records_at(node)} - {None}
        return sorted((n for n in lengths if n < below), reverse=True)

    def lru_to_mru(self):
        """Ids of all records, least recently used first (a new list)."""
        cdef int32_t place = self._lru_front
        out = []
        while place != NO_RECORD:
            out.append(self._records[place].id)
            place = self._records[place].lru_next
        return out

    cdef list _order(self, const lru_t* lists):
        cdef int32_t slot = lru_front(lists)
        out = []
        while slot >= 0:
            out.append(self._records[self._checkpoints[slot].place].id)
            slot = lru_next(lists, slot)
        return out

    def checkpoint_order(self):
        """Ids of the checkpoints that no lease holds, lowest class first, least recently used first (a new list)."""
        return self._order(&self.checkpoints)

    def partial_order(self):
        """The same of those that have a partial slot."""
        return self._order(&self.partials)

    @property
    def stale_checkpoint(self):
        """Id of the evictable checkpoint that expired or was superseded first, or None."""
        cdef int32_t place = self.stale_victim()
        return None if place == NO_RECORD else self._records[place].id

    @property
    def stale_partial(self):
        """The same of those that have a partial slot."""
        cdef int32_t place = self.stale_partial_victim()
        return None if place == NO_RECORD else self._records[place].id

    @property
    def checkpoint_class_sizes(self):
        """Evictable checkpoints by class: expired, superseded, low, normal, high priority."""
        return tuple(self.checkpoints.sizes[i] for i in range(NUM_CLASSES))

    # Recount

    def check_invariants(self):
        """Recount the store: LRU order, id map, node lists and checkpoint lists hold the same records.

        Raises:
            InvariantError: they differ.
        Cost: O(records + nodes + checkpoint capacity).
        """
        self._check_links()
        order = self.lru_to_mru()
        if len(order) != self.size or len(set(order)) != self.size or <Py_ssize_t>self._place_of.size() != self.size:
            raise InvariantError(f"{self.size} records, but LRU order {order} and an id map of {self._place_of.size()}")
        nodes = [*range(<Py_ssize_t>self._head_at_node.size()),
                 *(-2 - i for i in range(<Py_ssize_t>self._head_at_root.size()))]
        at_nodes = [r for node in nodes for r in self._checked_node_list(node)]
        if sorted(at_nodes) != sorted(order):
            raise InvariantError(f"records by node {sorted(at_nodes)} differ from the LRU order {sorted(order)}")
        for record_id in order:
            if self._records[self.place_of(record_id)].id != record_id or record_id > self._last_id:
                raise InvariantError(f"record {record_id} is not at the place its id maps to")
            try:
                _validate(&self._records[self.place_of(record_id)])
            except InvalidArgumentError as error:
                raise InvariantError(f"record {record_id} does not fit together: {error}") from error
        self._check_slots(order)
        self._check_order(order, self.checkpoint_order(), False)
        self._check_order(order, self.partial_order(), True)
        self._check_expiries()

    def _check_links(self):
        """The order over all records leads back the way it leads on; the other places are unused, once each."""
        cdef int32_t place = self._lru_front
        cdef int32_t before = NO_RECORD
        cdef Py_ssize_t count = 0
        while place != NO_RECORD and self._records[place].lru_prev == before and count <= self.size:
            before = place
            place = self._records[place].lru_next
            count += 1
        if place != NO_RECORD or before != self._lru_back or count != self.size:
            raise InvariantError(f"the LRU order of {self.size} records does not lead back the way it leads on")
        place = self._unused
        while place != NO_RECORD and self._records[place].id == 0 and count <= <Py_ssize_t>self._records.size():
            place = self._records[place].node_next
            count += 1
        if place != NO_RECORD or count != <Py_ssize_t>self._records.size():
            raise InvariantError(f"records and unused places are not {self._records.size()} places")
        if not lru_links_agree(&self.checkpoints) or not lru_links_agree(&self.partials):
            raise InvariantError("an eviction order of checkpoints does not lead back the way it leads on")

    def _checked_node_list(self, node):
        """Ids at a node; links back and the node of each record checked."""
        ids = self.records_at(node)
        newer = NO_RECORD
        for record_id in ids:
            place = self.place_of(record_id)
            if self._records[<int32_t>place].node != node or self._records[<int32_t>place].node_newer != newer:
                raise InvariantError(f"record {record_id} is in the list of node {node}, but not linked there")
            newer = place
        return ids

    def _check_slots(self, order):
        """Checkpoints and the entries of their slots belong together; no slot is used twice."""
        cdef int32_t slot
        cdef int32_t place
        cdef checkpoint_t* entry
        checkpoints = [r for r in order if self.is_checkpoint(self.place_of(r))]
        used = {slot: self._checkpoints[slot].place for slot in range(self.checkpoint_capacity)
                if self._checkpoints[slot].place != NO_RECORD}
        partials = []
        if sorted(used.values()) != sorted(self.place_of(r) for r in checkpoints) or len(used) != (
                self.checkpoint_count):
            raise InvariantError(f"checkpoints {checkpoints}, count {self.checkpoint_count}, but slots {used}")
        for slot, place in used.items():
            entry = &self._checkpoints[slot]
            partials += [entry.partial_slot] if entry.partial_slot >= 0 else []
            if self._records[place].recurrent_slot != slot or self._records[place].partial_slot != entry.partial_slot:
                raise InvariantError(f"slot {slot} and record {self._records[place].id} do not name each other")
            if self._records[place].exact_length != (
                    <int64_t>self._records[place].block_count * self.page_size + entry.tail_count):
                raise InvariantError(f"the checkpoint of slot {slot} does not have the length of its blocks and tail")
        if len(set(partials)) != len(partials):
            raise InvariantError(f"a partial slot is used twice: {partials}")

    def _check_order(self, order, listed, partial):
        """One eviction order: listed checkpoints once each, in the class they belong to."""
        cdef lru_t* lists = &self.partials if partial else &self.checkpoints
        cdef int32_t slot
        cdef checkpoint_t* entry
        wanted = {r for r in order if self.is_checkpoint(self.place_of(r)) and self.is_listed(self.place_of(r))
                  and (not partial or self.partial_slot(r) is not None)}
        if len(listed) != len(wanted) or set(listed) != wanted or lists.size != len(wanted):
            raise InvariantError(f"eviction order {listed} of {lists.size} is not the set {wanted}")
        classes = [self.class_of(r) for r in listed]
        if classes != sorted(classes) or [classes.count(i) for i in range(NUM_CLASSES)] != [
                lists.sizes[i] for i in range(NUM_CLASSES)]:
            raise InvariantError(f"eviction order {listed} has classes {classes}, not in order or counted wrongly")
        for slot in range(self.checkpoint_capacity):
            entry = &self._checkpoints[slot]
            cls = lru_class(&self.checkpoints, slot)
            if entry.place == NO_RECORD and (cls != UNLISTED or lru_listed(&self.partials, slot)):
                raise InvariantError(f"unused slot {slot} is listed")
            if entry.place != NO_RECORD and lru_class(&self.partials, slot) != (
                    cls if entry.partial_slot >= 0 else UNLISTED):
                raise InvariantError(f"slot {slot} has class {cls} in one list and another in the other")

    def _check_expiries(self):
        """The heap holds exactly the listed checkpoints that will expire, and each stands in the right class."""
        cdef int32_t slot
        cdef checkpoint_t* entry
        held = {self._expiries[i].item: self._expiries[i].expiry for i in range(self.expiries.size)}
        for slot in range(self.checkpoint_capacity):
            entry = &self._checkpoints[slot]
            listed = entry.place != NO_RECORD and lru_listed(&self.checkpoints, slot)
            cls = retention_class(entry.priority, entry.lifetime, entry.expiry, self.now)
            if entry.superseded and cls != CLASS_EXPIRED:
                cls = CLASS_SUPERSEDED
            if listed and lru_class(&self.checkpoints, slot) != cls:
                raise InvariantError(
                    f"the checkpoint of slot {slot} has class {lru_class(&self.checkpoints, slot)}, not {cls}")
            waits = listed and entry.lifetime == LIFETIME_TIMED and cls != CLASS_EXPIRED
            if waits != (slot in held) or (waits and held[slot] != entry.expiry):
                raise InvariantError(f"the checkpoint of slot {slot} has the wrong place among the expiries")
