"""`CommandQueue` and `EngineChannel`: everything that callers and the actor share.

Cancellation is no command: it is a flag on the record, so a full queue cannot lose it.  The shutdown mode
is likewise a fact beside the queue.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from edgellm.engine.metrics import EngineMetrics
from edgellm.engine.records import RequestRecord, TerminalStatus
from edgellm.errors import InvalidArgumentError, SubmitError
from edgellm.foreign import call_foreign
from edgellm.log import get_logger
from edgellm.session.types import RequestId
from edgellm.waits import WaitList

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgellm.engine.config import EngineConfig
    from edgellm.request import LLMGenerationResponse

_logger = get_logger(__name__)


class ShutdownMode(Enum):
    """DRAIN serves everything accepted; CANCEL ends after the step that is running."""

    DRAIN = "drain"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class SubmitCommand:
    record: RequestRecord


@dataclass(frozen=True, slots=True)
class ShutdownCommand:
    """Only wakes the actor; the mode is `EngineChannel.shutdown_mode`."""


Command: TypeAlias = SubmitCommand | ShutdownCommand


class CommandQueue:
    """Bounded FIFO: any thread pushes, the actor pops.  A full queue refuses; it neither waits nor grows."""

    def __init__(self, capacity: int) -> None:
        """Args: capacity: rounded up to a power of two, at least 2.

        Raises:
            InvalidArgumentError: capacity below 1.
        """
        if capacity < 1:
            raise InvalidArgumentError(f"command queue capacity is {capacity}; it must be at least 1")
        self.capacity = max(2, 1 << (capacity - 1).bit_length())
        self._commands: deque[Command] = deque()
        self._lock = threading.Lock()
        self.push_anyway = self._commands.append
        """Append past the capacity.  Not a method: no interrupt can land between the call and the append."""

    def push(self, command: Command) -> bool:
        """Append, or return False when full."""
        with self._lock:
            if self.is_full:
                return False
            self._commands.append(command)
            return True

    @property
    def is_full(self) -> bool:
        return len(self._commands) >= self.capacity

    def pop(self) -> Command | None:
        """The oldest command, or None.  One thread only."""
        return self._commands.popleft() if self._commands else None

    def __len__(self) -> int:
        return len(self._commands)


class EngineChannel:
    """Queue, admission gate, and the register of live records, whose length is what is pending.

    Shared by the engine, its actor and every handle; it knows none of them.  Every accepted request leaves
    through `terminate`, exactly once, which makes room for another.

    A request whose caller waits for room stands in line instead of being refused: it is accepted, and outside the
    limit until the actor takes room for it.
    """

    def __init__(self, config: EngineConfig, metrics: EngineMetrics) -> None:
        self.metrics = metrics
        self.queue = CommandQueue(config.command_queue_capacity)
        self._max_pending = config.max_pending_requests
        self._idle_wait = config.idle_wait
        # Re-entrant: the collector may end a forgotten engine while the actor is inside the gate.
        self._gate = threading.RLock()
        self._waiters = WaitList(self._gate)
        self._closed_because = ""
        self._shutdown_mode: ShutdownMode | None = None
        self._in_line = 0  # of those pending, without room under the limit
        self._newcomers: deque[RequestRecord] = deque()  # stand in line, and the actor does not know it yet
        self._ids = itertools.count(1)
        self._cancel_noted = False
        self._stream_noted = False
        self._records: dict[RequestId, RequestRecord] = {}

    # ---- submit (any thread) --------------------------------------------------------------------------

    def next_id(self) -> RequestId:
        """A fresh request id, larger than those before; takes no room."""
        return RequestId(next(self._ids))

    def accept(self, record: RequestRecord, *, wait: bool = False) -> None:
        """Take one unit of the pending limit, register and queue the record; with `wait` let it stand in line instead.

        Whole or not at all, wherever an interrupt lands; `record.accepted` tells, and `record.withdraw()` is the
        remedy of whoever leaves by an exception.  Once accepted, the actor is bound to end it.

        Raises:
            InvalidArgumentError: its stream channel belongs to another request.
            SubmitError: the limit is reached, the queue is full, or admission is closed.
        """
        record.claim_stream()
        command = SubmitCommand(record)
        with self._gate:
            self._check_open()
            self._check_room(wait=wait)
            if wait:
                self._enter(record, record, self._newcomers.append, in_line=1)
                return
            if self.queue.is_full:
                self.metrics.refused += 1
                raise SubmitError(
                    f"the command queue holds {len(self.queue)} submits, its capacity; "
                    "retry, or raise command_queue_capacity"
                )
            self._enter(record, command, self.queue.push_anyway, in_line=0)

    def _enter(self, record: RequestRecord, item: Any, append: Callable[[Any], None], *, in_line: int) -> None:
        # An interrupt is taken at a call or a jump, never between plain stores: these, up to the append, are one step.
        self._records[record.id] = record
        self._in_line += in_line
        self.metrics.submitted += 1
        record.accepted = True
        append(item)
        self._waiters.wake_all()

    def cancel_record(self, request_id: RequestId) -> None:
        """Cancel a live request by id; unknown and retired ids are ignored."""
        record = self._records.get(request_id)
        if record is not None:
            record.cancel()

    def note_cancel(self) -> None:
        """Tell the actor that some record was cancelled."""
        self._cancel_noted = True

    def note_stream(self) -> None:
        """Tell the actor that somebody asked for the stream of a request that had none."""
        self._stream_noted = True

    # ---- gate and shutdown ----------------------------------------------------------------------------

    def close_admission(self, because: str) -> None:
        """Refuse every later submit; the first reason stays.  What was accepted before is still served."""
        with self._gate:
            self._closed_because = self._closed_because or because

    def begin_shutdown(self, mode: ShutdownMode, because: str = "the engine is shutting down") -> None:
        """Close admission and tell the actor to stop; the first mode, and the first reason, win."""
        self.close_admission(because)
        with self._gate:
            if self._shutdown_mode is None:
                self._shutdown_mode = mode
                self.queue.push_anyway(ShutdownCommand())
            self._waiters.wake_all()

    @property
    def shutdown_mode(self) -> ShutdownMode | None:
        return self._shutdown_mode

    @property
    def closed_because(self) -> str:
        """Why submits are refused; empty while they are not."""
        return self._closed_because

    @property
    def pending(self) -> int:
        """Accepted requests without an outcome."""
        return len(self._records)

    def _check_room(self, *, wait: bool) -> None:
        if not wait and not self._has_room:
            self.metrics.refused += 1
            raise SubmitError(
                f"{self.pending - self._in_line} requests are pending, the limit max_pending_requests is "
                f"{self._max_pending}; retry when one has ended"
            )

    def _check_open(self) -> None:
        if self._closed_because:
            self.metrics.refused += 1
            raise SubmitError(f"{self._closed_because}; submit to another engine")

    # ---- actor ----------------------------------------------------------------------------------------

    def park(self) -> None:
        """Wait until there is something to drain, at most `idle_wait` seconds."""
        with self._gate:
            idle = not (len(self.queue) or self._newcomers or (self._in_line and self._has_room))
            bell = self._waiters.join() if idle else None
        if bell is not None:
            self._waiters.wait(bell, self._idle_wait)
        self.metrics.actor_wakeups += 1

    def drained(self) -> bool:
        """Whether no command is queued and nobody stands in line."""
        return not (len(self.queue) or self._in_line)

    def take_newcomers(self) -> list[RequestRecord]:
        """Those who came to stand in line since the last call."""
        newcomers = []
        while self._newcomers:
            newcomers.append(self._newcomers.popleft())
        return newcomers

    def take_room(self) -> bool:
        """Let one who stands in line go on within the limit; False where it is reached."""
        with self._gate:
            room = self._has_room
            self._in_line -= room
            return room

    def leave_line(self, count: int) -> None:
        """So many who stood in line are about to end."""
        with self._gate:
            self._in_line -= count

    @property
    def _has_room(self) -> bool:
        return self.pending - self._in_line < self._max_pending

    def live_records(self) -> list[RequestRecord]:
        """Every accepted request without an outcome, in order of submission."""
        with self._gate:
            return list(self._records.values())

    def take_cancel_note(self) -> bool:
        """Whether a record was cancelled since the last call."""
        noted = self._cancel_noted
        if noted:
            self._cancel_noted = False
        return noted

    def take_stream_note(self) -> bool:
        """Whether a stream was asked for since the last call."""
        noted = self._stream_noted
        if noted:
            self._stream_noted = False
        return noted

    def terminate(
        self,
        record: RequestRecord,
        status: TerminalStatus,
        message: str = "",
        response: LLMGenerationResponse | None = None,
        *,
        end_stream: bool = True,
    ) -> None:
        """The one exit of an accepted request: outcome first, then the end of its stream.  Actor only.

        Args:
            response: the answer; of a request that did not complete, what it had generated, or None.
            end_stream: False leaves the stream to a session that is about to close and still holds text for it;
                `record.end_stream()` must follow.

        Raises nothing: what goes wrong with one request is logged.
        """
        ending = partial(self._terminate, record, status, message, response, end_stream=end_stream)
        error = call_foreign(ending)
        if error is not None:  # it must not keep the others of its step from theirs
            _logger.error("ending request %d raised", record.id, exc_info=error)

    def _terminate(
        self,
        record: RequestRecord,
        status: TerminalStatus,
        message: str,
        response: LLMGenerationResponse | None,
        *,
        end_stream: bool,
    ) -> None:
        if record.outcome_published:
            _logger.error("request %d already ended as %s; a second outcome is dropped", record.id, record.status)
            return
        status = record.seal(status)
        with self._gate:
            self._records.pop(record.id, None)
            if status is TerminalStatus.COMPLETED:
                self.metrics.completed += 1
            elif status is TerminalStatus.CANCELLED:
                self.metrics.cancelled += 1
                self.metrics.timed_out += record.timed_out
            else:
                self.metrics.failed += 1
        record.publish(status, message, response)
        if end_stream:
            record.end_stream()
