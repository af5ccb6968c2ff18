"""`EngineActor`: the loop of the one thread that owns the runtime and its session.

The actor knows the channel, never the engine, so that a forgotten engine can be collected and stop it.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from edgellm.engine.admission import AdmissionPhase
from edgellm.engine.backlog import Backlog
from edgellm.engine.command_queue import ShutdownMode, SubmitCommand
from edgellm.engine.config import resolve_step_limits
from edgellm.engine.coordinator import RequestCoordinator
from edgellm.engine.records import TerminalStatus
from edgellm.engine.step_planner import StepPlanner
from edgellm.errors import ContractViolation
from edgellm.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgellm.engine.command_queue import EngineChannel
    from edgellm.engine.config import EngineConfig
    from edgellm.engine.coordinator import Outcome
    from edgellm.session.base import RuntimeSession
    from edgellm.session.types import ScheduledSequenceDescriptor, StepResult

_logger = get_logger(__name__)


class EngineActor:
    """Drains commands, admits, plans, executes and publishes, one boundary after the other.

    Attributes:
        started: set once the first session is open and the configuration was checked, or could not be.
        start_error: why the engine cannot run; None when it can.
    """

    def __init__(
        self,
        *,
        channel: EngineChannel,
        config: EngineConfig,
        open_session: Callable[[], RuntimeSession],
        device_healthy: Callable[[], bool] | None,
        close_runtime: Callable[[], None] | None,
    ) -> None:
        self._channel = channel
        self._config = config
        self._open_session = open_session
        self._device_healthy = device_healthy
        self._close_runtime = close_runtime
        self._session: RuntimeSession | None = None
        self._backlog = Backlog(config.scheduling.scheduling_policy)
        self._coordinator = RequestCoordinator(channel.metrics)
        self._admission = AdmissionPhase(
            channel=channel,
            backlog=self._backlog,
            coordinator=self._coordinator,
            reserved_slots=config.scheduling.priority_reserved_slots,
        )
        self._refused_once = False
        self.started = threading.Event()
        self.start_error: Exception | None = None

    # ---- observed from other threads ------------------------------------------------------------------

    def queued(self) -> int:
        return len(self._backlog)

    def resident(self) -> int:
        return len(self._coordinator)

    # ---- the thread -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Body of the actor thread."""
        try:
            try:
                self._open()
            except Exception as error:
                self._channel.close_admission(f"the engine could not start: {error}")
                self.start_error = error
                self._close_runtime = None
                return
            finally:
                self.started.set()
            self._loop()
        except BaseException:
            _logger.exception("the engine's thread ended unexpectedly")
            raise
        finally:
            self._final_sweep()

    def _loop(self) -> None:
        while True:
            self._drain()
            mode = self._channel.shutdown_mode
            if mode is ShutdownMode.CANCEL:
                return
            if not len(self._coordinator) and not len(self._backlog):
                if mode is None:
                    self._channel.park()
                elif not len(self._channel.queue):
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
        """Move at most one queue's worth of submits to the backlog, then let go of what was cancelled."""
        for _ in range(self._channel.queue.capacity):
            command = self._channel.queue.pop()
            if command is None:
                break
            if isinstance(command, SubmitCommand):
                self._backlog.add(command.record)
        if self._channel.take_cancel_note():
            for record in self._backlog.take_cancelled():
                self._channel.terminate(record, TerminalStatus.CANCELLED)
            self._coordinator.refresh_cancelled()

    def _admit(self) -> bool:
        """Seat what may run; False when the session was lost."""
        session = self._session
        if session is None:
            return False
        try:
            self._admission.run(session, self._limits)
        except Exception as error:
            self._lost(error, "admission")
            return False
        return True

    def _step(self) -> None:
        session = self._session
        if session is None or not len(self._coordinator):
            return
        plan: list[ScheduledSequenceDescriptor] = []
        try:
            self._coordinator.refresh_next_blocks(session)
            plan = self._planner.plan(self._coordinator.lengths)
            result = session.execute(plan)
            outcomes = self._coordinator.commit(result, plan, session)
        except Exception as error:
            if isinstance(error, ContractViolation):
                _logger.error("plan %s over lengths %s", plan, [_describe(seat) for seat in self._coordinator.lengths])
            self._lost(error, "a step")
            return
        self._channel.metrics.paused_resident_steps += self._planner.num_paused
        for outcome in outcomes:
            self._publish(outcome)
        if not result.ok:
            self._recover(session, result)

    def _publish(self, outcome: Outcome) -> None:
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
        except Exception:
            session.close()
            raise
        self._session = session
        self._limits = limits
        self._planner = StepPlanner(limits, self._config.scheduling)

    def _reopen(self) -> bool:
        """Replace a lost session; False when the engine is degraded instead."""
        try:
            if self._device_healthy is not None and not self._device_healthy():
                raise RuntimeError("the device does not answer")
            self._open()
        except Exception as error:
            _logger.exception("the session could not be reopened")
            self._degrade(f"the device is unhealthy and no session can be opened ({error})")
            return False
        self._channel.metrics.session_reopens += 1
        return True

    def _degrade(self, because: str) -> None:
        """Refuse submits from now on and fail what waits; only shutting down is left."""
        self._channel.close_admission(because)
        self._drain()
        for record in self._backlog.take_all():
            self._channel.terminate(record, TerminalStatus.EXECUTION_ERROR, because)

    def _lost(self, error: Exception, during: str) -> None:
        """The session's state is unknown: everybody on it failed."""
        _logger.error("the session is lost during %s", during, exc_info=error)
        self._fail_residents(f"{type(error).__name__}: {error}")

    def _recover(self, session: RuntimeSession, result: StepResult) -> None:
        failure = result.failure or "the step failed on the device"
        _logger.error("a step failed: %s", failure)
        if result.compact_refused:
            self._refused_once = True
            self._rescue_prompts(session, failure)
        self._fail_residents(failure)

    def _rescue_prompts(self, session: RuntimeSession, failure: str) -> None:
        """Move residents that produced nothing yet back to the backlog, under their old arrival."""
        for seat in self._coordinator.seats():
            record = seat.record
            if not seat.lengths.prompt_remaining or record.cancelled:
                continue
            if record.readmitted:
                _logger.error("request %d would be readmitted twice; it fails instead", record.id)
                continue
            try:
                session.release_for_readmission(seat.lengths.ref)
            except Exception:
                _logger.exception("request %d could not be released for readmission", record.id)
                continue
            record.readmitted = True
            self._coordinator.detach(seat)
            self._backlog.add(record)
            self._channel.metrics.readmitted += 1

    def _fail_residents(self, message: str) -> None:
        for outcome in self._coordinator.fail_everything(message):
            self._publish(outcome)
        self._close_session()

    # ---- ending ---------------------------------------------------------------------------------------

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        try:
            session.close()
        except Exception:
            _logger.exception("closing the session raised")

    def _final_sweep(self) -> None:
        """End everything that is left: after this no handle waits and no stream is open."""
        self._channel.close_admission("the engine has ended")
        for outcome in self._coordinator.fail_everything("the engine has ended"):
            self._channel.terminate(outcome.record, TerminalStatus.CANCELLED)
        while (command := self._channel.queue.pop()) is not None:
            if isinstance(command, SubmitCommand):
                self._backlog.add(command.record)
        for record in self._backlog.take_all():
            self._channel.terminate(record, TerminalStatus.CANCELLED)
        self._close_session()
        if self._close_runtime is not None:
            try:
                self._close_runtime()
            except Exception:
                _logger.exception("closing the runtime raised")


def _describe(seat: object) -> str:
    names = ("identity", "committed", "prompt_remaining", "exclusive", "cancelled")
    return ", ".join(f"{name}={getattr(seat, name)}" for name in names)
