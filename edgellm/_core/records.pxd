"""C interface of the record store: endpoints and checkpoints in arrays, their orders as index links.

A record hangs at a tree node or, for a checkpoint within the first block, at a namespace root (node below -1).
A *checkpoint* is a record with an exact length above 0; what only checkpoints have is kept by recurrent slot.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libcpp.string cimport string
from libcpp.unordered_map cimport unordered_map
from libcpp.vector cimport vector

from edgellm._core.block_hash cimport TokenChain
from edgellm._core.expiry_heap cimport expiry_heap_t, expiry_t
from edgellm._core.lru cimport CLASS_EXPIRED, CLASS_SUPERSEDED, lru_front, lru_link_t, lru_listed, lru_t
from edgellm._core.types cimport block_hash_t, node_id_t, page_id_t, token_t


cdef enum:
    NO_RECORD = -1
    NO_SLOT = -1
    # How many records of one node a search for a checkpoint looks at, newest first.
    MAX_RECORDS_AT_NODE = 64


cdef struct record_t:
    uint64_t id             # 0: this place is unused
    block_hash_t terminal   # endpoint: hash of the last full block; checkpoint: hash of exactly its tokens
    int64_t exact_length    # tokens of a checkpoint; 0 for an endpoint
    node_id_t node          # tree node of its last whole block, or the namespace root (`-2 - namespace`)
    int32_t block_count     # blocks from the root to `node`; 0 at a root
    int32_t recurrent_slot  # NO_SLOT for an endpoint
    int32_t partial_slot    # or NO_SLOT
    page_id_t draft_node    # draft node at `node` (MTP), or -1
    uint8_t mtp             # carries the draft side as well
    uint8_t kind            # CheckpointKind; 0 for an endpoint
    uint64_t owner          # serial number of the lease that published the checkpoint
    int32_t lru_prev        # places, in the order over all records; -1 at the ends
    int32_t lru_next
    int32_t node_newer      # neighbours in the list of the same node, newest first
    int32_t node_next       # also links unused places


cdef struct checkpoint_t:
    # By recurrent slot.
    int32_t place           # of its record, or NO_RECORD
    int32_t tail_count      # tokens after the last block of `node`, in `_tails`
    int32_t partial_slot    # as in the record
    int64_t expiry          # ns; counts only when lifetime is TIMED
    uint8_t priority        # RetentionPriority
    uint8_t lifetime        # LIFETIME_...
    uint8_t superseded      # a deeper checkpoint made it less useful; `set_superseded` changes it
    uint8_t expiring        # in the expiry heap


cdef inline record_t empty_record() noexcept nogil:
    """A record without anything: fill in what it has.  Order, list links and id are the store's business."""
    cdef record_t record
    record.id = record.owner = 0
    record.terminal.hi = record.terminal.lo = 0
    record.exact_length = 0
    record.node = record.draft_node = -1
    record.block_count = 0
    record.recurrent_slot = record.partial_slot = NO_SLOT
    record.mtp = record.kind = 0
    record.lru_prev = record.lru_next = record.node_newer = record.node_next = NO_RECORD
    return record


@cython.final
cdef class RecordStore:
    """See records.pyx.  A *place* is an index into `_records`; it is reused, a record id never is."""

    cdef bint sealed            # owned by a manager: the Python mutators are off
    cdef vector[record_t] _records
    cdef vector[int32_t] _head_at_node
    cdef vector[int32_t] _head_at_root
    cdef unordered_map[uint64_t, int32_t] _place_of
    cdef int32_t _unused
    cdef int32_t _lru_front
    cdef int32_t _lru_back
    cdef uint64_t _last_id
    cdef vector[checkpoint_t] _checkpoints      # [checkpoint_capacity]
    cdef vector[lru_link_t] _links
    cdef vector[lru_link_t] _partial_links
    cdef vector[token_t] _tails                 # [checkpoint_capacity, page_size]
    cdef vector[string] _tail_media             # [checkpoint_capacity]
    cdef vector[expiry_t] _expiries
    cdef vector[int32_t] _expiry_places
    cdef lru_t checkpoints      # items: recurrent slots of checkpoints that no lease holds
    cdef lru_t partials         # those of them that have a partial slot (items: recurrent slots as well)
    cdef expiry_heap_t expiries
    cdef int64_t now            # the caller's clock as last told to `demote_next`, ns
    cdef readonly Py_ssize_t size
    cdef readonly Py_ssize_t checkpoint_count
    cdef readonly int32_t checkpoint_capacity
    cdef readonly int32_t page_size
    cdef readonly object max_records
    cdef Py_ssize_t limit       # max_records, or -1 without a limit

    cdef inline int32_t head_at(self, node_id_t node) noexcept nogil:
        """Place of the newest record at a node or root, or NO_RECORD; go on with `next_at`."""
        if node >= 0:
            return self._head_at_node[node] if node < <node_id_t>self._head_at_node.size() else NO_RECORD
        if node < -1 and -2 - node < <node_id_t>self._head_at_root.size():
            return self._head_at_root[-2 - node]
        return NO_RECORD

    cdef inline int32_t next_at(self, int32_t place) noexcept nogil:
        """The next older record of the same node, or NO_RECORD."""
        return self._records[place].node_next

    cdef inline const record_t* record_at(self, int32_t place) noexcept nogil:
        """The record; valid until the next `add`."""
        return &self._records[place]

    cdef inline uint64_t id_at(self, int32_t place) noexcept nogil:
        return self._records[place].id

    cdef inline node_id_t node_at(self, int32_t place) noexcept nogil:
        return self._records[place].node

    cdef inline int32_t front(self) noexcept nogil:
        """Place of the least recently used record of all, or NO_RECORD."""
        return self._lru_front

    cdef inline bint is_checkpoint(self, int32_t place) noexcept nogil:
        return self._records[place].exact_length > 0

    cdef inline bint is_superseded(self, int32_t place) noexcept nogil:
        """Of a checkpoint."""
        return self._checkpoints[self._records[place].recurrent_slot].superseded != 0

    cdef inline bint is_listed(self, int32_t place) noexcept nogil:
        """Of a checkpoint: whether it may be evicted."""
        return lru_listed(&self.checkpoints, self._records[place].recurrent_slot)

    cdef inline int32_t checkpoint_victim(self) noexcept nogil:
        """Place of the unpinned checkpoint of lowest class, least recently used, or NO_RECORD."""
        cdef int32_t slot = lru_front(&self.checkpoints)
        return NO_RECORD if slot < 0 else self._checkpoints[slot].place

    cdef inline int32_t partial_victim(self) noexcept nogil:
        """The same among those that have a partial slot."""
        cdef int32_t slot = lru_front(&self.partials)
        return NO_RECORD if slot < 0 else self._checkpoints[slot].place

    cdef inline int32_t stale_victim(self) noexcept nogil:
        """Place of the unpinned checkpoint that expired or was superseded first, or NO_RECORD."""
        if self.checkpoints.sizes[CLASS_EXPIRED] + self.checkpoints.sizes[CLASS_SUPERSEDED] == 0:
            return NO_RECORD
        return self.checkpoint_victim()

    cdef inline int32_t stale_partial_victim(self) noexcept nogil:
        """The same among those that have a partial slot."""
        if self.partials.sizes[CLASS_EXPIRED] + self.partials.sizes[CLASS_SUPERSEDED] == 0:
            return NO_RECORD
        return self.partial_victim()

    # Looking
    cdef int32_t find_at(self, node_id_t node, int64_t exact_length) noexcept nogil
    cdef int32_t find_checkpoint(
        self, node_id_t node, TokenChain chain, int64_t exact_length, Py_ssize_t first
    ) noexcept nogil
    cdef int32_t longest_checkpoint(
        self, node_id_t node, TokenChain chain, Py_ssize_t first, int64_t below, bint need_mtp
    ) noexcept nogil
    cdef bint _tail_matches(self, int32_t place, TokenChain chain, Py_ssize_t first) noexcept nogil
    cdef int32_t common_tail(self, node_id_t node, const token_t* tokens, int32_t limit) noexcept nogil
    cdef int32_t place_of(self, uint64_t record_id) noexcept nogil
    # Adding: the last step of a transaction that can fail
    cdef int reserve_nodes(self, Py_ssize_t count) except -1
    cdef int32_t add(self, record_t record) except -1
    cdef int32_t add_checkpoint(self, record_t record, TokenChain chain, Py_ssize_t first) except -1
    # Moves that cannot fail
    cdef void touch_at(self, int32_t place) noexcept nogil
    cdef void erase_at(self, int32_t place) noexcept nogil
    cdef int32_t erase_node(self, node_id_t node) noexcept nogil
    cdef void raise_retention(self, int32_t place, int priority, int64_t expiry) noexcept nogil
    cdef void list_checkpoint(self, int32_t place) noexcept nogil
    cdef void unlist_checkpoint(self, int32_t place) noexcept nogil
    cdef void set_superseded(self, int32_t place, bint superseded) noexcept nogil
    cdef int32_t demote_next(self, int64_t now) noexcept nogil
    cdef void clear(self) noexcept nogil
    cdef void _list_slot(self, int32_t slot) noexcept nogil
    cdef void _unlist_slot(self, int32_t slot) noexcept nogil
    cdef void _drop_checkpoint(self, int32_t slot) noexcept nogil
    cdef int32_t* _head(self, node_id_t node) noexcept nogil
    cdef void _link_back(self, int32_t place) noexcept nogil
    cdef void _unlink(self, int32_t place) noexcept nogil
    # Python border
    cdef int32_t _checked(self, object record_id) except -1
    cdef int32_t _checked_checkpoint(self, object record_id) except -1
    cdef int _check_mutable(self) except -1
    cdef list _order(self, const lru_t* lists)
