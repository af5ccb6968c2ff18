"""`submit(wait=True)`: requests that stand in line outside the pending limit instead of being refused."""

import time

import pytest
from engine_rig import WAIT, admitted, ask, held, wait_until

from edgellm.engine.command_queue import EngineChannel
from edgellm.engine.config import EngineConfig
from edgellm.engine.engine import RequestEngine, ShutdownMode
from edgellm.engine.metrics import EngineMetrics
from edgellm.engine.records import RequestRecord, TerminalStatus
from edgellm.errors import RequestCancelled, RequestFailed, RequestTimedOut, StepDeviceError, SubmitError
from edgellm.testing.scripted_session import Script, ScriptedRuntime


@pytest.fixture
def full(start, brake):
    """An engine for two requests that has two, one of them inside a step."""
    runtime = ScriptedRuntime(script=Script(next_token=brake), max_batch_size=1)
    engine = start(runtime, EngineConfig(max_pending_requests=2, command_queue_capacity=2, idle_wait=60.0))
    first = held(engine, brake)
    return engine, runtime, [first, engine.submit(ask())]


def test_they_are_served_in_order_and_count_as_no_refusal(full, brake):
    engine, runtime, accepted = full
    waiting = [engine.submit(ask(), wait=True) for _ in range(9)]
    assert engine.pending() == 11
    with pytest.raises(SubmitError, match="2 requests are pending, the limit max_pending_requests is 2"):
        engine.submit(ask())
    brake.release()
    for handle in accepted + waiting:
        handle.get(WAIT)
    assert admitted(runtime) == [handle.id for handle in accepted + waiting]
    assert (engine.metrics().refused, engine.metrics().submitted) == (1, 11)


def test_without_a_queue_they_are_served_like_any_other(start):
    engine = start(ScriptedRuntime(), EngineConfig(max_pending_requests=1, idle_wait=60.0))
    for _ in range(3):
        assert len(engine.submit(ask(), wait=True).get(WAIT).token_ids) == 4


def test_a_cancel_and_a_timeout_end_them_in_line(full, brake):
    engine, runtime, accepted = full
    cancelled = engine.submit(ask(), wait=True)
    hurried = engine.submit(ask(timeout_seconds=0.01), wait=True)
    last = engine.submit(ask(), wait=True)
    cancelled.cancel()
    time.sleep(0.02)
    brake.release()
    with pytest.raises(RequestTimedOut, match=r"timed out 0\.01 s after its submit"):
        hurried.get(WAIT)
    with pytest.raises(RequestCancelled):
        cancelled.get(WAIT)
    last.get(WAIT)
    wait_until(lambda: engine.pending() == 0, "an outcome is missing")
    assert admitted(runtime) == [*(handle.id for handle in accepted), last.id]
    assert [engine.submit(ask()).get(WAIT).finish_reason.value for _ in range(2)] == ["length", "length"]


def test_drain_serves_the_line_and_cancel_ends_it(brake):
    for mode in ShutdownMode:
        runtime = ScriptedRuntime(script=Script(next_token=brake), max_batch_size=1)
        engine = RequestEngine(runtime, EngineConfig(max_pending_requests=1))
        held(engine, brake)
        waiting = [engine.submit(ask(), wait=True) for _ in range(3)]
        engine._channel.begin_shutdown(mode)
        with pytest.raises(SubmitError, match="shutting down"):
            engine.submit(ask(), wait=True)
        brake.release()
        engine.shutdown(mode)
        metrics = engine.metrics()
        assert engine.pending() == engine.queued() == 0
        assert (metrics.completed, metrics.cancelled) == ((4, 0) if mode is ShutdownMode.DRAIN else (0, 4))
        assert all(handle.ready() for handle in waiting)


def test_an_unhealthy_device_fails_the_line(start, brake):
    script = Script(next_token=brake)
    runtime = ScriptedRuntime(script=script, max_batch_size=1)
    engine = start(runtime, EngineConfig(max_pending_requests=1), device_healthy=lambda: False)
    first = held(engine, brake)
    waiting = [engine.submit(ask(), wait=True) for _ in range(3)]
    script.steps.append(StepDeviceError("gone"))
    brake.release()
    for handle in (first, *waiting):
        with pytest.raises(RequestFailed, match="gone" if handle is first else "the device is unhealthy"):
            handle.get(WAIT)
    assert engine.queued() == 0


def test_those_in_line_are_pending_outside_the_limit():
    channel = EngineChannel(EngineConfig(max_pending_requests=1), EngineMetrics())
    inside, in_line = (record_of(channel, wait=wait) for wait in (False, True))
    assert not channel.take_room()
    assert channel.pending == 2
    with pytest.raises(SubmitError, match="1 requests are pending"):
        record_of(channel, wait=False)
    channel.terminate(inside, TerminalStatus.CANCELLED)
    assert channel.take_room()
    with pytest.raises(SubmitError, match="1 requests are pending"):
        record_of(channel, wait=False)
    channel.terminate(in_line, TerminalStatus.CANCELLED)
    assert channel.pending == 0
    record_of(channel, wait=False)


def record_of(channel: EngineChannel, *, wait: bool) -> RequestRecord:
    record = RequestRecord(request_id=channel.next_id(), request=ask(), note_cancel=channel.note_cancel)
    channel.accept(record, wait=wait)
    return record
