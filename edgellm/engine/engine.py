"""`RequestEngine`: submit from any thread, one actor thread runs everything."""

from __future__ import annotations

import atexit
import dataclasses
import os
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Protocol

from edgellm.engine.actor import EngineActor
from edgellm.engine.command_queue import EngineChannel, ShutdownMode
from edgellm.engine.config import EngineConfig, SchedulingPolicy
from edgellm.engine.metrics import EngineMetrics
from edgellm.engine.prefix import prefix_key
from edgellm.engine.records import RequestHandle, RequestRecord
from edgellm.errors import CallerError, ContractViolation, InvalidArgumentError
from edgellm.foreign import describe_value
from edgellm.ownership import Uncopyable, require_home_process
from edgellm.sampling.params import SamplingParams
from edgellm.session.request_check import check_priority, check_supported, check_timeout_seconds
from edgellm.session.types import SessionOptions
from edgellm.streaming import StreamChannel

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from edgellm.engine.config import SchedulingOptions
    from edgellm.request import LLMGenerationRequest, LLMGenerationResponse
    from edgellm.session.base import RuntimeSession
    from edgellm.session.types import RequestId

__all__ = ["EngineConfig", "EngineMetrics", "RequestEngine", "RequestHandle", "ShutdownMode"]


class SessionRuntime(Protocol):
    """A runtime as the engine uses it: `LLMRankRuntime`, or a scripted one."""

    def open_session(self, options: SessionOptions) -> RuntimeSession: ...

    def close(self) -> None: ...


class RequestEngine(Uncopyable):
    """Feeds one runtime from many callers.

    The runtime is taken outright: only the actor thread touches it, from opening the first session to closing
    it at the end.  A session factory may stand in its place (a test seam); what it returns is closed too.

    Thread rules: every method may be called from any thread; `shutdown` waits for the actor and so must not
    be called on it (from a done callback, say).
    """

    def __init__(
        self,
        source: SessionRuntime | Callable[[], RuntimeSession],
        config: EngineConfig | None = None,
        *,
        device_healthy: Callable[[], bool] | None = None,
    ) -> None:
        """Open the first session and start serving.

        Args:
            source: a built runtime, or a factory of sessions; called on the actor thread.
            device_healthy: asked before a lost session is replaced; None takes the device for healthy.
        Raises:
            InvalidArgumentError: the configuration contradicts what the session can do.
            Exception: whatever opening the session raised.  Nothing is left running, and the runtime stays
                the caller's.
        """
        config = EngineConfig() if config is None else config
        self._process_id = os.getpid()
        self._scheduling = config.scheduling
        self._metrics = EngineMetrics()
        self._channel = EngineChannel(config, self._metrics)
        open_session, close_runtime = _adapt(source)
        self._check_decoder: Callable[[LLMGenerationRequest], None] = getattr(source, "check_decoder", _run_any)
        self._exit_hook = _ExitHook(self._channel)
        self._actor = EngineActor(
            channel=self._channel,
            config=config,
            open_session=open_session,
            device_healthy=device_healthy,
            close_runtime=close_runtime,
            on_end=self._exit_hook.forget,
        )
        self._thread = threading.Thread(target=self._actor.run, name="edgellm-engine", daemon=True)
        self._exit_hook.thread = self._thread
        atexit.register(self._exit_hook)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _abandon, self._channel, self._process_id)
        self._finalizer.atexit = False
        self._actor.started.wait()
        if self._actor.start_error is not None:
            self._forget_thread()
            raise self._actor.start_error

    # ---- requests -------------------------------------------------------------------------------------

    def submit(self, request: LLMGenerationRequest, *, wait: bool = False) -> RequestHandle:
        """Accept a request; never waits for the actor.

        The request object is not modified; its stream channel, if it brings one, is adopted.

        Args:
            wait: where it would be refused because too many are pending, let it stand in line, outside
                `max_pending_requests`, until one has ended; for callers that wait for the outcome anyway.  Its
                timeout runs meanwhile, and a cancel ends it there.
        Raises:
            UnsupportedRequestError: a kind of request that is never served, here or by the runtime's decoder.
            InvalidArgumentError: its priority, timeout, sampling, flags, cache policies, token callback or stream
                channel are malformed, its priority would have no effect, or its stream channel was used before.
            AdmissionError: one of its fields raises when it is looked at.
            SubmitError: too many are pending, the queue is full, or the engine is ending; may pass.  With `wait`
                only the last.
            ContractViolation: this process was forked from the one the engine runs in.
        """
        require_home_process(self._process_id, "make a new one here, or start workers with the 'spawn' method")
        check_supported(request)
        self._check_decoder(request)
        _check_engine_fields(request)
        _check_priority_counts(request.priority, self._scheduling)
        record = RequestRecord(
            request_id=self._channel.next_id(),
            request=dataclasses.replace(request),
            channel=request.stream_channel,
            note_cancel=self._channel.note_cancel,
            note_stream=self._channel.note_stream,
        )
        record.prefix_key = prefix_key(request)
        try:
            self._channel.accept(record, wait=wait)
            return RequestHandle(record)
        except BaseException:
            record.withdraw()
            raise

    def cancel(self, request_id: RequestId) -> None:
        """Cancel by id; unknown and retired ids are ignored."""
        self._channel.cancel_record(request_id)

    def handle_request(self, request: LLMGenerationRequest) -> LLMGenerationResponse | None:
        """Submit and wait; None on any refusal, cancel or failure."""
        try:
            return self.submit(request).get()
        except CallerError:
            return None

    # ---- ending ---------------------------------------------------------------------------------------

    def shutdown(self, mode: ShutdownMode = ShutdownMode.DRAIN) -> None:
        """Refuse new work, end as `mode` says, and wait for the actor.  The first caller's mode stays.

        Every call waits, also after one that was interrupted.  In a fork there is nothing to end.

        Raises:
            ContractViolation: called on the actor thread, which cannot wait for itself.
        """
        self.require_other_thread()
        if os.getpid() != self._process_id:
            return
        self._channel.begin_shutdown(mode)
        self._forget_thread()

    def require_other_thread(self) -> None:
        """Raises: ContractViolation: called on the actor thread, which cannot wait for itself."""
        if threading.current_thread() is self._thread:
            raise ContractViolation("shutdown: called on the engine's own thread; call it from another one")

    def _forget_thread(self) -> None:
        self._actor.ended.wait()  # an interrupted join takes a thread that runs for one that has ended
        self._thread.join()
        self._finalizer.detach()

    def __enter__(self) -> RequestEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.shutdown(ShutdownMode.DRAIN)
            return
        self._channel.close_admission(f"the engine is shutting down, left by {type(error).__name__}")
        self.shutdown(ShutdownMode.CANCEL)

    # ---- observation ----------------------------------------------------------------------------------

    def queued(self) -> int:
        """Requests that wait for a seat or for room; not those in commands that the actor has not drained."""
        return self._actor.queued()

    def resident(self) -> int:
        """Requests that hold a seat."""
        return self._actor.resident()

    def pending(self) -> int:
        """Accepted requests without an outcome, wherever they are."""
        return self._channel.pending

    def running(self) -> bool:
        """Whether the actor runs; False once shut down."""
        return os.getpid() == self._process_id and not self._actor.ended.is_set()

    def closed_because(self) -> str:
        """Why submits are refused for good (shutdown, an unhealthy device); empty while they are not."""
        return self._channel.closed_because

    def metrics(self) -> EngineMetrics:
        """A copy of the counters."""
        return self._metrics.snapshot()


def _adapt(
    source: SessionRuntime | Callable[[], RuntimeSession],
) -> tuple[Callable[[], RuntimeSession], Callable[[], None] | None]:
    """(open a session, close the runtime) of either kind of source."""
    open_session = getattr(source, "open_session", None)
    if open_session is not None:
        options = SessionOptions(allow_compact_execution=True)
        return lambda: open_session(options), getattr(source, "close", None)
    if callable(source):
        return source, None
    raise InvalidArgumentError(
        f"the engine got a {type(source).__name__}; pass a runtime with open_session(), or a session factory"
    )


def _run_any(request: LLMGenerationRequest) -> None:
    """`check_decoder` of sources that have none: admission tells."""


def _check_engine_fields(request: LLMGenerationRequest) -> None:
    """What the engine itself reads of a request; the rest is checked by the session's admission."""
    check_priority(request.priority)
    check_timeout_seconds(request.timeout_seconds)
    if not isinstance(request.sampling, SamplingParams):
        raise InvalidArgumentError(f"sampling is {describe_value(request.sampling)}; pass a SamplingParams")
    if request.token_callback is not None and not callable(request.token_callback):
        raise InvalidArgumentError(
            f"token_callback is {describe_value(request.token_callback)}; pass a function of the new token ids, or None"
        )
    if request.stream_channel is not None and not isinstance(request.stream_channel, StreamChannel):
        raise InvalidArgumentError(
            f"stream_channel is {describe_value(request.stream_channel)}; pass StreamChannel.create(), or None"
        )


def _check_priority_counts(priority: int, options: SchedulingOptions) -> None:
    """Refuse a priority that nothing looks at: arrival order ignores it, except for seats kept for urgent requests."""
    arrival = options.scheduling_policy is SchedulingPolicy.FCFS
    if priority and arrival and not options.priority_reserved_slots:
        raise InvalidArgumentError(
            f"priority is {priority} with scheduling_policy {options.scheduling_policy.value} and would have no "
            "effect; leave it 0, or set scheduling_policy to priority (SchedulingOptions)"
        )


class _ExitHook:
    """Called when the interpreter exits: ends the actor before the modules it runs on are torn down.

    Registered as long as the thread lives, also where the engine was collected; the thread takes it back.
    """

    def __init__(self, channel: EngineChannel) -> None:
        self._channel = channel
        self._process_id = os.getpid()
        self._exiting = False
        self.thread: threading.Thread | None = None

    def __call__(self) -> None:
        if os.getpid() != self._process_id:
            return
        self._exiting = True
        self._channel.begin_shutdown(ShutdownMode.CANCEL, "the interpreter is exiting")
        if self.thread is not None:
            self.thread.join()

    def forget(self) -> None:
        if not self._exiting:  # the list of hooks is being walked then
            atexit.unregister(self)


def _abandon(channel: EngineChannel, process_id: int) -> None:
    """An engine that nobody shut down was collected.

    Does not wait: the collector runs on any thread, at any point, perhaps inside a lock the actor needs.  The exit
    hook stays: a thread that still runs when the interpreter is torn down ends the process with an abort.
    """
    if os.getpid() != process_id:
        return
    pending = channel.pending
    channel.begin_shutdown(ShutdownMode.CANCEL)
    if pending:
        warnings.warn(
            f"a RequestEngine was collected with {pending} requests in flight, which are cancelled; call shutdown()",
            ResourceWarning,
            stacklevel=2,
        )
