"""`RequestRecord` and `RequestHandle`: one accepted request, as the engine and as its caller hold it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from enum import Enum
from typing import TYPE_CHECKING

from edgellm.argument_check import wait_seconds
from edgellm.errors import (
    ContractViolation,
    InvalidArgumentError,
    RequestCancelled,
    RequestFailed,
    RequestTimedOut,
)
from edgellm.foreign import call_foreign, describe_value
from edgellm.log import get_logger
from edgellm.memory import count
from edgellm.ownership import Uncopyable, require_home_process
from edgellm.request import CancelToken
from edgellm.session.types import FinishReason
from edgellm.streaming import DEFAULT_MAX_PENDING_CHUNKS, StreamChannel, StreamChunk
from edgellm.waits import WaitList

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgellm.engine.prefix import PrefixKey
    from edgellm.request import LLMGenerationRequest, LLMGenerationResponse
    from edgellm.session.types import RequestId

_logger = get_logger(__name__)


class TerminalStatus(Enum):
    """How an accepted request ended; coarser than `FinishReason`."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXECUTION_ERROR = "execution_error"


_FINISH_REASON = {
    TerminalStatus.COMPLETED: FinishReason.LENGTH,
    TerminalStatus.CANCELLED: FinishReason.CANCELLED,
    TerminalStatus.EXECUTION_ERROR: FinishReason.ERROR,
}


def _nothing() -> None:
    """Stands where nobody needs to be told."""


class RequestRecord:
    """One accepted request from submit to outcome.

    The outcome is written once, by the engine; the cancel flag is set by anybody and never lost, because it
    travels beside the command queue instead of through it.

    Attributes:
        accepted: the engine is bound to end it; set with the entry in the register.
        arrival: sequence number that orders equal priorities; kept across readmission.
        request: dropped with the outcome, so that a kept handle does not keep the prompt.
        channel: the stream that the caller brought, or that `open_stream` made; None while nobody streams.
        partial: what a request had generated that was cancelled or failed, as far as it is known.
        submitted_at, seated_at, first_token_at: seconds of `time.perf_counter()`; 0.0 before the event.
        readmitted: it was moved to a new session after a refused step; happens at most once.
        timeout_seconds: of the request.
        timed_out: its deadline was what cancelled it.
        prefix_key: what it has in common with requests that share a prefix with it; see `prefix_key()`.
        overtaken: how often a later request got a seat before it.
        refused_at: state of the capacity at which it last found none; see `AdmissionPhase`.
        replays: how often it began again after its session was lost.
        suspect: the session was lost while it was admitted; it is tried again alone.
    """

    __slots__ = (
        "__weakref__",
        "_done_callbacks",
        "_lock",
        "_note_cancel",
        "_note_stream",
        "_process_id",
        "_sealed",
        "_waiters",
        "accepted",
        "arrival",
        "cancel_token",
        "channel",
        "error_message",
        "first_token_at",
        "id",
        "outcome_published",
        "overtaken",
        "partial",
        "prefix_key",
        "priority",
        "readmitted",
        "refused_at",
        "replays",
        "request",
        "response",
        "seated_at",
        "status",
        "submitted_at",
        "suspect",
        "timed_out",
        "timeout_seconds",
    )

    def __init__(
        self,
        *,
        request_id: RequestId,
        request: LLMGenerationRequest,
        channel: StreamChannel | None = None,
        note_cancel: Callable[[], None],
        note_stream: Callable[[], None] = _nothing,
    ) -> None:
        """
        Args:
            note_cancel, note_stream: tell the actor that this record was cancelled, or wants a stream.
        """
        self.id = request_id
        self.arrival = int(request_id)
        self.request: LLMGenerationRequest | None = request
        self.priority = request.priority
        self.channel = channel
        self.accepted = False
        self.cancel_token = CancelToken()
        self.submitted_at = time.perf_counter()
        self.seated_at = 0.0
        self.first_token_at = 0.0
        self.readmitted = False
        self.timeout_seconds = request.timeout_seconds
        self.timed_out = False
        self.prefix_key: PrefixKey | None = None
        self.overtaken = 0
        self.refused_at: tuple[int, int] | None = None
        self.replays = 0
        self.suspect = False
        self.response: LLMGenerationResponse | None = None
        self.partial: LLMGenerationResponse | None = None
        self.status: TerminalStatus | None = None
        self.error_message = ""
        self.outcome_published = False
        # Re-entrant: the collector may cancel a dropped stream from inside a call of this record.
        self._lock = threading.RLock()
        self._waiters = WaitList(self._lock)
        self._process_id = os.getpid()
        self._done_callbacks: list[Callable[[], None]] = []
        self._note_cancel = note_cancel
        self._note_stream = note_stream
        self._sealed = False

    @property
    def deadline(self) -> float | None:
        """When it ends unless it has an outcome, on the clock of `submitted_at`; None never."""
        return None if self.timeout_seconds is None else self.submitted_at + self.timeout_seconds

    @property
    def cancelled(self) -> bool:
        """Whether somebody cancelled it, through the handle, the engine or the stream."""
        return self.cancel_token.cancelled

    def cancel(self) -> None:
        """Ask for the end of the request; any thread, never blocks, idempotent, no effect on an outcome."""
        if self._sealed or os.getpid() != self._process_id:  # nobody in a fork ends it, and its locks may be taken
            return
        self._plant_cancel()
        if self.channel is not None:
            self.channel.cancel()

    def expire(self) -> None:
        """`cancel()` because the deadline passed; a cancel that came before keeps its name."""
        with self._lock:
            if self._sealed or self.cancelled:
                return
            self.timed_out = True
        self.cancel()

    def seal(self, status: TerminalStatus) -> TerminalStatus:
        """Decide how the request ends: a cancel that came before wins over a natural end, a later one has no effect.

        Without this a waiter that a cancel released could see the request complete afterwards.
        """
        with self._lock:
            self._sealed = True
            if self.cancelled and status is TerminalStatus.COMPLETED:
                return TerminalStatus.CANCELLED
            return status

    def publish(self, status: TerminalStatus, message: str, response: LLMGenerationResponse | None) -> None:
        """Write the outcome and wake everybody who waits for it.  Called exactly once, by the engine.

        Args:
            response: the answer; of a request that did not complete, what it had generated, or None.
        Raises:
            ContractViolation: the outcome was published before.
        """
        with self._lock:
            if self.outcome_published:
                raise ContractViolation(f"request {self.id} already ended as {self.status}; an outcome is final")
            self.status = status
            self.error_message = message
            if status is TerminalStatus.COMPLETED:
                self.response = response
            else:
                self.partial = response
            self.request = None
            self._sealed = True
            self.outcome_published = True
            callbacks, self._done_callbacks = self._done_callbacks, []
            self._waiters.wake_all()
        for callback in callbacks:
            self._call_back(callback)

    def claim_stream(self) -> None:
        """Take the channel that the caller brought, if any; cancelling it cancels this request.

        Raises:
            InvalidArgumentError: it belongs to another request.  Nothing was changed.
        """
        if self.channel is not None:
            self.channel.claim(self._plant_cancel)

    def withdraw(self) -> None:
        """The submit failed or was interrupted: nobody has the handle.  Idempotent.

        Cancels a request that was accepted nevertheless; of another one the channel is free for a further try.
        """
        if self.accepted:
            self.cancel()
        elif self.channel is not None:
            self.channel.unclaim(self._plant_cancel)

    # ---- stream ---------------------------------------------------------------------------------------

    def open_stream(
        self, *, stream_interval: int = 1, max_pending_chunks: int = DEFAULT_MAX_PENDING_CHUNKS
    ) -> StreamChannel:
        """The request's stream, made by the first call; any thread, at any time.  See `RequestHandle.stream`."""
        self.require_home_process()
        with self._lock:
            if self.channel is not None:
                return self.channel
            channel = StreamChannel.create(stream_interval=stream_interval, max_pending_chunks=max_pending_chunks)
            channel.claim(self._plant_cancel)
            if self.outcome_published:
                # Whole before anybody sees it: the engine may be about to end the stream it finds.
                self._fill(channel)
            self.channel = channel
        if channel.is_finished():
            return channel
        if self.cancelled:
            channel.cancel()
        self._note_stream()
        return channel

    def settle_stream(self) -> None:
        """Let the session's admission see the stream that was asked for so far.  Actor only.

        One asked for later finds the request seated, and is attached there.
        """
        with self._lock:
            if self.request is not None:
                self.request.stream_channel = self.channel

    def end_stream(self) -> None:
        """End the stream that there was before the outcome, and fill it if no session ever served it.  Actor only.

        `open_stream` after the outcome makes one that has ended.
        """
        channel = self.channel
        if channel is not None and not channel.is_finished():
            self._fill(channel)

    def _fill(self, channel: StreamChannel) -> None:
        status = self.status
        if status is None:
            return
        source = self.response if self.response is not None else self.partial
        reason = _FINISH_REASON[status]
        if status is TerminalStatus.COMPLETED and source is not None:
            reason = source.finish_reason
        if source is None or channel.is_attached():
            channel.finish(reason)
            return
        channel.attach()
        logprobs = None if source.logprobs is None else list(source.logprobs)
        channel.push(StreamChunk(list(source.token_ids), source.text, True, reason, logprobs))

    def progress(self) -> str:
        """How far it got, for a message.  What was generated is counted once the engine has said so."""
        if not self.seated_at:
            return "waiting for a seat; raise timeout_seconds, or max_batch_size"
        if not self.first_token_at:
            waited = self.seated_at - self.submitted_at
            return f"computing its prompt, after {waited:.3g} s without a seat; raise timeout_seconds"
        first = f"its first token came after {self.first_token_at - self.submitted_at:.3g} s"
        if self.partial is None:
            return f"generating ({first}); raise timeout_seconds, or lower max_tokens"
        tokens = count(len(self.partial.token_ids), "token")
        return f"with {tokens} generated ({first}); raise timeout_seconds, or lower max_tokens"

    # ---- waiting --------------------------------------------------------------------------------------

    def wait(self, timeout: float | None) -> bool:
        """Wait for the outcome, or for a cancel that makes waiting for it pointless.

        Returns:
            False when the time is up.
        """
        self.require_home_process()
        return self._waiters.wait_for(self._released, timeout)

    def require_home_process(self) -> None:
        """Raises: ContractViolation: this is a fork of the engine's process, where the outcome will not arrive."""
        if not self.outcome_published:
            require_home_process(self._process_id, "read the answer in the process that asked for it")

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the outcome is published: on the engine's thread, or now.  What it raises is logged."""
        with self._lock:
            if not self.outcome_published:
                self._done_callbacks.append(callback)
                return
        self._call_back(callback)

    def _call_back(self, callback: Callable[[], None]) -> None:
        error = call_foreign(callback)
        if error is not None:
            _logger.error("request %d: a done callback raised", self.id, exc_info=error)

    def _released(self) -> bool:
        if self.outcome_published:
            return True
        # A stream that ended by itself says that the outcome is about to be published.
        return self.cancelled and not (self.channel is not None and self.channel.is_finished())

    def _plant_cancel(self) -> None:
        """Each step again at each call: an interrupt may have cut the one before short."""
        with self._lock:
            if self._sealed:
                return
            self.cancel_token.cancel()
        self._note_cancel()
        with self._lock:
            self._waiters.wake_all()


class RequestHandle(Uncopyable):
    """The caller's side of one request.  It does not keep the engine alive, and works after its end.

    A handle has one owner: its stream has a single consumer, so copying is refused.  Dropping it changes nothing:
    the request runs to its end unseen.  Cancel what nobody wants any more.
    """

    __slots__ = ("_record",)

    def __init__(self, record: RequestRecord) -> None:
        self._record = record

    @property
    def id(self) -> RequestId:
        return self._record.id

    def stream(
        self, *, stream_interval: int = 1, max_pending_chunks: int = DEFAULT_MAX_PENDING_CHUNKS
    ) -> StreamChannel:
        """The channel that carries the tokens, from the first one on, whenever it is asked for; one consumer.

        A request that nobody streams has none and costs no work for it.  What was generated before the first call
        arrives as one chunk.  After the outcome the stream holds the whole answer; after a failure or a cancel, what
        is known of it.

        Args:
            stream_interval, max_pending_chunks: as `StreamChannel.create`; read by the call that makes the
                channel, not where the request brought one.
        Raises:
            ContractViolation: this process was forked from the one the engine runs in, where the request still runs.
        """
        return self._record.open_stream(stream_interval=stream_interval, max_pending_chunks=max_pending_chunks)

    def ready(self) -> bool:
        """Whether the outcome is published, so that `get()` returns without waiting.

        A cancel releases `get()` at once, the outcome follows when the engine has seen it: for some milliseconds
        after `get()` raised `RequestCancelled` this is still False.
        """
        return self._record.outcome_published

    def cancel(self) -> None:
        """Ask for the end of the request; never blocks, idempotent."""
        self._record.cancel()

    def get(self, timeout: float | None = None) -> LLMGenerationResponse:
        """Wait for the outcome.

        A caller that leaves by an exception of its own (an interrupt, say) cancels the request: nobody is
        left to take the answer.

        Args:
            timeout: seconds, 0 or more; None and infinity wait without limit.
        Raises:
            ContractViolation: this process was forked from the one the engine runs in; there is no outcome yet.
            InvalidArgumentError: `timeout` is no such number; the request runs on.
            TimeoutError: the time is up; the request runs on and `get` may be called again.
            RequestCancelled: somebody cancelled the request.
            RequestTimedOut: its `timeout_seconds` were over; a `RequestCancelled` too.
            RequestFailed: it ended with an error; the message says why.
        """
        seconds = wait_seconds("timeout", timeout)
        try:
            done = self._record.wait(seconds)
        except BaseException:
            self._record.cancel()
            raise
        if not done:
            raise TimeoutError(f"request {self.id} has no outcome after {timeout} s; wait longer or cancel it")
        return self._outcome()

    async def get_async(self) -> LLMGenerationResponse:
        """`get()` for an event loop; cancelling the awaiting task cancels the request."""
        self._record.require_home_process()
        loop = asyncio.get_running_loop()
        published: asyncio.Future[None] = loop.create_future()
        self._record.add_done_callback(_thread_safe_setter(loop, published))
        try:
            await published
        except BaseException:  # cancelled, or the coroutine was closed
            self._record.cancel()
            raise
        return self._outcome()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the outcome is published: on the engine's thread, or now.

        It must not block.  What it raises is logged, and goes no further.

        Raises:
            InvalidArgumentError: `callback` cannot be called.
        """
        if not callable(callback):
            raise InvalidArgumentError(
                f"callback is {describe_value(callback)}; pass a function that takes no arguments"
            )
        self._record.add_done_callback(callback)

    def _outcome(self) -> LLMGenerationResponse:
        record = self._record
        if record.outcome_published and record.status is TerminalStatus.EXECUTION_ERROR:
            raise RequestFailed(f"request {record.id} failed: {record.error_message}")
        if record.response is None and record.timed_out:
            raise RequestTimedOut(
                f"request {record.id} timed out {record.timeout_seconds} s after its submit, {record.progress()}"
            )
        if record.response is None:
            raise RequestCancelled(f"request {record.id} was cancelled")
        return record.response


def _thread_safe_setter(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> Callable[[], None]:
    def settle() -> None:
        if not future.done():
            future.set_result(None)

    def publish() -> None:
        # The loop may have been closed meanwhile; then nobody waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle)

    return publish
