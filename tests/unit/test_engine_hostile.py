"""Hostile requests, options and callbacks: each harms at most its own request, and every request gets an outcome."""

import asyncio
import math

import pytest
from engine_rig import WAIT, ask, held, wait_until

from edgellm.engine.backlog import Backlog
from edgellm.engine.config import EngineConfig, SchedulingOptions
from edgellm.engine.engine import RequestEngine, ShutdownMode
from edgellm.errors import InvalidArgumentError, RequestFailed, SubmitError
from edgellm.streaming import StreamChannel
from edgellm.testing.scripted_session import Script, ScriptedRuntime

NAN, INF, HUGE = math.nan, math.inf, 10**400


class Unusual(BaseException):
    """No kind that anybody would think of."""


RAISED = [KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, SystemExit, ValueError, Unusual]


# ---- fields of a request --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("priority", HUGE, r"priority is 10+\.\.\.; it must be an integer from -2147483647 to 2147483647"),
        ("priority", -(2**31), "priority is -2147483648; it must be an integer"),
        ("priority", True, "priority is True"),
        ("timeout_seconds", HUGE, r"timeout_seconds is 10+\.\.\.; it must be a number of seconds above 0"),
        ("stream_channel", 5, r"stream_channel is 5; pass StreamChannel\.create\(\), or None"),
        ("token_callback", 5, "token_callback is 5; pass a function of the new token ids, or None"),
        ("sampling", 5, "sampling is 5; pass a SamplingParams"),
    ],
)
def test_submit_refuses_what_the_engine_itself_would_trip_over(start, field, value, message):
    engine = start(ScriptedRuntime())
    request = ask()
    setattr(request, field, value)
    with pytest.raises(InvalidArgumentError, match=message):
        engine.submit(request)
    assert engine.pending() == 0
    assert len(engine.submit(ask()).get(WAIT).token_ids) == 4


@pytest.mark.parametrize("priority", [2**31 - 1, -(2**31 - 1)])
def test_the_extreme_priorities_age(start, priority):
    options = SchedulingOptions(scheduling_policy="priority", priority_aging_seconds=1e-320)
    engine = start(ScriptedRuntime(), EngineConfig(scheduling=options))
    assert len(engine.submit(ask(priority=priority)).get(WAIT).token_ids) == 4


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("checkpoint_boundaries", -1, "checkpoint_boundaries is -1; pass a list of prompt lengths"),
        ("checkpoint_boundaries", NAN, "checkpoint_boundaries is nan"),
        ("checkpoint_boundaries", "12", "checkpoint_boundaries is '12'"),
        ("checkpoint_boundaries", [1, -1], "checkpoint_boundaries holds -1; each must be an integer of at least 0"),
        ("checkpoint_boundaries", [True], "checkpoint_boundaries holds True"),
        ("checkpoint_boundaries", ["x"], "checkpoint_boundaries holds 'x'"),
        ("replay_tail_length", -1, "replay_tail_length is -1; it must be a number of tokens from 0"),
        ("replay_tail_length", "x", "replay_tail_length is 'x'"),
        ("replay_tail_length", None, "replay_tail_length is None"),
    ],
)
def test_malformed_boundaries_fail_their_request_and_leave_the_session_open(start, brake, field, value, message):
    runtime = ScriptedRuntime(script=Script(next_token=brake))
    engine = start(runtime)
    resident = held(engine, brake)
    bad = engine.submit(ask(**{field: value}))
    brake.release()
    with pytest.raises(RequestFailed, match=message):
        bad.get(WAIT)
    assert len(resident.get(WAIT).token_ids) == 50
    assert len(runtime.sessions) == 1


# ---- options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("idle_wait", 3600.1, r"idle_wait is 3600\.1; it must be a finite number in \(0\.0, 3600\.0\]"),
        ("idle_wait", HUGE, r"idle_wait is 10+\.\.\.;"),
        ("scheduling", "x", r"scheduling is 'x'; pass an edgellm\.SchedulingOptions"),
        ("max_replays", HUGE, r"max_replays is 10+\.\.\.; it must be an integer from 0 to 2147483647"),
    ],
)
def test_engine_options_are_bounded(option, value, message):
    with pytest.raises(InvalidArgumentError, match=message):
        EngineConfig(**{option: value})


@pytest.mark.parametrize("option", ["step_time_budget_ms", "priority_aging_seconds"])
def test_times_that_no_float_holds_are_refused(option):
    with pytest.raises(InvalidArgumentError, match=rf"{option} is 10+\.\.\.; it must be a finite number above 0"):
        SchedulingOptions(scheduling_policy="priority", **{option: HUGE})


def test_the_longest_idle_wait_parks_and_wakes(start):
    engine = start(ScriptedRuntime(), EngineConfig(idle_wait=3600.0))
    wait_until(lambda: engine.running(), "not started")
    for _ in range(3):
        assert len(engine.submit(ask()).get(WAIT).token_ids) == 4


# ---- waiting for an outcome -----------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [-1, NAN, "x", True])
def test_a_malformed_timeout_of_get_leaves_the_request_alone(start, brake, timeout):
    engine = start(ScriptedRuntime(script=Script(next_token=brake)))
    handle = held(engine, brake)
    with pytest.raises(InvalidArgumentError, match=r"timeout is .*; it must be a number of seconds, 0 or more"):
        handle.get(timeout)
    brake.release()
    assert len(handle.get(WAIT).token_ids) == 50


@pytest.mark.parametrize("timeout", [INF, 1e308, HUGE])
def test_an_endless_timeout_of_get_waits_without_limit(start, timeout):
    engine = start(ScriptedRuntime())
    assert len(engine.submit(ask()).get(timeout).token_ids) == 4


def test_a_timeout_of_get_names_what_the_caller_gave(start, brake):
    engine = start(ScriptedRuntime(script=Script(next_token=brake)))
    handle = held(engine, brake)
    with pytest.raises(TimeoutError, match=r"has no outcome after 1e-09 s"):
        handle.get(1e-9)


# ---- callbacks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RAISED)
def test_whatever_a_callback_raises_the_engine_goes_on(start, brake, kind):
    def bad(*_: object) -> None:
        raise kind

    engine = start(ScriptedRuntime(script=Script(next_token=brake)))
    handle = held(engine, brake)
    handle.add_done_callback(bad)
    handle.stream().add_listener(bad)
    called = engine.submit(ask(token_callback=bad))
    brake.release()
    assert len(handle.get(WAIT).token_ids) == 50
    with pytest.raises(RequestFailed, match=f"the token callback raised: {kind.__name__}"):
        called.get(WAIT)
    assert len(engine.submit(ask()).get(WAIT).token_ids) == 4
    assert engine.running()


def test_a_late_done_callback_that_raises_is_logged_like_an_early_one(start, caplog):
    engine = start(ScriptedRuntime())
    handle = engine.submit(ask())
    handle.get(WAIT)
    handle.add_done_callback(lambda: 1 // 0)
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]


def test_a_plugin_that_raises_an_odd_error_in_a_step_costs_the_session_not_the_engine(start, monkeypatch):
    runtime = ScriptedRuntime()
    engine = start(runtime, EngineConfig(max_replays=0))

    def interrupted(plan):
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime.sessions[0], "execute", interrupted)
    with pytest.raises(RequestFailed, match="KeyboardInterrupt"):
        engine.submit(ask()).get(WAIT)
    assert len(engine.submit(ask()).get(WAIT).token_ids) == 4
    assert len(runtime.sessions) == 2


# ---- a dying thread -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_every_request_of_a_dying_engine_gets_its_outcome(brake, monkeypatch):
    """What kills the thread strikes again while its death is handled."""
    runtime = ScriptedRuntime(script=Script(next_token=brake))
    engine = RequestEngine(runtime)
    handles = [held(engine, brake)]
    handles += [engine.submit(ask(stream_channel=StreamChannel.create())) for _ in range(3)]

    def broken(*_: object) -> None:
        raise OverflowError("no place for it")

    monkeypatch.setattr(Backlog, "add", broken)
    monkeypatch.setattr(Backlog, "take_all", broken)
    monkeypatch.setattr(runtime.sessions[0], "close", broken)
    brake.release()
    for handle in handles:
        with pytest.raises(RequestFailed, match="thread ended unexpectedly: OverflowError: no place for it"):
            handle.get(WAIT)
    with pytest.raises(SubmitError, match="thread ended unexpectedly"):
        engine.submit(ask())
    engine.shutdown(ShutdownMode.CANCEL)
    assert all(handle.stream().is_finished() for handle in handles)
    metrics = engine.metrics()
    assert (metrics.submitted, metrics.failed, engine.pending(), engine.resident()) == (4, 4, 0, 0)


def test_a_runtime_that_cannot_open_a_session_is_reported_whatever_it_raises():
    def factory():
        raise Unusual("no device")

    with pytest.raises(Unusual, match="no device"):
        RequestEngine(factory)
