"""`ContextCacheCoordinator`: the lifecycle of requests around the host-only cache manager.

It decides when rows are bound, when state may be published, and when pages may go back.  It has no
thread: every call comes from the caller's thread and the caller serialises them.  Leases of several
requests may overlap in time, and page-table rows belong to resident slots, so they never collide.

Order inside every call: handle and phase, then all arguments, then mutation.  A call that raises a
`CallerError` left everything as it was and may be repeated with correct arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm._core.cache_manager import ContextCacheManager
from edgellm.cache import admission as admitting
from edgellm.cache import rebind
from edgellm.cache.advances import (
    apply_advance,
    apply_missing_advances,
    check_completed_slots,
    check_decode_advances,
    check_prefill_advance,
    require_count,
)
from edgellm.cache.binding import PageTableMirror, RowBinder
from edgellm.cache.compaction import check_mapping
from edgellm.cache.deployment import check_resources
from edgellm.cache.growth import grow_for_step
from edgellm.cache.metrics import ContextCacheMetrics, PoolGauge
from edgellm.cache.policy import LedgerOnlyPolicy
from edgellm.cache.quarantine import Quarantine, StreamSynchronizer, synchronize_stream
from edgellm.cache.request import Impl, RequestHandle, SequenceState
from edgellm.cache.results import AdmissionResult, AdmitSequenceResult, BeginRequestResult
from edgellm.cache.types import (
    ContextCacheBatchAdmission,
    ContextCacheConfig,
    ContextCacheCoordinatorStatus,
    ContextCacheDeploymentProfile,
    ContextCachePhysicalResources,
    ContextCacheSequenceAdmission,
    ContextCacheSequenceAdvance,
    DecodingKvHeadroom,
    DeploymentConfig,
    ResourceDemand,
    ResourceType,
)
from edgellm.errors import (
    FOREIGN_ERRORS,
    BrokenInvariantError,
    ContractViolation,
    InvalidArgumentError,
    InvariantError,
    PluginError,
)
from edgellm.log import get_logger
from edgellm.plugin_guard import build_policy
from edgellm.plugins import PolicyRegistration, choose_policy, load_plugins, missing_policy_distribution

if TYPE_CHECKING:
    import numpy.typing as npt

    from edgellm.runtime.device import Stream
    from edgellm.session.types import ResidentRef

logger = get_logger(__name__)

Status = ContextCacheCoordinatorStatus


def request_supports_live_admission(profile: ContextCacheDeploymentProfile, speculative_request: bool) -> bool:
    """Whether sequences may join such a request while it executes (one rule for the check and the predicate)."""
    return not speculative_request and profile.has_attention and not profile.uses_checkpoint_reuse


class ContextCacheCoordinator:
    """Owns the host and device lifecycle of every request that uses the context cache.

    Args:
        resources: borrowed physical owners; they must outlive the coordinator.
        stream: the one stream that all work of these requests is ordered on.
        synchronizer: waits for a stream and returns True, or returns False or raises when that failed.
        policies: registered publication policies; None loads the installed plugins.
        mirror: device copy of the page table, when the executor keeps one.
    Raises:
        InvalidArgumentError: geometry of deployment and resources disagrees.
        PluginError: no registered policy serves this deployment, or the one that does is broken.

    `close()` ends it.  A disabled cache (`config.enabled=False`) manages pages all the same and treats
    every sequence as lookup bypass.
    """

    def __init__(
        self,
        config: ContextCacheConfig,
        deployment: DeploymentConfig,
        profile: ContextCacheDeploymentProfile,
        resources: ContextCachePhysicalResources,
        stream: Stream,
        synchronizer: StreamSynchronizer | None = None,
        policies: Iterable[PolicyRegistration] | None = None,
        *,
        mirror: PageTableMirror | None = None,
    ) -> None:
        self._active_requests = 0
        check_resources(deployment, profile, resources)
        self.config = config
        self.deployment = deployment
        self.profile = profile
        self.stream = stream
        self.page_size = deployment.page_size
        self.counters = ContextCacheMetrics()
        self._policies = tuple(load_plugins().policies if policies is None else policies)
        chosen = [choose_policy(self._policies, profile, kind) for kind in {False, profile.is_speculative}]
        self._quarantine = Quarantine(synchronizer or synchronize_stream)
        self._rows = RowBinder(resources.base_page_table, mirror)
        self._manager = ContextCacheManager(
            deployment.page_size,
            ResourceDemand(base_kv_pages=deployment.num_pages, draft_kv_pages=deployment.num_draft_pages),
            max_records=config.max_records,
            spec_reuse_contract=profile.spec_reuse_contract,
        )
        self._closed = False
        self._live: dict[int, Impl] = {}
        self._occupied: dict[int, Impl] = {}
        for registration in chosen:
            build_policy(registration, self)  # a broken factory is found here, not by the first request

    # --- queries -----------------------------------------------------------------------------------------

    @property
    def manager(self) -> ContextCacheManager:
        """The cache manager, for reading."""
        return self._manager

    @property
    def rows(self) -> RowBinder:
        return self._rows

    @property
    def row_capacity_tokens(self) -> int:
        """Token positions that one page-table row can name."""
        return self.deployment.pages_per_slot * self.page_size

    @property
    def poisoned(self) -> bool:
        return self._quarantine.poisoned

    @property
    def active_requests(self) -> int:
        """Live handles plus quarantined requests."""
        return self._active_requests

    def supports_live_sequence_admission(self) -> bool:
        """Whether sequences may join an executing request on this deployment."""
        return request_supports_live_admission(self.profile, self.profile.is_speculative)

    def metrics(self) -> ContextCacheMetrics:
        """A copy of the counters with the gauges of now.  Cheap; never raises."""
        pools, evicted = self._manager.pools, self._manager.metrics()
        gauges = [PoolGauge(pools.free_count(kind), pools.capacity(kind)) for kind in ResourceType]
        return replace(
            self.counters,
            quarantined_requests=len(self._quarantine),
            current_records=len(self._manager.records),
            base_kv_pages=gauges[0],
            draft_kv_pages=gauges[1],
            recurrent_snapshots=gauges[2],
            partial_kv_snapshots=gauges[3],
            evicted_records=evicted.evicted_records,
            reclaimed_base_kv_pages=evicted.reclaimed_base_kv_pages,
            reclaimed_draft_kv_pages=evicted.reclaimed_draft_kv_pages,
            reclaimed_recurrent_snapshots=evicted.reclaimed_recurrent_snapshots,
            reclaimed_partial_kv_snapshots=evicted.reclaimed_partial_kv_snapshots,
        )

    def check_invariants(self) -> None:
        """K1 to K7 of the specification, and the manager's own.  Raises InvariantError.  Cost: O(everything)."""
        from edgellm.cache.invariants import check_coordinator

        check_coordinator(self, self._live.values(), self._quarantine.requests)

    # --- admission ---------------------------------------------------------------------------------------

    def begin_request(
        self, admission: ContextCacheBatchAdmission, headroom: DecodingKvHeadroom, stream: Stream
    ) -> BeginRequestResult:
        """Admit a batch, or open a long-lived container when the batch is empty.

        A container is executing and idle at once; sequences enter it by `admit_sequence`.

        Returns:
            POISONED, REQUEST_FAILED (not enough pages now; nothing is kept), or OK with the handle.
        Raises:
            CallerError: wrong arguments.  Nothing was changed.
        """
        if stream is not self.stream:
            raise InvalidArgumentError("begin_request got another stream than the coordinator's; pass that one")
        admitting.check_batch(self, admission)
        admitting.check_headroom(headroom, paired=self._paired(admission.speculative_request))
        if self._quarantine.poisoned:
            return BeginRequestResult(Status.POISONED)
        impl = self._new_impl(admission)
        try:
            admitted = admitting.acquire_batch(self, impl, admission, headroom)
        except BaseException:
            impl.destroy()
            raise
        if not admitted:
            impl.destroy()
            return BeginRequestResult(Status.REQUEST_FAILED)
        handle = RequestHandle(impl)
        self._live[id(impl)] = impl
        starts = [sequence.reuse_token_length for sequence in impl.sequences]
        reports = [sequence.reuse_report for sequence in impl.sequences]
        return BeginRequestResult(Status.OK, AdmissionResult(handle, starts, reports))

    def _new_impl(self, admission: ContextCacheBatchAdmission) -> Impl:
        chosen = choose_policy(self._policies, self.profile, admission.speculative_request)
        policy = build_policy(chosen, self)
        impl = Impl(self, self.stream, self.deployment.max_batch_size)
        impl.publication_policy = policy
        impl.speculative_request = admission.speculative_request
        impl.token_state_contract = admission.token_state_contract
        impl.lookup_policy = admission.lookup_policy
        impl.commit_policy = admission.commit_policy
        impl.replay_tail_length = admission.replay_tail_length
        if not admission.sequences:
            impl.is_container = True
            impl.open_container()
        return impl

    def admit_sequence(
        self,
        request: RequestHandle,
        admission: ContextCacheSequenceAdmission,
        headroom: DecodingKvHeadroom,
        *,
        reserve_pages: int = 0,
    ) -> AdmitSequenceResult:
        """Join one more sequence to an executing request: look up, lease, bind exactly its row.

        The length ledger is not advanced before `advance_prefill` or `finalize_sequence_admission`; until
        the latter the joiner is a ghost and holds in every decode step.  Lookup and commit policy are the
        joiner's own where it has them, else the container's.

        Args:
            reserve_pages: pages that must stay free or evictable behind the lease (promised to others).
        Returns:
            OK; POISONED; or REQUEST_FAILED, with `insufficient_capacity` when a retry may succeed later
            (without it the sequence needs more pages than the pool has).
        Raises:
            CallerError: wrong arguments or state.  Nothing was changed.
        """
        impl = self._require_settled(request, "admit_sequence")
        self._require_live_admission(impl)
        admitting.check_headroom(headroom, paired=False)
        if self._quarantine.poisoned:
            return AdmitSequenceResult(Status.POISONED)
        if len(impl.sequences) >= self.deployment.max_batch_size:
            raise ContractViolation(
                f"the request has {len(impl.sequences)} sequences, the limit is {self.deployment.max_batch_size}; "
                "retire one first"
            )
        admitting.check_sequence(self, admission, headroom)
        lookup = admitting.effective_lookup_policy(
            impl.lookup_policy, admission.lookup_policy, forced_bypass=not self.config.enabled
        )
        acquired = admitting.acquire_into(
            self, impl, admission, lookup, headroom, joined=True, reserve_pages=reserve_pages
        )
        if acquired is None:
            never = len(admission.token_ids) + headroom.base_extra_tokens > self.deployment.num_pages * self.page_size
            return AdmitSequenceResult(Status.REQUEST_FAILED, insufficient_capacity=not never)
        sequence = impl.sequences[-1]
        try:
            self._rows.bind([sequence])
            self._rows.upload()
        except BaseException:
            self._undo_joiner(impl, sequence)
            raise
        admitting.count_admission(self, sequence, acquired)
        return AdmitSequenceResult(Status.OK, False, sequence.reuse_token_length, sequence.reuse_report)

    def _undo_joiner(self, impl: Impl, sequence: SequenceState) -> None:
        """Take back a joiner whose row could not be bound; poison when the row cannot be cleared either."""
        self._drop_tail(impl)
        try:
            self._rows.clear([sequence])
            self._rows.upload()
        except Exception:
            logger.exception("the row of slot %d could not be cleared", sequence.resident.slot)
            self._quarantine.poison("a page-table row could not be cleared")

    def _drop_tail(self, impl: Impl) -> SequenceState:
        sequence = impl.pop_sequence()
        self._occupied.pop(sequence.resident.slot, None)
        sequence.lease.release()
        return sequence

    def _require_live_admission(self, impl: Impl) -> None:
        if request_supports_live_admission(self.profile, impl.speculative_request):
            return
        distribution = missing_policy_distribution(self.profile, impl.speculative_request)
        raise ContractViolation(
            f"sequences cannot join a {'speculative ' if impl.speculative_request else ''}request on a "
            f"{self.profile.base_state_kind.value} deployment; that needs live admission from {distribution}"
        )

    def finalize_sequence_admission(
        self, request: RequestHandle, slot: int, advance: ContextCacheSequenceAdvance
    ) -> Status:
        """The prompt of a joined sequence is complete: record its look-ahead token and publish its endpoint.

        Raises:
            CallerError: the advance is not one token with the whole prompt committed.  Nothing was changed.
        """
        impl = self._require_executing(request, "finalize_sequence_admission")
        sequence = request.sequence(slot)
        if self._quarantine.poisoned:
            return Status.POISONED
        if sequence.finalized:
            raise ContractViolation(f"slot {slot} was finalized before; a prompt ends once")
        check_prefill_advance(impl, slot, advance)
        apply_advance(impl, slot, advance)
        impl.lengths.finalized[slot] = True
        return self._guarded(request, lambda: impl.policy.on_sequence_finalized(request, slot))

    def retract_sequence_admission(self, request: RequestHandle) -> bool:
        """Undo the most recent `admit_sequence`, while the runtime has no slot for it yet.  Never raises.

        False means the coordinator is poisoned: there was nothing to retract, or clearing the row failed.
        """
        try:
            impl = request.impl
            tail = impl.sequences[-1]
            if not tail.joined or tail.finalized or tail.committed_state_length != tail.reuse_token_length:
                raise ContractViolation("the last sequence was seated or founded the request; it leaves by compaction")
            self._drop_tail(impl)
            self._rows.clear([tail])
            self._rows.upload()
        except Exception:
            logger.exception("an admission could not be retracted")
            self._quarantine.poison("an admission could not be retracted")
            return False
        return True

    # --- prefill -----------------------------------------------------------------------------------------

    def prepare_prefill(self, request: RequestHandle) -> Status:
        """Bind every row of an admitted batch.  From here an unfinished request must be drained."""
        impl = self._impl(request)
        if not impl.admitted() or impl.has_pending_device_work():
            raise ContractViolation(f"prepare_prefill needs an admitted request; this one is {impl.phase.value}")
        impl.begin_prefill()
        self._rows.bind(impl.sequences)
        self._rows.upload()
        return Status.OK

    def enqueue_prefill_captures(self, request: RequestHandle) -> Status:
        """Reserve and enqueue prefill-end snapshots; a no-op where no checkpoints exist or the request is
        speculative (its capture is `publish_hybrid_mtp_endpoint`)."""
        impl = self._require_executing(request, "enqueue_prefill_captures")
        self._require_pending(impl, "enqueue_prefill_captures")
        if self.profile.uses_checkpoint_reuse and not impl.speculative_request:
            raise self._missing_flavour("prefill checkpoints", "edgellm-hybrid")
        return Status.OK

    def rebind_prefill(self, request: RequestHandle, slot: int) -> int:
        """Look again before the next chunk, and take over blocks that another sequence published meanwhile.

        This is how identical prompts in flight share one producer.  Only while the prompt of `slot` is
        incomplete and nothing is pending; never waits, never evicts.

        Returns:
            The committed length: where the next chunk begins.
        """
        impl = self._require_settled(request, "rebind_prefill")
        if request.sequence(slot).finalized:
            raise ContractViolation(f"the prompt of slot {slot} is complete; rebind_prefill serves incomplete prompts")
        return rebind.rebind_prefill(self, impl, slot)

    def advance_prefill(self, request: RequestHandle, slot: int, committed: int) -> Status:
        """A prompt chunk ran: move the committed length without a token, and publish what it completed.

        Raises:
            CallerError: the prompt is complete already, or `committed` goes back or past it.  Nothing was changed.
        """
        impl = self._require_executing(request, "advance_prefill")
        sequence = request.sequence(slot)
        if sequence.finalized:
            raise ContractViolation(f"the prompt of slot {slot} is complete; advance_prefill serves incomplete prompts")
        low, high = sequence.committed_state_length, sequence.num_tokens
        if not low <= committed <= high:
            raise InvalidArgumentError(f"slot {slot}: committed {committed} must be from {low} to {high}, its prompt")
        impl.lengths.committed[slot] = committed
        if not impl.speculative_request:
            impl.lengths.common[slot] = committed
        return self._guarded(request, lambda: impl.policy.on_prefill_chunk(request, slot))

    def finalize_prefill_publication(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        common_state_lengths: Sequence[int] | None = None,
    ) -> Status:
        """The prompts of a batch are complete: apply their advances and publish every ready endpoint.

        Raises:
            CallerError: an entry is wrong.  Nothing was changed; repeat with correct ones.
        """
        impl = self._require_executing(request, "finalize_prefill_publication")
        self._require_pending(impl, "finalize_prefill_publication")
        require_count(impl, advances)
        self._check_common(impl, common_state_lengths)
        for slot, advance in enumerate(advances):
            if impl.lengths.finalized[slot]:
                raise ContractViolation(f"the prompt of slot {slot} was finalized before; a prompt ends once")
            check_prefill_advance(impl, slot, advance)
        impl.lengths.finalized[: impl.lengths.size] = True
        return self._guarded(
            request, lambda: impl.policy.on_prefill_finalized(request, advances, common_state_lengths), advances
        )

    # --- checkpoint flavours (their plugins are not part of this deployment) ------------------------------

    def publish_hybrid_mtp_endpoint(
        self,
        request: RequestHandle,
        slot: int,
        resident_state_length: int,
        base_hidden_states: Any,
        boundary_hidden_row: int,
    ) -> Status:
        """Publish one hybrid MTP checkpoint at the stable predecessor boundary."""
        self._require_hybrid_mtp("publish_hybrid_mtp_endpoint")
        policy = self._require_executing(request, "publish_hybrid_mtp_endpoint").policy
        return policy.publish_mtp_boundary(
            request, slot, resident_state_length, base_hidden_states, boundary_hidden_row
        )

    def restore_hybrid_mtp_boundary_hidden(
        self, request: RequestHandle, slot: int, base_hidden_states: Any, destination_row: int
    ) -> Status:
        """Restore the saved boundary hidden row; the caller orders it in its prefill stream."""
        self._require_hybrid_mtp("restore_hybrid_mtp_boundary_hidden")
        policy = self._require_executing(request, "restore_hybrid_mtp_boundary_hidden").policy
        return policy.restore_mtp_boundary(request, slot, base_hidden_states, destination_row)

    def _require_hybrid_mtp(self, call: str) -> None:
        if not (self.profile.is_hybrid and self.profile.is_speculative):
            raise self._missing_flavour(call, "edgellm-hybrid")

    def _missing_flavour(self, what: str, distribution: str) -> PluginError:
        kind = self.profile.base_state_kind.value
        speculative = "speculative" if self.profile.is_speculative else "not speculative"
        return PluginError(
            f"{what} is for hybrid MTP or checkpoint deployments; this one is {kind} and {speculative}: "
            f"deploy such a model with {distribution} installed"
        )

    # --- decode ------------------------------------------------------------------------------------------

    def prepare_decode_step(
        self, request: RequestHandle, headroom: DecodingKvHeadroom, slots: Sequence[int] | None = None
    ) -> Status:
        """Grow and upload every row that the next step writes beyond its pages.

        Args:
            slots: the sequences that take part (execution order); None means all.  An empty list is right
                for a step of prompt chunks only: their pages are leased, and the work is marked as pending.
        Returns:
            OK, or REQUEST_FAILED when one sequence can get no page (or its row is full).  Then
            `request.refused_slot` names it, the request stays executing and settled, and earlier growth
            stays with its leases: retire or preempt a sequence by compaction, then prepare again.
        """
        impl = self._require_executing(request, "prepare_decode_step")
        if impl.has_pending_device_work() and not impl.awaiting_first_spec_completion():
            raise ContractViolation("prepare_decode_step needs a settled request; complete the step before")
        self._require_no_compaction(impl, "prepare_decode_step")
        admitting.check_headroom(headroom, paired=self._paired(impl.speculative_request))
        impl.refused_slot = grow_for_step(self, impl, headroom, slots)
        if impl.refused_slot is not None:
            self.counters.growth_refusals += 1
            return Status.REQUEST_FAILED
        impl.mark_device_work_enqueued()
        self._rows.upload()
        return Status.OK

    def complete_decode_step(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        publishable_completed_slots: Sequence[int] = (),
        common_state_lengths: Sequence[int] | None = None,
    ) -> Status:
        """The step ran and the runtime has waited for it: apply advances, publish blocks and endpoints.

        Args:
            advances: one per sequence; `OneTokenAdvances` costs no Python object per sequence.
            publishable_completed_slots: sequences that ended normally in this step (never cancelled or
                failed ones).
        Raises:
            CallerError: an entry is wrong.  Nothing was changed; repeat with correct ones.
        """
        impl = self._require_executing(request, "complete_decode_step")
        self._require_pending(impl, "complete_decode_step")
        check_decode_advances(impl, advances)
        check_completed_slots(impl, publishable_completed_slots)
        self._check_common(impl, common_state_lengths)
        return self._guarded(
            request,
            lambda: impl.policy.on_decode_completed(
                request, advances, publishable_completed_slots, common_state_lengths
            ),
            advances,
        )

    def _check_common(self, impl: Impl, common: Sequence[int] | None) -> None:
        if common is None:
            return
        if not self._paired(impl.speculative_request):
            raise InvalidArgumentError("common_state_lengths is given for a request without draft state; pass None")
        if len(common) != len(impl.sequences):
            raise InvalidArgumentError(
                f"{len(common)} common_state_lengths for {len(impl.sequences)} sequences; pass one for each"
            )

    # --- policies are plugins: none of them may take a request's state with it ----------------------------

    def _guarded(
        self,
        request: RequestHandle,
        hook: Callable[[], Status | None],
        advances: Sequence[ContextCacheSequenceAdvance] | None = None,
    ) -> Status:
        """Run a policy hook; when it raises or leaves a step incomplete, make the ledger whole and switch it off.

        A container goes on unpublished until it is empty (its residents' text does not depend on publication); a
        batch request ends.  An invariant error is ours, not the plugin's: it propagates.
        """
        impl = request.impl
        committed_before = None if advances is None else impl.lengths.committed[: impl.lengths.size].copy()
        try:
            status = hook() or Status.OK
            forgot = _complete_ledger(impl, advances, committed_before)
            unsettled = impl.has_pending_device_work() and not impl.awaiting_first_spec_completion()
            if not forgot and (advances is None or not unsettled):
                return status
            logger.error("publication policy %r left a step incomplete; it is switched off", impl.policy.name)
        except BrokenInvariantError:
            raise
        except FOREIGN_ERRORS:
            logger.exception("publication policy %r raised; it is switched off for its request", impl.policy.name)
            _complete_ledger(impl, advances, committed_before)
        self.counters.policy_failures += 1
        impl.publication_policy = LedgerOnlyPolicy(self)
        if advances is not None:
            impl.mark_device_work_resolved_without_sync()
        if impl.is_container:
            return Status.OK
        impl.mark_finishing()
        return Status.REQUEST_FAILED

    # --- compaction --------------------------------------------------------------------------------------

    def begin_batch_compaction(
        self, request: RequestHandle, old_to_new: Sequence[int], new_batch_size: int, device_batch_mapping: Any = None
    ) -> Status:
        """Check and remember the one authoritative old-to-new mapping, before any slot is retired.

        Args:
            old_to_new: one entry per sequence; -1 retires, survivors are dense and keep their order.
            device_batch_mapping: (>= N,) int32 device tensor that receives the mapping, where one exists.
        Raises:
            CallerError: a wrong mapping, pending work, or a compaction already begun.  Nothing was changed.
        """
        impl = self._impl(request)
        if not impl.executing():
            raise ContractViolation(f"compaction needs an executing request; this one is {impl.phase.value}")
        self._require_no_compaction(impl, "begin_batch_compaction")
        check_mapping(old_to_new, new_batch_size, num_sequences=len(impl.sequences))
        status = self._guarded(request, lambda: impl.policy.on_terminalize(request))
        if status is not Status.OK:
            return status
        if impl.has_pending_device_work():
            raise ContractViolation("begin_batch_compaction needs a settled request; complete the step before")
        mapping = list(old_to_new)
        if device_batch_mapping is not None:
            _upload_mapping(mapping, device_batch_mapping)
        impl.mark_device_work_enqueued()
        impl.compaction.mapping = mapping
        impl.compaction.batch_size = new_batch_size
        return Status.OK

    def compact_batch(self, request: RequestHandle) -> Status:
        """Retire sequences by the remembered mapping; survivors' physical rows are not touched.

        Waits for the stream, because retired leases go back.  A failed wait is POISONED and the whole
        request is quarantined (the handle becomes empty).
        """
        impl = self._require_executing(request, "compact_batch")
        self._require_pending(impl, "compact_batch")
        if not impl.compaction_outstanding():
            raise ContractViolation("compact_batch without begin_batch_compaction; begin it first")
        self._require_nothing_staged(impl)
        retired = [sequence for sequence, new in zip(impl.sequences, impl.compaction.mapping, strict=True) if new < 0]
        survivors = [index for index, new in enumerate(impl.compaction.mapping) if new >= 0]
        self._rows.clear(retired)
        self._rows.upload()
        drained = False
        try:
            drained = self._quarantine.drain(impl)
        finally:
            if not drained:
                self._hold(request.take())
        if not drained:
            return Status.POISONED
        for sequence in retired:
            self._occupied.pop(sequence.resident.slot, None)
            sequence.lease.release()
        impl.keep_sequences(survivors)
        impl.compaction.mapping, impl.compaction.batch_size = [], -1
        if not survivors and impl.is_container:
            self._renew_policy(impl)
        elif not survivors:
            impl.mark_finishing()
        return Status.OK

    def _renew_policy(self, impl: Impl) -> None:
        """An empty container gets its policy back after one was switched off: those it failed for are gone."""
        if not isinstance(impl.policy, LedgerOnlyPolicy):
            return
        try:
            chosen = choose_policy(self._policies, self.profile, impl.speculative_request)
            impl.publication_policy = build_policy(chosen, self)
        except PluginError:
            logger.exception("the publication policy could not be built again; nothing is published")

    def _require_nothing_staged(self, impl: Impl) -> None:
        for slot, sequence in enumerate(impl.sequences):
            if sequence.staged_hybrid_publication is not None or sequence.frozen_spec_prefill_length is not None:
                raise ContractViolation(f"slot {slot} still has a staged endpoint; terminalize it before compaction")

    # --- ending ------------------------------------------------------------------------------------------

    def finish(self, request: RequestHandle) -> Status:
        """End a request normally: wait for its stream, then give its leases back.  Idempotent.

        A failed wait is POISONED and quarantines the request.
        """
        if not request.valid():
            return Status.OK
        impl = self._impl(request)
        try:
            terminalized = impl.policy.on_terminalize(request) is Status.OK
        except FOREIGN_ERRORS:
            logger.exception("publication policy %r raised while finishing", impl.policy.name)
            self.counters.policy_failures += 1
            terminalized = True  # the wait below decides; what it would have published is lost
        request.take()
        if not terminalized:
            self._hold(impl)
            return Status.POISONED
        if not self._drain_or_hold(impl):
            return Status.POISONED
        self._release(impl)
        return Status.OK

    def _drain_or_hold(self, impl: Impl) -> bool:
        """Wait for a request's stream, or quarantine it.  An interrupted wait proves nothing and quarantines too."""
        drained = False
        try:
            drained = self._quarantine.drain(impl)
        finally:
            if not drained:
                self._hold(impl)
        return drained

    def _abandon(self, impl: Impl) -> None:
        """The handle is gone while its request lives: drain, release, publish nothing.  Never raises."""
        if impl.has_pending_device_work() and not self._drain_or_hold(impl):
            return
        self._release(impl)

    def _release(self, impl: Impl) -> None:
        try:
            self._rows.clear(impl.sequences)
        except Exception:
            logger.exception("rows of an ended request could not be cleared")
            self._quarantine.poison("rows of an ended request could not be cleared")
        impl.mark_finishing()
        impl.destroy()

    def _hold(self, impl: Impl) -> None:
        """Quarantine a request whose device work may still run."""
        self._live.pop(id(impl), None)
        self._quarantine.hold(impl)

    def shutdown(self) -> Status:
        """Drain quarantined requests before physical resources go.  Never raises; may be repeated.

        Returns:
            POISONED while a drain fails, REQUEST_FAILED while requests are live, else OK.
        """
        if not self._quarantine.drain_all(self._release):
            self._quarantine.poison("a quarantined stream could not be drained")
            return Status.POISONED
        return Status.REQUEST_FAILED if self._active_requests > 0 else Status.OK

    def recover(self) -> bool:
        """Admit again after poison, once every quarantined stream is proven idle.  Rows are left as they are."""
        if not self._quarantine.drain_all(self._release):
            return False
        self._quarantine.lift_poison()
        return True

    def close(self) -> None:
        """End of life.  Raises BrokenInvariantError with live or quarantined requests: end them first."""
        if self._closed:
            return
        if self._active_requests > 0:
            raise InvariantError(
                f"the coordinator is closed with {self._active_requests} requests alive "
                f"({len(self._quarantine)} quarantined); finish them and call shutdown() first"
            )
        self._closed = True

    def __del__(self) -> None:
        if getattr(self, "_active_requests", 0) > 0:
            logger.error("a coordinator was dropped with %d live requests", self._active_requests)

    # --- shared checks -----------------------------------------------------------------------------------

    def require_base_flavour(self, speculative_request: bool) -> None:
        """Planning here covers attention-only, non-speculative requests."""
        if self.profile.uses_checkpoint_reuse or speculative_request:
            raise PluginError(
                f"planning {'speculative' if speculative_request else 'plain'} requests on "
                f"{self.profile.base_state_kind.value} models is not part of this version; "
                f"it comes with {missing_policy_distribution(self.profile, speculative_request)}"
            )

    def check_resident_free(self, resident: ResidentRef) -> None:
        """The slot is in range, its epoch live, and no other sequence occupies it."""
        if not 0 <= resident.slot < self.deployment.max_batch_size:
            raise InvalidArgumentError(
                f"slot {resident.slot} is not in [0, {self.deployment.max_batch_size}); acquire one from the slot pool"
            )
        if resident.epoch == 0:
            raise InvalidArgumentError(f"slot {resident.slot} has epoch 0, which is never live; acquire the slot")
        if resident.slot in self._occupied:
            raise InvalidArgumentError(f"slot {resident.slot} is occupied by a live sequence; release it first")

    def occupy(self, impl: Impl, resident: ResidentRef) -> None:
        """Remember who holds a slot until compaction, retraction or the end of the request."""
        self._occupied[resident.slot] = impl

    def _forget_residents(self, impl: Impl) -> None:
        for sequence in impl.sequences:
            self._occupied.pop(sequence.resident.slot, None)
        self._live.pop(id(impl), None)

    def _paired(self, speculative_request: bool) -> bool:
        return speculative_request and self.profile.owns_paged_spec_state

    def _impl(self, request: RequestHandle) -> Impl:
        impl = request.impl
        if impl.owner is not self:
            raise ContractViolation("the request belongs to another coordinator; use the one that began it")
        return impl

    def _require_executing(self, request: RequestHandle, call: str) -> Impl:
        impl = self._impl(request)
        if not impl.executing():
            raise ContractViolation(f"{call} needs an executing request; this one is {impl.phase.value}")
        return impl

    def _require_settled(self, request: RequestHandle, call: str) -> Impl:
        impl = self._require_executing(request, call)
        if impl.has_pending_device_work():
            raise ContractViolation(f"{call} needs a settled request; complete the step before")
        self._require_no_compaction(impl, call)
        return impl

    def _require_pending(self, impl: Impl, call: str) -> None:
        if not impl.has_pending_device_work():
            raise ContractViolation(f"{call} completes enqueued work, and none is pending; prepare the step first")

    def _require_no_compaction(self, impl: Impl, call: str) -> None:
        if impl.compaction_outstanding():
            raise ContractViolation(f"{call} while a compaction is outstanding; call compact_batch first")


def _complete_ledger(
    impl: Impl,
    advances: Sequence[ContextCacheSequenceAdvance] | None,
    committed_before: npt.NDArray[np.int64] | None,
) -> bool:
    """Apply what a policy hook left out of a step; whether there was something."""
    if advances is None or committed_before is None:
        return False
    return apply_missing_advances(impl, advances, committed_before) > 0


def _upload_mapping(mapping: list[int], device_batch_mapping: Any) -> None:
    import torch

    host = torch.from_numpy(np.asarray(mapping, dtype=np.int32))
    device_batch_mapping[: len(mapping)].copy_(host)
