"""`SessionCore`: one step, from a validated plan to the result that commits it.

Validation, cancellation, the token pipeline, streams, deltas and eviction do not depend on what executes the
step; the mechanism behind them is a subclass's (see `frame.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.errors import (
    FOREIGN_ERRORS,
    CompactRefusedError,
    InvariantError,
)
from edgellm.log import get_logger
from edgellm.session.admission import SessionAdmission
from edgellm.session.channels import emit_chunk
from edgellm.session.frame import NO_STEP, RowOutcome, SessionState, Step
from edgellm.session.plan_check import PlanLimits, StepShape, check_plan
from edgellm.session.resident import Resident
from edgellm.session.types import (
    FinishReason,
    ScheduledSequenceDescriptor,
    SequenceWork,
    StepId,
    StepResult,
    TokenDelta,
)

_logger = get_logger(__name__)


class SessionCore(SessionAdmission):
    """A whole session but for its mechanism."""

    def execute(self, plan: Sequence[ScheduledSequenceDescriptor]) -> StepResult:
        with self._drive("execute"):
            shape = check_plan(plan, seats=self._seats, order=self._order, limits=self._limits())
            completed = False
            try:
                result = self._execute_checked(plan, shape)
                completed = True
                return result
            finally:
                if not completed:
                    self._lose("a step raised; its effects are unknown")

    def _limits(self) -> PlanLimits:
        geometry = self._geometry
        return PlanLimits(
            max_batch_size=geometry.max_batch_size,
            max_input_length=geometry.max_input_length,
            max_kv_capacity=geometry.max_kv_capacity,
            compact=self._compact,
        )

    def _execute_checked(self, plan: Sequence[ScheduledSequenceDescriptor], shape: StepShape) -> StepResult:
        participants: list[Resident] = []
        for descriptor in plan:
            resident = self._seats[descriptor.identity.resident.slot]
            if resident is None:
                raise InvariantError("a validated plan names an empty slot")
            if resident.cancel_requested:
                resident.end(FinishReason.CANCELLED)
            participants.append(resident)
        step = Step(plan=plan, shape=shape, rows=participants, descriptors=list(plan))
        try:
            self._run_rows(step)
        except CompactRefusedError as error:
            return self._refused(step, str(error))
        except FOREIGN_ERRORS as error:
            _logger.exception("step %d failed", step.step_id)
            return self._failed(step, f"{type(error).__name__}: {error}")
        return self._finish_step(step, participants)

    def _run_rows(self, step: Step) -> None:
        """Run the rows that are still alive; rows that cannot run leave the step and end with ERROR."""
        _drop_terminal(step)
        if step.rows:
            self._prepare_rows(step)
            _drop_terminal(step)
        if not step.rows:
            return
        step.step_id = StepId(self._next_step_id)
        self._next_step_id += 1
        before = [resident.committed for resident in step.rows]
        outcomes = self._run(step)
        self._check_completion(step, before, len(outcomes))
        for resident, descriptor, outcome in zip(step.rows, step.descriptors, outcomes, strict=True):
            step.execution.append(_executed(descriptor, outcome.committed))
            self._advance(resident, descriptor, outcome)
        step.published_prefix = self._commit(step)

    def _check_completion(self, step: Step, before: Sequence[int], outcomes: int) -> None:
        """A late completion must never commit into a seat that changed hands or moved on."""
        if outcomes != len(step.rows):
            raise InvariantError(f"step {step.step_id} ran {len(step.rows)} rows and reported {outcomes}")
        for resident, past in zip(step.rows, before, strict=True):
            if self._seats[resident.ref.slot] is not resident or resident.committed != past:
                raise InvariantError(f"step {step.step_id} completed for {resident.ref}, whose seat changed meanwhile")

    def _advance(self, resident: Resident, descriptor: ScheduledSequenceDescriptor, outcome: RowOutcome) -> None:
        """Ledger, tokens, text and finish decision of one row; an isolated failure ends this row only."""
        resident.committed += outcome.committed
        resident.state_length = max(resident.state_length, resident.committed)
        if descriptor.work is SequenceWork.CONTEXT:
            resident.prompt_remaining -= descriptor.query_length
        if outcome.error:
            resident.end(FinishReason.ERROR, outcome.error)
        if resident.terminal or not outcome.token_ids:
            return
        try:
            resident.accept(outcome.token_ids, outcome.logprobs)
        except Exception as error:
            _logger.exception("request %d failed while its tokens were processed", resident.request_id)
            resident.fail(f"processing the generated tokens failed: {error}")

    def _finish_step(self, step: Step, participants: list[Resident]) -> StepResult:
        """Streams, callbacks, deltas, eviction and the result of a step that ran (or had nothing to run)."""
        for resident in participants:
            if resident.terminal:
                _flush_text(resident)
            if resident.channel is not None:
                emit_chunk(resident)
            if resident.exclusive:
                self._call_back(resident)
        result = self._result(step, ok=True)
        deltas = result.deltas
        for resident in participants:
            if resident.terminal:
                result.finished.append((resident.ref, resident.snapshot()))
                continue
            generated = resident.generated
            count = len(generated)
            if count > resident.reported:
                deltas.append((resident.ref, TokenDelta(generated[resident.reported :])))
                resident.reported = count
        if result.finished:
            try:
                self._evict()  # finds nothing to do when the mechanism had to evict before the step
            except FOREIGN_ERRORS as error:
                _logger.exception("step %d: eviction failed", step.step_id)
                return self._failed(step, f"eviction failed: {type(error).__name__}: {error}")
        return result

    def _call_back(self, resident: Resident) -> None:
        """Hand new tokens to the request's callback; one that raises ends its own request only."""
        callback = resident.request.token_callback
        new = resident.generated[resident.reported :]
        if callback is None or not new:
            return
        try:
            callback(new)
        except FOREIGN_ERRORS as error:
            _logger.exception("the token callback of request %d raised", resident.request_id)
            resident.end(FinishReason.ERROR, f"the token callback raised: {error}")
            _flush_text(resident)
            emit_chunk(resident)

    def _evict(self) -> None:
        """Retire terminal residents: mechanism first, then their slots under a new epoch."""
        retired = [resident for resident in self._order if resident.terminal]
        if not retired:
            return
        survivors = [resident for resident in self._order if not resident.terminal]
        old_to_new, kept = [], 0
        for resident in self._order:
            old_to_new.append(-1 if resident.terminal else kept)
            kept += not resident.terminal
        self._retire(retired, old_to_new, len(survivors))
        self._order = survivors
        for index, resident in enumerate(survivors):
            resident.index = index
        for resident in retired:
            self._seats[resident.ref.slot] = None
            if not self._slots.release(resident.ref):
                raise InvariantError(f"{resident.ref} was not the live owner of its slot at eviction")

    def _result(self, step: Step, *, ok: bool, failure: str = "") -> StepResult:
        executed = step.execution if ok else []
        ran = executed or step.plan
        context = any(descriptor.work is SequenceWork.CONTEXT for descriptor in ran)
        return StepResult(
            ok=ok,
            work=SequenceWork.CONTEXT if context else SequenceWork.DECODE,
            step_id=step.step_id if ok else NO_STEP,
            participants=[descriptor.identity for descriptor in step.plan],
            execution=list(executed),
            published_prefix=ok and step.published_prefix,
            graph_launched=ok and step.graph_launched,
            compact=step.shape is StepShape.COMPACT and (bool(executed) or not ok),
            failure=failure,
        )

    def _failed(self, step: Step, failure: str) -> StepResult:
        self._lose(failure)
        return self._result(step, ok=False, failure=failure)

    def _refused(self, step: Step, failure: str) -> StepResult:
        if step.shape is not StepShape.COMPACT:
            return self._failed(step, failure)
        self._state, self._state_reason = SessionState.REFUSED, failure
        self._compact, self._compact_reason = False, failure
        self._on_compact_refused(failure)
        result = self._result(step, ok=False, failure=failure)
        result.compact_refused = True
        return result


def _flush_text(resident: Resident) -> None:
    try:
        resident.flush_text()
    except Exception:
        _logger.exception("request %d: the rest of its text could not be decoded", resident.request_id)


def _drop_terminal(step: Step) -> None:
    """Keep the rows that still run, with their descriptors."""
    if any(resident.terminal for resident in step.rows):
        kept = [
            (resident, descriptor)
            for resident, descriptor in zip(step.rows, step.descriptors, strict=True)
            if not resident.terminal
        ]
        step.rows = [resident for resident, _ in kept]
        step.descriptors = [descriptor for _, descriptor in kept]


def _executed(descriptor: ScheduledSequenceDescriptor, committed: int) -> ScheduledSequenceDescriptor:
    if committed == descriptor.query_length:
        return descriptor
    return ScheduledSequenceDescriptor(
        identity=descriptor.identity,
        work=descriptor.work,
        query_length=committed,
        past_length=descriptor.past_length,
        select_last_token_logits=descriptor.select_last_token_logits,
    )
