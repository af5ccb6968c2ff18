"""`ContextCacheCoordinator`: the lifecycle of requests around the host-only cache manager.

It decides when rows are bound, when state may be published, and when pages may go back.  It has no
thread: every call comes from the caller's thread and the caller serialises them.  Leases of several
requests may overlap in time, and page-table rows belong to resident slots, so they never collide.

Order inside every call: handle and phase, then all arguments, then mutation.  A call that raises a
`CallerError` left everything as it was and may be repeated with correct arguments.

This class checks who may call what when; what a call does is in the module named after its stage: `acquire`,
`joining`, `prefill`, `decode`, `compaction`, `ending`, and `snapshots`, `boundary` for checkpoint deployments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgellm._core.cache_manager import ContextCacheManager
from edgellm.cache import (
    acquire,
    boundary,
    compaction,
    decode,
    ending,
    joining,
    policy_calls,
    prefill,
    rebind,
)
from edgellm.cache import admission as admitting
from edgellm.cache.binding import PageTableMirror, RowBinder, Rows, draft_pages
from edgellm.cache.deployment import check_config, check_resources, pool_capacities
from edgellm.cache.manager_view import ManagerView
from edgellm.cache.metrics import ContextCacheMetrics, PoolGauge
from edgellm.cache.quarantine import Quarantine, StreamSynchronizer, synchronize_stream
from edgellm.cache.request import BoundaryCall, Impl, RequestHandle
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
    ResourceType,
)
from edgellm.errors import ContractViolation, InvalidArgumentError, InvariantError, PluginError
from edgellm.log import get_logger
from edgellm.plugin_guard import build_policy
from edgellm.plugins import PolicyRegistration, choose_policy, load_plugins

if TYPE_CHECKING:
    from edgellm.cache.request import SequenceState
    from edgellm.runtime.device import Stream

logger = get_logger(__name__)

Status = ContextCacheCoordinatorStatus


class ContextCacheCoordinator:
    """Owns the host and device lifecycle of every request that uses the context cache.

    Args:
        resources: borrowed physical owners; they must outlive the coordinator.
        stream: the one stream that all work of these requests is ordered on.
        synchronizer: waits for a stream and returns True, or returns False or raises when that failed.
        policies: registered publication policies; None loads the installed plugins.
        mirror, draft_mirror: device copies of the page tables, when the executor keeps them.
        clock: monotonic nanoseconds; times to live are counted on it.
    Raises:
        InvalidArgumentError: geometry of deployment and resources disagrees, or the config has an odd number.
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
        draft_mirror: PageTableMirror | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._active_requests = 0
        check_config(config)
        check_resources(deployment, profile, resources)
        self.config = config
        self.deployment = deployment
        self.profile = profile
        self.resources = resources
        self.stream = stream
        self.page_size = deployment.page_size
        self.clock = clock
        self.expiry_in_use = False
        self.hook_request: Impl | None = None  # whose policy hook runs now
        self.counters = ContextCacheMetrics()
        self.registrations = tuple(load_plugins().policies if policies is None else policies)
        chosen = [choose_policy(self.registrations, profile, kind) for kind in {False, profile.is_speculative}]
        self._quarantine = Quarantine(synchronizer or synchronize_stream)
        base = resources.base_page_table if profile.has_attention else None
        draft = resources.draft_page_table
        self.rows = Rows(
            RowBinder(base, mirror) if base is not None else None,
            RowBinder(draft, draft_mirror, draft_pages) if draft is not None else None,
        )
        self._manager = ContextCacheManager(
            deployment.page_size,
            pool_capacities(deployment, profile, resources),
            max_records=config.max_records,
            base_state_kind=profile.base_state_kind,
            spec_reuse_contract=profile.spec_reuse_contract,
        )
        self._closed = False
        self._has_dropped = False
        self._live: dict[int, Impl] = {}
        self._occupied: dict[int, Impl] = {}
        for registration in chosen:
            build_policy(registration, self)  # a broken factory is found here, not by the first request

    # --- queries -----------------------------------------------------------------------------------------

    @property
    def manager(self) -> ManagerView:
        """The cache manager, for reading."""
        return ManagerView(self._manager)

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
        """Whether sequences may join an executing request on this deployment: all do."""
        return True

    def runs_paired_draft(self, speculative_request: bool) -> bool:
        """Whether such a request has draft pages of its own beside its base pages."""
        return speculative_request and self.profile.owns_paged_spec_state

    def tracks_common(self, speculative_request: bool, *, required: bool = False) -> bool:
        """Whether such a request may (or, `required`, must) say how far base and draft state agree.

        A draft that borrows base state may; one with pages of its own must.  MTP never does: its checkpoints say it.
        """
        if not speculative_request or self.profile.uses_checkpoint_reuse:
            return False
        return self.profile.owns_paged_spec_state or not required

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

    def tell_time(self) -> None:
        """Let what has expired go first from here on; costs nothing while nobody asked for a time to live."""
        if self.expiry_in_use:
            self._manager.set_now(self.clock())

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
        self.refuse_in_hook("begin_request")
        self._collect_dropped()
        if stream is not self.stream:
            raise InvalidArgumentError("begin_request got another stream than the coordinator's; pass that one")
        admitting.check_batch(self, admission)
        admitting.check_headroom(headroom, paired=self.runs_paired_draft(admission.speculative_request))
        if self.poisoned:
            return BeginRequestResult(Status.POISONED)
        impl = self._new_impl(admission)
        try:
            admitted = acquire.acquire_batch(self, impl, admission, headroom)
        except BaseException:
            impl.destroy()
            raise
        if not admitted:
            impl.destroy()
            return BeginRequestResult(Status.REQUEST_FAILED)
        self._live[id(impl)] = impl
        starts = [sequence.reuse_token_length for sequence in impl.sequences]
        reports = [sequence.reuse_report for sequence in impl.sequences]
        return BeginRequestResult(Status.OK, AdmissionResult(RequestHandle(impl), starts, reports))

    def _new_impl(self, admission: ContextCacheBatchAdmission) -> Impl:
        chosen = choose_policy(self.registrations, self.profile, admission.speculative_request)
        policy = build_policy(chosen, self)
        impl = Impl(self, self.stream, self.deployment.max_batch_size)
        impl.publication_policy = policy
        impl.speculative_request = admission.speculative_request
        impl.tracks_common = self.tracks_common(admission.speculative_request)
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
        draft_reserve_pages: int = 0,
    ) -> AdmitSequenceResult:
        """Join one more sequence to an executing request: look up, lease, bind exactly its rows.

        The copies that put it at its prefill start (an unfilled page, a recurrent checkpoint) are enqueued here.  The
        length ledger is not advanced before `advance_prefill` or `finalize_sequence_admission`; until the latter the
        joiner is a ghost and holds in every decode step.  Policies are the joiner's own where it has them.

        Args:
            reserve_pages: pages that must stay free or evictable behind the lease (promised to others).
            draft_reserve_pages: draft pages, likewise; of no meaning without a paired draft.
        Returns:
            OK; POISONED; or REQUEST_FAILED, with `insufficient_capacity` when a retry may succeed later
            (without it the sequence needs more pages than the pool has).
        Raises:
            CallerError: wrong arguments or state.  Nothing was changed.
        """
        self._collect_dropped()
        impl = self._require_settled(request, "admit_sequence")
        return joining.admit_sequence(self, impl, admission, headroom, reserve_pages, draft_reserve_pages)

    def finalize_sequence_admission(
        self,
        request: RequestHandle,
        slot: int,
        advance: ContextCacheSequenceAdvance,
        common_state_length: int | None = None,
    ) -> Status:
        """The prompt of a joined sequence is complete: record its look-ahead token and publish its endpoint.

        Args:
            common_state_length: how far its draft state reaches once the enqueued draft work is done; None is the
                whole prompt.  It is frozen and published by the first decode step it takes part in.
        Raises:
            CallerError: the advance is not one token with the whole prompt committed.  Nothing was changed.
        """
        impl = self._require_executing(request, "finalize_sequence_admission")
        self._require_no_compaction(impl, "finalize_sequence_admission")
        return joining.finalize_sequence_admission(self, request, slot, advance, common_state_length)

    def retract_sequence_admission(self, request: RequestHandle) -> bool:
        """Undo the most recent `admit_sequence`, while the runtime has no slot for it yet.  Never raises.

        False means the coordinator is poisoned: there was nothing to retract, or clearing the row failed.
        """
        self.refuse_in_hook("retract_sequence_admission")
        return joining.retract_sequence_admission(self, request)

    # --- prefill -----------------------------------------------------------------------------------------

    def prepare_prefill(self, request: RequestHandle) -> Status:
        """Bind every row of an admitted batch and put its state at the reuse boundaries.

        From here an unfinished request must be drained.
        """
        impl = self._impl(request)
        if not impl.admitted() or impl.has_pending_device_work():
            raise ContractViolation(f"prepare_prefill needs an admitted request; this one is {impl.phase.value}")
        prefill.prepare_prefill(self, impl)
        return Status.OK

    def checkpoint_boundaries(self, request: RequestHandle, slot: int) -> tuple[int, ...]:
        """Prompt lengths at which chunks of `slot` should end, ascending: its policy keeps a checkpoint there.

        Those behind the committed length are gone; empty where no checkpoints exist.
        """
        impl = request.impl
        committed = request.sequence(slot).committed_state_length
        return tuple(length for length in impl.sequences[slot].wanted_checkpoints if length > committed)

    def enqueue_prefill_captures(
        self,
        request: RequestHandle,
        slots: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Status:
        """Reserve and enqueue checkpoints, after the forward and before the runtime's own wait.

        Args:
            slots, lengths: the sequences whose chunk ends at a length worth keeping; without them every prompt ends
                that has not ended before.
        A no-op where no checkpoints exist or the request is speculative (see `publish_hybrid_mtp_endpoint`).  Short
        snapshot pools are counted and skipped.

        Raises:
            CallerError: nothing is pending, or a chunk end is out of range.
        """
        impl = self._require_executing(request, "enqueue_prefill_captures")
        self._require_pending(impl, "enqueue_prefill_captures")
        self._require_no_compaction(impl, "enqueue_prefill_captures")
        prefill.enqueue_captures(self, impl, slots, lengths)
        return Status.OK

    def rebind_prefill(self, request: RequestHandle, slot: int) -> int:
        """Look again before the next chunk, and take over state that another sequence published meanwhile.

        This is how identical prompts in flight share one producer.  Only while the prompt of `slot` is
        incomplete and nothing is pending; never waits, never evicts.

        Returns:
            The committed length: where the next chunk begins.
        """
        impl = self._require_settled(request, "rebind_prefill")
        if request.sequence(slot).finalized:
            raise ContractViolation(f"the prompt of slot {slot} is complete; rebind_prefill serves incomplete prompts")
        return rebind.rebind_prefill(self, impl, slot)

    def advance_prefill(
        self, request: RequestHandle, slot: int, committed: int, common_state_length: int | None = None
    ) -> Status:
        """A prompt chunk ran and was waited for: move the committed length without a token, publish what it completed.

        Args:
            common_state_length: with a paired draft, how far draft state exists as well; None leaves it.
        Raises:
            CallerError: the prompt is complete already, or a length goes back or past it.  Nothing was changed.
        """
        impl = self._require_executing(request, "advance_prefill")
        self._require_no_compaction(impl, "advance_prefill")
        return prefill.advance_prefill(self, request, slot, committed, common_state_length)

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
        self._require_no_compaction(impl, "finalize_prefill_publication")
        return prefill.finalize_prefill(self, request, advances, common_state_lengths)

    # --- hybrid with MTP ----------------------------------------------------------------------------------

    def publish_hybrid_mtp_endpoint(
        self,
        request: RequestHandle,
        slot: int,
        resident_state_length: int,
        base_hidden_states: Any,
        boundary_hidden_row: int,
    ) -> Status:
        """Publish one hybrid MTP checkpoint at the stable predecessor boundary; waits for the stream once.

        Raises:
            PluginError: the deployment is no hybrid MTP one.
            CallerError: slot, length or row is out of range.  Nothing was changed.
        """
        self._require_hybrid_mtp("publish_hybrid_mtp_endpoint")
        impl = self._require_executing(request, "publish_hybrid_mtp_endpoint")
        boundary.check_boundary(impl, slot, resident_state_length, boundary_hidden_row)
        call = BoundaryCall(slot, resident_state_length, base_hidden_states, boundary_hidden_row)
        return policy_calls.call_boundary_hook(
            self,
            request,
            call,
            lambda policy: policy.publish_mtp_boundary(
                request, slot, resident_state_length, base_hidden_states, boundary_hidden_row
            ),
        )

    def restore_hybrid_mtp_boundary_hidden(
        self, request: RequestHandle, slot: int, base_hidden_states: Any, destination_row: int
    ) -> Status:
        """Restore the saved boundary hidden row; the caller orders it in its prefill stream.

        The row is restored whatever the policy does: the text depends on it.

        Raises:
            PluginError: the deployment is no hybrid MTP one.
            CallerError: no checkpoint is bound to the sequence, or the row is negative.
        """
        self._require_hybrid_mtp("restore_hybrid_mtp_boundary_hidden")
        self._require_executing(request, "restore_hybrid_mtp_boundary_hidden")
        sequence = request.sequence(slot)
        boundary.check_restorable(sequence, destination_row)
        sequence.boundary_restored, saved_in = False, sequence.lease.recurrent_snapshot_slot
        status = policy_calls.call_boundary_hook(
            self,
            request,
            BoundaryCall(slot, None, base_hidden_states, destination_row),
            lambda policy: policy.restore_mtp_boundary(request, slot, base_hidden_states, destination_row),
        )
        if not sequence.boundary_restored:  # a policy that unpinned the checkpoint gave it to nobody yet
            boundary.copy_hidden_row(self, saved_in, base_hidden_states[slot], destination_row)
        return status

    def _require_hybrid_mtp(self, call: str) -> None:
        if self.profile.is_hybrid and self.profile.owns_paged_spec_state:
            return
        speculative = "speculative" if self.profile.is_speculative else "not speculative"
        raise PluginError(
            f"{call} is for hybrid MTP deployments; this one is {self.profile.base_state_kind.value} and "
            f"{speculative}: deploy such a model with edgellm-hybrid installed"
        )

    # --- decode ------------------------------------------------------------------------------------------

    def prepare_decode_step(
        self,
        request: RequestHandle,
        headroom: DecodingKvHeadroom,
        slots: Sequence[int] | None = None,
        ahead: Sequence[int] = (),
    ) -> Status:
        """Grow and upload every row that the next step writes beyond its pages.

        Args:
            slots: the sequences that take part (execution order); None means all that have not ended.  An empty list
                is right for a step of prompt chunks only: their pages are leased, and the work is marked as pending.
            ahead: participants that get the page of one token more where there is one: the step behind the next one is
                enqueued early.  Those that get none are not refused.
        Returns:
            OK, or REQUEST_FAILED when one sequence can get no page (or its row is full).  Then
            `request.refused_slot` names it, the request stays executing and settled, and earlier growth
            stays with its leases: retire or preempt a sequence by compaction, then prepare again.
        """
        if self._has_dropped:
            self._collect_dropped()
        impl = self._require_executing(request, "prepare_decode_step")
        if impl.has_pending_device_work() and not impl.awaiting_first_spec_completion():
            raise ContractViolation("prepare_decode_step needs a settled request; complete the step before")
        self._require_no_compaction(impl, "prepare_decode_step")
        return decode.prepare_step(self, impl, headroom, slots, ahead)

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
            publishable_completed_slots: sequences that ended normally in this step (never cancelled or failed
                ones).  They take part in nothing more until they are compacted away.
            common_state_lengths: with draft state, how far base and draft agree after this step; -1 holds one.
        Raises:
            CallerError: an entry is wrong.  Nothing was changed; repeat with correct ones.
        """
        impl = self._require_executing(request, "complete_decode_step")
        self._require_pending(impl, "complete_decode_step")
        self._require_no_compaction(impl, "complete_decode_step")
        return decode.complete_step(self, request, advances, publishable_completed_slots, common_state_lengths)

    # --- compaction --------------------------------------------------------------------------------------

    def begin_batch_compaction(
        self, request: RequestHandle, old_to_new: Sequence[int], new_batch_size: int, device_batch_mapping: Any = None
    ) -> Status:
        """Check and remember the one authoritative old-to-new mapping, before any slot is retired.

        What only waited for the stream (a frozen speculative prefill) is waited for and published first.

        Args:
            old_to_new: one entry per sequence; -1 retires, survivors are dense and keep their order.
            device_batch_mapping: (>= N,) int32 device tensor that receives the mapping, where one exists.
        Raises:
            CallerError: a wrong mapping, pending work, or a compaction already begun.  Nothing was changed.
        """
        impl = self._require_executing(request, "begin_batch_compaction")
        self._require_no_compaction(impl, "begin_batch_compaction")
        return compaction.begin(self, request, old_to_new, new_batch_size, device_batch_mapping)

    def compact_batch(self, request: RequestHandle) -> Status:
        """Retire sequences by the remembered mapping; survivors' physical rows are not touched.

        Waits for the stream, because retired leases go back.  A failed wait is POISONED and the whole
        request is quarantined (the handle becomes empty).
        """
        impl = self._require_executing(request, "compact_batch")
        self._require_pending(impl, "compact_batch")
        if not impl.compaction_outstanding():
            raise ContractViolation("compact_batch without begin_batch_compaction; begin it first")
        return compaction.compact(self, request)

    # --- ending ------------------------------------------------------------------------------------------

    def finish(self, request: RequestHandle) -> Status:
        """End a request normally: wait for its stream, then give its leases back.  Idempotent.

        Publishes nothing but a frozen speculative prefill.  A failed wait is POISONED and quarantines the request.
        """
        if not request.valid():
            return Status.OK
        self._impl(request)
        self.refuse_in_hook("finish")
        return ending.finish(self, request)

    def _abandon(self, impl: Impl) -> None:
        ending.abandon(self, impl)

    def shutdown(self) -> Status:
        """Drain quarantined requests before physical resources go.  Never raises; may be repeated.

        Returns:
            POISONED while a drain fails, REQUEST_FAILED while requests are live, else OK.
        """
        self.refuse_in_hook("shutdown")
        self._collect_dropped()
        return ending.shutdown(self)

    def recover(self) -> bool:
        """Admit again after poison, once every stream is proven idle; quarantined requests are released.

        False when a stream cannot be drained; the poison stays.
        """
        self.refuse_in_hook("recover")
        self._collect_dropped()
        return ending.recover(self)

    def close(self) -> None:
        """End of life.  Raises BrokenInvariantError with live or quarantined requests: end them first."""
        self.refuse_in_hook("close")
        if self._closed:
            return
        self._collect_dropped()
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

    def _collect_dropped(self) -> None:
        if self._has_dropped:
            ending.collect_dropped(self)

    def let_go(self, sequence: SequenceState) -> None:
        """Give one sequence's lease back; see `acquire.let_go`."""
        acquire.let_go(self, sequence)

    def _forget_residents(self, impl: Impl) -> None:
        for sequence in impl.sequences:
            self._occupied.pop(sequence.resident.slot, None)
        self._live.pop(id(impl), None)

    def refuse_in_hook(self, call: str) -> None:
        """A policy publishes through its helpers; it does not drive the coordinator that calls it."""
        if self.hook_request is not None:
            raise ContractViolation(f"{call} was called from a policy hook; a policy uses its own helpers only")

    def _impl(self, request: RequestHandle) -> Impl:
        self.refuse_in_hook("the coordinator")
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
