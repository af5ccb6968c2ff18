"""`StreamChannel`: how generated tokens travel from the session to one consumer.

One producer (the session, on the actor thread) and one consumer (any thread, or one event loop).  The
producer never waits: when the consumer stops reading, further chunks are merged into the newest unread one.
A stalled stream therefore holds at most `max_pending_chunks` chunks and the tokens of its one request, and
loses nothing.

The end of a stream is a fact of its own: a finished channel says that no more text will come, not that the
request's outcome is published.  Read the outcome from the request handle.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgellm.argument_check import INT32_MAX, check_flag, check_int, wait_seconds
from edgellm.errors import ContractViolation, InvalidArgumentError
from edgellm.foreign import call_foreign, describe_value
from edgellm.log import get_logger
from edgellm.ownership import Uncopyable, require_home_process
from edgellm.session.types import FinishReason
from edgellm.waits import WaitList

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edgellm.sampling.logprobs import TokenLogprobs

_logger = get_logger(__name__)
_FACTORY_KEY = object()

DEFAULT_MAX_PENDING_CHUNKS = 64
"""Unread chunks that a channel keeps apart before it merges."""


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one sequence produced since the chunk before.

    Attributes:
        token_ids: new ids, several under speculation; may be empty on the terminal chunk.
        text: valid UTF-8; may be empty while a character or a possible stop string is incomplete.
        finished: this is the last chunk.
        reason: why the sequence ended; NOT_FINISHED before the last chunk.
        logprobs: one entry a token of `token_ids`, or None when none were asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: bool = False
    reason: FinishReason = FinishReason.NOT_FINISHED
    logprobs: list[TokenLogprobs] | None = None


class _Gathered:
    """Several chunks on the way to be one; grows in place, so that a long stall costs no repeated copies."""

    __slots__ = ("_logprobs", "_reason", "_texts", "token_ids")

    def __init__(self, first: StreamChunk) -> None:
        self.token_ids = list(first.token_ids)
        self._texts = [first.text]
        self._logprobs = None if first.logprobs is None else list(first.logprobs)
        self._reason = first.reason

    def add(self, later: StreamChunk) -> None:
        self.token_ids += later.token_ids
        if later.text:
            self._texts.append(later.text)
        if later.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += later.logprobs
        self._reason = later.reason

    def chunk(self) -> StreamChunk:
        return StreamChunk(
            token_ids=self.token_ids,
            text="".join(self._texts),
            finished=self._reason is not FinishReason.NOT_FINISHED,
            reason=self._reason,
            logprobs=self._logprobs,
        )


class StreamChannel(Uncopyable):
    """Single-use stream of `StreamChunk`s; make one with `StreamChannel.create()`.

    Thread rules: `push`, `finish`, `attach`, `detach` belong to the producer; `try_pop`, `wait_pop`,
    `consume` and the two iterators to the one consumer; `cancel`, `add_listener` and the queries to anybody.

    Memory: at most `max_pending_chunks` unread chunks, whatever the consumer does; together they hold each
    token of the request at most once.

    Cancelling releases the consumer at once: chunks that were already pushed are still delivered, then the
    stream ends without waiting for the producer to notice.
    """

    def __init__(self, key: object = None) -> None:
        if key is not _FACTORY_KEY:
            raise ContractViolation("StreamChannel is made by StreamChannel.create(), not by its constructor")
        # Re-entrant: the collector may cancel a dropped stream from inside a call of this channel.
        self._lock = threading.RLock()
        self._waiters = WaitList(self._lock)
        self._pending: deque[StreamChunk] = deque()
        self._merged: _Gathered | None = None  # the newest unread chunk, once it had to be merged
        self._held: _Gathered | None = None  # not yet `stream_interval` tokens
        self._claimant: Callable[[], None] | None = None  # how its request hears of a cancel
        self._process_id: int | None = None  # of the claimant
        self._attached = False
        self._read = False
        self._cancelled = False
        self._reason = FinishReason.NOT_FINISHED
        self._stream_interval = 1
        self._max_pending_chunks = DEFAULT_MAX_PENDING_CHUNKS
        self._skip_special_tokens: bool | None = None
        self._reader_waits = False  # spares the producer a notification that nobody would hear
        self._waker: Callable[[], None] | None = None
        self._cancel_listeners: list[Callable[[], None]] = []
        self._listeners: tuple[Callable[[], None], ...] = ()

    @classmethod
    def create(
        cls,
        *,
        stream_interval: int = 1,
        skip_special_tokens: bool | None = None,
        max_pending_chunks: int = DEFAULT_MAX_PENDING_CHUNKS,
    ) -> StreamChannel:
        """A fresh channel.

        Args:
            stream_interval: non-final chunks carry at least so many tokens; below 1 counts as 1.
            skip_special_tokens: overrides the request's own setting for the streamed text; None keeps it.
            max_pending_chunks: most unread chunks; further ones are merged into the newest, nothing is lost.
                1 always hands over everything there is; 0 does not bound.
        Raises:
            InvalidArgumentError: one of them is of another type, or out of range.
        """
        check_int("max_pending_chunks", max_pending_chunks, low=0)
        channel = cls(_FACTORY_KEY)
        channel.set_stream_interval(stream_interval)
        channel._max_pending_chunks = max_pending_chunks
        if skip_special_tokens is not None:
            channel.set_skip_special_tokens(skip_special_tokens)
        return channel

    # ---- settings -------------------------------------------------------------------------------------

    def set_stream_interval(self, interval: int) -> None:
        """Let non-final chunks carry at least `interval` tokens; below 1 counts as 1.

        Raises:
            InvalidArgumentError: no integer of 32 bits.
        """
        check_int("stream_interval", interval, low=-INT32_MAX)
        with self._lock:
            self._stream_interval = max(1, interval)

    def set_skip_special_tokens(self, skip: bool) -> None:
        """Override the request's setting for the streamed text (never the ids).

        Raises:
            ContractViolation: the channel belongs to a request already.
            InvalidArgumentError: neither True nor False.
        """
        check_flag("skip_special_tokens", skip)
        with self._lock:
            if self._attached or self._claimant is not None:
                raise ContractViolation(
                    "set_skip_special_tokens: the channel is attached to a request; set it before submitting"
                )
            self._skip_special_tokens = skip

    @property
    def stream_interval(self) -> int:
        return self._stream_interval

    @property
    def skip_special_tokens(self) -> bool | None:
        return self._skip_special_tokens

    @property
    def max_pending_chunks(self) -> int:
        return self._max_pending_chunks

    # ---- producer -------------------------------------------------------------------------------------

    def claim(self, on_cancel: Callable[[], None]) -> None:
        """Promise the channel to one request, before a session attaches it.

        Args:
            on_cancel: tells the request that the channel was cancelled (now, if it already is); must be idempotent,
                since each `cancel()` calls it.
        Raises:
            InvalidArgumentError: it served or serves a request already.  Nothing was changed.
        """
        with self._lock:
            if self._claimant is not None or self._attached or self._finished:
                raise InvalidArgumentError(
                    "stream_channel served another request already; give each request its own channel"
                )
            self._process_id = os.getpid()
            self._claimant = on_cancel
            cancelled = self._cancelled
        if cancelled:
            on_cancel()

    def unclaim(self, on_cancel: Callable[[], None]) -> None:
        """Take back the `claim` with the same argument, if there is one: its request was never accepted."""
        with self._lock:
            if self._claimant == on_cancel:
                self._claimant = None

    def attach(self) -> None:
        """Claim the channel for one sequence.

        Raises:
            ContractViolation: attached already, or finished.  Nothing was changed.
        """
        with self._lock:
            if self._attached:
                raise ContractViolation("attach: the channel already serves a sequence; give each request its own")
            if self._finished:
                raise ContractViolation(f"attach: the channel finished ({self._reason.value}); channels are single use")
            self._attached = True

    def detach(self) -> None:
        """Give an unfinished channel back unused, so that its request can be admitted elsewhere.

        Raises:
            ContractViolation: not attached, or finished.
        """
        with self._lock:
            if not self._attached or self._finished:
                state = "finished" if self._finished else "not attached"
                raise ContractViolation(f"detach: the channel is {state}; only an attached, unfinished one can move")
            self._attached = False

    def rewind(self) -> bool:
        """`detach` for a sequence that begins again: drop what nobody has read.

        Returns:
            False when the consumer has read a chunk, or the channel finished: its sequence cannot begin again
            unseen.  Nothing was changed.
        """
        with self._lock:
            if self._read or self._finished:
                return False
            self._pending.clear()
            self._merged = self._held = None
            self._attached = False
            return True

    def push(self, chunk: StreamChunk) -> bool:
        """Hand over a chunk without waiting; a chunk with `finished` also finishes the channel.

        Returns:
            False when the channel had finished before: the chunk is dropped.
        Raises:
            InvalidArgumentError: a finished chunk without a reason.  Nothing was changed.
        """
        if chunk.finished is (chunk.reason is FinishReason.NOT_FINISHED):
            raise InvalidArgumentError(
                f"push: finished={chunk.finished} with reason {chunk.reason.value}; exactly the last chunk has a reason"
            )
        with self._lock:
            if self._reason is not FinishReason.NOT_FINISHED:
                return False
            if self._held is not None or (len(chunk.token_ids) < self._stream_interval and not chunk.finished):
                held = self._hold_locked(chunk)
                if held is None:
                    return True
                chunk = held
            self._append_locked(chunk)
            listeners = self._listeners
            if chunk.finished:
                self._reason = chunk.reason
                self._cancel_listeners.clear()
                self._listeners = ()
            waker = self._wake_locked() if self._reader_waits else None
        _call(waker)
        for listener in listeners:
            _tell(listener)
        return True

    def finish(self, reason: FinishReason) -> bool:
        """End the stream with a terminal chunk that carries whatever was held back.

        Idempotent: the first reason wins.

        Returns:
            Whether this call ended the stream.
        Raises:
            InvalidArgumentError: `reason` is NOT_FINISHED.
        """
        if reason is FinishReason.NOT_FINISHED:
            raise InvalidArgumentError("finish: reason is NOT_FINISHED; name why the stream ended")
        return self.push(StreamChunk(finished=True, reason=reason))

    # ---- consumer -------------------------------------------------------------------------------------

    def try_pop(self) -> StreamChunk | None:
        """The oldest unread chunk, or None."""
        with self._lock:
            return self._pop_locked() if self._readable else None

    def wait_pop(self, timeout: float | None = None) -> StreamChunk | None:
        """Wait for the next chunk, at most `timeout` seconds (None: no limit).

        Returns:
            The chunk; None at the end of the stream (`is_exhausted()`) or when the time is up.
        Raises:
            InvalidArgumentError: `timeout` is no number of seconds.
            ContractViolation: this process was forked from the one that serves the stream.
        """
        timeout = wait_seconds("timeout", timeout)
        self._require_home_process()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                if self._readable:
                    return self._pop_locked()
                remaining = None if deadline is None else deadline - time.monotonic()
                if self._ended or (remaining is not None and remaining <= 0):
                    return None
                self._reader_waits = True
                bell = self._waiters.join()
            self._waiters.wait(bell, remaining)

    def consume(self, handler: Callable[[StreamChunk], None], poll: float = 0.1) -> FinishReason:
        """Call `handler` with every chunk, without the lock, until the stream ends.

        A handler that raises cancels the channel: nobody reads on, so nothing more need be generated.

        Args:
            poll: seconds between looks at the channel; only a backstop, chunks wake the consumer.
        Returns:
            `reason()`; NOT_FINISHED when the stream was cancelled before the producer ended it.
        """
        while not self.is_exhausted():
            chunk = self.wait_pop(poll)
            if chunk is None:
                continue
            try:
                handler(chunk)
            except BaseException:
                self.cancel()
                raise
        return self.reason()

    def __iter__(self) -> Iterator[StreamChunk]:
        while (chunk := self.wait_pop()) is not None:
            yield chunk

    def __aiter__(self) -> StreamChannel:
        return self

    async def __anext__(self) -> StreamChunk:
        self._require_home_process()
        while True:
            loop = asyncio.get_running_loop()
            arrived: asyncio.Future[None] = loop.create_future()
            with self._lock:
                if self._readable:
                    return self._pop_locked()
                if self._ended:
                    raise StopAsyncIteration
                if self._waker is not None:
                    raise ContractViolation("two tasks read one stream; a stream has one reader, make one for each")
                waker = self._waker = _thread_safe_waker(loop, arrived, self.cancel)
                self._reader_waits = True
            try:
                await arrived
            finally:
                with self._lock:
                    if self._waker is waker:  # a later reader's stays
                        self._waker = None

    # ---- anybody --------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Ask the producer to stop and release the consumer.  Idempotent; no effect once finished."""
        with self._lock:
            if self._finished:
                return
            first = not self._cancelled
            self._cancelled = True
            claimant = self._claimant
            cancel_listeners, listeners = tuple(self._cancel_listeners), self._listeners
            waker = self._wake_locked()
        if claimant is not None:  # each time: an interrupt may have kept the first call from telling
            claimant()
        _call(waker)
        if not first:
            return
        for listener in cancel_listeners:
            listener()
        for listener in listeners:
            _tell(listener)

    def add_cancel_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` on the cancelling thread once the channel is cancelled (now, if it already is).

        Listeners are dropped when the stream ends: cancelling has no effect any more.

        Raises:
            InvalidArgumentError: `listener` cannot be called.
        """
        _check_callable("listener", listener)
        with self._lock:
            if not self._finished:
                self._cancel_listeners.append(listener)
            cancelled = self._cancelled
        if cancelled:
            listener()

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Call `callback` each time a chunk can be read, when the stream ends and when it is cancelled.

        It runs on the thread that brought it about (the engine's, but for a cancel), and here and now when a chunk is
        waiting or the stream is over; so it must neither block nor raise.  It may also find nothing to read.  With
        it one event loop or thread serves any number of streams: let it schedule a `try_pop` loop.

        Raises:
            InvalidArgumentError: `callback` cannot be called.
        """
        _check_callable("callback", callback)
        with self._lock:
            if not self._finished:
                self._listeners = (*self._listeners, callback)
            now = self._readable or self._ended
        if now:
            _tell(callback)

    def remove_listener(self, callback: Callable[[], None]) -> None:
        """Forget `callback`; a call that is under way still arrives.  Unknown ones are ignored."""
        with self._lock:
            self._listeners = tuple(listener for listener in self._listeners if listener != callback)

    def is_finished(self) -> bool:
        """Whether the producer ended the stream; unread chunks may remain."""
        return self._finished

    def is_cancelled(self) -> bool:
        return self._cancelled

    def is_attached(self) -> bool:
        return self._attached

    def is_exhausted(self) -> bool:
        """Whether the consumer will see no further chunk."""
        with self._lock:
            return self._ended and not self._readable

    def reason(self) -> FinishReason:
        """Why the stream ended; NOT_FINISHED before it did."""
        return self._reason

    def _require_home_process(self) -> None:
        if self._process_id is not None and not self._finished:
            require_home_process(self._process_id, "read the stream in the process that asked for it")

    # ---- under the lock -------------------------------------------------------------------------------

    @property
    def _finished(self) -> bool:
        return self._reason is not FinishReason.NOT_FINISHED

    @property
    def _ended(self) -> bool:
        return self._finished or self._cancelled

    @property
    def _readable(self) -> bool:
        return bool(self._pending) or self._merged is not None

    def _hold_locked(self, chunk: StreamChunk) -> StreamChunk | None:
        """Join `chunk` to what is held back; the whole once it is long enough or the last, else None."""
        if self._held is None:
            self._held = _Gathered(chunk)
        else:
            self._held.add(chunk)
        if len(self._held.token_ids) < self._stream_interval and not chunk.finished:
            return None
        whole, self._held = self._held.chunk(), None
        return whole

    def _append_locked(self, chunk: StreamChunk) -> None:
        limit, merged = self._max_pending_chunks, self._merged
        if 0 < limit <= len(self._pending) + (merged is not None):
            if merged is None:
                merged = self._merged = _Gathered(self._pending.pop())
            merged.add(chunk)
            return
        if merged is not None:
            self._pending.append(merged.chunk())
            self._merged = None
        self._pending.append(chunk)

    def _pop_locked(self) -> StreamChunk:
        self._read = True
        if self._pending:
            return self._pending.popleft()
        if self._merged is None:
            raise ContractViolation("two threads read one stream; a stream has one reader, make one for each")
        chunk, self._merged = self._merged.chunk(), None
        return chunk

    def _wake_locked(self) -> Callable[[], None] | None:
        """Wake a waiting thread; returns the event loop's waker, to be called without the lock."""
        self._reader_waits = False
        self._waiters.wake_all()
        waker, self._waker = self._waker, None
        return waker


def _thread_safe_waker(
    loop: asyncio.AbstractEventLoop, arrived: asyncio.Future[None], on_closed: Callable[[], None]
) -> Callable[[], None]:
    def settle() -> None:
        if not arrived.done():
            arrived.set_result(None)

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the loop was closed under its reader: nobody is left
            on_closed()

    return wake


def _check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise InvalidArgumentError(f"{name} is {describe_value(value)}; pass a function that takes no arguments")


def _call(waker: Callable[[], None] | None) -> None:
    if waker is not None:
        waker()


def _tell(listener: Callable[[], None]) -> None:
    error = call_foreign(listener)
    if error is not None:
        _logger.error("a stream listener raised", exc_info=error)
