"""`EngineActor`: the loop of the one thread that owns the runtime and its session.

The actor knows the channel, never the engine, so that a forgotten engine can be collected and stop it.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from edgellm.engine.admission import AdmissionPhase
from edgellm.engine.backlog import Backlog
from edgellm.engine.command_queue import ShutdownMode, SubmitCommand
from edgellm.engine.config import resolve_step_limits
from edgellm.engine.coordinator import RequestCoordinator
from edgellm.engine.deadlines import Deadlines
from edgellm.engine.records import TerminalStatus
from edgellm.engine.recovery import Recovery
from edgellm.engine.step_clock import StepClock
from edgellm.engine.step_planner import StepPlanner
from edgellm.engine.waiting_line import WaitingLine
from edgellm.errors import CallerError, ContractViolation
from edgellm.foreign import call_foreign, describe_error
from edgellm.log import get_logger
from edgellm.waits import Latch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edgellm.engine.command_queue import EngineChannel
    from edgellm.engine.config import EngineConfig
    from edgellm.engine.coordinator import Outcome
    from edgellm.engine.records import RequestRecord
    from edgellm.session.base import RuntimeSession
    from edgellm.session.types import ScheduledSequenceDescriptor, StepResult

_logger = get_logger(__name__)

_REOPEN_WAIT = 0.05  # seconds before the second attempt; later ones wait longer


def _nothing() -> None:
    """Stands where nobody needs to be told."""


class EngineActor:
    """Drains commands, admits, plans, executes and publishes, one boundary after the other.

    What sessions, plugins and callers' hooks raise is caught here as `BaseException`: nothing else interrupts this
    thread, since the interpreter interrupts the main one only.

    Attributes:
        started: set once the first session is open and the configuration was checked, or could not be.
        start_error: why the engine cannot run; None when it can.
        ended: set once everything has ended; nothing but the thread itself is left.
    """

    def __init__(
        self,
        *,
        channel: EngineChannel,
        config: EngineConfig,
        open_session: Callable[[], RuntimeSession],
        device_healthy: Callable[[], bool] | None,
        close_runtime: Callable[[], None] | None,
        on_end: Callable[[], None] = _nothing,
    ) -> None:
        """
        Args:
            on_end: called on the thread once everything has ended.
        """
        self._channel = channel
        self._config = config
        self._open_session = open_session
        self._on_end = on_end
        self._died_of = ""
        self._close_runtime = close_runtime
        self._session: RuntimeSession | None = None
        options = config.scheduling
        self._backlog = Backlog(options.scheduling_policy, options.priority_aging_seconds)
        self._line = WaitingLine(channel)
        self._deadlines = Deadlines()
        self._clock = StepClock(channel.metrics, options.step_time_budget_ms)
        self._coordinator = RequestCoordinator(channel.metrics)
        self._recovery = Recovery(
            metrics=channel.metrics,
            backlog=self._backlog,
            coordinator=self._coordinator,
            max_replays=config.max_replays,
            device_healthy=device_healthy,
        )
        self._admission = AdmissionPhase(
            channel=channel,
            backlog=self._backlog,
            coordinator=self._coordinator,
            options=options,
            may_replay=self._recovery.may_replay,
        )
        self._refused_once = False
        self.started = Latch()
        self.ended = Latch()
        self.start_error: BaseException | None = None

    # ---- observed from other threads ------------------------------------------------------------------

    def queued(self) -> int:
        return len(self._backlog) + len(self._line)

    def resident(self) -> int:
        return len(self._coordinator)

    # ---- the thread -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Body of the actor thread."""
        try:
            try:
                self._open()
            except BaseException as error:
                self._channel.close_admission(f"the engine could not start: {describe_error(error)}")
                self.start_error = error
                self._close_runtime = None
                return
            finally:
                self.started.set()
            self._loop()
        except BaseException as error:
            self._died_of = f"the engine's thread ended unexpectedly: {describe_error(error)}"
            _logger.exception("the engine's thread ended unexpectedly")
            raise
        finally:
            self._end()

    def _loop(self) -> None:
        while True:
            self._drain()
            mode = self._channel.shutdown_mode
            if mode is ShutdownMode.CANCEL:
                return
            if not len(self._coordinator) and not len(self._backlog):
                if mode is None:
                    self._channel.park()
                elif self._channel.drained():
                    return
                continue
            self._boundary()

    def _boundary(self) -> None:
        """One boundary with work: admit, then run one step."""
        if self._session is None and not self._reopen():
            return
        if self._admit():
            self._step()

    def _drain(self) -> None:
        """Move at most one queue's worth of submits to the backlog, let go of what was cancelled, advance the line."""
        for _ in range(self._channel.queue.capacity):
            command = self._channel.queue.pop()
            if command is None:
                break
            if isinstance(command, SubmitCommand):
                self._backlog.add(command.record)
                self._deadlines.add(command.record)
        for record in self._channel.take_newcomers():
            self._line.add(record)
            self._deadlines.add(record)
        if len(self._deadlines):
            self._deadlines.expire(time.perf_counter())
        if self._channel.take_cancel_note():
            for record in [*self._backlog.take_cancelled(), *self._line.take_cancelled()]:
                self._channel.terminate(record, TerminalStatus.CANCELLED)
            self._coordinator.refresh_cancelled()
        for record in self._line.take_with_room():
            self._backlog.add(record)
        self._attach_streams()

    def _attach_streams(self) -> None:
        """Serve the streams that were asked for since their requests were seated."""
        if self._session is not None and self._channel.take_stream_note():
            self._coordinator.attach_streams(self._session)

    def _admit(self) -> bool:
        """Seat what may run; False when the session was lost."""
        session = self._session
        if session is None:
            return False
        try:
            self._admission.run(session, self._limits)
        except BaseException as error:
            self._lost(error, "admission", replay=True)
            return False
        return True

    def _step(self) -> None:
        session = self._session
        if session is None or not len(self._coordinator):
            return
        plan: Sequence[ScheduledSequenceDescriptor] = ()
        committing = False
        try:
            self._coordinator.refresh_next_blocks(session)
            plan = self._plan()
            result = self._clock.execute(session, plan)
            committing = True
            outcomes = self._coordinator.commit(result, plan, session)
        except BaseException as error:
            if isinstance(error, ContractViolation):
                _logger.error("plan %s over lengths %s", plan, [_describe(seat) for seat in self._coordinator.lengths])
            self._lost(error, "a step", replay=not committing)
            return
        self._clock.note_tokens(result, self._coordinator.lengths)
        self._channel.metrics.paused_resident_steps += self._planner.num_paused
        for outcome in outcomes:
            self._publish(outcome)
        if not result.ok:
            self._recover(session, result)

    def _plan(self) -> Sequence[ScheduledSequenceDescriptor]:
        lengths = self._coordinator.lengths
        prompt_tokens = self._clock.prompt_tokens(lengths, self._limits)
        if prompt_tokens is None:
            return self._planner.plan(lengths)
        return self._planner.plan(lengths, prompt_tokens=prompt_tokens)

    def _publish(self, outcome: Outcome) -> None:
        """Give one request its outcome; what goes wrong with it must not keep others from theirs."""
        error = call_foreign(self._complete, outcome)
        if error is None:
            return
        record = outcome.record
        _logger.error("publishing the outcome of request %d raised", record.id, exc_info=error)
        if not record.outcome_published:
            because = f"its outcome could not be published: {describe_error(error)}"
            self._channel.terminate(record, TerminalStatus.EXECUTION_ERROR, because)

    def _complete(self, outcome: Outcome) -> None:
        record, response = outcome.record, outcome.response
        if response is not None:
            now = time.perf_counter()
            response.queue_ms = (record.seated_at - record.submitted_at) * 1e3
            response.total_ms = (now - record.submitted_at) * 1e3
            if record.first_token_at:
                response.time_to_first_token_ms = (record.first_token_at - record.submitted_at) * 1e3
        self._channel.terminate(record, outcome.status, outcome.message, response)

    # ---- recovery -------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Open a session and derive limits and planner from what it can do.

        Raises:
            InvalidArgumentError: the configuration contradicts the session; the session is closed again.
        """
        session = self._open_session()
        try:
            limits = resolve_step_limits(self._config, session.capabilities(), after_refusal=self._refused_once)
        except BaseException:
            session.close()
            raise
        self._session = session
        self._limits = limits
        self._planner = StepPlanner(limits, self._config.scheduling)

    def _reopen(self) -> bool:
        """Replace a lost session; False when the engine is degraded instead, or shutting down.

        A failed attempt may be a passing one (a wait for the device that did not end, say), so there are several.
        """
        for attempt in range(1, self._config.max_reopen_attempts + 1):
            try:
                if not self._recovery.device_answers():
                    raise ContractViolation("the device does not answer")
                self._open()
                self._channel.metrics.session_reopens += 1
                return True
            except BaseException as error:
                _logger.exception("the session could not be reopened, attempt %d", attempt)
                if isinstance(error, CallerError) or attempt == self._config.max_reopen_attempts:
                    self._degrade(f"the device is unhealthy and no session can be opened ({describe_error(error)})")
                    return False
            time.sleep(_REOPEN_WAIT * attempt)
            if self._channel.shutdown_mode is ShutdownMode.CANCEL:
                return False
        return False

    def _degrade(self, because: str) -> None:
        """Refuse submits from now on and fail what waits; only shutting down is left."""
        self._channel.close_admission(because)
        self._drain()
        for record in [*self._backlog.take_all(), *self._line.take_all()]:
            self._channel.terminate(record, TerminalStatus.EXECUTION_ERROR, because)

    def _lost(self, error: BaseException, during: str, *, replay: bool) -> None:
        """The session's state is unknown: nobody on it can go on."""
        _logger.error("the session is lost during %s", during, exc_info=error)
        self._end_session(describe_error(error), replay=replay and not isinstance(error, ContractViolation))

    def _recover(self, session: RuntimeSession, result: StepResult) -> None:
        failure = result.failure or "the step failed on the device"
        _logger.error("a step failed: %s", failure)
        if result.compact_refused:
            self._refused_once = True
            self._recovery.readmit_prompts(session)
        self._end_session(failure, replay=True)

    def _end_session(self, failure: str, *, replay: bool) -> None:
        """Move what can begin again to the backlog, fail the rest, close."""
        if replay and self._session is not None:
            self._recovery.replay_unseen(self._session)
        self._fail_residents(failure)

    def _fail_residents(self, message: str) -> None:
        """Outcomes first; then the session closes, which ends the streams with what it still holds of their text."""
        self._attach_streams()
        outcomes = self._coordinator.fail_everything(message)
        for outcome in outcomes:
            self._channel.terminate(outcome.record, outcome.status, outcome.message, end_stream=False)
        self._close_session()
        for outcome in outcomes:
            error = call_foreign(outcome.record.end_stream)
            if error is not None:
                _logger.error("ending the stream of request %d raised", outcome.record.id, exc_info=error)

    # ---- ending ---------------------------------------------------------------------------------------

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        error = call_foreign(session.close)
        if error is not None:
            _logger.error("closing the session raised", exc_info=error)

    def _end(self) -> None:
        try:
            self._final_sweep()
            self._on_end()
        finally:
            self.ended.set()

    def _final_sweep(self) -> None:
        """End everything that is left: after this no handle waits and no stream is open.

        What ended the thread may strike here too, so each step is taken whatever became of those before.
        """
        self._channel.close_admission(self._died_of or "the engine has ended")
        records = self._channel.live_records()
        steps: list[Callable[[], object]] = [self._attach_streams]
        steps += [partial(self._end_unserved, record) for record in records]
        steps += [self._coordinator.clear, self._backlog.take_all, self._line.take_all, self._close_session]
        steps += [record.end_stream for record in records]
        if self._close_runtime is not None:
            steps.append(self._close_runtime)
        for step in steps:
            error = call_foreign(step)
            if error is not None:
                _logger.error("ending the engine: %r raised", step, exc_info=error)

    def _end_unserved(self, record: RequestRecord) -> None:
        """The outcome of a request that the end of the engine catches up with; its stream ends after the session."""
        if self._died_of and not record.cancelled:
            self._channel.terminate(record, TerminalStatus.EXECUTION_ERROR, self._died_of, end_stream=False)
            return
        self._channel.terminate(record, TerminalStatus.CANCELLED, end_stream=False)
        record.cancel_token.cancel()  # the session, closing, is to end its stream with that reason


def _describe(seat: object) -> str:
    names = ("identity", "committed", "prompt_remaining", "exclusive", "cancelled")
    return ", ".join(f"{name}={getattr(seat, name)}" for name in names)
