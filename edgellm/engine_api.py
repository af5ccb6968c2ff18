"""`Engine`: one model for many callers; each submits for itself, nobody waits for another's call."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgellm.engine.engine import ShutdownMode
from edgellm.frontend import RequestFrontend, RequestOptions, prompt_of
from edgellm.host import ModelHost
from edgellm.metric_lines import metric_lines
from edgellm.outputs import RequestOutput, TokenStream, output_from_response
from edgellm.ownership import Uncopyable
from edgellm.runtime.sharing_counts import SharingCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from edgellm.cache.metrics import ContextCacheMetrics
    from edgellm.cache.types import Retention
    from edgellm.engine.metrics import EngineMetrics
    from edgellm.engine.records import RequestHandle
    from edgellm.memory import MemoryBudget
    from edgellm.prompts import Prompt
    from edgellm.request import Message
    from edgellm.sampling.params import SamplingParams
    from edgellm.session.types import RequestId


@dataclass(frozen=True, slots=True)
class ServingMetrics:
    """What an engine did since it started, and where its requests are now.

    Each number is right by itself; together they are not one instant.

    Attributes:
        engine: requests, steps, latencies.
        cache: hits, reused tokens, evictions, free pages.
        memory: the KV pool.
        pending: accepted requests without an outcome; `queued` of them wait for a seat, `resident` have one (those
            that the engine has not looked at yet are neither).
        sharing: what decode steps on a GPU read once for several requests with the same prefix.
    """

    engine: EngineMetrics
    cache: ContextCacheMetrics
    memory: MemoryBudget
    pending: int
    queued: int
    resident: int
    sharing: SharingCounts = field(default_factory=SharingCounts)

    def __str__(self) -> str:
        """One metric a line."""
        return metric_lines(self)

    @classmethod
    def of(cls, frontend: RequestFrontend) -> ServingMetrics:
        """A copy of everything now.

        Raises:
            ContractViolation: closed.
        """
        engine, runtime = frontend.open_engine("metrics"), frontend.open_runtime("metrics")
        return cls(
            engine=engine.metrics(),
            cache=runtime.coordinator.metrics(),
            memory=frontend.memory_budget,
            pending=engine.pending(),
            queued=engine.queued(),
            resident=engine.resident(),
            sharing=getattr(runtime.executor, "sharing", SharingCounts()),
        )


class SubmittedRequest(Uncopyable):
    """One accepted request.  It does not keep the engine alive, and its outcome may be read after the engine's end.

    Threads: every method from any thread; the stream has one consumer.
    """

    __slots__ = ("_handle", "_lock", "_output", "_prompt_token_ids", "_stream")

    def __init__(self, handle: RequestHandle, prompt_token_ids: Sequence[int]) -> None:
        self._handle = handle
        self._prompt_token_ids = list(prompt_token_ids)
        self._lock = threading.RLock()
        self._stream: TokenStream | None = None
        self._output: RequestOutput | None = None

    @property
    def id(self) -> RequestId:
        """Its number in this engine."""
        return self._handle.id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as the model sees it."""
        return list(self._prompt_token_ids)

    def stream(self) -> TokenStream:
        """Its text as it comes; every call gives the same stream, which begins with what there is already.

        Dropping both this object and the stream cancels the request from now on.
        """
        with self._lock:  # a second stream, when dropped, would cancel the request
            if self._stream is None:
                self._stream = TokenStream(self._handle, self._prompt_token_ids)
            return self._stream

    def ready(self) -> bool:
        """Whether it has ended, so that `get()` returns without waiting."""
        return self._handle.ready()

    def get(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the answer.

        Args:
            timeout: seconds; None waits without limit.  The request itself runs on when they are over.
        Raises:
            TimeoutError: no answer yet; `get` may be called again.
            RequestCancelled, RequestTimedOut, RequestFailed: it ended without one.
            ContractViolation: this process was forked from the engine's, and there is no answer yet.
        """
        if self._output is None:
            self._output = output_from_response(self._prompt_token_ids, self._handle.get(timeout))
        return self._output

    def cancel(self) -> None:
        """Ask for its end; never waits, idempotent.  Its pages are free after the step that is running."""
        self._handle.cancel()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once it has ended: on the engine's thread, or now.  It must not block.

        Raises:
            InvalidArgumentError: `callback` cannot be called.
        """
        self._handle.add_done_callback(callback)

    def __repr__(self) -> str:
        return f"SubmittedRequest(id={int(self.id)}, {'ready' if self.ready() else 'running'})"


class Engine(ModelHost):
    """A model that serves many callers in this process.  Options: see `__init__`.

    `submit` returns at once; `generate` and `chat` wait for their own requests only, `stream` yields text.  All
    requests share steps.

    Threads: every method may be called from several threads at once.
    Ownership: `shutdown()` (or the `with` block) ends the engine and frees the pool; later calls raise.
    """

    def submit(
        self,
        prompt_or_messages: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_seconds: float | None = None,
        cache_salt: str | None = None,
        use_cache: bool = True,
        retention: Retention | None = None,
        stream: bool = False,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> SubmittedRequest:
        """Accept one prompt or conversation; never waits for the engine.

        Args:
            priority: smaller is more urgent; needs `scheduling_policy` priority (or `priority_reserved_slots`), other
                than 0 is refused without.
            timeout_seconds: most time from now until the answer; then it ends with `RequestTimedOut`.
            stream: its text will be read as it comes.  Without, `stream()` may still be called: its first piece is
                then everything up to that moment.
            Others: as `generate` and `chat`.
        Raises:
            AdmissionError, InputTooLongError, InvalidArgumentError: the prompt or a parameter is wrong.
            SubmitError: too many requests are pending, or the engine shuts down.
            ContractViolation: shut down.
        """
        self._frontend.open_engine("submit")
        options = RequestOptions.checked(
            cache_salt=cache_salt,
            use_cache=use_cache,
            retention=retention,
            priority=priority,
            timeout_seconds=timeout_seconds,
        )
        request = self._frontend.prepare_one(
            prompt_or_messages,
            sampling_params,
            options,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
            method="submit",
        )
        return SubmittedRequest(self._frontend.submit(request, stream=stream), prompt_of(request))

    def metrics(self) -> ServingMetrics:
        """Engine, context cache and memory in one object."""
        return ServingMetrics.of(self._frontend)

    def shutdown(self, drain: bool = True) -> None:
        """Take no more requests and end; returns once everything has.  Idempotent; the first call decides.

        Args:
            drain: True serves what was accepted, False cancels it.
        Raises:
            ContractViolation: called from a done callback, on the engine's own thread.
        """
        self._frontend.close(ShutdownMode.DRAIN if drain else ShutdownMode.CANCEL)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Serve what was accepted; cancel it when the block ended by an exception."""
        self.shutdown(drain=error is None)
