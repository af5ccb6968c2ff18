"""The watch around a policy under test: every hook, every publication and every wait passes through it.

A `Watch` stands in three places of a coordinator: its policy factory returns a `WatchedPolicy`, its stream wait is
wrapped, and its manager is replaced by a `ManagerSpy`.  None of them changes what happens; all of them write into
one `Journal`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from edgellm.cache.advances import OneTokenAdvances, is_hold
from edgellm.cache.policy import CheckpointContext, PublicationPolicy
from edgellm.cache.types import (
    HOLD_COMMITTED_STATE_LENGTH,
    ContextCacheCoordinatorStatus,
    ContextCacheSequenceAdvance,
)
from edgellm.errors import FOREIGN_ERRORS
from edgellm.foreign import describe_error
from edgellm.testing.conformance_journal import Journal, Promise, SequenceTruth

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl, RequestHandle, SequenceState
    from edgellm.runtime.device import Stream

Status = ContextCacheCoordinatorStatus


class Watch:
    """One watched run.

    Args:
        journal: where truths and findings go.
        paired_draft: draft state has pages of its own: it may trail the base, and the prompt's is complete only after
            the first verification round.
        probe: called at every hook boundary, wait and publication: a lookup by somebody else.
    """

    def __init__(self, journal: Journal, *, paired_draft: bool, probe: Callable[[], None]) -> None:
        self.journal = journal
        self.probe = probe
        self._paired_draft = paired_draft
        self._impl: Impl | None = None
        self._unsynchronized_captures: set[int] = set()
        self._wait_failed = False

    # --- the three places --------------------------------------------------------------------------------

    def factory(self, build: Callable[[ContextCacheCoordinator], PublicationPolicy]) -> Callable[..., Any]:
        """A policy factory that returns watched policies."""
        return lambda coordinator: WatchedPolicy(coordinator, build(coordinator), self)

    def _watched_wait(self, wait: Callable[[Stream], bool]) -> Callable[[Stream], bool]:
        def watched(stream: Stream) -> bool:
            self._wait_failed = True
            done = wait(stream)
            if done is not False:
                self._wait_failed = False
                self._unsynchronized_captures.clear()
                self._prove_everything()
            return done

        return watched

    def spy_on(self, coordinator: ContextCacheCoordinator) -> None:
        """Let every publication and every wait of a coordinator pass through the watch."""
        vars(coordinator)["_manager"] = ManagerSpy(coordinator._manager, self)
        quarantine = coordinator._quarantine
        vars(quarantine)["_synchronizer"] = self._watched_wait(quarantine._synchronizer)

    # --- around a hook -----------------------------------------------------------------------------------

    @contextmanager
    def hook(self, name: str, request: RequestHandle, slots: Sequence[int]) -> Iterator[None]:
        """Watch one hook call about `slots`: probes on both sides, what it raises, what it leaves staged."""
        journal, before = self.journal, self.journal.where
        journal.where, self._impl, self._wait_failed = name, request.impl, False
        seen_before = journal.observations
        self.probe()
        try:
            yield
        except FOREIGN_ERRORS as error:
            journal.add(Promise.RAISES_NOTHING, f"it raised {describe_error(error)}")
            raise
        finally:
            self._check_nothing_staged(request.impl, slots)
            self.probe()
            journal.faulty_calls += journal.observations > seen_before
            journal.where, self._impl = before, None

    def call_quiet(self, hook: Callable[..., object], *arguments: object) -> None:
        """Call a hook that returns nothing, and see that it does."""
        answer = hook(*arguments)
        if answer is not None:
            self.journal.add(Promise.RAISES_NOTHING, f"it returned {answer!r}; this hook returns nothing")

    def check_status(self, status: object) -> None:
        """A hook's claim: a status, and POISONED only when a wait failed."""
        if not isinstance(status, Status):
            self.journal.add(
                Promise.RAISES_NOTHING, f"it returned {status!r}; a ContextCacheCoordinatorStatus is needed"
            )
        elif status is Status.POISONED and not self._is_poisoned():
            self.journal.add(Promise.HONEST_STATUS, "it claimed POISONED and no wait for the stream had failed")
        elif status is Status.REQUEST_FAILED:
            self.journal.add(Promise.HONEST_STATUS, "it claimed REQUEST_FAILED; a policy cannot fail a request")

    def _is_poisoned(self) -> bool:
        return self._wait_failed or (self._impl is not None and self._impl.owner.poisoned)

    def _check_nothing_staged(self, impl: Impl, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot < len(impl.sequences) and impl.sequences[slot].staged_hybrid_publication is not None:
                self.journal.add(
                    Promise.NO_LEAK, f"slot {slot}: a reserved checkpoint was neither published nor given back"
                )

    # --- truths ------------------------------------------------------------------------------------------

    def see(self, impl: Impl) -> None:
        """Take down what the coordinator knows before a hook runs: it has completed every earlier step."""
        for slot, sequence in enumerate(impl.sequences):
            truth = self.journal.truth(sequence)
            truth.tokens = [int(token_id) for token_id in sequence.token_ids]
            truth.committed = int(impl.lengths.committed[slot])
            truth.common = int(impl.lengths.common[slot])
            truth.finalized = bool(impl.lengths.finalized[slot])

    def chunk_committed(self, impl: Impl, slot: int) -> None:
        """The coordinator moved the ledger of one prompt by a chunk."""
        self.see(impl)
        truth = self.journal.truth(impl.sequences[slot])
        truth.proven = max(truth.proven, min(truth.committed, truth.common))

    def prompt_finalized(self, impl: Impl, slot: int) -> None:
        """The coordinator moved the ledger of one joiner to the end of its prompt."""
        self.see(impl)
        truth = self.journal.truth(impl.sequences[slot])
        if not self._paired_draft:
            truth.proven = min(truth.committed, truth.common)

    def step_completed(
        self,
        impl: Impl,
        advances: Sequence[ContextCacheSequenceAdvance],
        common: Sequence[int] | None,
        *,
        prefill: bool = False,
    ) -> None:
        """The runtime's report of a step, before the policy applies it."""
        self.see(impl)
        for slot, advance in enumerate(advances):
            truth = self.journal.truth(impl.sequences[slot])
            held = is_hold(advance)
            if not held:
                truth.tokens += [int(token_id) for token_id in advance.accepted_token_ids]
                truth.committed = advance.committed_state_length
            if common is not None and common[slot] != HOLD_COMMITTED_STATE_LENGTH:
                truth.common = int(common[slot])
            elif common is None and not self._paired_draft:
                truth.common = truth.committed
            if not (held or (prefill and self._paired_draft)):
                truth.proven = min(truth.committed, truth.common)

    def _prove_everything(self) -> None:
        """The stream was waited for inside a hook: what base and draft have in common is complete."""
        if self._impl is None:
            return
        for sequence in self._impl.sequences:
            truth = self.journal.truth(sequence)
            truth.proven = max(truth.proven, min(truth.committed, truth.common))

    def check_ledger(self, impl: Impl, *, held: Sequence[bool]) -> None:
        """The ledger of the request says what the journal knows."""
        lengths = impl.lengths
        for slot, hold in enumerate(held):
            truth = self.journal.truth(impl.sequences[slot])
            promise = Promise.HOLDS if hold else Promise.PROGRESS
            tokens = impl.chains[slot].num_tokens
            for what, got, right in (
                ("committed length", int(lengths.committed[slot]), truth.committed),
                ("common length", int(lengths.common[slot]), truth.common),
                ("number of tokens", tokens, len(truth.tokens)),
                ("number of tokens in the ledger", int(lengths.num_tokens[slot]), len(truth.tokens)),
            ):
                if got != right:
                    self.journal.add(promise, f"slot {slot}: {what} is {got} after the hook; {right} is what ran")

    def check_resolved(self, impl: Impl, *, may_await: bool) -> None:
        """The step was marked as resolved (or, with draft state, armed)."""
        if impl.has_pending_device_work() and not (may_await and impl.awaiting_first_spec_completion()):
            self.journal.add(Promise.PROGRESS, "the step's work was not marked as resolved")

    # --- publications ------------------------------------------------------------------------------------

    def publishing(self, call: str, lease: object, length: int, reservation: object) -> None:
        """The manager is asked to publish `length` tokens of a lease."""
        impl = self._impl
        sequence = None if impl is None else _sequence_of(impl, lease)
        if sequence is None:
            self.journal.add(Promise.NOTHING_EARLY, f"{call} was called for a lease that is no sequence of the request")
            return
        truth = self.journal.truth(sequence)
        slot = f"slot {sequence.index}"
        if not truth.publishes:
            self.journal.add(Promise.BYPASS, f"{slot}: {length} tokens were published; the sequence bypasses the cache")
        elif not truth.publishes_generated and length > truth.prompt_length:
            self.journal.add(
                Promise.COMMIT_POLICY, f"{slot}: {length} tokens were published; its prompt has {truth.prompt_length}"
            )
        if length > truth.proven:
            self._add_too_long(slot, truth, length)
        if id(reservation) in self._unsynchronized_captures:
            self.journal.add(Promise.NOTHING_EARLY, f"{slot}: a checkpoint was published, its copy not waited for")

    def _add_too_long(self, slot: str, truth: SequenceTruth, length: int) -> None:
        if not truth.is_at_rest:
            what = f"{slot}: {length} tokens were published when {truth.proven} were complete"
            self.journal.add(Promise.NOTHING_EARLY, what)
            return
        limit = "committed length" if length > truth.committed else "common length"
        what = f"{slot}: {length} tokens were published; the {limit} is {truth.proven}"
        self.journal.add(Promise.NOTHING_BEYOND, what)

    def captured(self, reservation: object) -> None:
        """Copies into a reservation were enqueued inside a hook."""
        if self._impl is not None:
            self._unsynchronized_captures.add(id(reservation))


def _sequence_of(impl: Impl, lease: object) -> SequenceState | None:
    return next((sequence for sequence in impl.sequences if sequence.lease is lease), None)


class ManagerSpy:
    """Stands in for a coordinator's manager; publications and captures are told to the watch first."""

    def __init__(self, manager: Any, watch: Watch) -> None:
        self._spied = manager
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spied, name)

    def publish(self, lease: Any, chain: Any, resident_state_length: int, **options: Any) -> Any:
        self._watch.publishing("publish", lease, resident_state_length, None)
        return self._spied.publish(lease, chain, resident_state_length, **options)

    def publish_spec(self, lease: Any, chain: Any, common_state_length: int, **options: Any) -> Any:
        self._watch.publishing("publish_spec", lease, common_state_length, None)
        return self._spied.publish_spec(lease, chain, common_state_length, **options)

    def publish_hybrid(self, lease: Any, chain: Any, exact_length: int, reservation: Any, **options: Any) -> Any:
        self._watch.publishing("publish_hybrid", lease, exact_length, reservation)
        return self._spied.publish_hybrid(lease, chain, exact_length, reservation, **options)

    def publish_hybrid_mtp(self, lease: Any, chain: Any, exact_length: int, reservation: Any, **options: Any) -> Any:
        self._watch.publishing("publish_hybrid_mtp", lease, exact_length, reservation)
        return self._spied.publish_hybrid_mtp(lease, chain, exact_length, reservation, **options)

    def mark_snapshots_written(self, lease: Any, reservation: Any) -> Any:
        self._watch.captured(reservation)
        return self._spied.mark_snapshots_written(lease, reservation)


class WatchedPolicy(PublicationPolicy):
    """Passes every hook to the policy under test, and looks at the request before and after."""

    def __init__(self, coordinator: ContextCacheCoordinator, inner: PublicationPolicy, watch: Watch) -> None:
        super().__init__(coordinator)
        self.inner = inner
        self._watch = watch

    @property
    def name(self) -> str:
        return self.inner.name

    def on_prefill_finalized(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        common_state_lengths: Sequence[int] | None,
    ) -> None:
        impl, watch = request.impl, self._watch
        watch.step_completed(impl, advances, common_state_lengths, prefill=True)
        with watch.hook("on_prefill_finalized", request, range(len(advances))):
            watch.call_quiet(self.inner.on_prefill_finalized, request, advances, common_state_lengths)
            watch.check_ledger(impl, held=[is_hold(advance) for advance in advances])
            watch.check_resolved(impl, may_await=True)

    def on_decode_completed(
        self,
        request: RequestHandle,
        advances: Sequence[ContextCacheSequenceAdvance],
        publishable_completed_slots: Sequence[int],
        common_state_lengths: Sequence[int] | None,
    ) -> ContextCacheCoordinatorStatus:
        impl, watch = request.impl, self._watch
        readable = _readable(impl, advances)
        held = [is_hold(advance) for advance in readable]
        watch.step_completed(impl, readable, common_state_lengths)
        complete = [slot for slot in range(len(held)) if impl.lengths.finalized[slot]]
        with watch.hook("on_decode_completed", request, complete):
            status = self.inner.on_decode_completed(
                request, advances, publishable_completed_slots, common_state_lengths
            )
            watch.check_status(status)
            watch.check_ledger(impl, held=held)
            watch.check_resolved(impl, may_await=False)
        return status

    def on_prefill_chunk(self, request: RequestHandle, slot: int) -> None:
        self._watch.chunk_committed(request.impl, slot)
        with self._watch.hook("on_prefill_chunk", request, [slot]):
            self._watch.call_quiet(self.inner.on_prefill_chunk, request, slot)
            self._check_untouched(request.impl)

    def on_sequence_finalized(self, request: RequestHandle, slot: int) -> None:
        self._watch.prompt_finalized(request.impl, slot)
        with self._watch.hook("on_sequence_finalized", request, [slot]):
            self._watch.call_quiet(self.inner.on_sequence_finalized, request, slot)
            self._check_untouched(request.impl)

    def _check_untouched(self, impl: Impl) -> None:
        """The ledger moved before the hook, so the hook leaves it alone."""
        self._watch.check_ledger(impl, held=[False] * len(impl.sequences))

    def on_terminalize(self, request: RequestHandle) -> ContextCacheCoordinatorStatus:
        self._watch.see(request.impl)
        with self._watch.hook("on_terminalize", request, range(request.num_sequences)):
            status = self.inner.on_terminalize(request)
            self._watch.check_status(status)
            self._check_untouched(request.impl)
        return status

    def plan_checkpoints(self, context: CheckpointContext) -> Sequence[int]:
        journal, before = self._watch.journal, self._watch.journal.where
        journal.where = "plan_checkpoints"
        try:
            planned = self.inner.plan_checkpoints(context)
        except FOREIGN_ERRORS as error:
            journal.add(Promise.RAISES_NOTHING, f"it raised {describe_error(error)}")
            raise
        finally:
            journal.where = before
        outside = [length for length in planned if not 0 < length <= context.num_tokens]
        if outside:
            self._watch.journal.faulty_calls += 1
            what = f"plan_checkpoints named {outside}; lengths must be in (0, {context.num_tokens}]"
            journal.add(Promise.RAISES_NOTHING, what)
        return planned

    def publish_mtp_boundary(
        self,
        request: RequestHandle,
        slot: int,
        resident_state_length: int,
        base_hidden_states: Any,
        boundary_hidden_row: int,
    ) -> ContextCacheCoordinatorStatus:
        watch = self._watch
        watch.see(request.impl)
        truth = watch.journal.truth(request.impl.sequences[slot])
        truth.proven = max(truth.proven, resident_state_length)
        with watch.hook("publish_mtp_boundary", request, [slot]):
            status = self.inner.publish_mtp_boundary(
                request, slot, resident_state_length, base_hidden_states, boundary_hidden_row
            )
            watch.check_status(status)
        return status

    def restore_mtp_boundary(
        self, request: RequestHandle, slot: int, base_hidden_states: Any, destination_row: int
    ) -> ContextCacheCoordinatorStatus:
        with self._watch.hook("restore_mtp_boundary", request, []):
            status = self.inner.restore_mtp_boundary(request, slot, base_hidden_states, destination_row)
            self._watch.check_status(status)
        return status


def _readable(impl: Impl, advances: Sequence[ContextCacheSequenceAdvance]) -> Sequence[ContextCacheSequenceAdvance]:
    """Advances whose entries can be read one by one."""
    if isinstance(advances, OneTokenAdvances):
        return OneTokenAdvances(advances.token_ids, impl.lengths.committed[: impl.lengths.size].copy())
    return advances
