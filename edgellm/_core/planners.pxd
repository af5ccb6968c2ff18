"""C interface of the planners: the reuse plan as the manager reads it, and the functions that make one."""

cimport cython
from libc.stdint cimport int32_t, uint64_t
from libcpp.vector cimport vector

from edgellm._core.block_hash cimport TokenChain
from edgellm._core.block_index cimport BlockIndex
from edgellm._core.draft_index cimport DraftIndex
from edgellm._core.records cimport RecordStore
from edgellm._core.types cimport node_id_t, page_id_t


@cython.final
cdef class ReusePlan:
    """See planners.pyx.  `bindings[i]` is the node (and page) that block i will share, `draft_bindings[i]` likewise."""

    cdef vector[node_id_t] bindings
    cdef vector[page_id_t] draft_bindings
    cdef node_id_t tail_page            # page to copy the tail tokens from, or NO_NODE
    cdef page_id_t draft_tail_page      # or NO_DRAFT
    cdef int32_t recurrent_slot         # snapshots to restore, or NO_SLOT
    cdef int32_t partial_slot
    cdef int32_t record_place           # of the checkpoint, or NO_RECORD
    cdef bint index_only                # base pages have no memory behind them (pure recurrent)
    cdef bint paired                    # draft pages go along
    cdef readonly TokenChain chain
    cdef readonly Py_ssize_t num_tokens
    cdef readonly Py_ssize_t matched_token_length
    cdef readonly Py_ssize_t reuse_token_length
    cdef readonly Py_ssize_t known_token_length
    cdef readonly Py_ssize_t total_pages
    cdef readonly Py_ssize_t stop_position
    cdef readonly Py_ssize_t tail_token_count
    cdef readonly Py_ssize_t replayed_token_count
    cdef readonly bint namespace_known
    cdef readonly object mode
    cdef readonly object kind
    cdef readonly object stop_reason
    cdef readonly object hybrid_record
    cdef readonly object hybrid_checkpoint
    cdef object owner           # the manager it was made by, None for a bare plan
    cdef uint64_t version       # that manager's version when it was made


cdef ReusePlan make_vanilla_plan(
    BlockIndex index, TokenChain chain, Py_ssize_t num_tokens, object lookup_policy, Py_ssize_t future
)
cdef ReusePlan make_spec_plan(
    BlockIndex index, DraftIndex drafts, TokenChain chain, Py_ssize_t num_tokens, object lookup_policy,
    Py_ssize_t future
)
cdef ReusePlan make_checkpoint_plan(
    BlockIndex index, DraftIndex drafts, RecordStore records, TokenChain chain, object lookup_policy, bint mtp,
    bint has_attention
)
cdef ReusePlan without_tail(ReusePlan plan)
