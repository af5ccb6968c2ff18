"""`CommandQueue` and `EngineChannel`: everything that callers and the actor share.

Cancellation is no command: it is a flag on the record, so a full queue cannot lose it.  The shutdown mode
is likewise a fact beside the queue.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from edgellm.engine.metrics import EngineMetrics
from edgellm.engine.records import RequestRecord, TerminalStatus
from edgellm.errors import InvalidArgumentError, SubmitError
from edgellm.log import get_logger
from edgellm.session.types import RequestId

if TYPE_CHECKING:
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

    def push(self, command: Command) -> bool:
        """Append, or return False when full."""
        with self._lock:
            if len(self._commands) >= self.capacity:
                return False
            self._commands.append(command)
            return True

    def push_anyway(self, command: Command) -> None:
        """Append past the capacity; for the one shutdown command of an engine's life."""
        self._commands.append(command)

    def pop(self) -> Command | None:
        """The oldest command, or None.  One thread only."""
        return self._commands.popleft() if self._commands else None

    def __len__(self) -> int:
        return len(self._commands)


class EngineChannel:
    """Queue, admission gate, register of live records, and the reservation count.

    Shared by the engine, its actor and every handle; it knows none of them.  Every accepted request leaves
    through `terminate`, exactly once, which gives its reservation back.
    """

    def __init__(self, config: EngineConfig, metrics: EngineMetrics) -> None:
        self.metrics = metrics
        self.queue = CommandQueue(config.command_queue_capacity)
        self._max_pending = config.max_pending_requests
        self._idle_wait = config.idle_wait
        # Re-entrant: the collector may end a forgotten engine while the actor is inside the gate.
        self._gate = threading.Condition(threading.RLock())
        self._closed_because = ""
        self._shutdown_mode: ShutdownMode | None = None
        self._pending = 0
        self._next_id = 1
        self._cancel_noted = False
        self._stream_noted = False
        self._records: weakref.WeakValueDictionary[RequestId, RequestRecord] = weakref.WeakValueDictionary()

    # ---- submit (any thread) --------------------------------------------------------------------------

    def reserve(self) -> RequestId:
        """Take one unit of the pending limit and a fresh request id.

        Raises:
            SubmitError: the limit is reached, or admission is closed.  Nothing was taken.
        """
        with self._gate:
            self._check_open()
            if self._pending >= self._max_pending:
                self.metrics.refused += 1
                raise SubmitError(
                    f"{self._pending} requests are pending, the limit max_pending_requests is {self._max_pending}; "
                    "retry when one has ended"
                )
            self._pending += 1
            request_id = RequestId(self._next_id)
            self._next_id += 1
            return request_id

    def unreserve(self) -> None:
        """Give a reservation back whose request was never accepted."""
        with self._gate:
            self._pending -= 1

    def post(self, record: RequestRecord) -> None:
        """Register and queue a record; once this returns, the actor is bound to end it.

        Raises:
            SubmitError: the queue is full or admission is closed.  The record is forgotten.
        """
        with self._gate:
            self._check_open()
            self._records[record.id] = record
            if not self.queue.push(SubmitCommand(record)):
                self.forget(record.id)
                self.metrics.refused += 1
                raise SubmitError(
                    f"the command queue holds {len(self.queue)} submits, its capacity; "
                    "retry, or raise command_queue_capacity"
                )
            self.metrics.submitted += 1
            self._gate.notify_all()

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
            self._gate.notify_all()

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
        return self._pending

    def _check_open(self) -> None:
        if self._closed_because:
            self.metrics.refused += 1
            raise SubmitError(f"{self._closed_because}; submit to another engine")

    # ---- actor ----------------------------------------------------------------------------------------

    def park(self) -> None:
        """Wait until a command is queued, at most `idle_wait` seconds."""
        with self._gate:
            if not len(self.queue):
                self._gate.wait(self._idle_wait)
        self.metrics.actor_wakeups += 1

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

    def forget(self, request_id: RequestId) -> None:
        self._records.pop(request_id, None)

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
        """
        if record.outcome_published:
            _logger.error("request %d already ended as %s; a second outcome is dropped", record.id, record.status)
            return
        status = record.seal(status)
        with self._gate:
            self._pending -= 1
            if status is TerminalStatus.COMPLETED:
                self.metrics.completed += 1
            elif status is TerminalStatus.CANCELLED:
                self.metrics.cancelled += 1
                self.metrics.timed_out += record.timed_out
            else:
                self.metrics.failed += 1
        self.forget(record.id)
        record.publish(status, message, response)
        if end_stream:
            record.end_stream()
