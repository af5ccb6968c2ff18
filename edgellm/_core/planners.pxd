"""C interface of the planners: the reuse plan as the manager reads it."""

cimport cython
from libc.stdint cimport uint64_t
from libcpp.vector cimport vector

from edgellm._core.block_hash cimport TokenChain
from edgellm._core.block_index cimport BlockIndex
from edgellm._core.types cimport node_id_t


@cython.final
cdef class ReusePlan:
    """See planners.pyx.  `bindings[i]` is the node (and page) that block i will share."""

    cdef vector[node_id_t] bindings
    cdef readonly TokenChain chain
    cdef readonly Py_ssize_t num_tokens
    cdef readonly Py_ssize_t matched_token_length
    cdef readonly Py_ssize_t reuse_token_length
    cdef readonly Py_ssize_t total_pages
    cdef readonly Py_ssize_t stop_position
    cdef readonly object kind
    cdef readonly object stop_reason
    cdef object owner           # the manager it was made by, None for a bare plan
    cdef uint64_t version       # that manager's version when it was made


cdef ReusePlan make_vanilla_plan(BlockIndex index, TokenChain chain, Py_ssize_t num_tokens, object lookup_policy)
