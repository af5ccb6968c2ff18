"""Cache records: remembered endpoints in the block tree, with an LRU order of their own.

A record names an endpoint: the node of its last full block and, later, a recurrent checkpoint with its snapshots.  It
owns no page: the node does.  So the number of records is bounded by the pages, and `max_records` is an option.
"""

cimport cython
from cython.operator cimport dereference as deref
from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp.pair cimport pair
from libcpp.unordered_map cimport unordered_map

from edgellm._core.block_hash cimport from_hash128, hash_equal, to_hash128
from edgellm._core.types cimport node_id_t

from edgellm.cache.types import CacheRecordKey
from edgellm.errors import ContractViolation, InvalidArgumentError, InvariantError


cdef int _raise_unknown(object record_id) except -1:
    raise InvalidArgumentError(f"record {record_id!r} is not in the store; it was evicted or never existed")


cdef int _validate(record_t* record) except -1:
    """The rules that every record keeps: an endpoint, and snapshots exactly when it is a checkpoint."""
    if record.node < 0 or record.block_count < 0 or record.exact_length < 0:
        raise InvalidArgumentError(
            f"a record needs node, block count and length of 0 or more, got {record.node}, {record.block_count}, "
            f"{record.exact_length}")
    if record.exact_length == 0:
        if record.block_count == 0:
            raise InvalidArgumentError("a record without a checkpoint needs at least one full block")
        if record.recurrent_slot >= 0 or record.partial_slot >= 0:
            raise InvalidArgumentError("only a recurrent checkpoint has snapshots; give its exact length as well")
    elif record.recurrent_slot < 0:
        raise InvalidArgumentError(f"the checkpoint at {record.exact_length} tokens needs a recurrent snapshot")
    return 0


@cython.final
cdef class RecordStore:
    """Endpoints by node and by id, least recently used first.  Single writer; not thread safe.

    The store does not enforce `max_records` (the manager does) and never touches pools or index.
    """

    def __cinit__(self, max_records=None):
        if max_records is not None and (not isinstance(max_records, int) or max_records < 0):
            raise InvalidArgumentError(f"max_records {max_records!r} must be 0 or more, or None for no limit")
        self.max_records = max_records
        self.limit = -1 if max_records is None else max_records
        self._unused = self._lru_front = self._lru_back = NO_RECORD

    cdef int reserve_nodes(self, Py_ssize_t count) except -1:
        """Room for node ids below `count`."""
        if <Py_ssize_t>self._head_at_node.size() < count:
            self._head_at_node.resize(count, NO_RECORD)
        return 0

    cdef int32_t find_at(self, node_id_t node, int64_t exact_length) noexcept nogil:
        """Place of the record with that endpoint, or NO_RECORD."""
        cdef int32_t place = self.head_at(node)
        while place != NO_RECORD and self._records[place].exact_length != exact_length:
            place = self._records[place].node_next
        return place

    cdef int32_t place_of(self, uint64_t record_id) noexcept nogil:
        cdef unordered_map[uint64_t, int32_t].iterator found = self._place_of.find(record_id)
        return NO_RECORD if found == self._place_of.end() else deref(found).second

    cdef int32_t add(self, record_t record) except -1:
        """Insert at the MRU end under the next id and return the place; nothing changes when memory is short.

        The caller made sure that no record has this endpoint.
        """
        cdef int32_t place = self._unused
        _validate(&record)
        self.reserve_nodes(record.node + 1)
        record.id = self._last_id + 1
        if place == NO_RECORD:
            place = <int32_t>self._records.size()
            self._records.push_back(record)
            self._records[place].id = 0
            self._records[place].node_next = self._unused
            self._unused = place
        self._place_of.insert(pair[uint64_t, int32_t](record.id, place))
        self._unused = self._records[place].node_next
        record.node_next = self._head_at_node[record.node]
        self._records[place] = record
        self._head_at_node[record.node] = place
        self._last_id = record.id
        self.size += 1
        self._link_back(place)
        return place

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
        self._unlink(place)
        self._link_back(place)

    cdef void erase_at(self, int32_t place) noexcept nogil:
        cdef record_t* record = &self._records[place]
        cdef int32_t* link = &self._head_at_node[record.node]
        while link[0] != place:
            link = &self._records[link[0]].node_next
        link[0] = record.node_next
        self._unlink(place)
        self._place_of.erase(record.id)
        record.id = 0
        record.node_next = self._unused
        self._unused = place
        self.size -= 1

    cdef int32_t erase_node(self, node_id_t node) noexcept nogil:
        """Erase all records that end at `node`; returns how many there were."""
        cdef int32_t count = 0
        while self.head_at(node) != NO_RECORD:
            self.erase_at(self._head_at_node[node])
            count += 1
        return count

    cdef void clear(self) noexcept nogil:
        while self._lru_front != NO_RECORD:
            self.erase_at(self._lru_front)

    # Python interface

    cdef int32_t _checked(self, object record_id) except -1:
        if not isinstance(record_id, int) or record_id < 0:
            _raise_unknown(record_id)
        cdef int32_t place = self.place_of(record_id)
        if place == NO_RECORD:
            _raise_unknown(record_id)
        return place

    cdef int _check_mutable(self) except -1:
        if self.sealed:
            raise ContractViolation("this store belongs to a manager, which alone may change it; read it only")
        return 0

    def __len__(self):
        return self.size

    def __contains__(self, record_id):
        return self.place_of(record_id) != NO_RECORD

    def insert(self, node, key, *, exact_length=0, recurrent_slot=-1, partial_slot=-1):
        """Remember an endpoint at the MRU end; an endpoint that is known already is only touched.

        Args:
            node: tree node of the last full block.
            key: `CacheRecordKey`.
            exact_length: tokens of a recurrent checkpoint, 0 without one.
        Returns:
            `(record id, inserted)`.
        Raises:
            InvalidArgumentError: no full block and no checkpoint, snapshots without checkpoint, checkpoint without
                recurrent snapshot, or a negative number.  Nothing was changed.
        """
        cdef record_t record
        self._check_mutable()
        record.terminal = from_hash128(key.terminal_hash)
        record.block_count = key.full_block_count
        record.node = node
        record.exact_length = exact_length
        record.recurrent_slot = recurrent_slot
        record.partial_slot = partial_slot
        record.id = 0
        record.lru_prev = record.lru_next = record.node_next = NO_RECORD
        _validate(&record)
        cdef int32_t place = self.find_at(record.node, record.exact_length)
        if place != NO_RECORD:
            if not hash_equal(self._records[place].terminal, record.terminal):
                raise InvalidArgumentError(f"node {node} has a record with another terminal hash; erase that one first")
            self.touch_at(place)
            return self._records[place].id, False
        return self._records[self.add(record)].id, True

    def node(self, record_id):
        """The tree node a record ends at."""
        return self._records[self._checked(record_id)].node

    def key(self, record_id):
        """The `CacheRecordKey` of a record."""
        cdef int32_t place = self._checked(record_id)
        return CacheRecordKey(to_hash128(self._records[place].terminal), self._records[place].block_count)

    def exact_length(self, record_id):
        """Tokens of the record's recurrent checkpoint, or None when it has none."""
        return self._records[self._checked(record_id)].exact_length or None

    def records_at(self, node):
        """Ids of the records that end at `node`, newest first; none for a node that does not exist."""
        cdef int32_t place = self.head_at(node) if node >= 0 else NO_RECORD
        out = []
        while place != NO_RECORD:
            out.append(self._records[place].id)
            place = self._records[place].node_next
        return out

    def touch(self, record_id):
        """Make a record the most recently used one."""
        self._check_mutable()
        self.touch_at(self._checked(record_id))

    def erase(self, record_id):
        """Forget a record; its id is never used again."""
        self._check_mutable()
        self.erase_at(self._checked(record_id))

    def lru_to_mru(self):
        """Record ids, least recently used first (a new list)."""
        cdef int32_t place = self._lru_front
        out = []
        while place != NO_RECORD:
            out.append(self._records[place].id)
            place = self._records[place].lru_next
        return out

    def check_invariants(self):
        """Recount the store: LRU order, id map and node lists hold the same records.

        Raises:
            InvariantError: they differ.
        Cost: O(records + nodes).
        """
        order = self.lru_to_mru()
        if len(order) != self.size or len(set(order)) != self.size or <Py_ssize_t>self._place_of.size() != self.size:
            raise InvariantError(f"{self.size} records, but LRU order {order} and an id map of {self._place_of.size()}")
        at_nodes = [r for node in range(<Py_ssize_t>self._head_at_node.size()) for r in self.records_at(node)]
        if sorted(at_nodes) != sorted(order):
            raise InvariantError(f"records by node {sorted(at_nodes)} differ from the LRU order {sorted(order)}")
        for record_id in order:
            if self._records[self.place_of(record_id)].id != record_id or record_id > self._last_id:
                raise InvariantError(f"record {record_id} is not at the place its id maps to")
