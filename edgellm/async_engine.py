"""`AsyncEngine`: an `Engine` for an event loop; awaiting tasks and streams instead of waiting threads."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from edgellm.assembly import LoadOptions, Parts, assemble
from edgellm.engine.engine import ShutdownMode
from edgellm.engine_api import ServingMetrics
from edgellm.errors import ContractViolation
from edgellm.fetch import DEFAULT_MODEL
from edgellm.frontend import RequestFrontend, RequestOptions, check_seed, prompt_of
from edgellm.outputs import RequestOutput, StreamIterator, TokenStream, output_from_response
from edgellm.sampling.structured import StructuredOutput

if TYPE_CHECKING:
    import os
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

    from edgellm.cache.types import Retention
    from edgellm.decoding.options import SpeculativeOptions
    from edgellm.engine.config import SchedulingOptions
    from edgellm.memory import MemoryBudget
    from edgellm.prompts import Conversation, Prompt
    from edgellm.request import LLMGenerationRequest, Message
    from edgellm.sampling.params import SamplingParams
    from edgellm.streaming import StreamChunk

Item = TypeVar("Item")


class AsyncEngine:
    """A model that serves many tasks of an event loop.  Options: those of `Engine`.

    Loading begins with `async with`, `await start()` or the first request, beside the loop.  Prompts are tokenised
    on one helper thread, in order, each once the form that it asks for is compiled; streams cost no thread.  One
    object may serve several loops.

    Ownership: `await shutdown()` (or the `async with` block) ends the engine and frees the pool; later calls raise.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        deterministic: bool = False,
        kv_budget: int | float | str | None = None,
        page_size: int = 32,
        max_batch_size: int = 8,
        max_model_len: int | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        step_time_budget_ms: float | None = None,
        scheduling: SchedulingOptions | None = None,
        max_pending_requests: int = 256,
        speculative: SpeculativeOptions | str | None = None,
        seed: int | None = None,
        on_fetch: Callable[[int, int], None] | None = None,
        on_load: Callable[[int, int, str], None] | None = None,
    ) -> None:
        """Check the options; nothing is loaded yet.

        Raises:
            InvalidArgumentError: an option is out of range.
        """
        options = LoadOptions(
            model=model,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            deterministic=deterministic,
            kv_budget=kv_budget,
            page_size=page_size,
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            tokenizer=tokenizer,
            step_time_budget_ms=step_time_budget_ms,
            scheduling=scheduling,
            max_pending_requests=max_pending_requests,
            speculative=speculative,
        )
        self._set_up(partial(assemble, options, on_fetch=on_fetch, on_load=on_load), seed)

    @classmethod
    def from_parts(cls, parts: Parts, *, seed: int | None = None) -> AsyncEngine:
        """The same over a runtime that was put together elsewhere (tests, other executors); takes the runtime over."""
        engine = cls.__new__(cls)
        engine._set_up(lambda: parts, seed)
        return engine

    def _set_up(self, make_parts: Callable[[], Parts], seed: int | None) -> None:
        self._seed = check_seed(seed)
        self._make_parts = make_parts
        self._load_lock = threading.Lock()
        self._frontend: RequestFrontend | None = None
        self._closed = False
        self._helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="edgellm-prompts")

    # ---- starting and ending --------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model, beside the loop.  Idempotent; a failed start may be tried again.

        Raises:
            InvalidArgumentError, FetchError, UnsupportedModelError, WeightFileError: as `Engine`.
            ContractViolation: shut down.
        """
        await self._started("start")

    async def shutdown(self, drain: bool = True) -> None:
        """Take no more requests and end; returns once everything has, without holding the loop up.  Idempotent.

        Args:
            drain: True serves what was accepted, False cancels it.
        """
        self._closed = True
        mode = ShutdownMode.DRAIN if drain else ShutdownMode.CANCEL
        await asyncio.to_thread(self._close, mode)

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Serve what was accepted; cancel it when the block ended by an exception."""
        await self.shutdown(drain=error is None)

    # ---- generating -----------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        use_cache: bool = True,
        retention: Retention | None = None,
        priority: int = 0,
        timeout_seconds: float | None = None,
    ) -> RequestOutput:
        """Continue one prompt.  Waits its turn while too many are pending; cancelling the task cancels the request.

        Arguments and raises: as `Engine.generate`, for one prompt.
        """
        options = RequestOptions.checked(
            cache_salt=cache_salt,
            use_cache=use_cache,
            retention=retention,
            priority=priority,
            timeout_seconds=timeout_seconds,
        )
        return await self._answer("generate", prompt, sampling_params, options, True, None)

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        use_cache: bool = True,
        retention: Retention | None = None,
        priority: int = 0,
        timeout_seconds: float | None = None,
    ) -> RequestOutput:
        """Answer one conversation.  Arguments and raises: as `Engine.chat`, for one; otherwise as `generate`."""
        options = RequestOptions.checked(
            cache_salt=cache_salt,
            use_cache=use_cache,
            retention=retention,
            priority=priority,
            timeout_seconds=timeout_seconds,
        )
        return await self._answer(
            "chat", messages, sampling_params, options, add_generation_prompt, chat_template_kwargs
        )

    def stream(
        self,
        prompt_or_messages: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        use_cache: bool = True,
        retention: Retention | None = None,
        priority: int = 0,
        timeout_seconds: float | None = None,
    ) -> AsyncTokenStream:
        """The text of one prompt or conversation as it comes: `async for piece in engine.stream(...)`.

        The request starts with the first `async for`, `async with` or `await` on the result, which then raises what
        `Engine.stream` raises (`SubmitError` when too many are pending).  Leaving the loop cancels it.
        """
        options = RequestOptions.checked(
            cache_salt=cache_salt,
            use_cache=use_cache,
            retention=retention,
            priority=priority,
            timeout_seconds=timeout_seconds,
        )

        async def submit() -> TokenStream:
            request = await self._prepare(
                "stream", prompt_or_messages, sampling_params, options, add_generation_prompt, chat_template_kwargs
            )
            return TokenStream(self._open("stream").submit(request, stream=True), prompt_of(request))

        return AsyncTokenStream(submit)

    # ---- looking --------------------------------------------------------------------------------------

    def metrics(self) -> ServingMetrics:
        """Engine, context cache and memory in one object.

        Raises:
            ContractViolation: not started yet, or shut down.
        """
        return ServingMetrics.of(self._open("metrics"))

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (`encode`, `decode`, `apply_chat_template`); once started."""
        return self._open("tokenizer").tokenizer

    @property
    def memory_budget(self) -> MemoryBudget:
        """What the KV pool costs and how much fits in it; once started."""
        return self._open("memory_budget").memory_budget

    def __repr__(self) -> str:
        frontend = self._frontend
        state = "shut down" if self._closed else "not started" if frontend is None else "open"
        return f"AsyncEngine({'' if frontend is None else repr(frontend.model_name) + ', '}{state})"

    # ---- inside ---------------------------------------------------------------------------------------

    async def _answer(
        self,
        method: str,
        prompt_or_messages: Any,
        sampling_params: SamplingParams | None,
        options: RequestOptions,
        add_generation_prompt: bool,
        chat_template_kwargs: dict[str, Any] | None,
    ) -> RequestOutput:
        request = await self._prepare(
            method, prompt_or_messages, sampling_params, options, add_generation_prompt, chat_template_kwargs
        )
        handle = self._open("submit").submit(request, wait=True)
        return output_from_response(prompt_of(request), await handle.get_async())

    async def _prepare(
        self,
        method: str,
        prompt_or_messages: Any,
        sampling_params: SamplingParams | None,
        options: RequestOptions,
        add_generation_prompt: bool,
        chat_template_kwargs: dict[str, Any] | None,
    ) -> LLMGenerationRequest:
        """Check and tokenise on the helper thread: a long document must not hold the loop up.

        A form is compiled elsewhere and waited for here, so that the helper goes on with other requests.
        """
        frontend = await self._started(method)
        await _form_compiled(frontend, sampling_params)
        prepare = partial(
            frontend.prepare_one,
            prompt_or_messages,
            sampling_params,
            options,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
            method=method,
        )
        try:
            prepared = asyncio.get_running_loop().run_in_executor(self._helper, prepare)
        except RuntimeError as error:  # the helper is gone: shut down since we looked
            raise self._closed_error(method) from error
        return await prepared

    async def _started(self, method: str) -> RequestFrontend:
        if self._closed:
            raise self._closed_error(method)
        if self._frontend is None:
            await asyncio.to_thread(self._load)
        return self._open(method)

    def _load(self) -> None:
        with self._load_lock:
            if self._frontend is None and not self._closed:
                self._frontend = RequestFrontend(self._make_parts(), seed=self._seed, owner="AsyncEngine")

    def _close(self, mode: ShutdownMode) -> None:
        with self._load_lock:
            if self._frontend is not None:
                self._frontend.close(mode)
        self._helper.shutdown()

    def _open(self, method: str) -> RequestFrontend:
        if self._frontend is None:
            if self._closed:
                raise self._closed_error(method)
            raise ContractViolation(f"{method}: this AsyncEngine is not started; use async with, or await start()")
        return self._frontend

    def _closed_error(self, method: str) -> ContractViolation:
        return ContractViolation(f"{method}: this AsyncEngine is closed; make a new one")


async def _form_compiled(frontend: RequestFrontend, sampling_params: SamplingParams | None) -> None:
    """Wait until the form that a request asks for is compiled; at once when it asks for none, or for nonsense.

    Raises:
        AdmissionError: the form does not go with this model.
    """
    structured, runtime = getattr(sampling_params, "structured", None), frontend.runtime
    if isinstance(structured, StructuredOutput) and runtime is not None:
        await asyncio.wrap_future(runtime.guidance.begin(structured))


class AsyncTokenStream:
    """One request of an `AsyncEngine`: iterate over it to get its text as it is generated.

    Yields non-empty pieces of text; `chunks()` yields `StreamChunk`s with token ids and log-probabilities.  Leaving
    the loop or the `async with` block, or the cancellation of the task, cancels a request that still runs.

    Raises, while iterating: as `TokenStream`, and with the first step what starting the request raises.
    """

    def __init__(self, submit: Callable[[], Awaitable[TokenStream]]) -> None:
        self._submit = submit
        self._stream: TokenStream | None = None
        self._starting = asyncio.Lock()  # whoever comes first submits: a reader, or who waits for the output
        self._cancelled_early = False

    async def output(self) -> RequestOutput:
        """The finished answer.

        Raises:
            RequestCancelled, RequestTimedOut: there is none; what was streamed is all.
            RequestFailed: it ended with an error.
        """
        return await (await self._running()).async_output()

    def cancel(self) -> None:
        """Stop generating.  Idempotent, never waits; iteration ends with what was already generated."""
        self._cancelled_early = True
        if self._stream is not None:
            self._stream.cancel()

    def chunks(self) -> AsyncStreamIterator[StreamChunk]:
        """Iterate over `StreamChunk`s: token ids, text, log-probabilities."""
        return AsyncStreamIterator(self._running, TokenStream.async_chunks)

    def __aiter__(self) -> AsyncStreamIterator[str]:
        return AsyncStreamIterator(self._running, TokenStream.__aiter__)

    async def __aenter__(self) -> AsyncTokenStream:
        await self._running()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.__exit__(kind, error, trace)

    async def _running(self) -> TokenStream:
        async with self._starting:
            if self._stream is None:
                self._stream = await self._submit()
                if self._cancelled_early:
                    self._stream.cancel()
        return self._stream


class AsyncStreamIterator(Generic[Item]):
    """Iterates over a stream that starts with the first item."""

    __slots__ = ("_closed", "_inner", "_pieces", "_running")

    def __init__(
        self,
        running: Callable[[], Awaitable[TokenStream]],
        pieces: Callable[[TokenStream], StreamIterator[Item]],
    ) -> None:
        self._running = running
        self._pieces = pieces
        self._inner: StreamIterator[Item] | None = None
        self._closed = False

    def __aiter__(self) -> AsyncStreamIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        if self._closed:
            raise StopAsyncIteration
        if self._inner is None:
            self._inner = self._pieces(await self._running())
        return await self._inner.__anext__()

    async def aclose(self) -> None:
        """Stop iterating; cancels the request unless it has ended, or was never started.  Idempotent."""
        self._closed = True
        if self._inner is not None:
            await self._inner.aclose()
