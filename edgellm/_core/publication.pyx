"""Publication: what a sequence computed enters the tree, as one transaction.

`stage` does all that can fail and changes nothing anybody can see; `commit` cannot fail; `unstage` undoes `stage`.
Between the two, `publish` (and the checkpoint module likewise) makes the record.
"""

from libc.stdint cimport int32_t

from edgellm._core.block_hash cimport TokenChain
from edgellm._core.block_index cimport NO_MEDIA, NO_NODE, PREFETCH_BLOCKS, prefetch_bucket, text_length
from edgellm._core.cache_state cimport CacheRequestLease, CacheState
from edgellm._core.draft_index cimport NO_DRAFT, NO_SUCCESSOR
from edgellm._core.page_ledger cimport pool_add_cache
from edgellm._core.records cimport NO_RECORD, empty_record, record_t
from edgellm._core.types cimport node_id_t, page_id_t, token_t

from edgellm.errors import InvariantError


# Looking

cdef Py_ssize_t find_path(CacheState state, CacheRequestLease lease, TokenChain chain, Py_ssize_t limit) except -1:
    """Walk on from the lease's published blocks into `scratch`, over blocks others published; their number."""
    cdef Py_ssize_t start = lease.published_block_count
    cdef node_id_t parent
    if limit <= start:
        return 0
    state.step()
    state.scratch.resize(limit - start)
    parent = lease.pages[start - 1] if start else state.index.find_namespace(chain.key_bytes)
    return state.index.match(chain, parent, start, limit, state.scratch.data())


cdef int _raise_indexed(str pool, page_id_t page, Py_ssize_t block_idx) except -1:
    raise InvariantError(f"{pool} page {page} is indexed already, but not as block {block_idx} of this lease")


cdef Py_ssize_t _publishable(CacheState state, CacheRequestLease lease, Py_ssize_t first, Py_ssize_t count) except -1:
    """End of the run of blocks from `first` whose pages may be indexed for this lease.

    A page that left the index while several leases held it must not come back for one of them: the others do not hold
    the path to it.  Such a page ends the run.
    """
    cdef Py_ssize_t i
    for i in range(first, count):
        if state.tree.nodes[lease.pages[i]].indexed:
            _raise_indexed("base", lease.pages[i], i)
        if state.base.active[lease.pages[i]] != 1:
            return i
    return max(first, count)


cdef int _check_drafts(CacheState state, CacheRequestLease lease, Py_ssize_t count) except -1:
    cdef Py_ssize_t i
    for i in range(lease.published_draft_block_count, count):
        if state.drafts.is_draft(lease.draft_pages[i]):
            _raise_indexed("draft", lease.draft_pages[i], i)
    return 0


cdef node_id_t endpoint(
    CacheState state, CacheRequestLease lease, Py_ssize_t count, const staged_t* staged
) noexcept nogil:
    """Node that block count-1 has, or will have once `staged` is committed."""
    cdef Py_ssize_t start = lease.published_block_count
    if start < count <= start + staged.found:
        return state.scratch[count - 1 - start]
    return lease.pages[count - 1]


cdef token_t _token_after(CacheState state, TokenChain chain, Py_ssize_t position) noexcept nogil:
    """The one token that draft state in front of `position` depends on, when it is known and a text token."""
    if state.future_tokens != 1 or position >= chain.token_count() or chain.tokens[position] < 0:
        return NO_SUCCESSOR
    return chain.tokens[position]


cdef page_id_t _same_draft(CacheState state, node_id_t base, page_id_t parent, token_t successor) noexcept nogil:
    """The draft node of `base` under `parent` that holds what this sequence computes as well, or NO_DRAFT.

    The last entries of a draft page were made with the tokens behind the block.  One of them is remembered, so more
    look-ahead than that, or a token that is unknown or media, proves nothing.
    """
    if state.future_tokens != 0 and successor == NO_SUCCESSOR:
        return NO_DRAFT
    return state.drafts.find(base, parent, successor)


# Staging: everything that can fail

cdef int _stage_media(CacheState state, TokenChain chain, Py_ssize_t first, Py_ssize_t end) except -1:
    """Keep the media bytes of the blocks that will be added; `media_scratch` has one place for each."""
    cdef Py_ssize_t i
    state.step()
    state.media_scratch.clear()
    state.media_scratch.resize(max(<Py_ssize_t>0, end - first), NO_MEDIA)
    if not chain.has_media:
        return 0
    try:
        for i in range(first, end):
            state.step()
            state.media_scratch[i - first] = state.index.stage_media(chain, i)
    except BaseException:
        _unstage_media(state)
        raise
    return 0


cdef void _unstage_media(CacheState state) noexcept:
    cdef size_t i
    for i in range(state.media_scratch.size()):
        state.index.drop_media(state.media_scratch[i])
    state.media_scratch.clear()


cdef int stage(
    CacheState state, CacheRequestLease lease, TokenChain chain, const request_t* request, staged_t* staged
) except -1:
    """Prepare the publication of `request`; the caller checked lease, chain and counts."""
    cdef Py_ssize_t start = lease.published_block_count
    staged.root = NO_NODE
    state.check_overlap(lease, chain, min(request.count, start))
    staged.found = find_path(state, lease, chain, request.count)
    staged.first = start + staged.found
    staged.end = _publishable(state, lease, staged.first, request.count)
    if request.drafts:
        _check_drafts(state, lease, request.count)
    _stage_media(state, chain, staged.first, staged.end)
    if request.need_root or (staged.first == 0 and (staged.end > 0 or request.tail > 0)):
        try:
            state.step()
            staged.root = state.index.open_namespace(chain.key_bytes)
        except BaseException:
            _unstage_media(state)
            raise
    return 0


cdef int unstage(CacheState state, const staged_t* staged) except -1:
    """Undo `stage`."""
    _unstage_media(state)
    if staged.root != NO_NODE:
        state.index.close_namespace_if_empty(staged.root)
    return 0


# Committing: nothing fails from here on

cdef void adopt(CacheState state, CacheRequestLease lease, Py_ssize_t found) noexcept nogil:
    """Take the `found` canonical pages in `scratch` for the next blocks and give the lease's own copies back."""
    cdef Py_ssize_t i
    cdef page_id_t own
    for i in range(found):
        own = lease.pages[lease.published_block_count]
        if own != state.scratch[i]:
            state.pin_nodes(&state.scratch[i], 1)
            lease.pages[lease.published_block_count] = state.scratch[i]
            state.unpin_node(own)
            lease.rebound_page_count += 1
        lease.published_block_count += 1


cdef void adopt_draft(CacheState state, CacheRequestLease lease, Py_ssize_t block_idx, page_id_t draft) noexcept nogil:
    """Take over an indexed draft page for one block and give the lease's own back; the counts are the caller's."""
    cdef page_id_t own = lease.draft_pages[block_idx]
    if own == draft:
        return
    state.pin_drafts(&draft, 1)
    lease.draft_pages[block_idx] = draft
    state.unpin_draft(own)
    lease.rebound_draft_page_count += 1


cdef inline void _mark_volatile(
    CacheState state, CacheRequestLease lease, node_id_t node, Py_ssize_t first, Py_ssize_t end
) noexcept nogil:
    """Remember where in a new node, tokens [first, end), a volatile template tail begins."""
    if 0 <= lease.volatile_from < end:
        state.tree.branches[node].volatile_from = <int32_t>max(<Py_ssize_t>0, lease.volatile_from - first)


cdef void _add_blocks(
    CacheState state, CacheRequestLease lease, TokenChain chain, const staged_t* staged
) noexcept nogil:
    """Index the lease's own pages, below its published blocks or below the root."""
    cdef Py_ssize_t i
    cdef node_id_t parent
    for i in range(staged.first, staged.end):
        if i + PREFETCH_BLOCKS < staged.end:
            prefetch_bucket(state.tree, chain.hashes[i + PREFETCH_BLOCKS])
        parent = lease.pages[i - 1] if i else staged.root
        state.index.add(lease.pages[i], parent, chain.hashes[i], chain.block_tokens(i),
                        state.media_scratch[i - staged.first])
        pool_add_cache(state.base, lease.pages[i])
        _mark_volatile(state, lease, lease.pages[i], i * state.page_size, (i + 1) * state.page_size)
        if state.tree.tail_count and state.media_scratch[i - staged.first] == NO_MEDIA:
            state.drop_tails_before(parent, chain.block_tokens(i), state.page_size)
        lease.published_block_count = i + 1
    state.media_scratch.clear()


cdef Py_ssize_t _add_drafts(
    CacheState state, CacheRequestLease lease, TokenChain chain, Py_ssize_t count
) noexcept nogil:
    """Name the draft pages of the leading `count` published blocks, or take over what the same lineage has there.

    Returns:
        How many new draft nodes there are.
    """
    cdef Py_ssize_t new = 0
    cdef Py_ssize_t i = lease.published_draft_block_count
    cdef page_id_t parent, own, draft
    cdef token_t successor
    while i < count:
        parent = lease.draft_pages[i - 1] if i else NO_DRAFT
        successor = _token_after(state, chain, (i + 1) * state.page_size)
        own = lease.draft_pages[i]
        draft = _same_draft(state, lease.pages[i], parent, successor)
        if draft != NO_DRAFT:
            adopt_draft(state, lease, i, draft)
        elif state.draft.active[own] == 1:
            state.drafts.add(own, lease.pages[i], parent, successor, state.page_size)
            pool_add_cache(state.draft, own)
            new += 1
        else:
            break       # it left the index while others hold it, see _publishable
        i += 1
        lease.published_draft_block_count = i
    return new


cdef bint _tail_is_private(CacheState state, CacheRequestLease lease, Py_ssize_t count, bint drafts) noexcept nogil:
    """Whether all blocks in front of the unfilled page are published and nobody else holds that page."""
    if lease.published_block_count != count or <Py_ssize_t>lease.pages.size() <= count:
        return False
    if state.base.active[lease.pages[count]] != 1 or state.tree.nodes[lease.pages[count]].indexed:
        return False
    if not drafts:
        return True
    return (lease.published_draft_block_count == count and <Py_ssize_t>lease.draft_pages.size() > count
            and state.draft.active[lease.draft_pages[count]] == 1
            and not state.drafts.is_draft(lease.draft_pages[count]))


cdef Py_ssize_t _retain_tail(
    CacheState state, CacheRequestLease lease, TokenChain chain, const request_t* request, node_id_t root
) noexcept nogil:
    """Keep the unfilled last page as a tail node and seal the lease; its tokens, 0 when it is not worth a node."""
    cdef Py_ssize_t first = request.count * state.page_size
    cdef int32_t tail = <int32_t>request.tail
    cdef node_id_t parent = lease.pages[request.count - 1] if request.count else root
    cdef const token_t* tokens = chain.tokens.data() + first
    cdef node_id_t page
    cdef page_id_t draft
    if not _tail_is_private(state, lease, request.count, request.drafts):
        return 0
    if text_length(chain, first, first + tail) < tail or state.index.find_cover(parent, tokens, tail) != NO_NODE:
        return 0
    page = lease.pages[request.count]
    state.index.add_tail(page, parent, tokens, tail, NO_MEDIA)
    pool_add_cache(state.base, page)
    _mark_volatile(state, lease, page, first, first + tail)
    state.drop_tails_before(parent, tokens, tail)
    if request.drafts:
        draft = lease.draft_pages[request.count]
        state.drafts.add(draft, page, lease.draft_pages[request.count - 1] if request.count else NO_DRAFT,
                         _token_after(state, chain, first + tail), tail)
        pool_add_cache(state.draft, draft)
    lease.sealed = True
    return tail


cdef void commit(
    CacheState state, CacheRequestLease lease, TokenChain chain, const request_t* request, const staged_t* staged,
    published_t* out
) noexcept nogil:
    """Carry out what `stage` prepared."""
    out.record_id = 0
    out.existing_record = False
    out.new_drafts = out.tail_tokens = 0
    out.new_blocks = max(<Py_ssize_t>0, staged.end - staged.first)
    adopt(state, lease, staged.found)
    _add_blocks(state, lease, chain, staged)
    if request.drafts:
        out.new_drafts = _add_drafts(state, lease, chain, min(request.count, lease.published_block_count))
    if request.tail:
        out.tail_tokens = _retain_tail(state, lease, chain, request, staged.root)
    state.version += 1


# Publication with the endpoint records of attention models

cdef int32_t _prepare_endpoint(CacheState state, TokenChain chain, Py_ssize_t count, node_id_t node) except -1:
    cdef record_t record = empty_record()
    state.step()
    record.terminal = chain.hashes[count - 1]
    record.node = node
    record.block_count = <int32_t>count
    return state.records.add(record)


cdef int publish(
    CacheState state, CacheRequestLease lease, TokenChain chain, const request_t* request, published_t* out
) except -1:
    """Publish blocks and, when asked, remember the endpoint.  The caller checked lease, chain and counts."""
    cdef staged_t staged
    cdef int32_t place = NO_RECORD
    cdef bint existing = False
    cdef bint had_drafts = False
    cdef node_id_t node
    stage(state, lease, chain, request, &staged)
    try:
        if request.endpoint and request.count > 0 and staged.end >= request.count:
            node = endpoint(state, lease, request.count, &staged)
            had_drafts = state.drafts.newest_at(node) != NO_DRAFT
            place = state.records.find_at(node, 0)
            existing = place != NO_RECORD
            if not existing:
                place = _prepare_endpoint(state, chain, request.count, node)
    except BaseException:
        unstage(state, &staged)
        raise
    commit(state, lease, chain, request, &staged, out)
    if staged.root != NO_NODE:
        state.index.close_namespace_if_empty(staged.root)
    if place == NO_RECORD:
        return 0
    out.record_id = state.records.id_at(place)
    # An endpoint that had base state only and gets draft state now is as good as new.
    out.existing_record = existing and not (out.new_drafts and not had_drafts)
    if existing:
        state.records.touch_at(place)
    elif state.records.limit >= 0 and state.records.size > state.records.limit:
        state.drop_record(state.records.front())
    return 0


# Looking again

cdef Py_ssize_t _draft_path(
    CacheState state, CacheRequestLease lease, TokenChain chain, Py_ssize_t found, Py_ssize_t limit
) noexcept nogil:
    """Draft nodes that go on with the lease's lineage along its published blocks and `found` more; into draft_scratch.

    Returns:
        How many blocks they go beyond the published draft blocks.
    """
    cdef Py_ssize_t start = lease.published_draft_block_count
    cdef Py_ssize_t i = start
    cdef page_id_t draft = lease.draft_pages[start - 1] if start else NO_DRAFT
    cdef node_id_t node
    while i < min(limit, lease.published_block_count + found):
        node = lease.pages[i] if i < lease.published_block_count else state.scratch[i - lease.published_block_count]
        draft = _same_draft(state, node, draft, _token_after(state, chain, (i + 1) * state.page_size))
        if draft == NO_DRAFT:
            break
        state.draft_scratch[i - start] = draft
        i += 1
    return i - start


cdef Py_ssize_t look_again(CacheState state, CacheRequestLease lease, TokenChain chain) except -1:
    """Share what others published since, base and draft alike; at least the last token stays to be computed.

    Returns:
        Leading blocks whose state exists now.
    """
    cdef Py_ssize_t limit = min((chain.token_count() - 1) // state.page_size, <Py_ssize_t>lease.pages.size())
    cdef Py_ssize_t found, i
    cdef Py_ssize_t drafts = 0
    cdef Py_ssize_t start = lease.published_draft_block_count
    state.check_overlap(lease, chain, lease.published_block_count)
    if lease.paired:
        limit = min(limit, <Py_ssize_t>lease.draft_pages.size())
    found = find_path(state, lease, chain, limit)
    if lease.paired:
        state.step()
        state.draft_scratch.resize(max(<Py_ssize_t>0, limit - start))
        drafts = _draft_path(state, lease, chain, found, limit)
        found = max(<Py_ssize_t>0, start + drafts - lease.published_block_count)
    if found:
        adopt(state, lease, found)
    if lease.paired:
        for i in range(drafts):
            adopt_draft(state, lease, start + i, state.draft_scratch[i])
        lease.published_draft_block_count = start + drafts
        lease.shared_draft_block_count = lease.published_draft_block_count
        found += drafts
    if found:
        lease.shared_block_count = lease.published_block_count
        state.version += 1
    return lease.published_draft_block_count if lease.paired else lease.published_block_count
