"""`RequestRecord` and `RequestHandle`: one accepted request, as the engine and as its caller hold it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from enum import Enum
from typing import TYPE_CHECKING, NoReturn

from edgellm.errors import (
    FOREIGN_ERRORS,
    ContractViolation,
    RequestCancelled,
    RequestFailed,
)
from edgellm.log import get_logger
from edgellm.request import CancelToken

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgellm.request import LLMGenerationRequest, LLMGenerationResponse
    from edgellm.session.types import RequestId
    from edgellm.streaming import StreamChannel

_logger = get_logger(__name__)


class TerminalStatus(Enum):
    """How an accepted request ended; coarser than `FinishReason`."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXECUTION_ERROR = "execution_error"


class RequestRecord:
    """One accepted request from submit to outcome.

    The outcome is written once, by the engine; the cancel flag is set by anybody and never lost, because it
    travels beside the command queue instead of through it.

    Attributes:
        arrival: sequence number that orders equal priorities; kept across readmission.
        request: dropped with the outcome, so that a kept handle does not keep the prompt.
        submitted_at, seated_at, first_token_at: seconds of `time.perf_counter()`; 0.0 before the event.
        readmitted: it was moved to a new session after a refused step; happens at most once.
    """

    __slots__ = (
        "__weakref__",
        "_condition",
        "_done_callbacks",
        "_note_cancel",
        "arrival",
        "cancel_token",
        "channel",
        "error_message",
        "first_token_at",
        "id",
        "outcome_published",
        "priority",
        "readmitted",
        "request",
        "response",
        "seated_at",
        "status",
        "submitted_at",
    )

    def __init__(
        self,
        *,
        request_id: RequestId,
        request: LLMGenerationRequest,
        channel: StreamChannel,
        note_cancel: Callable[[], None],
    ) -> None:
        self.id = request_id
        self.arrival = int(request_id)
        self.request: LLMGenerationRequest | None = request
        self.priority = request.priority
        self.channel = channel
        self.cancel_token = CancelToken()
        self.submitted_at = time.perf_counter()
        self.seated_at = 0.0
        self.first_token_at = 0.0
        self.readmitted = False
        self.response: LLMGenerationResponse | None = None
        self.status: TerminalStatus | None = None
        self.error_message = ""
        self.outcome_published = False
        self._condition = threading.Condition(threading.Lock())
        self._done_callbacks: list[Callable[[], None]] = []
        self._note_cancel = note_cancel
        channel.add_cancel_listener(self._plant_cancel)

    @property
    def cancelled(self) -> bool:
        """Whether somebody cancelled it, through the handle, the engine or the stream."""
        return self.cancel_token.cancelled

    def cancel(self) -> None:
        """Ask for the end of the request; any thread, never blocks, idempotent, no effect on an outcome."""
        if self.outcome_published:
            return
        self._plant_cancel()
        self.channel.cancel()

    def publish(self, status: TerminalStatus, message: str, response: LLMGenerationResponse | None) -> None:
        """Write the outcome and wake everybody who waits for it.  Called exactly once, by the engine.

        Raises:
            ContractViolation: the outcome was published before.
        """
        with self._condition:
            if self.outcome_published:
                raise ContractViolation(f"request {self.id} already ended as {self.status}; an outcome is final")
            self.status = status
            self.error_message = message
            self.response = response
            self.request = None
            self.outcome_published = True
            callbacks, self._done_callbacks = self._done_callbacks, []
            self._condition.notify_all()
        for callback in callbacks:
            try:
                callback()
            except FOREIGN_ERRORS:
                # A caller's mistake must not reach the engine's thread.
                _logger.exception("request %d: a done callback raised", self.id)

    def wait(self, timeout: float | None) -> bool:
        """Wait for the outcome, or for a cancel that makes waiting for it pointless.

        Returns:
            False when the time is up.
        """
        with self._condition:
            return self._condition.wait_for(self._released, timeout)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the outcome is published: on the engine's thread, or now."""
        with self._condition:
            if not self.outcome_published:
                self._done_callbacks.append(callback)
                return
        callback()

    def _released(self) -> bool:
        return self.outcome_published or (self.cancelled and not self.channel.is_finished())

    def _plant_cancel(self) -> None:
        if self.cancel_token.cancelled:
            return
        self.cancel_token.cancel()
        self._note_cancel()
        with self._condition:
            self._condition.notify_all()


class RequestHandle:
    """The caller's side of one request.  It does not keep the engine alive, and works after its end.

    A handle has one owner: its stream has a single consumer, so copying is refused.
    """

    __slots__ = ("_record",)

    def __init__(self, record: RequestRecord) -> None:
        self._record = record

    @property
    def id(self) -> RequestId:
        return self._record.id

    def stream(self) -> StreamChannel:
        """The channel that carries the tokens; it has one consumer."""
        return self._record.channel

    def ready(self) -> bool:
        """Whether the outcome is published, so that `get()` returns without waiting."""
        return self._record.outcome_published

    def cancel(self) -> None:
        """Ask for the end of the request; never blocks, idempotent."""
        self._record.cancel()

    def get(self, timeout: float | None = None) -> LLMGenerationResponse:
        """Wait for the outcome.

        A caller that leaves by an exception of its own (an interrupt, say) cancels the request: nobody is
        left to take the answer.

        Args:
            timeout: seconds; None waits without limit.
        Raises:
            TimeoutError: the time is up; the request runs on and `get` may be called again.
            RequestCancelled: somebody cancelled the request.
            RequestFailed: it ended with an error; the message says why.
        """
        try:
            done = self._record.wait(timeout)
        except BaseException:
            self._record.cancel()
            raise
        if not done:
            raise TimeoutError(f"request {self.id} has no outcome after {timeout} s; wait longer or cancel it")
        return self._outcome()

    async def get_async(self) -> LLMGenerationResponse:
        """`get()` for an event loop; cancelling the awaiting task cancels the request."""
        loop = asyncio.get_running_loop()
        published: asyncio.Future[None] = loop.create_future()
        self._record.add_done_callback(_thread_safe_setter(loop, published))
        try:
            await published
        except asyncio.CancelledError:
            self._record.cancel()
            raise
        return self._outcome()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the outcome is published: on the engine's thread, or now.  Must not block."""
        self._record.add_done_callback(callback)

    def _outcome(self) -> LLMGenerationResponse:
        record = self._record
        if record.outcome_published and record.status is TerminalStatus.EXECUTION_ERROR:
            raise RequestFailed(f"request {record.id} failed: {record.error_message}")
        if record.response is None:
            raise RequestCancelled(f"request {record.id} was cancelled")
        return record.response

    def __copy__(self) -> NoReturn:
        raise TypeError("a RequestHandle has one owner and cannot be copied; share the outcome instead")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a RequestHandle has one owner and cannot be copied; share the outcome instead")


def _thread_safe_setter(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> Callable[[], None]:
    def settle() -> None:
        if not future.done():
            future.set_result(None)

    def publish() -> None:
        # The loop may have been closed meanwhile; then nobody waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle)

    return publish
