"""Typedefs of the core: the only place they are declared (mirrored in `edgellm.cache.types`)."""

from libc.stdint cimport int32_t, uint64_t

ctypedef int32_t page_id_t      # index into one pool; -1 is unused
ctypedef int32_t node_id_t      # index of a block-tree node; -1 is none
ctypedef int32_t slot_t         # resident row
ctypedef int32_t token_t

cdef struct block_hash_t:
    uint64_t hi
    uint64_t lo
