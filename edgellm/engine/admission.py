"""`AdmissionPhase`: which waiting requests get a seat before the next step.

The backlog is tried in order.  Where a request must wait, later ones may pass it, but not for ever: each record
counts how often it was overtaken, and one that reached `max_overtakes` is passed by nobody until it is seated.
With 0 the order is strict.  Seats kept for urgent requests are outside that count: who may not take one is not
overtaken by who may.

While seats are scarce, a request that shares a prefix with a resident goes first, within the same bound: what one
computes the other finds.
"""

from __future__ import annotations

import time
from enum import Enum
from itertools import takewhile
from typing import TYPE_CHECKING

from edgellm.engine.compatibility import first_difference
from edgellm.engine.metrics import StallReason
from edgellm.engine.records import TerminalStatus
from edgellm.errors import CallerError, ContractViolation
from edgellm.foreign import describe_error
from edgellm.log import get_logger
from edgellm.session.types import AdmissionStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgellm.engine.backlog import Backlog
    from edgellm.engine.command_queue import EngineChannel
    from edgellm.engine.config import SchedulingOptions, StepLimits
    from edgellm.engine.coordinator import RequestCoordinator
    from edgellm.engine.prefix import PrefixKey
    from edgellm.engine.records import RequestRecord
    from edgellm.request import LLMGenerationRequest
    from edgellm.session.base import RuntimeSession

_logger = get_logger(__name__)

_WINDOW = 4
"""Neighbours of residents are looked for among the first `_WINDOW * max_overtakes` records."""


class _Next(Enum):
    """What one look at a record leads to."""

    RETIRED = "retired"
    SEATED = "seated"
    WAITS = "waits"
    STOP = "stop"


class AdmissionPhase:
    """Seats records of the backlog until a stop condition; belongs to the actor."""

    def __init__(
        self,
        *,
        channel: EngineChannel,
        backlog: Backlog,
        coordinator: RequestCoordinator,
        options: SchedulingOptions,
        may_replay: Callable[[RequestRecord], bool],
    ) -> None:
        """
        Args:
            may_replay: whether a request whose admission lost the session may be tried again; counts the try.
        """
        self._channel = channel
        self._backlog = backlog
        self._coordinator = coordinator
        self._reserved = options.priority_reserved_slots
        self._max_overtakes = options.max_overtakes
        self._prefix_aware = options.prefix_aware and options.max_overtakes > 0
        self._may_replay = may_replay
        self._difference_logged = False

    def run(self, session: RuntimeSession, limits: StepLimits) -> None:
        """Admit what may run now.

        A boundary at which nobody fits costs at most `max_overtakes + 1` tries.

        Raises:
            SessionLostError, ContractViolation, and whatever else `session.admit` should not raise: the request
                being admitted was ended, or waits to be replayed; the caller must replace the session.
        """
        seated = 0
        waiting: list[RequestRecord] = []  # were tried at this boundary
        for record in self._candidates(session, limits):
            if seated >= limits.max_admissions or len(self._coordinator) >= limits.max_batch_size:
                return
            if any(earlier.overtaken >= self._max_overtakes for earlier in waiting):
                self._channel.metrics.stalls[StallReason.OVERTAKEN] += self._max_overtakes > 0
                return
            if record.cancelled:
                self._retire(record, TerminalStatus.CANCELLED)
            elif self._kept_for_urgent(record, limits):
                self._stall(record, StallReason.RESERVED)
            else:
                outcome = self._try(session, record, limits)
                seated += outcome is _Next.SEATED
                if outcome is _Next.WAITS:
                    waiting.append(record)
                if outcome is _Next.STOP or len(waiting) > self._max_overtakes > 0:
                    return

    def _candidates(self, session: RuntimeSession, limits: StepLimits) -> list[RequestRecord]:
        """The backlog in the order in which it is tried: neighbours of residents first, while seats are scarce."""
        records = list(self._backlog.records)
        seats = min(limits.max_batch_size - len(self._coordinator), limits.max_admissions)
        if seats <= 0 or not self._prefix_aware or len(records) <= seats or session.exclusive_resident():
            return records
        keys = {seat.record.prefix_key for seat in self._coordinator.seats()} - {None}
        near = self._neighbours(records, keys)[:seats] if keys else []
        if not near:
            return records
        chosen = {record.id for record in near}
        return near + [record for record in records if record.id not in chosen]

    def _neighbours(self, records: list[RequestRecord], keys: set[PrefixKey | None]) -> list[RequestRecord]:
        """Records with one of `keys` that may go first: near the front, passing only their own class, and nobody
        more often than `max_overtakes`."""
        near: list[RequestRecord] = []
        slack = float("inf")  # how many may still pass the records that were looked at
        for record in records[: _WINDOW * self._max_overtakes]:
            if slack <= 0 or not self._backlog.same_class(record, records[0]):
                break
            if record.prefix_key in keys:
                near.append(record)
                slack -= 1
            else:
                slack = min(slack, self._max_overtakes - record.overtaken)
        return near

    def _kept_for_urgent(self, record: RequestRecord, limits: StepLimits) -> bool:
        free = limits.max_batch_size - len(self._coordinator)
        return record.priority >= 0 and free <= self._reserved

    def _try(self, session: RuntimeSession, record: RequestRecord, limits: StepLimits) -> _Next:
        request = record.request
        if request is None:
            raise ContractViolation(f"request {record.id} waits for a seat but has an outcome already")
        passed = [
            earlier
            for earlier in takewhile(lambda other: other is not record, self._backlog.records)
            if not self._kept_for_urgent(earlier, limits)
        ]
        try:
            outcome = self._admit(session, record, request)
        except BaseException as error:
            if isinstance(error, ContractViolation) or not self._may_replay(record):
                self._retire(record, TerminalStatus.EXECUTION_ERROR, describe_error(error))
            else:
                record.suspect = True
            raise
        if outcome is _Next.SEATED and passed:
            self._count_overtakes(record, passed)
        return outcome

    def _count_overtakes(self, record: RequestRecord, passed: list[RequestRecord]) -> None:
        for earlier in passed:
            earlier.overtaken += 1
        metrics = self._channel.metrics
        metrics.overtakes += len(passed)
        keys = (seat.record.prefix_key for seat in self._coordinator.seats() if seat.record is not record)
        if record.prefix_key is not None and record.prefix_key in keys:
            metrics.prefix_overtakes += len(passed)

    def _admit(self, session: RuntimeSession, head: RequestRecord, request: LLMGenerationRequest) -> _Next:
        exclusive = session.requires_exclusive_admission(request)
        stall = self._why_wait(session, request, alone=exclusive or head.suspect)
        if stall is not None:
            self._stall(head, stall)
            return _Next.STOP if stall is StallReason.EXCLUSIVE else _Next.WAITS
        if head.refused_at == self._capacity() and head is not self._backlog.head():
            return _Next.WAITS  # nothing was given back since it found no room; the head is tried all the same
        head.settle_stream()
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

    def _why_wait(self, session: RuntimeSession, request: LLMGenerationRequest, *, alone: bool) -> StallReason | None:
        if session.exclusive_resident():
            return StallReason.EXCLUSIVE
        if alone and not session.idle():
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
            self._stall(head, StallReason.NO_CAPACITY)
            head.refused_at = self._capacity()
            return _Next.WAITS
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
        return _Next.RETIRED

    def _note_seated(self, record: RequestRecord) -> None:
        metrics = self._channel.metrics
        metrics.admitted += 1
        metrics.admitted_mid_flight += len(self._coordinator) > 1
        if not record.seated_at:
            record.seated_at = time.perf_counter()
            metrics.queue_latency.record(record.seated_at - record.submitted_at)

    def _capacity(self) -> tuple[int, int]:
        """Changes whenever something was given back or became shareable."""
        metrics = self._channel.metrics
        ended = metrics.completed + metrics.cancelled + metrics.failed
        return ended + metrics.session_reopens, metrics.prefix_published

    def _stall(self, record: RequestRecord, reason: StallReason) -> None:
        if record is self._backlog.head():
            self._channel.metrics.stalls[reason] += 1

    def _log_difference(self, difference: str) -> None:
        if not self._difference_logged:
            self._difference_logged = True
            _logger.info("a request waits because it cannot share steps with the residents: %s", difference)
