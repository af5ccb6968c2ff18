"""Calling policy hooks.  Policies are plugins: a fault is charged to the sequences it is about, and to nobody else.

A hook that raises, answers nonsense, leaves its step incomplete, forgets what it armed, or claims a device failure
that did not happen is *faulty*: the sequences it was called for go on unpublished, and the request gets a new policy
object.  A hook that takes longer than the deadline, not counting its waits for the device, is counted; the third time
switches publication off as well, and only that is a warning: a busy machine makes any hook slow now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from edgellm.cache import snapshots
from edgellm.cache.advances import participants, took_part
from edgellm.cache.policy import LedgerOnlyPolicy, PublicationPolicy
from edgellm.cache.policy_step import LedgerAtRest, PolicyStep, mend_chains, prove_prompts, prove_step, settle_ledger
from edgellm.cache.types import ContextCacheCoordinatorStatus
from edgellm.errors import FOREIGN_ERRORS, BrokenInvariantError, PluginError
from edgellm.foreign import describe_error
from edgellm.log import get_logger
from edgellm.plugin_guard import build_policy
from edgellm.plugins import choose_policy

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import BoundaryCall, Impl, RequestHandle
    from edgellm.cache.types import ContextCacheSequenceAdvance

logger = get_logger(__name__)

Status = ContextCacheCoordinatorStatus
OVERRUNS_ALLOWED = 2


Hook = Callable[[PublicationPolicy], Any]


def call_slot_hook(coordinator: ContextCacheCoordinator, request: RequestHandle, slot: int, hook: Hook) -> Status:
    """`on_prefill_chunk` and `on_sequence_finalized`: about one sequence, no answer."""
    call = _Call(coordinator, request.impl, hook, answers=False, slots=lambda: [slot], own_slot=slot)
    return call.run(lambda: [slot] if _is_staged(request.impl, slot) else [])


def call_boundary_hook(
    coordinator: ContextCacheCoordinator, request: RequestHandle, asked: BoundaryCall, hook: Hook
) -> Status:
    """The two MTP hooks: about one sequence, with an answer.  The policy may do what was asked for, or nothing."""
    impl, slot = request.impl, asked.slot
    call = _Call(coordinator, impl, hook, answers=True, slots=lambda: [slot], own_slot=slot)
    impl.boundary_call = asked
    try:
        return call.run(list)
    finally:
        impl.boundary_call = None


def call_terminalize(coordinator: ContextCacheCoordinator, request: RequestHandle) -> Status:
    """`on_terminalize`: afterwards nothing is staged or frozen."""
    impl = request.impl

    def armed() -> list[int]:
        return [slot for slot in range(len(impl.sequences)) if _is_staged(impl, slot) or _is_frozen(impl, slot)]

    waiting = armed()
    return _Call(
        coordinator, impl, lambda policy: policy.on_terminalize(request), answers=True, slots=lambda: waiting
    ).run(armed)


def call_prefill_finalized(
    coordinator: ContextCacheCoordinator,
    request: RequestHandle,
    advances: Sequence[ContextCacheSequenceAdvance],
    hook: Hook,
    common_state_lengths: Sequence[int] | None,
) -> Status:
    """`on_prefill_finalized`: applies the advances; only a speculative batch stays pending, for its first round."""
    impl = request.impl
    call = _Call(coordinator, impl, hook, answers=False, slots=lambda: participants(advances))
    call.step = PolicyStep(impl, advances)
    prove_prompts(impl, call.step, common_state_lengths)

    def forgotten() -> list[int]:
        awaiting = impl.awaiting_first_spec_completion()
        return [
            slot
            for slot in range(len(impl.sequences))
            if _is_staged(impl, slot) or (_is_frozen(impl, slot) and not awaiting)
        ]

    return call.run(forgotten)


def call_decode_completed(
    coordinator: ContextCacheCoordinator,
    request: RequestHandle,
    advances: Sequence[ContextCacheSequenceAdvance],
    hook: Hook,
    common_state_lengths: Sequence[int] | None,
) -> Status:
    """`on_decode_completed`: applies the advances and ends resolved."""
    impl = request.impl
    call = _Call(coordinator, impl, hook, answers=True, slots=lambda: participants(advances))
    call.step = PolicyStep(impl, advances)
    prove_step(impl, call.step, common_state_lengths)

    def forgotten() -> list[int]:
        if not impl.speculative_request and not coordinator.profile.uses_checkpoint_reuse:
            return []
        return [
            slot
            for slot, sequence in enumerate(impl.sequences)
            if (_is_staged(impl, slot) and sequence.finalized)
            or (_is_frozen(impl, slot) and (not sequence.joined or took_part(advances, slot)))
        ]

    return call.run(forgotten)


def _is_staged(impl: Impl, slot: int) -> bool:
    return impl.sequences[slot].staged_hybrid_publication is not None


def _is_frozen(impl: Impl, slot: int) -> bool:
    return impl.sequences[slot].frozen_spec_prefill_length is not None


class _Call:
    """One call of one hook: run, settle, judge, charge.

    `slots` names the sequences the hook is about, and is asked only when something is to be charged.  `own_slot` is the
    one that a hook about one sequence is called for.
    """

    __slots__ = ("answers", "coordinator", "hook", "impl", "own_slot", "slots", "step")

    def __init__(
        self,
        coordinator: ContextCacheCoordinator,
        impl: Impl,
        hook: Hook,
        *,
        answers: bool,
        slots: Callable[[], Sequence[int]],
        own_slot: int | None = None,
    ) -> None:
        self.coordinator = coordinator
        self.impl = impl
        self.hook = hook
        self.answers = answers
        self.slots = slots
        self.own_slot = own_slot
        self.step: PolicyStep | None = None

    def run(self, forgotten: Callable[[], list[int]]) -> Status:
        """The status for the caller.  `forgotten` says which sequences still have something armed that must not be."""
        coordinator, impl, step = self.coordinator, self.impl, self.step
        policy = self._policy()
        if policy is None:
            return Status.OK
        failed_waits = coordinator._quarantine.failed_waits
        rest = None if step is not None else LedgerAtRest(impl)
        work = impl.work_state()
        impl.step, impl.hook_slot = step, self.own_slot
        try:
            status, fault, elapsed = timed(coordinator, impl, policy, self.hook)
        finally:
            impl.step = impl.hook_slot = None
        behind = settle_ledger(impl, step) if step is not None else []
        if rest is not None:
            behind = rest.restore(impl)
        if coordinator._quarantine.failed_waits != failed_waits:
            if impl.executing():
                impl.mark_device_work_enqueued()  # also at rest: the drain of the request decides
            return Status.POISONED
        if self.own_slot is not None:
            impl.restore_work_state(work)
        charge_time(coordinator, impl, self.slots, elapsed)
        if fault is None:
            fault = self._judge(status, behind)
        left = forgotten()
        if fault is None and not left:
            return status if self.answers else Status.OK
        mend_chains(impl)
        charged = left if fault is None else sorted({*self.slots(), *left}) or _charged_for_nobody(impl)
        return _switch_policy(coordinator, impl, charged, fault or "it forgot to publish what it armed", step)

    def _policy(self) -> PublicationPolicy | None:
        """Whom to call: the policy, unless everybody the hook is about is silenced.

        Then a step is carried out without the policy, and any other hook is not called at all.
        """
        silenced = self.impl.lengths.silenced[: self.impl.lengths.size]
        if not silenced.any():
            return self.impl.policy
        about = list(self.slots())
        if not about or not silenced[about].all():
            return self.impl.policy
        return None if self.step is None else LedgerOnlyPolicy(self.coordinator)

    def _judge(self, status: object, behind: Sequence[int]) -> str | None:
        """What is wrong with a hook that returned, or None."""
        if not self.answers and status is not None:
            return f"it returned {status!r} where nothing is asked for"
        if self.answers and not isinstance(status, Status):
            return f"it returned {status!r}; a ContextCacheCoordinatorStatus is needed"
        if status is Status.POISONED:
            return "it claims a device failure, and no wait failed"
        if behind:
            return f"it moved the ledger of slots {list(behind)} otherwise than the runtime reported"
        if status is Status.REQUEST_FAILED:
            return "it gave the request up"
        return None if self.step is None else self._judge_work()

    def _judge_work(self) -> str | None:
        """A step ends resolved; only the prompts of a speculative batch stay pending, for their first round."""
        pending, awaiting, _ = self.impl.work_state()
        if awaiting and (self.answers or not pending or not self.impl.speculative_request):
            return "it awaits a draft initialisation, and none is under way"
        return "it left its step pending" if pending and not awaiting else None


def timed(
    coordinator: ContextCacheCoordinator, impl: Impl, policy: PublicationPolicy, hook: Hook
) -> tuple[Any, str | None, int]:
    """What the hook answered, what it raised, and how long it took (nanoseconds) without its waits for the device.

    An invariant error that edgellm raised is ours, not the plugin's: it propagates.
    """
    quarantine = coordinator._quarantine
    started = time.perf_counter_ns() - quarantine.waited_ns
    coordinator.hook_request = impl
    try:
        status = hook(policy)
    except FOREIGN_ERRORS as error:
        if isinstance(error, BrokenInvariantError) and _is_ours(error):
            raise
        logger.exception("publication policy %s raised", name_of(policy))
        return None, describe_error(error), time.perf_counter_ns() - quarantine.waited_ns - started
    finally:
        coordinator.hook_request = None
    return status, None, time.perf_counter_ns() - quarantine.waited_ns - started


def _is_ours(error: BaseException) -> bool:
    """Whether the error was raised in edgellm's own code, not in the plugin's."""
    frame = error.__traceback__
    if frame is None:
        return False
    while frame.tb_next is not None:
        frame = frame.tb_next
    return str(frame.tb_frame.f_globals.get("__name__", "")).split(".")[0] == "edgellm"


def name_of(policy: PublicationPolicy) -> str:
    """For messages; a name is a plugin's code too."""
    try:
        return repr(policy.name)
    except FOREIGN_ERRORS:
        return type(policy).__name__


def charge_time(
    coordinator: ContextCacheCoordinator, impl: Impl, slots: Callable[[], Sequence[int]], elapsed_ns: int
) -> None:
    """Count a hook that was too slow; whom it was about the third time goes on unpublished."""
    counters, deadline = coordinator.counters, coordinator.config.policy_deadline_seconds
    if deadline is None or elapsed_ns <= deadline * 1e9:
        return
    counters.policy_deadline_overruns += 1
    counters.slowest_policy_nanoseconds = max(counters.slowest_policy_nanoseconds, elapsed_ns)
    name, taken = name_of(impl.policy), elapsed_ns / 1e6
    logger.info("publication policy %s took %.1f ms, the deadline is %.1f", name, taken, deadline * 1e3)
    for slot in slots() or _charged_for_nobody(impl):
        sequence = impl.sequences[slot]
        sequence.policy_overruns += 1
        if sequence.policy_overruns > OVERRUNS_ALLOWED and impl.lengths.publishes[slot]:
            _warn_too_slow(impl, slot, deadline, taken)
            switch_off(coordinator, impl, slot)


def _warn_too_slow(impl: Impl, slot: int, deadline: float, taken: float) -> None:
    logger.warning(
        "publication policy %s was slower than its deadline of %.1f ms for the third time (%.1f ms): the sequence in "
        "slot %d (a prompt of %d tokens) goes on, but its state is kept for no later prompt; make its hooks faster, or "
        "raise policy_deadline_seconds; on a machine that is merely busy, run less beside it",
        name_of(impl.policy),
        deadline * 1e3,
        taken,
        slot,
        int(impl.lengths.prompt[slot]),
    )


def _charged_for_nobody(impl: Impl) -> Sequence[int]:
    """Whom a policy's faults and delays in hooks about nobody are charged to: the third time, everybody there."""
    impl.faults_about_nobody += 1
    return range(len(impl.sequences)) if impl.faults_about_nobody > OVERRUNS_ALLOWED else ()


def _switch_policy(
    coordinator: ContextCacheCoordinator, impl: Impl, slots: Sequence[int], fault: str, step: PolicyStep | None
) -> Status:
    """Charge a fault: publication off for `slots`, a new policy object for the others; a batch request ends."""
    logger.error("publication policy %s is at fault (slots %s): %s", name_of(impl.policy), list(slots), fault)
    coordinator.counters.policy_failures += 1
    for slot in slots:
        switch_off(coordinator, impl, slot)
    if impl.is_container:
        if step is not None:
            impl.mark_device_work_resolved_without_sync()
            impl.end_spec_draft_init()
        renew_policy(coordinator, impl)
        return Status.OK
    if step is not None and not impl.speculative_request:
        impl.mark_device_work_resolved_without_sync()  # a speculative batch is drained instead: its draft may run
    impl.mark_finishing()
    return Status.REQUEST_FAILED


def switch_off(coordinator: ContextCacheCoordinator, impl: Impl, slot: int) -> None:
    """A sequence publishes nothing from here on; what was armed for it is given up."""
    sequence, lengths = impl.sequences[slot], impl.lengths
    lengths.silenced[slot] = True
    lengths.publishes[slot] = lengths.publishes_generated[slot] = False
    sequence.frozen_spec_prefill_length = None
    snapshots.drop_staged(coordinator, sequence)


def renew_policy(coordinator: ContextCacheCoordinator, impl: Impl) -> None:
    """A new policy object in place of one that was at fault; without one nothing is published."""
    try:
        chosen = choose_policy(coordinator.registrations, coordinator.profile, impl.speculative_request)
        impl.publication_policy = build_policy(chosen, coordinator)
    except PluginError:
        logger.exception("the publication policy could not be built again; nothing is published")
        impl.publication_policy = LedgerOnlyPolicy(coordinator)
