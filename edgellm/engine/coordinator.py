"""`RequestCoordinator`: which record sits on which resident, and what a step result means for it.

Thread-free and deterministic; the actor is its only user.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.engine.records import TerminalStatus
from edgellm.engine.step_planner import LengthLedger
from edgellm.errors import ContractViolation
from edgellm.log import get_logger
from edgellm.session._decode_lane import advance_mirror
from edgellm.session._ledger import with_prompt_left
from edgellm.session._step_plan import StepPlan
from edgellm.session.types import FinishReason, SequenceIdentity, SequenceWork

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from edgellm.engine.metrics import EngineMetrics
    from edgellm.engine.records import RequestRecord
    from edgellm.request import LLMGenerationRequest, LLMGenerationResponse
    from edgellm.session.base import RuntimeSession
    from edgellm.session.types import (
        AdmissionResult,
        BatchResult,
        ResidentRef,
        ScheduledSequenceDescriptor,
        StepResult,
    )


_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request's end is, ready to be published.

    `response` is the answer; of a request that did not complete, what it had generated, or None.
    """

    record: RequestRecord
    status: TerminalStatus
    message: str = ""
    response: LLMGenerationResponse | None = None


@dataclass(slots=True)
class Seat:
    """One resident as the engine knows it."""

    record: RequestRecord
    request: LLMGenerationRequest
    lengths: LengthLedger


class RequestCoordinator:
    """The table of residents, in resident order, with the engine's mirror of their lengths."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._seats: dict[int, Seat] = {}
        self._lengths: list[LengthLedger] = []
        self._without_token: set[int] = set()  # slots; spares decode steps the search for first tokens

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def lengths(self) -> list[LengthLedger]:
        """Length ledgers of all residents in resident order; read-only."""
        return self._lengths

    def requests(self) -> list[LLMGenerationRequest]:
        return [seat.request for seat in self._seats.values()]

    def seats(self) -> list[Seat]:
        """All seats in resident order."""
        return [self._seats[lengths.identity.resident.slot] for lengths in self._lengths]

    def add(
        self, record: RequestRecord, request: LLMGenerationRequest, admission: AdmissionResult, *, exclusive: bool
    ) -> None:
        """Seat an admitted record at the end of the resident order.

        Raises:
            ContractViolation: the slot is taken, or the admission's lengths are impossible.
        """
        ref, start, end = admission.ref, admission.prefill_start, admission.prompt_length
        if ref.epoch == 0 or ref.slot in self._seats:
            raise ContractViolation(f"request {record.id} was admitted as {ref}, which is invalid or already seated")
        if not 0 <= start < end:
            raise ContractViolation(
                f"request {record.id} was admitted with context work [{start}, {end}); at least one token must be left"
            )
        lengths = LengthLedger(
            identity=SequenceIdentity(record.id, ref),
            arrival=record.arrival,
            priority=record.priority,
            committed=start,
            prompt_remaining=end - start,
            exclusive=exclusive,
            cancelled=record.cancelled,
        )
        self._seats[ref.slot] = Seat(record, request, lengths)
        self._lengths.append(lengths)
        if not record.first_token_at:
            self._without_token.add(ref.slot)

    def refresh_cancelled(self) -> None:
        """Copy the records' cancel flags into the lengths that the planner reads."""
        for seat in self._seats.values():
            seat.lengths.cancelled = seat.record.cancelled

    def attach_streams(self, session: RuntimeSession) -> None:
        """Hand streams to residents that got one after their admission; one that fails is filled at the end."""
        for seat in self._seats.values():
            channel = seat.record.channel
            if channel is None or seat.request.stream_channel is not None:
                continue
            seat.request.stream_channel = channel
            try:
                session.attach_stream(seat.lengths.ref, channel)
            except Exception:  # its text so far does not decode, say: no reason to lose the session
                _logger.exception("request %d: its late stream could not be attached", seat.record.id)

    def refresh_next_blocks(self, session: RuntimeSession) -> None:
        """Ask which block each unfinished prompt would compute next, where several are unfinished."""
        unfinished = with_prompt_left(self._lengths)
        for lengths in unfinished:
            lengths.next_block = session.next_block_identity(lengths.ref) if len(unfinished) > 1 else None

    def commit(
        self, result: StepResult, plan: Sequence[ScheduledSequenceDescriptor], session: RuntimeSession
    ) -> list[Outcome]:
        """Apply one step result, in two passes: the first checks and materialises, the second cannot fail.

        Returns:
            The outcomes of the sequences that finished, to be published by the caller.
        Raises:
            ContractViolation: the result contradicts the table.  Nothing was changed; so it is for whatever
                `session.materialize` raises.
        """
        outcomes = [self._outcome(ref, snapshot, session) for ref, snapshot in result.finished]
        if len({ref for ref, _ in result.finished}) != len(outcomes):
            raise ContractViolation(f"step {result.step_id} finished a resident twice: {result.finished}")
        if result.ok:
            first_tokens = self._first_tokens(result)
            execution = result.execution
            if not (isinstance(execution, StepPlan) and advance_mirror(self._lengths, execution)):
                for lengths, committed, consumed in self._advances(execution, plan):
                    lengths.committed = committed
                    lengths.prompt_remaining -= consumed
            for slot, record in first_tokens:
                self._stamp_first_token(slot, record)
            self._count(result)
        if result.finished:
            self._count_drafts(result.finished)
            self._remove(ref.slot for ref, _ in result.finished)
        return outcomes

    def detach(self, seat: Seat) -> None:
        """Take one resident out of the table without an outcome."""
        self._remove([seat.lengths.ref.slot])

    def fail_everything(self, message: str) -> list[Outcome]:
        """Empty the table: every resident failed, or was cancelled before."""
        outcomes = [_lost(seat.record, message) for seat in self.seats()]
        self.clear()
        return outcomes

    def clear(self) -> None:
        """Empty the table; the outcomes are the caller's."""
        self._seats.clear()
        self._lengths = []
        self._without_token.clear()

    # ---- checks (pass 1) ------------------------------------------------------------------------------

    def _seat(self, ref: ResidentRef) -> Seat:
        seat = self._seats.get(ref.slot)
        if seat is None or seat.lengths.identity.resident != ref:
            owner = "nobody" if seat is None else str(seat.lengths.identity)
            raise ContractViolation(f"a step result names {ref}; the engine knows {owner} in slot {ref.slot}")
        return seat

    def _outcome(self, ref: ResidentRef, snapshot: BatchResult, session: RuntimeSession) -> Outcome:
        seat = self._seat(ref)
        record = seat.record
        stops = seat.request.sampling.stop_strings
        if snapshot.terminal_reason is FinishReason.CANCELLED or record.cancelled:
            return Outcome(record, TerminalStatus.CANCELLED, response=_partial(snapshot, stops, session))
        if snapshot.terminal_reason is FinishReason.ERROR:
            message = snapshot.error_message or "the sequence failed"
            return Outcome(record, TerminalStatus.EXECUTION_ERROR, message, _partial(snapshot, stops, session))
        response = session.materialize(snapshot, stops)
        return Outcome(record, TerminalStatus.COMPLETED, response=response)

    def _advances(
        self, execution: Sequence[ScheduledSequenceDescriptor], plan: Sequence[ScheduledSequenceDescriptor]
    ) -> list[tuple[LengthLedger, int, int]]:
        """(lengths, new committed, prompt tokens consumed) per executed descriptor.

        The committed length follows what ran; the prompt is consumed by what was planned, because a step may
        run fewer positions than it was given (pruned media) or accept more (speculation).
        """
        planned: dict[SequenceIdentity, int] | None = None
        advances = []
        for descriptor in execution:
            identity, past = descriptor.identity, descriptor.past_length
            lengths = self._seat(identity.resident).lengths
            if past != lengths.committed:
                raise ContractViolation(f"{identity} ran from {past}, its committed length is {lengths.committed}")
            consumed = 0
            if descriptor.work is SequenceWork.CONTEXT:
                if planned is None:
                    planned = {entry.identity: entry.query_length for entry in plan}
                consumed = planned.get(identity, -1)
                if not 0 < consumed <= lengths.prompt_remaining:
                    raise ContractViolation(
                        f"{identity} ran a chunk of {consumed} planned tokens with "
                        f"{lengths.prompt_remaining} of its prompt left"
                    )
            advances.append((lengths, past + descriptor.query_length, consumed))
        return advances

    def _first_tokens(self, result: StepResult) -> list[tuple[int, RequestRecord]]:
        """(slot, record) of those whose first token is in this step."""
        if not self._without_token:
            return []
        refs = [ref for ref, _ in result.deltas]
        refs += [ref for ref, snapshot in result.finished if snapshot.generate_length]
        return [(ref.slot, self._seat(ref).record) for ref in refs if ref.slot in self._without_token]

    # ---- changes (pass 2) -----------------------------------------------------------------------------

    def _remove(self, slots: Iterable[int]) -> None:
        gone = set(slots)
        for slot in gone:
            del self._seats[slot]
        self._without_token -= gone
        self._lengths = [lengths for lengths in self._lengths if lengths.identity.resident.slot not in gone]

    def _stamp_first_token(self, slot: int, record: RequestRecord) -> None:
        self._without_token.discard(slot)
        record.first_token_at = time.perf_counter()
        self._metrics.time_to_first_token.record(record.first_token_at - record.submitted_at)

    def _count(self, result: StepResult) -> None:
        metrics = self._metrics
        if not result.execution:
            return
        context = result.work is SequenceWork.CONTEXT
        metrics.steps_context += context
        metrics.steps_decode += not context
        metrics.steps_compact += result.compact
        metrics.graph_launched += result.graph_launched
        metrics.prefix_published += result.published_prefix
        if not context:
            metrics.decode_tokens += _num_tokens(result.execution)
            return
        for entry in result.execution:
            if entry.work is SequenceWork.CONTEXT:
                metrics.chunks += 1
                metrics.prefill_tokens += entry.query_length
            else:
                metrics.decode_tokens += entry.query_length

    def _count_drafts(self, finished: Iterable[tuple[ResidentRef, BatchResult]]) -> None:
        for _, snapshot in finished:
            self._metrics.proposed_draft_tokens += snapshot.proposed_draft_tokens
            self._metrics.accepted_draft_tokens += snapshot.accepted_draft_tokens


def _num_tokens(execution: Sequence[ScheduledSequenceDescriptor]) -> int:
    if isinstance(execution, StepPlan):
        return execution.num_tokens
    return sum(entry.query_length for entry in execution)


def _partial(
    snapshot: BatchResult, stop_strings: Sequence[str], session: RuntimeSession
) -> LLMGenerationResponse | None:
    """What an unfinished request had generated; a failure here must not become the failure of others."""
    if not snapshot.generate_length:
        return None
    try:
        return session.materialize(snapshot, stop_strings)
    except Exception:
        _logger.exception("what a request had generated before it ended could not be decoded")
        return None


def _lost(record: RequestRecord, message: str) -> Outcome:
    if record.cancelled:
        return Outcome(record, TerminalStatus.CANCELLED)
    return Outcome(record, TerminalStatus.EXECUTION_ERROR, message)
