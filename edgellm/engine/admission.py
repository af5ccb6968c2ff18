"""`AdmissionPhase`: which waiting requests get a seat before the next step.

Only the head of the backlog is considered; while it waits, everybody waits, so that nothing overtakes it.
The one exception are reserved seats, which requests with priority < 0 take past others.
"""

from __future__ import annotations

import time
from enum import Enum
from typing import TYPE_CHECKING

from edgellm.engine.compatibility import first_difference
from edgellm.engine.metrics import StallReason
from edgellm.engine.records import TerminalStatus
from edgellm.errors import CallerError, ContractViolation
from edgellm.log import get_logger
from edgellm.session.types import AdmissionStatus

if TYPE_CHECKING:
    from edgellm.engine.backlog import Backlog
    from edgellm.engine.command_queue import EngineChannel
    from edgellm.engine.config import StepLimits
    from edgellm.engine.coordinator import RequestCoordinator
    from edgellm.engine.records import RequestRecord
    from edgellm.request import LLMGenerationRequest
    from edgellm.session.base import RuntimeSession

_logger = get_logger(__name__)


class _Next(Enum):
    """What one look at the head leads to."""

    CONTINUE = "continue"
    SEATED = "seated"
    STOP = "stop"


class AdmissionPhase:
    """Seats heads of the backlog until a stop condition; belongs to the actor."""

    def __init__(
        self,
        *,
        channel: EngineChannel,
        backlog: Backlog,
        coordinator: RequestCoordinator,
        reserved_slots: int,
    ) -> None:
        self._channel = channel
        self._backlog = backlog
        self._coordinator = coordinator
        self._reserved = reserved_slots
        self._difference_logged = False

    def run(self, session: RuntimeSession, limits: StepLimits) -> None:
        """Admit what may run now.

        Raises:
            SessionLostError, ContractViolation, and whatever else `session.admit` should not raise: the
                request being admitted was ended; the caller must replace the session.
        """
        seated = 0
        while len(self._backlog) and seated < limits.max_admissions:
            outcome = self._try_next(session, limits)
            if outcome is _Next.STOP:
                return
            seated += outcome is _Next.SEATED

    def _try_next(self, session: RuntimeSession, limits: StepLimits) -> _Next:
        head = self._backlog.head()
        if head.cancelled:
            return self._retire(head, TerminalStatus.CANCELLED)
        free = limits.max_batch_size - len(self._coordinator)
        if free <= 0:
            return _Next.STOP
        if head.priority >= 0 and free <= self._reserved:
            self._stall(StallReason.RESERVED)
            urgent = self._backlog.first_urgent()
            if urgent is None:
                return _Next.STOP
            head = urgent
            if head.cancelled:
                return self._retire(head, TerminalStatus.CANCELLED)
        request = head.request
        if request is None:
            raise ContractViolation(f"request {head.id} waits for a seat but has an outcome already")
        try:
            return self._admit(session, head, request)
        except Exception as error:
            self._retire(head, TerminalStatus.EXECUTION_ERROR, f"{type(error).__name__}: {error}")
            raise

    def _admit(self, session: RuntimeSession, head: RequestRecord, request: LLMGenerationRequest) -> _Next:
        exclusive = session.requires_exclusive_admission(request)
        stall = self._why_wait(session, request, exclusive)
        if stall is not None:
            self._stall(stall)
            return _Next.STOP
        try:
            result = session.admit(request, head.id, head.cancel_token)
        except ContractViolation:
            raise
        except CallerError as error:
            return self._retire(head, TerminalStatus.EXECUTION_ERROR, str(error))
        if result.status is AdmissionStatus.REJECTED:
            return self._retire(head, TerminalStatus.EXECUTION_ERROR, result.reason)
        if result.status is AdmissionStatus.NO_CAPACITY:
            return self._no_capacity(session, head, result.reason)
        self._coordinator.add(head, request, result, exclusive=exclusive)
        self._backlog.remove(head)
        self._note_seated(head)
        return _Next.SEATED

    def _why_wait(self, session: RuntimeSession, request: LLMGenerationRequest, exclusive: bool) -> StallReason | None:
        if session.exclusive_resident():
            return StallReason.EXCLUSIVE
        if exclusive and not session.idle():
            return StallReason.FOUNDER_ONLY
        candidate_uniform = session.requires_uniform_sampling(request)
        for resident in self._coordinator.requests():
            uniform = candidate_uniform or session.requires_uniform_sampling(resident)
            difference = first_difference(resident, request, uniform_sampling=uniform)
            if difference:
                self._log_difference(difference)
                return StallReason.INCOMPATIBLE
        return None

    def _no_capacity(self, session: RuntimeSession, head: RequestRecord, reason: str) -> _Next:
        if not session.idle():
            self._stall(StallReason.NO_CAPACITY)
            return _Next.STOP
        # Nobody is resident, so nothing will ever be given back: waiting would wait for ever.
        detail = reason or "no slot or page is free"
        return self._retire(
            head,
            TerminalStatus.EXECUTION_ERROR,
            f"the request does not fit an empty session ({detail}); shorten it or raise the KV budget",
        )

    def _retire(self, record: RequestRecord, status: TerminalStatus, message: str = "") -> _Next:
        self._backlog.remove(record)
        self._channel.terminate(record, status, message)
        return _Next.CONTINUE

    def _note_seated(self, record: RequestRecord) -> None:
        metrics = self._channel.metrics
        metrics.admitted += 1
        metrics.admitted_mid_flight += len(self._coordinator) > 1
        if not record.seated_at:
            record.seated_at = time.perf_counter()
            metrics.queue_latency.record(record.seated_at - record.submitted_at)

    def _stall(self, reason: StallReason) -> None:
        self._channel.metrics.stalls[reason] += 1

    def _log_difference(self, difference: str) -> None:
        if not self._difference_logged:
            self._difference_logged = True
            _logger.info("a request waits because it cannot share steps with the residents: %s", difference)
