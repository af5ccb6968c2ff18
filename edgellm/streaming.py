"""`StreamChannel`: how generated tokens travel from the session to one consumer.

One producer (the session, on the actor thread) and one consumer (any thread, or one event loop).  The
producer never waits: a consumer that stops reading costs memory, not progress, and with
`max_pending_chunks` not even an unbounded number of chunks.

The end of a stream is a fact of its own: a finished channel says that no more text will come, not that the
request's outcome is published.  Read the outcome from the request handle.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgellm.errors import ContractViolation, InvalidArgumentError
from edgellm.session.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edgellm.sampling.logprobs import TokenLogprobs

_FACTORY_KEY = object()


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

    def merged_with(self, later: StreamChunk) -> StreamChunk:
        """Both chunks as one, as if produced together."""
        logprobs = None
        if self.logprobs is not None or later.logprobs is not None:
            logprobs = [*(self.logprobs or ()), *(later.logprobs or ())]
        return StreamChunk(
            token_ids=self.token_ids + later.token_ids,
            text=self.text + later.text,
            finished=later.finished,
            reason=later.reason,
            logprobs=logprobs,
        )


class StreamChannel:
    """Single-use stream of `StreamChunk`s; make one with `StreamChannel.create()`.

    Thread rules: `push`, `finish`, `attach`, `detach` belong to the producer; `try_pop`, `wait_pop`,
    `consume` and the two iterators to the one consumer; `cancel` and the queries to anybody.

    Cancelling releases the consumer at once: chunks that were already pushed are still delivered, then the
    stream ends without waiting for the producer to notice.
    """

    def __init__(self, key: object = None) -> None:
        if key is not _FACTORY_KEY:
            raise ContractViolation("StreamChannel is made by StreamChannel.create(), not by its constructor")
        self._condition = threading.Condition(threading.Lock())
        self._pending: deque[StreamChunk] = deque()
        self._held: StreamChunk | None = None
        self._attached = False
        self._cancelled = False
        self._reason = FinishReason.NOT_FINISHED
        self._stream_interval = 1
        self._max_pending_chunks = 0
        self._skip_special_tokens: bool | None = None
        self._reader_waits = False  # spares the producer a notification that nobody would hear
        self._waker: Callable[[], None] | None = None
        self._cancel_listeners: list[Callable[[], None]] = []

    @classmethod
    def create(
        cls, *, stream_interval: int = 1, skip_special_tokens: bool | None = None, max_pending_chunks: int = 0
    ) -> StreamChannel:
        """A fresh channel.

        Args:
            stream_interval: non-final chunks carry at least so many tokens; below 1 counts as 1.
            skip_special_tokens: overrides the request's own setting for the streamed text; None keeps it.
            max_pending_chunks: > 0 bounds the unread chunks: further text is merged into the newest one.
                Nothing is lost.  0 does not bound.
        """
        if max_pending_chunks < 0:
            raise InvalidArgumentError(f"max_pending_chunks is {max_pending_chunks}; it must be 0 (no bound) or more")
        channel = cls(_FACTORY_KEY)
        channel.set_stream_interval(stream_interval)
        channel._max_pending_chunks = max_pending_chunks
        channel._skip_special_tokens = skip_special_tokens
        return channel

    # ---- settings -------------------------------------------------------------------------------------

    def set_stream_interval(self, interval: int) -> None:
        """Let non-final chunks carry at least `interval` tokens; below 1 counts as 1."""
        with self._condition:
            self._stream_interval = max(1, interval)

    def set_skip_special_tokens(self, skip: bool) -> None:
        """Override the request's setting for the streamed text (never the ids).

        Raises:
            ContractViolation: the channel is attached already.
        """
        with self._condition:
            if self._attached:
                raise ContractViolation("set_skip_special_tokens: the channel is attached; set it before submitting")
            self._skip_special_tokens = skip

    @property
    def stream_interval(self) -> int:
        return self._stream_interval

    @property
    def skip_special_tokens(self) -> bool | None:
        return self._skip_special_tokens

    # ---- producer -------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Claim the channel for one sequence.

        Raises:
            ContractViolation: attached already, or finished.  Nothing was changed.
        """
        with self._condition:
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
        with self._condition:
            if not self._attached or self._finished:
                state = "finished" if self._finished else "not attached"
                raise ContractViolation(f"detach: the channel is {state}; only an attached, unfinished one can move")
            self._attached = False

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
        with self._condition:
            if self._reason is not FinishReason.NOT_FINISHED:
                return False
            if self._held is not None:
                chunk = self._held.merged_with(chunk)
                self._held = None
            if chunk.finished:
                self._reason = chunk.reason
                self._cancel_listeners.clear()
            elif len(chunk.token_ids) < self._stream_interval:
                self._held = chunk
                return True
            if 0 < self._max_pending_chunks <= len(self._pending):
                chunk = self._pending.pop().merged_with(chunk)
            self._pending.append(chunk)
            waker = self._wake_locked() if self._reader_waits else None
        _call(waker)
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
        with self._condition:
            return self._pending.popleft() if self._pending else None

    def wait_pop(self, timeout: float | None = None) -> StreamChunk | None:
        """Wait for the next chunk, at most `timeout` seconds (None: no limit).

        Returns:
            The chunk; None at the end of the stream (`is_exhausted()`) or when the time is up.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while not self._pending:
                if self._ended:
                    return None
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return None
                self._reader_waits = True
                self._condition.wait(remaining)
            return self._pending.popleft()

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
        while True:
            loop = asyncio.get_running_loop()
            arrived: asyncio.Future[None] = loop.create_future()
            with self._condition:
                if self._pending:
                    return self._pending.popleft()
                if self._ended:
                    raise StopAsyncIteration
                if self._waker is not None:
                    raise ContractViolation("two tasks read one stream; a stream has one reader, make one for each")
                waker = self._waker = _thread_safe_waker(loop, arrived)
                self._reader_waits = True
            try:
                await arrived
            finally:
                with self._condition:
                    if self._waker is waker:  # a later reader's stays
                        self._waker = None

    # ---- anybody --------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Ask the producer to stop and release the consumer.  Idempotent; no effect once finished."""
        with self._condition:
            if self._cancelled or self._finished:
                return
            self._cancelled = True
            listeners = tuple(self._cancel_listeners)
            waker = self._wake_locked()
        _call(waker)
        for listener in listeners:
            listener()

    def add_cancel_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` on the cancelling thread once the channel is cancelled (now, if it already is).

        Listeners are dropped when the stream ends: cancelling has no effect any more.
        """
        with self._condition:
            if not self._finished:
                self._cancel_listeners.append(listener)
            cancelled = self._cancelled
        if cancelled:
            listener()

    def is_finished(self) -> bool:
        """Whether the producer ended the stream; unread chunks may remain."""
        return self._finished

    def is_cancelled(self) -> bool:
        return self._cancelled

    def is_attached(self) -> bool:
        return self._attached

    def is_exhausted(self) -> bool:
        """Whether the consumer will see no further chunk."""
        with self._condition:
            return self._ended and not self._pending

    def reason(self) -> FinishReason:
        """Why the stream ended; NOT_FINISHED before it did."""
        return self._reason

    # ---- under the lock -------------------------------------------------------------------------------

    @property
    def _finished(self) -> bool:
        return self._reason is not FinishReason.NOT_FINISHED

    @property
    def _ended(self) -> bool:
        return self._finished or self._cancelled

    def _wake_locked(self) -> Callable[[], None] | None:
        """Wake a waiting thread; returns the event loop's waker, to be called without the lock."""
        self._reader_waits = False
        self._condition.notify_all()
        waker, self._waker = self._waker, None
        return waker


def _thread_safe_waker(loop: asyncio.AbstractEventLoop, arrived: asyncio.Future[None]) -> Callable[[], None]:
    def settle() -> None:
        if not arrived.done():
            arrived.set_result(None)

    def wake() -> None:
        # The loop may have been closed meanwhile; then nobody waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle)

    return wake


def _call(waker: Callable[[], None] | None) -> None:
    if waker is not None:
        waker()
