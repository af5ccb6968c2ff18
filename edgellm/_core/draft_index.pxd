"""C interface of the draft index: which draft page describes which block, by which producer.

A draft node is named by its draft page (`draft id == draft page id`).  It describes one base node and follows one
draft node of the block in front, or none for a first block: so a path never mixes producers.
"""

cimport cython
from libc.stdint cimport int32_t, uint8_t
from libcpp.vector cimport vector

from edgellm._core.lru cimport lru_link_t, lru_listed, lru_t
from edgellm._core.types cimport node_id_t, page_id_t, token_t


cdef enum:
    NO_DRAFT = -1
    NO_SUCCESSOR = -1
    # How many draft nodes of one base node `find` looks at, newest first.
    MAX_LINEAGES = 64


cdef struct draft_t:
    node_id_t base          # base node it describes; -1: this page is no draft node
    page_id_t parent        # draft node of the block in front, or NO_DRAFT for a first block
    int32_t child_count     # draft nodes that follow it; 0: a leaf
    page_id_t newer         # siblings at the same base node
    page_id_t older
    token_t successor       # token that followed the block when it was published, or NO_SUCCESSOR
    int32_t token_count     # tokens it holds: those of its base node
    uint8_t priority        # RetentionPriority; its expiry is that of its base node


cdef struct drafts_t:
    int32_t capacity        # draft pages
    int32_t base_capacity   # base pages
    int32_t size            # draft nodes
    lru_t lru               # draft nodes that no lease holds, and no others
    draft_t* nodes          # [capacity]
    page_id_t* heads        # [base_capacity] newest draft node of a base node, or NO_DRAFT


@cython.final
cdef class DraftIndex:
    """See draft_index.pyx.  `core` points into the vectors, which never change size."""

    cdef drafts_t core
    cdef bint sealed        # owned by a manager: the Python mutators are off
    cdef vector[draft_t] _nodes
    cdef vector[lru_link_t] _links
    cdef vector[page_id_t] _heads

    cdef inline bint is_draft(self, page_id_t draft) noexcept nogil:
        """Whether the draft page is a node."""
        return self.core.nodes[draft].base >= 0

    cdef inline page_id_t newest_at(self, node_id_t base) noexcept nogil:
        """Newest draft node of a base node; go on with `nodes[draft].older`.  NO_DRAFT when there is none."""
        return self.core.heads[base]

    cdef inline bint is_listed(self, page_id_t draft) noexcept nogil:
        return lru_listed(&self.core.lru, draft)

    cdef inline void raise_priority(self, page_id_t draft, int priority) noexcept nogil:
        if priority > self.core.nodes[draft].priority:
            self.core.nodes[draft].priority = <uint8_t>priority

    cdef page_id_t find(self, node_id_t base, page_id_t parent, token_t successor) noexcept nogil
    cdef void path_into(self, page_id_t draft, Py_ssize_t length, page_id_t* out) noexcept nogil
    cdef void add(
        self, page_id_t draft, node_id_t base, page_id_t parent, token_t successor, int32_t token_count
    ) noexcept nogil
    cdef void remove(self, page_id_t draft) noexcept nogil
    cdef void list_draft(self, page_id_t draft, bint expired) noexcept nogil
    cdef void unlist_draft(self, page_id_t draft) noexcept nogil
    cdef void expire_at(self, node_id_t base) noexcept nogil
    cdef void clear(self) noexcept nogil
    cdef page_id_t _checked(self, object draft) except -1
    cdef page_id_t _checked_node(self, object draft) except -1
    cdef node_id_t _checked_base(self, object base) except -1
    cdef int _check_mutable(self) except -1
