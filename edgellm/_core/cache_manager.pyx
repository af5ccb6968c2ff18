"""The context-cache manager: the only component that changes pools, indexes and records, always as a transaction.

Every operation first does all that can fail (checks, room in vectors, a new namespace or record), then changes state
by moves that cannot fail.  A refusal or an exception therefore leaves everything as it was.  This module is the border
to Python: it checks arguments; the moves live in `cache_state`, `leasing`, `publication` and `checkpoints`.
"""

cimport cython
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint64_t
from libcpp.vector cimport vector

from edgellm._core.block_hash cimport TokenChain
from edgellm._core.block_index cimport NO_NODE, raise_retention
from edgellm._core.cache_state cimport CacheRequestLease, CacheState, reservation_t
from edgellm._core.checkpoints cimport find_reservation, publish_checkpoint, reserve, resume_deeper, retire
from edgellm._core.draft_index cimport NO_DRAFT
from edgellm._core.leasing cimport grow_to, has_pages, lease_options_t, make_lease, pages_for, plan_fits, undo_growth
from edgellm._core.lru cimport CLASS_EXPIRED, lru_front
from edgellm._core.planners cimport (
    ReusePlan,
    make_checkpoint_plan,
    make_spec_plan,
    make_vanilla_plan,
    without_tail,
)
from edgellm._core.publication cimport look_again, published_t, request_t
from edgellm._core.publication cimport publish as publish_blocks
from edgellm._core.records cimport NO_RECORD, NO_SLOT
from edgellm._core.types cimport node_id_t, page_id_t

import edgellm._core.cache_state as _cache_state
from edgellm._core.recount import check_counts, check_invariants
from edgellm.cache.types import (
    AcquireStatus,
    CacheRecord,
    CheckpointKind,
    ContextCacheLookupPolicy,
    ContextCacheManagerMetrics,
    HybridSnapshotReservation,
    PublishStatus,
    RetentionPriority,
    ReusePlanMode,
)
from edgellm.errors import ContractViolation, InvalidArgumentError

globals()["CacheRequestLease"] = _cache_state.CacheRequestLease     # a cimported name is not one of Python's

cdef object _USE_CACHE = ContextCacheLookupPolicy.USE_CACHE
cdef object _NORMAL = RetentionPriority.NORMAL
cdef object _ACQUIRED = AcquireStatus.ACQUIRED
cdef object _INSUFFICIENT = AcquireStatus.INSUFFICIENT_CAPACITY
cdef object _PUBLISHED = PublishStatus.PUBLISHED
cdef object _EXISTING = PublishStatus.EXISTING_RECORD
cdef object _VANILLA = ReusePlanMode.VANILLA
cdef object _SPEC = ReusePlanMode.SPEC
cdef object _HYBRID = ReusePlanMode.HYBRID
cdef object _HYBRID_MTP = ReusePlanMode.HYBRID_MTP
cdef object _TAIL = CheckpointKind.TAIL


cdef int _raise_mode(str call, object mode) except -1:
    raise InvalidArgumentError(f"{call} is not for a {mode.value} lease; nothing was changed")


cdef int _raise_length(int64_t length, int64_t extra, int64_t draft_extra) except -1:
    raise InvalidArgumentError(
        f"length {length} with {extra} more ({draft_extra} in draft pages) must be from 0 to {INT32_MAX} tokens")


@cython.final
cdef class AcquireResult:
    """What an acquisition gave.

    Attributes:
        lease: None when refused.
        status: `AcquireStatus`.
        plan: the plan that was carried out; where room was short it is the given one without its tail.
    """


@cython.final
cdef class PublishResult:
    """What a publication did.

    Attributes:
        status: `PublishStatus`.
        record: id of the endpoint's or checkpoint's record, or None when none was asked for or kept.
        published_block_count, published_draft_block_count: leading blocks of the lease that the index knows now.
        new_block_count, new_draft_block_count: how many of them this call added.
        retained_tail_tokens: tokens of the unfilled last page that was retained; the lease is sealed unless it is 0.
    """


@cython.final
cdef class ContextCacheManager(CacheState):
    """Pools, block tree, draft tree and records of one cache.  Single writer; not thread safe.

    Args:
        page_size: tokens per page, 1 or more.
        capacities: `ResourceDemand` with the size of each pool.  The base pages of a pure recurrent model only index
            its checkpoints; size them so that they never run short.
        max_records: most records; None bounds them by pages and snapshot slots only, 0 retains nothing.
        base_state_kind: `BaseStateKind`; unless it is attention only, reuse starts at checkpoints.
        spec_reuse_contract: `SpecReuseContract` for speculative requests; others ignore it.
        hash_mask: 128-bit mask on the hashes the index sees; for tests.
    Raises:
        InvalidArgumentError: a size is out of range, or a pure recurrent model with paged draft state.
    """

    # Planning and acquisition

    cdef ReusePlan make_plan(self, TokenChain chain, object lookup_policy, bint speculative):
        cdef ReusePlan plan
        cdef uint64_t version = self.version    # before the look: making a plan may collect a dropped lease
        if speculative and self.spec_reuse_contract is None:
            raise InvalidArgumentError("a speculative request needs a manager with a spec_reuse_contract")
        if self.checkpointed:
            plan = make_checkpoint_plan(
                self.index, self.drafts, self.records, chain, lookup_policy, speculative and self.owns_draft,
                self.has_attention)
        elif speculative and self.owns_draft:
            plan = make_spec_plan(
                self.index, self.drafts, chain, chain.token_count(), lookup_policy, self.future_tokens)
        else:
            plan = make_vanilla_plan(
                self.index, chain, chain.token_count(), lookup_policy, self.future_tokens if speculative else 0)
        plan.owner = self
        plan.version = version
        return plan

    def plan(self, TokenChain chain not None, lookup_policy=ContextCacheLookupPolicy.USE_CACHE, *,
             bint speculative=False):
        """Plan the reuse of a whole prompt; changes nothing.

        Args:
            speculative: plan by the manager's contract: with draft pages where it owns some.
        Returns:
            `ReusePlan`, to be acquired before anything else changes this manager.
        Raises:
            InvalidArgumentError: page sizes differ, unknown policy, or speculative without a contract.
        Cost: O(blocks of the prompt); siblings and checkpoints of one node are looked at up to a fixed number.
        """
        return self.make_plan(chain, lookup_policy, speculative)

    cdef int fill_options(
        self, lease_options_t* options, int64_t min_tokens, int64_t draft_min_tokens, int64_t reserve_pages,
        int64_t draft_reserve_pages, object priority, int64_t expiry
    ) except -1:
        if min(min_tokens, draft_min_tokens, reserve_pages, draft_reserve_pages, expiry) < 0:
            raise InvalidArgumentError(
                f"min_tokens {min_tokens}, draft_min_tokens {draft_min_tokens}, reserve_pages {reserve_pages}, "
                f"draft_reserve_pages {draft_reserve_pages} and expiry {expiry} must be 0 or more")
        if priority is not _NORMAL and not isinstance(priority, RetentionPriority):
            raise InvalidArgumentError(f"priority {priority!r} must be a RetentionPriority")
        # More than any pool has, and small enough to add up.
        options.min_pages = <Py_ssize_t>min(pages_for(min_tokens, self.page_size), <int64_t>INT32_MAX)
        options.min_draft_pages = <Py_ssize_t>min(pages_for(draft_min_tokens, self.page_size), <int64_t>INT32_MAX)
        options.reserve_pages = <Py_ssize_t>min(reserve_pages, <int64_t>INT32_MAX)
        options.reserve_draft_pages = <Py_ssize_t>min(draft_reserve_pages, <int64_t>INT32_MAX)
        options.priority = priority
        options.expiry = expiry
        return 0

    def acquire(self, ReusePlan plan not None, *, int64_t min_tokens=0, int64_t draft_min_tokens=0,
                int64_t reserve_pages=0, int64_t draft_reserve_pages=0, priority=RetentionPriority.NORMAL,
                int64_t expiry=0):
        """Turn a plan into a lease, evicting least recently used leaves when pages are short.

        Where only holding the page that the tail is copied from leaves too little room, the same plan is carried out
        without its tail.

        Args:
            min_tokens, draft_min_tokens: tokens that base and draft pages cover at least (prompt plus headroom).
            reserve_pages: base pages that must still be free or evictable afterwards (promised to others).
            draft_reserve_pages: draft pages, likewise; of no meaning without a paired draft.
            priority: `RetentionPriority` of what the sequence leaves behind.
            expiry: when that expires, ns of the clock that `set_now` tells; 0 is never.
        Returns:
            `AcquireResult`; with `INSUFFICIENT_CAPACITY` nothing was changed.
        Raises:
            ContractViolation: the manager changed since the plan was made, or another manager made it.
            InvalidArgumentError: a negative number or an unknown priority.
        """
        cdef lease_options_t options
        # Before the version is compared: a new object may make Python collect a lease that somebody dropped.
        cdef AcquireResult result = AcquireResult.__new__(AcquireResult)
        if plan.owner is not self:
            raise ContractViolation("the plan was made by another manager; plan again with this one")
        if plan.version != self.version:
            raise ContractViolation("the cache changed since the plan was made; plan again and acquire at once")
        self.fill_options(
            &options, min_tokens, draft_min_tokens, reserve_pages, draft_reserve_pages, priority, expiry)
        result.plan = plan
        if not plan_fits(self, plan, &options) and plan.tail_token_count:
            result.plan = without_tail(plan)
        if not plan_fits(self, result.plan, &options):
            result.status = _INSUFFICIENT
            return result
        result.lease = make_lease(self, result.plan, &options)
        result.status = _ACQUIRED
        return result

    cdef AcquireResult acquire_as(
        self, object mode, TokenChain chain, object lookup_policy, bint speculative, int64_t min_tokens,
        int64_t draft_min_tokens, int64_t reserve_pages
    ):
        cdef ReusePlan plan = self.make_plan(chain, lookup_policy, speculative)
        if plan.mode is not mode and not (mode is _SPEC and plan.mode is _VANILLA):
            raise InvalidArgumentError(f"this manager makes {plan.mode.value} leases, not {mode.value} ones")
        return self.acquire(
            plan, min_tokens=min_tokens, draft_min_tokens=draft_min_tokens, reserve_pages=reserve_pages)

    def acquire_vanilla(
        self, TokenChain chain not None, *, lookup_policy=ContextCacheLookupPolicy.USE_CACHE, int64_t min_tokens=0,
        int64_t draft_min_tokens=0, int64_t reserve_pages=0
    ):
        """`plan` and `acquire` in one step, for an attention model without speculation."""
        return self.acquire_as(_VANILLA, chain, lookup_policy, False, min_tokens, draft_min_tokens, reserve_pages)

    def acquire_spec(
        self, TokenChain chain not None, *, lookup_policy=ContextCacheLookupPolicy.USE_CACHE, int64_t min_tokens=0,
        int64_t draft_min_tokens=0, int64_t reserve_pages=0
    ):
        """`plan` and `acquire` in one step, for a speculative request; a contract without draft pages of its own gives
        a vanilla lease."""
        return self.acquire_as(_SPEC, chain, lookup_policy, True, min_tokens, draft_min_tokens, reserve_pages)

    def acquire_hybrid(
        self, TokenChain chain not None, *, lookup_policy=ContextCacheLookupPolicy.USE_CACHE, int64_t min_tokens=0,
        int64_t draft_min_tokens=0, int64_t reserve_pages=0
    ):
        """`plan` and `acquire` in one step, for a hybrid or pure recurrent model."""
        return self.acquire_as(_HYBRID, chain, lookup_policy, False, min_tokens, draft_min_tokens, reserve_pages)

    def acquire_hybrid_mtp(
        self, TokenChain chain not None, *, lookup_policy=ContextCacheLookupPolicy.USE_CACHE, int64_t min_tokens=0,
        int64_t draft_min_tokens=0, int64_t reserve_pages=0
    ):
        """`plan` and `acquire` in one step, for a hybrid model with paged draft state."""
        return self.acquire_as(_HYBRID_MTP, chain, lookup_policy, True, min_tokens, draft_min_tokens, reserve_pages)

    def release(self, CacheRequestLease lease not None):
        """Release a lease of this manager; a second time does nothing.

        Raises:
            InvalidArgumentError: the lease belongs to another manager.
        """
        if lease.manager is not self:
            raise InvalidArgumentError("the lease belongs to another manager; nothing was changed")
        lease.release()

    def release_tail_source(self, CacheRequestLease lease not None):
        """Let go of the pages that the first private pages are copied from: the copy is enqueued on the stream.

        Nothing happens when there are none.  Raises InvalidArgumentError for a bad lease.
        """
        self.check_lease(lease)
        if lease.tail_page != NO_NODE or lease.draft_tail_page != NO_DRAFT:
            self.release_tail(lease)
            self.version += 1

    def release_restored_hybrid_snapshots(self, CacheRequestLease lease not None):
        """Let go of the snapshots that were restored from: the copies are enqueued on the stream.

        Nothing happens when there are none.  Raises InvalidArgumentError for a bad lease.
        """
        self.check_lease(lease)
        if lease.recurrent_slot != NO_SLOT:
            self.release_restored(lease)
            self.version += 1

    # Growth

    cdef int check_mode(self, CacheRequestLease lease, bint paired, str call) except -1:
        if lease.paired != paired:
            _raise_mode(call, lease.mode)
        return 0

    def grow_base_pages(self, CacheRequestLease lease not None, additional):
        """Append `additional` private base pages to a lease without draft pages.

        Returns:
            False when free and evictable pages do not suffice; nothing was changed or evicted then.
        Raises:
            InvalidArgumentError: negative amount, a lease with draft pages, or a released or foreign lease.
            ContractViolation: the lease is sealed.
        """
        self.check_open(lease)
        self.check_mode(lease, False, "grow_base_pages")
        if additional < 0:
            raise InvalidArgumentError(f"cannot grow by {additional} pages; the amount must be 0 or more")
        if additional > self.base.capacity:
            return False
        return bool(grow_to(self, lease, <int64_t>lease.pages.size() + <int64_t>additional, 0))

    def grow_spec_pages(self, CacheRequestLease lease not None, base_additional, draft_additional):
        """Append private base and draft pages to a lease that has both, all or none.

        Returns:
            False when one of the pools cannot give them; nothing was changed or evicted then.
        Raises:
            InvalidArgumentError: negative amount, a lease without draft pages, or a released or foreign lease.
            ContractViolation: the lease is sealed.
        """
        self.check_open(lease)
        self.check_mode(lease, True, "grow_spec_pages")
        if base_additional < 0 or draft_additional < 0:
            raise InvalidArgumentError(
                f"cannot grow by {base_additional} and {draft_additional} pages; the amounts must be 0 or more")
        if base_additional > self.base.capacity or draft_additional > self.draft.capacity:
            return False
        return bool(grow_to(
            self, lease, <int64_t>lease.pages.size() + <int64_t>base_additional,
            <int64_t>lease.draft_pages.size() + <int64_t>draft_additional))

    def ensure_base_pages(self, CacheRequestLease lease not None, int64_t min_tokens):
        """Grow until the lease's base pages cover `min_tokens` tokens; False when refused (nothing was changed)."""
        self.check_open(lease)
        if min_tokens < 0:
            raise InvalidArgumentError(f"min_tokens {min_tokens} must be 0 or more")
        return bool(grow_to(self, lease, pages_for(min_tokens, self.page_size), 0))

    def ensure_coverage(self, list leases not None, lengths, int64_t extra, int64_t draft_extra=0):
        """Grow each lease to cover its length plus look-ahead, in order; base and draft pages of one lease together.

        Args:
            leases: valid leases of this manager.
            lengths: as many committed lengths in tokens, 0 or more.
            extra, draft_extra: tokens beyond the committed length that the next forward may write, in base pages and,
                for leases that have some, in draft pages.
        Returns:
            Index of the first refused lease (unchanged, as are those after it; earlier growth stays), or -1.
        Raises:
            InvalidArgumentError: sizes differ, a negative number, or a bad lease.  Nothing was changed.
            ContractViolation: a lease is sealed.  Nothing was changed.
        Cost: O(leases); pages are looked at only for leases that must grow.
        """
        cdef Py_ssize_t k
        cdef Py_ssize_t count = len(leases)
        cdef CacheRequestLease lease
        cdef int64_t length, pages, drafts
        cdef int64_t least = min(extra, draft_extra)
        cdef int64_t most = max(extra, draft_extra)
        if len(lengths) != count:
            raise InvalidArgumentError(f"{count} leases need as many lengths, got {len(lengths)}")
        if least < -INT32_MAX or most > INT32_MAX:      # from here on the sums fit
            _raise_length(0, extra, draft_extra)
        self.step()
        self.scratch.resize(count)
        for k in range(count):
            self.check_open(<CacheRequestLease?>leases[k])
            length = lengths[k]
            if not (0 <= length <= INT32_MAX and 0 <= length + least and length + most <= INT32_MAX):
                _raise_length(length, extra, draft_extra)
            self.scratch[k] = <int32_t>length
        for k in range(count):
            lease = <CacheRequestLease>leases[k]
            pages = pages_for(self.scratch[k] + extra, self.page_size)
            drafts = pages_for(self.scratch[k] + draft_extra, self.page_size) if lease.paired else 0
            if not has_pages(lease, pages, drafts) and not grow_to(self, lease, pages, drafts):
                return k
        return -1

    # Publication of attention state

    cdef PublishResult publish_as(
        self, CacheRequestLease lease, TokenChain chain, int64_t length, bint make_record, bint retain_tail
    ):
        """`publish` and `publish_spec` once lease and mode are known to be right."""
        cdef PublishResult result = PublishResult.__new__(PublishResult)
        cdef published_t done
        cdef request_t request
        cdef Py_ssize_t held = <Py_ssize_t>lease.pages.size()
        self.check_chain(chain)
        length = min(length, <int64_t>chain.token_count())
        request.count = <Py_ssize_t>(length // self.page_size)
        request.tail = <Py_ssize_t>(length % self.page_size) if retain_tail else 0
        if length < 0 or (request.count == 0 and request.tail == 0):
            raise InvalidArgumentError(
                f"{length} resident tokens of a chain with {chain.block_count()} full blocks complete no block of "
                f"{self.page_size} tokens; publish later")
        request.drafts = lease.paired and not self.checkpointed
        request.endpoint = make_record
        request.need_root = False
        if not self.has_attention:
            if self.records.limit != 0:
                grow_to(self, lease, request.count, 0)  # such pages only index; they come as they are needed
            request.count = min(request.count, <Py_ssize_t>lease.pages.size())
        if request.count > <Py_ssize_t>lease.pages.size():
            raise InvalidArgumentError(
                f"the lease holds {lease.pages.size()} pages but {request.count} blocks were to be published")
        if request.drafts and request.count > <Py_ssize_t>lease.draft_pages.size():
            raise InvalidArgumentError(
                f"the lease holds {lease.draft_pages.size()} draft pages but {request.count} blocks were to be "
                "published")
        result.status = _PUBLISHED
        if self.records.limit == 0:
            return result
        try:
            publish_blocks(self, lease, chain, &request, &done)
        except BaseException:
            undo_growth(self, lease, held)
            raise
        _fill(result, lease, &done, request.count)
        return result

    def publish(self, CacheRequestLease lease not None, TokenChain chain not None, int64_t resident_state_length, *,
                bint make_record, bint retain_tail=False):
        """Make the full blocks of committed state findable, and remember the endpoint when asked.

        A block that another sequence published first keeps that page; this lease takes it over and gives its own copy
        back (`lease.rebound_page_count` moves then), so equal content is held once.

        Args:
            chain: the sequence's tokens; its published blocks are those of the lease.
            resident_state_length: tokens whose state is written and final on the device.
            make_record: remember the endpoint of the last full block (prefill end, decode end); attention only.
            retain_tail: the sequence has ended: keep its unfilled last page as well, when nothing stored says as much,
                and seal the lease; attention only.
        Returns:
            `PublishResult`.  After an eviction of records under live leases, a page that several leases still hold
            cannot be published again; the result then has fewer blocks and no record.
        Raises:
            InvalidArgumentError: bad lease or chain, no full block, more blocks than leased pages, a chain that differs
                from what the lease shares, a lease with draft state (`publish_spec`), or a record or tail where reuse
                starts at checkpoints (`publish_hybrid`).  Nothing was changed.
            InvariantError: a private page of the lease is indexed already.  Nothing was changed.
            ContractViolation: the lease is sealed.
        """
        self.check_open(lease)
        if lease.mode is _SPEC or (self.checkpointed and (make_record or retain_tail)):
            _raise_mode("publish" if lease.mode is _SPEC else "publish with a record or a tail", lease.mode)
        return self.publish_as(lease, chain, resident_state_length, make_record, retain_tail)

    def publish_spec(self, CacheRequestLease lease not None, TokenChain chain not None, int64_t common_state_length, *,
                     bint make_record, bint retain_tail=False):
        """`publish` for base and draft pages in pairs.

        Where the same lineage named a draft page for a block already, with the same token behind it, the lease takes
        that page over (`lease.rebound_draft_page_count` moves then).

        Args:
            common_state_length: tokens whose base and draft state are both written and final.
        Returns:
            `PublishResult`; an endpoint that had base state only before counts as published.
        Raises:
            As `publish`; InvalidArgumentError for a lease other than a speculative one with draft pages.
        """
        self.check_open(lease)
        if lease.mode is not _SPEC:
            _raise_mode("publish_spec", lease.mode)
        return self.publish_as(lease, chain, common_state_length, make_record, retain_tail)

    cdef int append_one(
        self, CacheRequestLease lease, TokenChain chain, int token, bint publish, Py_ssize_t lookahead
    ) except -1:
        """One token for one sequence: 1, or 0 when its page was refused (nothing changed)."""
        cdef Py_ssize_t length = chain.token_count()
        cdef published_t done
        cdef request_t request
        cdef int64_t pages = length // self.page_size + 1
        if not has_pages(lease, pages, 0) and not grow_to(self, lease, pages, 0):
            return 0
        self.step()
        chain.append_token(token)
        request.count = (length + 1 - lookahead) // self.page_size
        if publish and length + 1 > lookahead and request.count > lease.published_block_count:
            request.tail = 0
            request.drafts = request.endpoint = request.need_root = False
            publish_blocks(self, lease, chain, &request, &done)
        return 1

    def append_tokens(self, list leases not None, list chains not None, const int32_t[::1] tokens, bint publish, *,
                      Py_ssize_t lookahead=1):
        """Append one token to each sequence: make sure of its page, extend the chain, publish what it completes.

        Args:
            leases: valid leases of this manager.
            chains: the chain of each lease.
            tokens: (len(leases),) int32, 0 or more.
            publish: publish full blocks of committed state (no record); not for leases of speculative mode.
            lookahead: newest tokens whose state is not written yet; 1 where the appended token runs in the next
                step, 0 where its state is already final.
        Returns:
            Index of the first sequence whose page was refused (it and those after it are unchanged), or -1.
        Raises:
            InvalidArgumentError: sizes differ, bad token, bad lease, or a chain of another prefix.  Nothing changed.
            ContractViolation: a lease is sealed.  Nothing changed.
            MemoryError: the sequences in front are done; the one at hand has its token, and publishes later.
        Cost: O(sequences), amortised; allocates only where a vector grows.
        """
        cdef Py_ssize_t k
        cdef Py_ssize_t count = len(leases)
        cdef CacheRequestLease lease
        cdef TokenChain chain
        if len(chains) != count or tokens.shape[0] != count or lookahead < 0:
            raise InvalidArgumentError(
                f"{count} leases need as many chains and tokens and a look-ahead of 0 or more, got {len(chains)}, "
                f"{tokens.shape[0]} and {lookahead}")
        for k in range(count):
            lease = <CacheRequestLease?>leases[k]
            chain = <TokenChain?>chains[k]
            self.check_open(lease)
            self.check_chain(chain)
            if tokens[k] < 0:
                raise InvalidArgumentError(f"token {tokens[k]} of sequence {k} must be 0 or more")
            if publish and lease.mode is _SPEC:
                _raise_mode("append_tokens with publication", lease.mode)
            self.check_overlap(lease, chain, lease.published_block_count)
        publish = publish and self.records.limit != 0
        for k in range(count):
            if not self.append_one(<CacheRequestLease>leases[k], <TokenChain>chains[k], tokens[k], publish, lookahead):
                return k
        return -1

    def rebind(self, CacheRequestLease lease not None, TokenChain chain not None):
        """Look again: let the lease share blocks that others published since, in place of its own private pages.

        For a sequence that is still in prefill, between two chunks, with no device work on the replaced pages.  At
        least the last token of the chain stays to be computed.  A speculative lease takes base and draft pages in
        pairs, of the lineage it has.

        Returns:
            Leading tokens whose state exists now (shared, copied, published, or rebound); never less than before.
        Raises:
            InvalidArgumentError: bad lease or chain, a chain of another prefix, or a model whose reuse starts at
                checkpoints (`rebind_checkpoint`).  Nothing was changed.
            ContractViolation: the lease is sealed.
        """
        self.check_open(lease)
        self.check_chain(chain)
        if self.checkpointed:
            _raise_mode("rebind", lease.mode)
        return max(look_again(self, lease, chain) * self.page_size, lease.reuse_length)

    # Checkpoints

    def reserve_hybrid_snapshots(self, CacheRequestLease lease not None, bint needs_partial):
        """Take snapshot slots for a capture, evicting checkpoints where none are free.

        Args:
            needs_partial: a partial-page slot as well: attention, and a length within a page (always with MTP).
        Returns:
            `HybridSnapshotReservation`, or None under pressure (nothing was changed then).
        Raises:
            InvalidArgumentError: bad lease, a model without checkpoints, or a partial slot for a pure recurrent one.
        """
        self.check_open(lease)
        if not self.checkpointed or (needs_partial and not self.has_attention):
            raise InvalidArgumentError(
                f"a {self.base_state_kind.value} model has no {'partial pages' if needs_partial else 'snapshots'} to "
                "reserve slots for; nothing was changed")
        if not reserve(self, lease, needs_partial):
            return None
        cdef reservation_t taken = lease.reservations.back()
        return HybridSnapshotReservation(
            taken.recurrent_slot, None if taken.partial_slot == NO_SLOT else taken.partial_slot)

    cdef Py_ssize_t reservation_of(self, CacheRequestLease lease, object reservation) except -1:
        """Which of the lease's reservations it is."""
        self.check_lease(lease)
        if not isinstance(reservation, HybridSnapshotReservation):
            raise InvalidArgumentError(f"{reservation!r} is not a HybridSnapshotReservation")
        cdef Py_ssize_t which = -1
        recurrent, partial = reservation.recurrent_snapshot_slot, reservation.partial_kv_snapshot_slot
        if 0 <= recurrent <= INT32_MAX and (partial is None or 0 <= partial <= INT32_MAX):
            which = find_reservation(lease, recurrent, NO_SLOT if partial is None else partial)
        if which < 0:
            raise InvalidArgumentError(f"the lease does not hold {reservation}; it was retired or is another lease's")
        return which

    def mark_snapshots_written(self, CacheRequestLease lease not None, reservation):
        """The captures into these slots are enqueued: from now on they may be published.

        Raises:
            InvalidArgumentError: bad lease, or a reservation it does not hold.
        """
        cdef Py_ssize_t which = self.reservation_of(lease, reservation)
        lease.reservations[which].written = True

    def retire_hybrid_snapshot_reservation(self, CacheRequestLease lease not None, reservation):
        """Let go of a reservation: published slots stay with their checkpoint, unpublished ones are free.

        Raises:
            InvalidArgumentError: bad lease, or a reservation it does not hold.
        """
        retire(self, lease, self.reservation_of(lease, reservation))

    cdef PublishResult publish_checkpoint_as(
        self, CacheRequestLease lease, TokenChain chain, int64_t exact_length, object reservation, object kind,
        object keep_lengths
    ):
        """`publish_hybrid` and `publish_hybrid_mtp` once lease and mode are known to be right."""
        cdef PublishResult result = PublishResult.__new__(PublishResult)
        cdef published_t done
        cdef vector[int64_t] keep
        cdef Py_ssize_t which, count
        cdef Py_ssize_t held = <Py_ssize_t>lease.pages.size()
        self.check_chain(chain)
        which = self.reservation_of(lease, reservation)
        if not 0 < exact_length <= chain.token_count():
            raise InvalidArgumentError(
                f"a checkpoint stands for 1 to {chain.token_count()} tokens of its chain, not {exact_length}")
        if not isinstance(kind, CheckpointKind):
            raise InvalidArgumentError(f"kind {kind!r} must be a CheckpointKind")
        cdef reservation_t taken = lease.reservations[which]
        cdef bint needs_partial = lease.paired or (self.has_attention and exact_length % self.page_size != 0)
        if (taken.partial_slot != NO_SLOT) != needs_partial:
            raise InvalidArgumentError(
                f"a checkpoint at {exact_length} tokens {'needs a' if needs_partial else 'has no'} partial-page slot; "
                "reserve accordingly")
        if not taken.written:
            raise InvalidArgumentError(
                f"{reservation} was not written; publish after mark_snapshots_written, never before the capture")
        count = <Py_ssize_t>((exact_length - lease.paired) // self.page_size)
        self.step()
        keep = keep_lengths
        if not self.has_attention:
            grow_to(self, lease, count, 0)
        elif count > <Py_ssize_t>lease.pages.size() or (lease.paired and count > <Py_ssize_t>lease.draft_pages.size()):
            raise InvalidArgumentError(
                f"the lease holds {lease.pages.size()} base and {lease.draft_pages.size()} draft pages but {count} "
                "blocks were to be published")
        result.status = _PUBLISHED
        if self.records.limit == 0 or count > <Py_ssize_t>lease.pages.size():
            return result
        try:
            publish_checkpoint(self, lease, chain, exact_length, &taken, kind, &keep, &done)
        except BaseException:
            undo_growth(self, lease, held)
            raise
        _fill(result, lease, &done, count)
        return result

    def publish_hybrid(
        self, CacheRequestLease lease not None, TokenChain chain not None, int64_t exact_length, reservation, *,
        kind=CheckpointKind.TAIL, keep_lengths=()
    ):
        """Publish the full blocks in front of a checkpoint, and the checkpoint itself.

        Args:
            exact_length: L, tokens whose recurrent state is in the reserved snapshot.
            reservation: of this lease, written; with a partial slot exactly when attention has an unfilled page at L.
            kind: `CheckpointKind`; decides what may supersede it.
            keep_lengths: lengths of shallower checkpoints on the path that stay useful (the policy's ladder).
        Returns:
            `PublishResult`.  `EXISTING_RECORD` when a checkpoint stands for these tokens already: it was touched, and
            the reservation is of no use.  The reservation stays with the lease until it is retired.
        Raises:
            InvalidArgumentError: another mode, a bad length, or a reservation that is not the lease's, not written or
                of the wrong sort.  Nothing was changed.
            InvariantError: a private page of the lease is indexed already.  Nothing was changed.
        """
        self.check_open(lease)
        if lease.mode is not _HYBRID:
            _raise_mode("publish_hybrid", lease.mode)
        return self.publish_checkpoint_as(lease, chain, exact_length, reservation, kind, keep_lengths)

    def publish_hybrid_mtp(
        self, CacheRequestLease lease not None, TokenChain chain not None, int64_t exact_length, reservation, *,
        kind=CheckpointKind.TAIL, keep_lengths=()
    ):
        """`publish_hybrid` with the draft side: a partial slot always, draft pages of the blocks before token L-1.

        A plain checkpoint for the same tokens is replaced.
        """
        self.check_open(lease)
        if lease.mode is not _HYBRID_MTP:
            _raise_mode("publish_hybrid_mtp", lease.mode)
        return self.publish_checkpoint_as(lease, chain, exact_length, reservation, kind, keep_lengths)

    def rebind_checkpoint(self, CacheRequestLease lease not None, TokenChain chain not None, int64_t committed):
        """Look again for a checkpoint deeper than what is computed; share the pages in front of it.

        For a sequence in prefill, between two chunks, with no device work on its pages.  The snapshots are held as
        restore bindings of the lease, as after an acquisition.

        Args:
            committed: tokens whose state the sequence has.
        Returns:
            Length of the checkpoint to restore, or `committed` when there is no deeper one.
        Raises:
            InvalidArgumentError: another mode, a chain of another prefix, a bad length, or restore bindings that were
                not released yet.  Nothing was changed.
        """
        self.check_open(lease)
        self.check_chain(chain)
        if not self.checkpointed:
            _raise_mode("rebind_checkpoint", lease.mode)
        if not 0 <= committed <= chain.token_count():
            raise InvalidArgumentError(f"committed {committed} must be from 0 to {chain.token_count()} tokens")
        if lease.recurrent_slot != NO_SLOT:
            raise InvalidArgumentError("the lease still holds snapshots to restore; release them first")
        return resume_deeper(self, lease, chain, committed)

    # Retention

    def set_now(self, int64_t now_ns):
        """Tell the time; what nobody holds and whose time is over goes before everything else from now on.

        Args:
            now_ns: ns of the caller's monotonic clock; a time before the last one told is ignored.
        Raises:
            InvalidArgumentError: a negative time.
        Cost: O(log n) for each thing that expired.
        """
        cdef node_id_t node
        if now_ns < 0:
            raise InvalidArgumentError(f"the time {now_ns} must be 0 ns or more")
        node = self.index.demote_next(now_ns)
        while node != NO_NODE:
            if self.owns_draft:
                self.drafts.expire_at(node)
            node = self.index.demote_next(now_ns)
        while self.records.demote_next(now_ns) != NO_RECORD:
            pass

    def expire(self):
        """Free everything that expired.

        Returns:
            How many blocks and checkpoints left the cache.
        """
        cdef int64_t before = self.tree.size + self.records.checkpoint_count
        while self.records.checkpoints.sizes[CLASS_EXPIRED]:
            self.evict_checkpoint(self.records.checkpoint_victim())
        while self.tree.lru.sizes[CLASS_EXPIRED]:
            self.evict_node(lru_front(&self.tree.lru))
        while self.drafts.core.lru.sizes[CLASS_EXPIRED]:
            self.evict_draft(lru_front(&self.drafts.core.lru))
        self.version += 1
        return before - self.tree.size - self.records.checkpoint_count

    def note_withheld(self, TokenChain chain not None, Py_ssize_t block_idx):
        """Remember that a full block was computed but is not published by policy: a lookup that stops there says so.

        Raises:
            InvalidArgumentError: not a full block of the chain, or page sizes differ.
        """
        self.check_chain(chain)
        if not 0 <= block_idx < chain.block_count():
            raise InvalidArgumentError(f"block {block_idx} is not a full block of a chain with {chain.block_count()}")
        self.index.note_withheld(chain.hashes[block_idx])

    def set_expiry(self, CacheRequestLease lease not None, int64_t expiry):
        """When what the lease leaves behind expires: nanoseconds of the clock that `set_now` is told, 0 for never.

        What it let go of already keeps the later time that it was promised, and so do the blocks in front of that.

        Raises:
            InvalidArgumentError: bad lease, or a negative time.
        """
        cdef Py_ssize_t i
        self.check_lease(lease)
        if expiry < 0:
            raise InvalidArgumentError(f"expiry {expiry} must be 0 (never) or a time in nanoseconds")
        if lease.tail_token_count and lease.tail_page == NO_NODE:
            # The tail source went with the expiry so far; what it hangs below must not expire before it.
            for i in range(lease.shared_block_count):
                raise_retention(self.tree, lease.pages[i], lease.retention, lease.expiry)
        lease.expiry = expiry

    def set_volatile_from(self, CacheRequestLease lease not None, Py_ssize_t position):
        """What the lease publishes from `position` on is a template tail that the next prompt will not repeat.

        Args:
            position: token index, or -1 for none.
        Raises:
            InvalidArgumentError: bad lease or position.
        """
        self.check_lease(lease)
        if position < -1:
            raise InvalidArgumentError(f"position {position} must be a token index, or -1 for none")
        lease.volatile_from = position

    # Eviction

    def evict_record(self, record_id):
        """Forget one record now, with the blocks that only it kept.

        A block with children or another record stays.  A page that a lease holds leaves the index at once and stays
        leased; it is not counted as reclaimed, nor are snapshots that a lease holds.

        Raises:
            InvalidArgumentError: unknown id.
        """
        self.drop_record(self.records._checked(record_id))
        self.version += 1

    def evict_all(self):
        """Forget every record and block; leased pages stay leased and are free after their release.

        Returns:
            How many blocks left the index.
        Cost: O(capacity).
        """
        cdef Py_ssize_t count = self.tree.size
        cdef size_t k
        cdef node_id_t first, node, parent
        cdef CacheRequestLease lease
        while self.records.size:
            self.erase_record(self.records.front(), True)
        for k in range(self.live.size()):
            lease = <CacheRequestLease>self.live[k]
            lease.published_block_count = lease.published_draft_block_count = 0
        while self.tree.lru.size:
            self.evict_node(lru_front(&self.tree.lru))
        for first in range(self.tree.capacity):     # what is left is held: from each leaf upwards
            node = first
            while node >= 0 and self.tree.nodes[node].indexed and self.tree.nodes[node].child_count == 0:
                parent = self.tree.nodes[node].parent
                self.drop_node(node, True)
                node = parent
        self.version += 1
        return count

    # Reading

    def record(self, record_id):
        """`CacheRecord` snapshot of a record.

        Raises:
            InvalidArgumentError: unknown id.
        """
        cdef int32_t place = self.records._checked(record_id)
        cdef node_id_t node = self.records.node_at(place)
        cdef bint checkpoint = self.records.is_checkpoint(place)
        cdef page_id_t draft = self.records.record_at(place).draft_node
        if not checkpoint and self.owns_draft:
            draft = self.drafts.newest_at(node)
        path = tuple(self.index.path_of(node)) if node >= 0 and self.has_attention else ()
        drafts = None
        if draft != NO_DRAFT:
            drafts = tuple(self.drafts.path_of(draft))
        elif checkpoint and self.records.record_at(place).mtp:
            drafts = ()
        slot = self.records.record_at(place).recurrent_slot
        partial = self.records.record_at(place).partial_slot
        return CacheRecord(
            id=record_id, key=self.records.key(record_id), node=node, base_page_path=path, draft_page_path=drafts,
            recurrent_snapshot_slot=slot if slot >= 0 else None,
            partial_kv_snapshot_slot=partial if partial >= 0 else None,
            exact_checkpoint_length=self.records.record_at(place).exact_length or None)

    def metrics(self):
        """`ContextCacheManagerMetrics`, cumulative."""
        return ContextCacheManagerMetrics(
            evicted_records=self.evicted_records, reclaimed_base_kv_pages=self.reclaimed_base_pages,
            reclaimed_draft_kv_pages=self.reclaimed_draft_pages,
            reclaimed_recurrent_snapshots=self.reclaimed_recurrent,
            reclaimed_partial_kv_snapshots=self.reclaimed_partial)

    def check_counts(self):
        """Compare the counts of pools, indexes and orders with each other.

        Raises:
            InvariantError: they disagree; stop using this manager.
        Cost: O(1).
        """
        check_counts(self)

    def check_invariants(self):
        """Recount everything: pools, trees, records and leases must tell the same story.

        Raises:
            InvariantError: they do not; stop using this manager.
        Cost: O(capacity + table + leased pages).
        """
        check_invariants(self)


cdef int _fill(PublishResult result, CacheRequestLease lease, const published_t* done, Py_ssize_t count) except -1:
    """The outcome of a publication as Python sees it."""
    if done.existing_record:
        result.status = _EXISTING
    if done.record_id:
        result.record = done.record_id
    result.published_block_count = min(count, lease.published_block_count)
    result.published_draft_block_count = min(count, lease.published_draft_block_count)
    result.new_block_count = done.new_blocks
    result.new_draft_block_count = done.new_drafts
    result.retained_tail_tokens = done.tail_tokens
    return 0
