"""Ctrl-C inside any call leaves the engine, its counts and the request's own lock as other threads need them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from engine_rig import WAIT, ask, wait_until
from interrupts import interrupts

from edgellm.engine.config import EngineConfig
from edgellm.engine.engine import RequestEngine, ShutdownMode
from edgellm.engine.records import RequestHandle
from edgellm.errors import CallerError
from edgellm.outputs import TokenStream
from edgellm.request import LLMGenerationRequest
from edgellm.streaming import StreamChannel
from edgellm.testing.scripted_session import ScriptedRuntime
from edgellm.waits import Latch

HANG = 5.0  # seconds after which a call that takes microseconds hangs


@pytest.fixture
def engine() -> Iterator[RequestEngine]:
    engine = RequestEngine(ScriptedRuntime(max_batch_size=8), EngineConfig(max_pending_requests=4))
    yield engine
    elsewhere(lambda: engine.shutdown(ShutdownMode.CANCEL))


def elsewhere(action: Callable[[], object]) -> None:
    """Run it on a thread of its own, which a lock that was left taken stops."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except CallerError:
            pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG)
    assert not thread.is_alive(), "a lock is left taken"
    assert failures == []


def everything_works(engine: RequestEngine, handle: RequestHandle | None) -> None:
    if handle is not None:
        elsewhere(handle.cancel)
        elsewhere(lambda: handle.get(WAIT))
        elsewhere(lambda: list(handle.stream()))
    wait_until(lambda: engine.pending() == 0, "a request is pending for ever")
    elsewhere(lambda: engine.submit(ask(max_tokens=1)).get(WAIT))
    metrics = engine.metrics()
    assert metrics.completed + metrics.cancelled + metrics.failed == metrics.submitted
    assert engine.closed_because() == ""


def streamed(channel: StreamChannel) -> LLMGenerationRequest:
    return ask(max_tokens=1, stream_channel=channel)


@pytest.mark.parametrize("wait", [False, True])
def test_a_submit_is_whole_or_not_at_all(engine: RequestEngine, wait: bool) -> None:
    places = 0
    for interrupt in interrupts():
        channel = StreamChannel.create()
        came = interrupt.run(lambda: engine.submit(streamed(channel), wait=wait))  # noqa: B023
        everything_works(engine, None)
        if not channel.is_cancelled() and not channel.is_finished():
            engine.submit(streamed(channel)).get(WAIT)  # never accepted, so free for another try
        if not came:
            break
        places += 1
    assert places > 30


@pytest.mark.parametrize("wait", [False, True])
def test_an_interrupt_right_after_the_acceptance_cancels(
    engine: RequestEngine, wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = engine._channel
    accept = channel.accept

    def interrupted(*args: object, **kwargs: object) -> None:
        accept(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(channel, "accept", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.submit(ask(max_tokens=10**4), wait=wait)
    everything_works(engine, None)
    assert engine.metrics().cancelled == 1


ACTIONS: dict[str, Callable[[RequestHandle], object]] = {
    "get": lambda handle: handle.get(WAIT),
    "cancel": lambda handle: handle.cancel(),
    "open a stream": lambda handle: handle.stream(),
    "read a stream": lambda handle: list(handle.stream()),
    "read text": lambda handle: list(TokenStream(handle, [])),
    "add a callback": lambda handle: handle.add_done_callback(lambda: None),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("brought", [False, True])
def test_a_request_can_be_used_on_after_an_interrupt(engine: RequestEngine, action: str, brought: bool) -> None:
    places = 0
    for interrupt in interrupts():
        handle = engine.submit(streamed(StreamChannel.create()) if brought else ask(max_tokens=1))
        came = interrupt.run(lambda: ACTIONS[action](handle))  # noqa: B023
        everything_works(engine, handle)
        if not came:
            break
        places += 1
    assert places >= 3


def test_a_cancel_that_was_interrupted_can_be_repeated(engine: RequestEngine) -> None:
    for interrupt in interrupts():
        handle = engine.submit(ask(max_tokens=10**4, stream_channel=StreamChannel.create()))
        came = interrupt.run(handle.cancel)
        handle.cancel()
        everything_works(engine, handle)
        if not came:
            break
    assert engine.metrics().completed < engine.metrics().submitted


def test_a_wait_leaves_the_lock_and_the_list_in_order() -> None:
    for interrupt in interrupts():
        latch = Latch()
        setter = threading.Timer(0.001, latch.set)
        setter.start()
        came = interrupt.run(lambda: latch.wait(WAIT))  # noqa: B023
        elsewhere(lambda: latch.wait(WAIT))  # noqa: B023
        setter.join()
        if not came:
            break


def test_a_shutdown_that_was_interrupted_waits_the_next_time() -> None:
    for interrupt in interrupts():
        engine = RequestEngine(ScriptedRuntime())
        came = interrupt.run(engine.shutdown)
        elsewhere(engine.shutdown)
        assert not engine.running()
        assert not engine._thread.is_alive()
        if not came:
            break
