"""Planners: pure functions that decide what is reused and what would be evicted.  They change nothing.

A lookup walks full blocks down the tree, then looks how far the next tokens agree with a child or a tail of the last
one.  What is known is M tokens; what is reused, R, leaves at least one token to compute.  The whole pages below R are
shared, the rest of R is copied from the page that holds it (`tail_source`) into a private page.  Recurrent state
cannot be cut, so those flavours start at checkpoints only.
"""

cimport cython
from libc.stdint cimport int32_t

from edgellm._core.block_hash cimport TokenChain, to_hash128
from edgellm._core.block_index cimport (
    MAX_SIBLINGS,
    NO_NODE,
    NO_VOLATILE,
    BlockIndex,
    partial_t,
    text_length,
)
from edgellm._core.draft_index cimport MAX_LINEAGES, NO_DRAFT, DraftIndex
from edgellm._core.lru cimport lru_front, lru_next
from edgellm._core.page_ledger cimport ResourcePools
from edgellm._core.records cimport NO_RECORD, NO_SLOT, RecordStore, record_t
from edgellm._core.types cimport node_id_t, page_id_t

import numpy as np

from dataclasses import dataclass

from edgellm.cache.types import (
    ContextCacheLookupPolicy,
    HybridCheckpointKey,
    ResourceDemand,
    ResourceType,
    ReusePlanKind,
    ReusePlanMode,
    ReuseStopReason,
)
from edgellm.errors import InvalidArgumentError

cdef object _USE_CACHE = ContextCacheLookupPolicy.USE_CACHE
cdef object _BYPASS_POLICY = ContextCacheLookupPolicy.BYPASS
cdef object _STANDARD = ReusePlanKind.STANDARD
cdef object _NO_PREFIX = ReusePlanKind.NO_REUSABLE_PREFIX
cdef object _REWIND = ReusePlanKind.FULL_INPUT_REWIND
cdef object _VANILLA = ReusePlanMode.VANILLA
cdef object _SPEC = ReusePlanMode.SPEC
cdef object _HYBRID = ReusePlanMode.HYBRID
cdef object _HYBRID_MTP = ReusePlanMode.HYBRID_MTP
cdef object _FULL = ReuseStopReason.FULL
cdef object _NO_RECORD_REASON = ReuseStopReason.NO_RECORD
cdef object _EVICTED = ReuseStopReason.EVICTED
cdef object _POLICY = ReuseStopReason.POLICY
cdef object _MEDIA = ReuseStopReason.MEDIA
cdef object _TEMPLATE_TAIL = ReuseStopReason.TEMPLATE_TAIL
cdef object _LOOKAHEAD = ReuseStopReason.LOOKAHEAD_REPLAY
cdef object _NO_CHECKPOINT = ReuseStopReason.NO_CHECKPOINT
cdef object _BYPASS = ReuseStopReason.BYPASS


@cython.final
@cython.auto_pickle(False)      # `__setstate__` would let Python change it
cdef class ReusePlan:
    """What one prompt reuses and what it must be given.  Immutable from Python; lengths are in tokens.

    Attributes:
        mode: `ReusePlanMode`, the flavour of the lease it can be turned into.
        chain: the prompt it was made for (shared, not copied).
        num_tokens: n, length of the planned prompt.
        matched_token_length: leading tokens whose state the cache has, for this flavour.
        reuse_token_length: where prefill starts; at most matched, and below n for n > 0.
        known_token_length: leading tokens that were computed, as far as the block tree and the checkpoints tell,
            whether or not their state can be reused.
        tail_token_count: of the reused tokens, those that are copied from `tail_source` into a private page.
        replayed_token_count: matched tokens given up because draft state looks at later tokens.
        total_pages: ceil(n / page size).
        namespace_known: whether anything at all is stored under the prompt's request-constant key.
        kind: `ReusePlanKind`.
        stop_reason, stop_position: why matching stopped, and at which token.
        hybrid_record, hybrid_checkpoint: id and key of the recurrent checkpoint that is restored, or None.
    """

    @property
    def base_page_bindings(self):
        """(shared blocks,) int32 pages that will be shared, first block first; a copy.  Empty for a pure recurrent
        model, whose base pages hold nothing."""
        return np.array([] if self.index_only else self.bindings, dtype=np.int32)

    @property
    def draft_page_bindings(self):
        """(shared draft blocks,) int32 draft pages of one lineage; a copy."""
        return np.array(self.draft_bindings, dtype=np.int32)

    @property
    def matched_block_hashes(self):
        """`Hash128` of each bound block."""
        if self.index_only:
            return []
        return [to_hash128(self.chain.hashes[i]) for i in range(self.bindings.size())]

    @property
    def tail_source(self):
        """Base page whose first `tail_token_count` tokens are copied into the first private page, or None."""
        return None if self.tail_page == NO_NODE else self.tail_page

    @property
    def draft_tail_source(self):
        """Likewise in the draft pool, or None."""
        return None if self.draft_tail_page == NO_DRAFT else self.draft_tail_page

    @property
    def recurrent_snapshot_binding(self):
        """Recurrent snapshot to restore from, or None."""
        return None if self.recurrent_slot == NO_SLOT else self.recurrent_slot

    @property
    def partial_kv_snapshot_binding(self):
        """Partial-page snapshot to restore from, or None."""
        return None if self.partial_slot == NO_SLOT else self.partial_slot

    @property
    def demand(self):
        """Units that must be allocated beside the bindings."""
        return ResourceDemand(
            base_kv_pages=0 if self.index_only else self.total_pages - <Py_ssize_t>self.bindings.size(),
            draft_kv_pages=self.total_pages - <Py_ssize_t>self.draft_bindings.size() if self.paired else 0)

    def __repr__(self):
        return (f"ReusePlan(mode={self.mode}, num_tokens={self.num_tokens}, matched={self.matched_token_length}, "
                f"reuse={self.reuse_token_length}, kind={self.kind}, stop={self.stop_reason}@{self.stop_position})")


# What all flavours share

cdef ReusePlan _new_plan(BlockIndex index, TokenChain chain, Py_ssize_t num_tokens, object lookup_policy, object mode):
    """A plan that reuses nothing; with the bypass policy it is final."""
    cdef ReusePlan plan = ReusePlan.__new__(ReusePlan)
    cdef Py_ssize_t page_size = index.core.page_size
    if lookup_policy is not _USE_CACHE and lookup_policy is not _BYPASS_POLICY:
        raise InvalidArgumentError(f"lookup policy {lookup_policy!r} must be a ContextCacheLookupPolicy")
    if chain.page_size != page_size:
        raise InvalidArgumentError(f"the chain has page size {chain.page_size}, the cache {page_size}; make them equal")
    plan.mode = mode
    plan.chain = chain
    plan.num_tokens = num_tokens
    plan.total_pages = (num_tokens + page_size - 1) // page_size
    plan.tail_page = NO_NODE
    plan.draft_tail_page = NO_DRAFT
    plan.recurrent_slot = plan.partial_slot = NO_SLOT
    plan.record_place = NO_RECORD
    plan.kind = _STANDARD if num_tokens == 0 else _NO_PREFIX
    if lookup_policy is _BYPASS_POLICY:
        plan.stop_reason = _BYPASS
    return plan


cdef node_id_t _walk(ReusePlan plan, BlockIndex index) except? -1:
    """Bind all leading full blocks the tree knows; returns the namespace root, NO_NODE when nothing is stored there."""
    cdef Py_ssize_t full_blocks = plan.num_tokens // index.core.page_size
    cdef Py_ssize_t matched
    cdef node_id_t root = index.find_namespace(plan.chain.key_bytes)
    plan.namespace_known = root != NO_NODE
    if root == NO_NODE or full_blocks == 0:
        return root
    plan.bindings.resize(full_blocks)
    matched = index.match(plan.chain, root, 0, full_blocks, plan.bindings.data())
    plan.bindings.resize(matched)
    return root


cdef inline node_id_t _node_at(ReusePlan plan, Py_ssize_t blocks, node_id_t root) noexcept nogil:
    """The node after `blocks` matched blocks: the root for none."""
    return plan.bindings[blocks - 1] if blocks > 0 else root


cdef object _why_here(ReusePlan plan, BlockIndex index, Py_ssize_t known, partial_t partial, node_id_t parent):
    """Why nothing is known from token `known` on; `partial` is the child or tail that the walk ended in."""
    cdef TokenChain chain = plan.chain
    cdef Py_ssize_t page_size = index.core.page_size
    cdef Py_ssize_t block_idx = known // page_size
    cdef Py_ssize_t end = min(plan.num_tokens, (block_idx + 1) * page_size)
    if block_idx < plan.num_tokens // page_size:
        if index.was_withheld(chain.hashes[block_idx]):
            return _POLICY
        if index.was_evicted(chain.hashes[block_idx]):
            return _EVICTED
    if _is_volatile(index, partial, parent):
        return _TEMPLATE_TAIL
    if chain.has_media and text_length(chain, block_idx * page_size, end) < end - block_idx * page_size:
        return _MEDIA
    return _NO_RECORD_REASON


cdef bint _is_volatile(BlockIndex index, partial_t partial, node_id_t parent) noexcept nogil:
    """Whether the walk ended where a template's volatile tail begins or follows."""
    cdef node_id_t node = partial.node
    if node == NO_NODE and parent != NO_NODE:
        # Nothing agrees: the newest branch says whether the tail begins exactly at this block.
        if parent >= 0 and index.core.branches[parent].volatile_from != NO_VOLATILE:
            return False
        node = index.first_child(parent)
        if node == NO_NODE:
            node = index.first_tail(parent)
    if node == NO_NODE or index.core.branches[node].volatile_from == NO_VOLATILE:
        return False
    return index.core.branches[node].volatile_from <= partial.length


cdef void _set_kind(ReusePlan plan) noexcept:
    if plan.num_tokens and plan.matched_token_length == plan.num_tokens:
        plan.kind = _REWIND
    elif plan.reuse_token_length:
        plan.kind = _STANDARD
    else:
        plan.kind = _STANDARD if plan.num_tokens == 0 else _NO_PREFIX


# Attention

cdef void _bind(ReusePlan plan, BlockIndex index, Py_ssize_t valid, page_id_t partial_page, page_id_t partial_draft):
    """Reuse what is `valid` but one token: whole pages are shared, the rest is copied from where it lies."""
    cdef Py_ssize_t reuse = max(<Py_ssize_t>0, min(valid, plan.num_tokens - 1))
    cdef Py_ssize_t shared = reuse // index.core.page_size
    plan.reuse_token_length = reuse
    plan.tail_token_count = reuse % index.core.page_size
    if plan.tail_token_count:
        plan.tail_page = plan.bindings[shared] if shared < <Py_ssize_t>plan.bindings.size() else partial_page
    if plan.paired and plan.tail_token_count:
        plan.draft_tail_page = (
            plan.draft_bindings[shared] if shared < <Py_ssize_t>plan.draft_bindings.size() else partial_draft)
    plan.bindings.resize(shared)
    if plan.paired:
        plan.draft_bindings.resize(shared)
    _set_kind(plan)


cdef ReusePlan make_vanilla_plan(
    BlockIndex index, TokenChain chain, Py_ssize_t num_tokens, object lookup_policy, Py_ssize_t future
):
    """Base pages only; `future` matched tokens are given up (a contract that borrows the base KV and looks ahead)."""
    cdef ReusePlan plan = _new_plan(index, chain, num_tokens, lookup_policy, _VANILLA)
    cdef partial_t partial
    cdef node_id_t root, parent
    cdef Py_ssize_t known, valid
    if plan.stop_reason is _BYPASS:
        return plan
    root = _walk(plan, index)
    known = <Py_ssize_t>plan.bindings.size() * index.core.page_size
    parent = _node_at(plan, <Py_ssize_t>plan.bindings.size(), root)
    partial = index.find_partial(chain, parent, known, num_tokens)
    known += partial.length
    valid = max(<Py_ssize_t>0, known - future)
    plan.matched_token_length = plan.known_token_length = plan.stop_position = known
    plan.replayed_token_count = known - valid
    _bind(plan, index, valid, partial.node, NO_DRAFT)
    if plan.reuse_token_length >= num_tokens - 1:
        plan.stop_reason = _FULL    # all that can be reused: at least one token runs again
    elif valid < known:
        plan.stop_reason = _LOOKAHEAD
    else:
        plan.stop_reason = _why_here(plan, index, known, partial, parent)
    return plan


# Speculative with draft pages of its own

cdef page_id_t _draft_under(DraftIndex drafts, node_id_t base, page_id_t parent) noexcept nogil:
    """The newest draft node of `base` that goes on from draft node `parent`, or NO_DRAFT."""
    cdef page_id_t draft = drafts.newest_at(base)
    cdef int _i
    for _i in range(MAX_LINEAGES):
        if draft == NO_DRAFT or drafts.core.nodes[draft].parent == parent:
            return draft
        draft = drafts.core.nodes[draft].older
    return NO_DRAFT


cdef page_id_t _best_pair(
    ReusePlan plan, BlockIndex index, DraftIndex drafts, node_id_t parent, page_id_t last_draft, partial_t* best
) noexcept nogil:
    """The child or tail of `parent` that goes on with the same lineage for most tokens; its draft node.

    `best` gets the base node and the length that both halves have in common with the prompt.
    """
    cdef partial_t candidates[2 * MAX_SIBLINGS]
    cdef Py_ssize_t first = <Py_ssize_t>plan.bindings.size() * index.core.page_size
    cdef Py_ssize_t text = text_length(plan.chain, first, plan.num_tokens)
    cdef page_id_t best_draft = NO_DRAFT
    cdef page_id_t draft
    cdef int32_t i, count, length
    best.node = NO_NODE
    best.length = 0
    if parent == NO_NODE or text == 0:
        return NO_DRAFT
    count = index.partial_matches(
        parent, plan.chain.tokens.data() + first, <int32_t>min(text, <Py_ssize_t>index.core.page_size), candidates)
    for i in range(count):
        if candidates[i].length <= best.length:
            continue
        draft = _draft_under(drafts, candidates[i].node, last_draft)
        if draft == NO_DRAFT:
            continue
        length = min(candidates[i].length, drafts.core.nodes[draft].token_count)
        if length > best.length:
            best.node = candidates[i].node
            best.length = length
            best_draft = draft
    return best_draft


cdef Py_ssize_t _valid_length(
    ReusePlan plan, DraftIndex drafts, Py_ssize_t known, page_id_t last, bint at_its_end, Py_ssize_t future
) noexcept nogil:
    """Of `known` paired tokens, those whose draft state holds for this prompt's continuation.

    With one token of look-ahead nothing is lost when the draft node that covers the last token ends exactly there and
    was followed by the same token.
    """
    if future == 0 or known == 0:
        return known
    if (future == 1 and at_its_end and known < plan.num_tokens and last != NO_DRAFT
            and plan.chain.tokens[known] >= 0 and drafts.core.nodes[last].successor == plan.chain.tokens[known]):
        return known
    return max(<Py_ssize_t>0, known - future)


cdef Py_ssize_t _bind_draft_path(ReusePlan plan, DraftIndex drafts) except -1:
    """Cut the base walk to its deepest block with draft state and bind the newest lineage there; its length."""
    cdef Py_ssize_t depth = <Py_ssize_t>plan.bindings.size()
    while depth > 0 and drafts.newest_at(plan.bindings[depth - 1]) == NO_DRAFT:
        depth -= 1
    plan.draft_bindings.resize(depth)
    if depth:
        drafts.path_into(drafts.newest_at(plan.bindings[depth - 1]), depth, plan.draft_bindings.data())
    return depth


cdef ReusePlan make_spec_plan(
    BlockIndex index, DraftIndex drafts, TokenChain chain, Py_ssize_t num_tokens, object lookup_policy,
    Py_ssize_t future
):
    """Base and draft pages in pairs; the draft side is always one lineage, and base-only hits are ignored."""
    cdef ReusePlan plan = _new_plan(index, chain, num_tokens, lookup_policy, _SPEC)
    cdef partial_t partial
    cdef node_id_t root, parent
    cdef page_id_t last, partial_draft
    cdef Py_ssize_t depth, known, valid, in_tree
    plan.paired = True
    if plan.stop_reason is _BYPASS:
        return plan
    root = _walk(plan, index)
    in_tree = <Py_ssize_t>plan.bindings.size()
    depth = _bind_draft_path(plan, drafts)
    last = plan.draft_bindings[depth - 1] if depth else NO_DRAFT
    parent = _node_at(plan, in_tree, root)
    partial.node = NO_NODE
    partial.length = 0
    partial_draft = NO_DRAFT
    if depth == in_tree:
        partial_draft = _best_pair(plan, index, drafts, parent, last, &partial)
    plan.bindings.resize(depth)
    known = depth * index.core.page_size + partial.length
    if partial_draft != NO_DRAFT:
        last = partial_draft
    valid = _valid_length(plan, drafts, known, last,
                          partial.length == 0 or partial.length == drafts.core.nodes[last].token_count, future)
    plan.matched_token_length = plan.stop_position = known
    plan.known_token_length = max(known, in_tree * index.core.page_size)
    plan.replayed_token_count = known - valid
    _bind(plan, index, valid, partial.node, partial_draft)
    if plan.reuse_token_length >= num_tokens - 1:
        plan.stop_reason = _FULL
    elif valid < known:
        plan.stop_reason = _LOOKAHEAD
    elif depth < in_tree:
        plan.stop_reason = _NO_RECORD_REASON    # the base tree goes on, the draft state does not
    else:
        plan.stop_reason = _why_here(plan, index, known, partial, parent)
    return plan


cdef ReusePlan without_tail(ReusePlan plan):
    """The same plan with whole pages only: for when pinning the page that is copied from leaves too little room."""
    cdef ReusePlan out = ReusePlan.__new__(ReusePlan)
    # `assign`, because Cython lets an exception of `=` go through to C++.
    out.bindings.assign(plan.bindings.begin(), plan.bindings.end())
    out.draft_bindings.assign(plan.draft_bindings.begin(), plan.draft_bindings.end())
    out.tail_page = NO_NODE
    out.draft_tail_page = NO_DRAFT
    out.recurrent_slot = out.partial_slot = NO_SLOT
    out.record_place = NO_RECORD
    out.paired = plan.paired
    out.chain = plan.chain
    out.num_tokens = plan.num_tokens
    out.matched_token_length = plan.matched_token_length
    out.reuse_token_length = plan.reuse_token_length - plan.tail_token_count
    out.known_token_length = plan.known_token_length
    out.total_pages = plan.total_pages
    out.stop_position = plan.stop_position
    out.replayed_token_count = plan.replayed_token_count
    out.namespace_known = plan.namespace_known
    out.mode = plan.mode
    out.stop_reason = plan.stop_reason
    out.owner = plan.owner
    out.version = plan.version
    _set_kind(out)
    return out


# Checkpoints

cdef int _bind_checkpoint(
    ReusePlan plan, DraftIndex drafts, RecordStore records, int32_t place, Py_ssize_t blocks
) except -1:
    """Start at the checkpoint at `place`: the pages before it, and its snapshots."""
    cdef const record_t* record = records.record_at(place)
    plan.matched_token_length = plan.reuse_token_length = <Py_ssize_t>record.exact_length
    plan.record_place = place
    plan.hybrid_record = record.id
    plan.hybrid_checkpoint = HybridCheckpointKey(to_hash128(record.terminal), record.exact_length)
    plan.recurrent_slot = record.recurrent_slot
    plan.partial_slot = record.partial_slot
    plan.bindings.resize(blocks)
    if plan.paired and blocks:
        plan.draft_bindings.resize(blocks)
        drafts.path_into(record.draft_node, blocks, plan.draft_bindings.data())
    return 0


cdef Py_ssize_t _common_tail(
    BlockIndex index, RecordStore records, TokenChain chain, node_id_t node, Py_ssize_t first
) noexcept nogil:
    """How far the checkpoints at `node` know the prompt from token `first` on, those at its end or behind included."""
    cdef Py_ssize_t limit = min(chain.token_count(), first + index.core.page_size)
    if node == NO_NODE:
        return 0
    return records.common_tail(node, chain.tokens.data() + first, <int32_t>text_length(chain, first, limit))


cdef ReusePlan make_checkpoint_plan(
    BlockIndex index, DraftIndex drafts, RecordStore records, TokenChain chain, object lookup_policy, bint mtp,
    bint has_attention
):
    """Hybrid, pure recurrent, hybrid with MTP: the deepest usable checkpoint below the prompt's end, or nothing."""
    cdef Py_ssize_t num_tokens = chain.token_count()
    cdef ReusePlan plan = _new_plan(index, chain, num_tokens, lookup_policy, _HYBRID_MTP if mtp else _HYBRID)
    cdef Py_ssize_t page_size = index.core.page_size
    cdef partial_t partial
    cdef node_id_t root, parent
    cdef int32_t place = NO_RECORD
    cdef Py_ssize_t blocks
    plan.paired = mtp
    plan.index_only = not has_attention
    if plan.stop_reason is _BYPASS:
        return plan
    root = _walk(plan, index)
    blocks = <Py_ssize_t>plan.bindings.size()
    parent = _node_at(plan, blocks, root)
    partial = index.find_partial(chain, parent, blocks * page_size, num_tokens)
    plan.known_token_length = blocks * page_size + max(
        <Py_ssize_t>partial.length, _common_tail(index, records, chain, parent, blocks * page_size))
    while root != NO_NODE and blocks >= 0:
        place = records.longest_checkpoint(_node_at(plan, blocks, root), chain, blocks * page_size, num_tokens, mtp)
        if place != NO_RECORD:
            break
        blocks -= 1
    if place == NO_RECORD:
        plan.bindings.clear()
    else:
        _bind_checkpoint(plan, drafts, records, place, blocks)
        plan.known_token_length = max(plan.known_token_length, plan.reuse_token_length)
    plan.stop_position = plan.known_token_length
    _set_kind(plan)
    if plan.reuse_token_length >= num_tokens - 1:
        plan.stop_reason = _FULL
    elif plan.known_token_length > plan.reuse_token_length:
        plan.stop_reason = _NO_CHECKPOINT
    else:
        plan.stop_reason = _why_here(plan, index, plan.known_token_length, partial, parent)
    return plan


# Python interface

def plan_vanilla_reuse(
    BlockIndex index not None, TokenChain chain not None, *, lookup_policy=ContextCacheLookupPolicy.USE_CACHE,
    num_tokens=None
):
    """Plan the reuse of an attention-only prompt without speculation.

    Args:
        chain: the prompt; its page size is the index's.
        num_tokens: plan only for this many leading tokens of `chain`; None for all.
    Returns:
        `ReusePlan`.  Of a fully known prompt (`FULL_INPUT_REWIND`) one token is left to compute.
    Raises:
        InvalidArgumentError: page sizes differ, unknown policy, or `num_tokens` is outside the chain.
    Effects: none (pure).  Cost: O(matched blocks), one vector.
    """
    if num_tokens is None:
        num_tokens = chain.token_count()
    if not 0 <= num_tokens <= chain.token_count():
        raise InvalidArgumentError(f"cannot plan {num_tokens} tokens of a chain that has {chain.token_count()}")
    return make_vanilla_plan(index, chain, num_tokens, lookup_policy, 0)


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """Which cached blocks would go.

    Attributes:
        feasible: whether free units and victims together meet the demand.
        victims: base pages of the blocks that would be evicted for base pages, in that order; empty when infeasible.
        reclaimed: units that would become free, draft pages that go with a victim block included.
        draft_victims: draft pages that would be evicted for draft pages, in that order.
    """

    feasible: bool
    victims: tuple
    reclaimed: ResourceDemand
    draft_victims: tuple = ()


def plan_eviction(demand, ResourcePools pools not None, BlockIndex index not None, DraftIndex drafts=None):
    """Which blocks an allocation of `demand` would evict: from the front of the eviction order, always leaves.

    Args:
        drafts: the draft index; without it no draft page is evictable.
    Returns:
        `EvictionPlan`; the shortest front of each order that meets the demand.  What a lease holds is in no order, so
        it never counts.  Snapshot slots are not planned here: a demand for more than the free ones is infeasible.
        Where blocks serve checkpoints only, one victim may take its prefix along, so fewer may be needed.
    Raises:
        InvalidArgumentError: negative demand.
    Effects: none (pure).  Cost: O(victims); an allocation itself needs only the lengths of the lists.
    """
    if not demand.is_non_negative():
        raise InvalidArgumentError(f"a demand must be 0 or more in every pool, got {demand}")
    snapshots_fit = all(
        demand.get(kind) <= pools.free_count(kind)
        for kind in (ResourceType.RECURRENT_SNAPSHOT, ResourceType.PARTIAL_KV_SNAPSHOT))
    short = max(0, demand.base_kv_pages - pools.base.free_count)
    draft_short = max(0, demand.draft_kv_pages - pools.draft.free_count)
    draft_room = 0 if drafts is None else drafts.core.lru.size
    if not snapshots_fit or short > index.core.lru.size or draft_short > draft_room:
        return EvictionPlan(False, (), ResourceDemand())
    victims = _front(index, short)
    along = set() if drafts is None else _drafts_of(drafts, victims)
    draft_victims = () if drafts is None else _draft_front(drafts, draft_short - len(along), along)
    reclaimed = ResourceDemand(len(victims), len(along) + len(draft_victims))
    return EvictionPlan(True, victims, reclaimed, draft_victims)


def _front(BlockIndex index, count):
    """The first `count` nodes of the eviction order."""
    cdef node_id_t node = lru_front(&index.core.lru)
    out = []
    while len(out) < count:
        out.append(node)
        node = lru_next(&index.core.lru, node)
    return tuple(out)


def _drafts_of(DraftIndex drafts, victims):
    """Draft pages that go with the base blocks `victims`."""
    cdef page_id_t draft
    out = set()
    for victim in victims:
        draft = drafts.newest_at(victim)
        while draft != NO_DRAFT:
            out.add(draft)
            draft = drafts.core.nodes[draft].older
    return out


def _draft_front(DraftIndex drafts, count, gone):
    """The first `count` draft nodes of the eviction order that are not `gone` already."""
    cdef page_id_t draft = lru_front(&drafts.core.lru)
    out = []
    while len(out) < count:
        if draft not in gone:
            out.append(draft)
        draft = lru_next(&drafts.core.lru, draft)
    return tuple(out)
