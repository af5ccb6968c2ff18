"""`SessionCore`: one step, from a validated plan to the result that commits it.

Validation, cancellation, the token pipeline, streams, deltas and eviction do not depend on what executes the
step; the mechanism behind them is a subclass's (see `frame.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgellm.errors import FOREIGN_ERRORS, CompactRefusedError, InvariantError
from edgellm.foreign import call_foreign, describe_error
from edgellm.log import get_logger
from edgellm.session._decode_lane import moved_seat, named_rows, take_tokens
from edgellm.session._ledger import poll_cancelled, renumber, split_ended, with_readers
from edgellm.session._step_plan import StepDeltas, StepPlan, report
from edgellm.session.admission import SessionAdmission
from edgellm.session.channels import emit_chunk
from edgellm.session.frame import NO_STEP, OneTokenOutcomes, RowOutcome, SessionState, Step
from edgellm.session.plan_check import PlanLimits, StepShape, as_step_plan, check_plan
from edgellm.session.resident import Resident
from edgellm.session.types import (
    FinishReason,
    ScheduledSequenceDescriptor,
    SequenceWork,
    StepId,
    StepResult,
)

if TYPE_CHECKING:
    from edgellm.sampling.logprobs import TokenLogprobs

_logger = get_logger(__name__)


class SessionCore(SessionAdmission):
    """A whole session but for its mechanism."""

    def execute(self, plan: Sequence[ScheduledSequenceDescriptor]) -> StepResult:
        with self._drive("execute"):
            steps = plan if type(plan) is StepPlan else as_step_plan(plan)
            shape = check_plan(steps, seats=self._seats, order=self._order, limits=self._limits())
            completed = False
            try:
                result = self._execute_checked(steps, shape)
                completed = True
                return result
            finally:
                if not completed:
                    self._lose("a step raised; its effects are unknown")

    def _limits(self) -> PlanLimits:
        limits = self._plan_limits
        if limits is None or limits.compact is not self._compact:
            geometry = self._geometry
            limits = self._plan_limits = PlanLimits(
                max_batch_size=geometry.max_batch_size,
                max_input_length=geometry.max_input_length,
                max_kv_capacity=geometry.max_kv_capacity,
                compact=self._compact,
            )
        return limits

    def _execute_checked(self, plan: StepPlan, shape: StepShape) -> StepResult:
        # Resident order is replaced when somebody leaves, never changed during a step, so it may be borrowed.
        whole = shape is StepShape.FULL_COHORT_DECODE
        participants = self._order if whole else named_rows(plan, self._seats)
        step = Step(plan=plan, shape=shape, rows=participants, descriptors=plan)
        if poll_cancelled(participants):
            step.keep_running()
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
        if step.rows:
            self._prepare_rows(step)
            step.keep_running()
        if not step.rows:
            return
        step.step_id = StepId(self._next_step_id)
        self._next_step_id += 1
        outcomes = self._run(step)
        self._check_completion(step, len(outcomes))
        if isinstance(outcomes, OneTokenOutcomes):
            self._advance_one_each(step, outcomes)
            step.execution = step.descriptors
        else:
            executed = []
            for resident, descriptor, outcome in zip(step.rows, step.descriptors, outcomes, strict=True):
                self._advance(resident, descriptor, outcome)
                executed.append(_executed(descriptor, outcome.committed))
            step.execution = executed
        step.published_prefix = self._commit(step)

    def _check_completion(self, step: Step, outcomes: int) -> None:
        """A late completion must never commit into a seat that changed hands or moved on."""
        if outcomes != len(step.rows):
            raise InvariantError(f"step {step.step_id} ran {len(step.rows)} rows and reported {outcomes}")
        moved = moved_seat(step.rows, step.descriptors, self._seats)
        if moved is not None:
            raise InvariantError(f"step {step.step_id} completed for {moved.ref}, whose seat changed meanwhile")

    def _advance_one_each(self, step: Step, outcomes: OneTokenOutcomes) -> None:
        """`_advance` for a step of decode rows; Python runs for rows with text, and for those that failed."""
        left, failed = take_tokens(step.rows, step.descriptors, outcomes.token_ids)
        for index in left:
            token_id, error = int(outcomes.token_ids[index]), outcomes.errors.get(index, "")
            if (token_id < 0) is not bool(error):
                raise InvariantError(f"step {step.step_id}: row {index} has token {token_id} and error {error!r}")
            if error:
                step.rows[index].end(FinishReason.ERROR, error)
            else:
                _accept(step.rows[index], (token_id,), None)
        for row, failure in failed:
            _fail_tokens(row, failure)
        if not (outcomes.errors or failed or any(step.rows[index].reason is FinishReason.ERROR for index in left)):
            step.one_token_each = outcomes.token_ids

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
        before = len(resident.generated)
        _accept(resident, outcome.token_ids, outcome.logprobs)
        dropped = len(outcome.token_ids) - (len(resident.generated) - before)
        if dropped and descriptor.work is SequenceWork.DECODE:
            _take_back(resident, outcome, dropped)

    def _finish_step(self, step: Step, participants: list[Resident]) -> StepResult:
        """Streams, callbacks, deltas, eviction and the result of a step that ran (or had nothing to run)."""
        for resident in with_readers(participants):
            if resident.terminal:
                _flush_text(resident)
            if resident.channel is not None and not (resident.exclusive and resident.terminal):
                emit_chunk(resident)
            if resident.exclusive:
                self._call_back(resident)
                emit_chunk(resident)  # the last chunk says how it really ended; any other is out already
        deltas, ended = report(participants)
        result = self._result(step, ok=True, deltas=deltas)
        if ended:
            result.finished = [(resident.ref, resident.snapshot()) for resident in ended]
            try:
                self._evict()  # finds nothing to do when the mechanism had to evict before the step
            except FOREIGN_ERRORS as error:
                _logger.exception("step %d: eviction failed", step.step_id)
                return self._failed(step, f"eviction failed: {type(error).__name__}: {error}")
        return result

    def _call_back(self, resident: Resident) -> None:
        """Hand new tokens to the request's callback; one that raises ends its own request only.

        Also on the last tokens: a request that ended by itself then ends with ERROR, its text complete.
        """
        callback = resident.request.token_callback
        new = resident.generated[resident.reported :]
        if callback is None or not new:
            return
        error = call_foreign(callback, new)
        if error is None:
            return
        _logger.error("the token callback of request %d raised", resident.request_id, exc_info=error)
        message = f"the token callback raised: {describe_error(error)}"
        if not resident.terminal:
            resident.end(FinishReason.ERROR, message)
            _flush_text(resident)
        elif resident.reason not in (FinishReason.CANCELLED, FinishReason.ERROR):
            resident.fail(message)

    def _evict(self) -> None:
        """Retire terminal residents: mechanism first, then their slots under a new epoch."""
        retired, survivors, old_to_new = split_ended(self._order)
        if not retired:
            return
        self._retire(retired, old_to_new, len(survivors))
        self._order = survivors
        renumber(survivors)
        for resident in retired:
            self._seats[resident.ref.slot] = None
            if not self._slots.release(resident.ref):
                raise InvariantError(f"{resident.ref} was not the live owner of its slot at eviction")

    def _result(self, step: Step, *, ok: bool, failure: str = "", deltas: StepDeltas | None = None) -> StepResult:
        executed = step.execution if ok else ()
        context = step.descriptors.has_context if executed else step.plan.has_context
        return StepResult(
            ok=ok,
            work=SequenceWork.CONTEXT if context else SequenceWork.DECODE,
            step_id=step.step_id if ok else NO_STEP,
            participants=step.plan.identities,
            execution=executed or [],
            deltas=[] if deltas is None else deltas,
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


def _take_back(resident: Resident, outcome: RowOutcome, dropped: int) -> None:
    """The sequence ended inside its accepted run: positions behind its end were never gained.

    One that failed before it kept a token still counts the position that ran.
    """
    dropped = min(dropped, outcome.committed - 1)
    outcome.committed -= dropped
    resident.committed -= dropped
    resident.state_length = resident.committed


def _accept(resident: Resident, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> None:
    """Tokens, text and finish decision of one row; a failure ends this row only."""
    try:
        resident.accept(token_ids, logprobs)
    except Exception as error:
        _fail_tokens(resident, error)


def _fail_tokens(resident: Resident, error: Exception) -> None:
    _logger.error("request %d failed while its tokens were processed", resident.request_id, exc_info=error)
    resident.fail(f"processing the generated tokens failed: {error}")


def _flush_text(resident: Resident) -> None:
    try:
        resident.flush_text()
    except Exception:
        _logger.exception("request %d: the rest of its text could not be decoded", resident.request_id)


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
