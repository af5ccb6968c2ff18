"""What a request gives back: `RequestOutput` when it is done, `TokenStream` while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from edgellm.errors import BrokenInvariantError, RequestCancelled
from edgellm.ownership import Uncopyable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from types import TracebackType

    from edgellm.cache.types import ReuseReport
    from edgellm.engine.records import RequestHandle
    from edgellm.request import LLMGenerationResponse
    from edgellm.sampling.logprobs import TokenLogprobs
    from edgellm.streaming import StreamChannel, StreamChunk


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Where the time of one request went.

    Attributes:
        queue_ms: from submission until the request got a seat.
        time_to_first_token_ms: from submission until the first generated token.
        total_ms: from submission until the last token.
        tokens_per_second: rate of the tokens after the first one; 0.0 when only one was generated.
    """

    queue_ms: float
    time_to_first_token_ms: float
    total_ms: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The finished answer to one prompt.

    Attributes:
        prompt_token_ids: the prompt as the model saw it, after templating and tokenising.
        text: generated text, cut at a stop string.
        token_ids: every generated id, also those whose text a stop string cut away.
        finish_reason: "stop" (end token, stop id or stop string) or "length" (OpenAI names).
        logprobs: one entry a token of `token_ids`; None unless they were asked for.
        reuse: how much of the prompt was not computed again, and why not more.
        proposed_draft_tokens, accepted_draft_tokens: under speculative decoding, draft tokens that were verified, and
            those of them that are in the answer.
    """

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs] | None
    reuse: ReuseReport
    timings: RequestTimings
    proposed_draft_tokens: int = 0
    accepted_draft_tokens: int = 0


def output_from_response(prompt_token_ids: Sequence[int], response: LLMGenerationResponse) -> RequestOutput:
    """The public form of an engine's response.

    Raises:
        BrokenInvariantError: the response has no reuse report or no finish reason.
    """
    reason = response.finish_reason.openai
    if response.reuse is None or reason is None:
        raise BrokenInvariantError(
            f"a completed response has finish reason {response.finish_reason.value!r} and reuse report "
            f"{response.reuse}; this is a defect of edgellm, please report it"
        )
    return RequestOutput(
        prompt_token_ids=list(prompt_token_ids),
        text=response.text,
        token_ids=list(response.token_ids),
        finish_reason=reason,
        logprobs=response.logprobs,
        reuse=response.reuse,
        timings=_timings(response),
        proposed_draft_tokens=response.proposed_draft_tokens,
        accepted_draft_tokens=response.accepted_draft_tokens,
    )


def _timings(response: LLMGenerationResponse) -> RequestTimings:
    later_tokens = len(response.token_ids) - 1
    later_ms = response.total_ms - response.time_to_first_token_ms
    rate = 1000.0 * later_tokens / later_ms if later_tokens > 0 and later_ms > 0 else 0.0
    return RequestTimings(response.queue_ms, response.time_to_first_token_ms, response.total_ms, rate)


class TokenStream(Uncopyable):
    """One running request: iterate over it (`for` or `async for`) to get text as it is generated.

    Yields non-empty pieces of text whose concatenation is `output.text`; `chunks()` yields
    `StreamChunk`s with token ids and log-probabilities instead.  Leaving the loop or the `with` (or `async with`)
    block, or dropping the last reference, cancels a request that still runs.

    Threads: one consumer; `cancel()` from any thread.

    Raises, while iterating:
        RequestFailed: the request ended with an error.
        RequestCancelled: somebody else cancelled it (for example by closing the LLM).  A stream that was
            cancelled through its own `cancel()` just ends.
    """

    def __init__(self, handle: RequestHandle, prompt_token_ids: Sequence[int]) -> None:
        self._handle = handle
        self._channel: StreamChannel = handle.stream()
        self._prompt_token_ids = list(prompt_token_ids)
        self._output: RequestOutput | None = None
        self._cancelled_here = False
        # A dropped stream must not keep a seat; at interpreter exit the LLM itself shuts down.
        self._finalizer = weakref.finalize(self, handle.cancel)
        self._finalizer.atexit = False

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self._prompt_token_ids)

    @property
    def output(self) -> RequestOutput:
        """The finished answer; waits for it when the request still runs.

        Raises:
            RequestCancelled: it was cancelled, by `cancel()` or by leaving the block early: there is no answer,
                what was streamed is all there is.
            RequestFailed: it ended with an error.
        """
        if self._output is None:
            self._output = output_from_response(self._prompt_token_ids, self._handle.get())
            self._finalizer.detach()
        return self._output

    def cancel(self) -> None:
        """Stop generating.  Idempotent, never waits; iteration ends with what was already generated.

        No effect once the last chunk is there, read or not: the answer is complete and on its way.
        """
        self._cancelled_here = True
        if not self._channel.is_finished():
            self._handle.cancel()

    def chunks(self) -> Generator[StreamChunk, None, None]:
        """Iterate over `StreamChunk`s: token ids, text, log-probabilities.

        An iterator that is closed or dropped before the end (`break`, `close()`) cancels the request, and so does an
        interrupt while it waits, also when somebody keeps this object alive.  To take a stream in parts, keep one
        iterator; another one yields what was generated until then.
        """
        try:
            yield from self._channel
            self._settle()
        except GeneratorExit:
            self.cancel()
            raise
        except BaseException:
            self._handle.cancel()
            raise

    def async_chunks(self) -> StreamIterator[StreamChunk]:
        """`chunks()` for an event loop; cancelling the task that iterates, or leaving the loop, cancels the request."""
        return StreamIterator(self, lambda chunk: chunk)

    async def async_output(self) -> RequestOutput:
        """`output` for an event loop; cancelling the awaiting task cancels the request.

        Raises: as `output`.
        """
        if self._output is None:
            self._output = output_from_response(self._prompt_token_ids, await self._handle.get_async())
            self._finalizer.detach()
        return self._output

    def __iter__(self) -> Generator[str, None, None]:
        with contextlib.closing(self.chunks()) as chunks:
            for chunk in chunks:
                if chunk.text:
                    yield chunk.text

    def __aiter__(self) -> StreamIterator[str]:
        return StreamIterator(self, lambda chunk: chunk.text or None)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._output is None:
            self.cancel()

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def _settle(self) -> None:
        """After the last chunk: learn the outcome, so that a failure cannot pass for a short answer."""
        try:
            _ = self.output
        except RequestCancelled:
            if not self._cancelled_here:
                raise

    async def _next_chunk(self) -> StreamChunk | None:
        try:
            return await self._channel.__anext__()
        except StopAsyncIteration:
            return None

    async def _settle_async(self) -> None:
        try:
            await self.async_output()
        except RequestCancelled:
            if not self._cancelled_here:
                raise


Item = TypeVar("Item")


class StreamIterator(Generic[Item]):
    """An async iterator over one stream.

    Whoever stops iterating before the end - by `break`, an exception or the cancellation of the task - cancels the
    request: the iterator is dropped then, and nobody is left to read.
    """

    __slots__ = ("_ended", "_item_of", "_stream")

    def __init__(self, stream: TokenStream, item_of: Callable[[StreamChunk], Item | None]) -> None:
        """Args: item_of: what a chunk yields; None passes it over."""
        self._stream = stream
        self._item_of = item_of
        self._ended = False

    def __aiter__(self) -> StreamIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        if self._ended:
            raise StopAsyncIteration
        try:
            while (chunk := await self._stream._next_chunk()) is not None:
                item = self._item_of(chunk)
                if item is not None:
                    return item
            self._ended = True
            await self._stream._settle_async()
        except asyncio.CancelledError:
            self._stream.cancel()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop iterating; cancels the request unless it has ended.  Idempotent."""
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        if not self._ended:
            self._ended = True
            self._stream.cancel()
