"""`Engine` and `LLM` under several threads, in a fork, and while they are shut down."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from toy_parts import executor_of, hold_after, toy_parts

from edgellm import LLM, Engine, SamplingParams
from edgellm.assembly import Parts
from edgellm.errors import ContractViolation, InvalidArgumentError
from edgellm.frontend import RequestOptions
from edgellm.outputs import TokenStream
from edgellm.streaming import StreamChannel

PROMPT = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
PLAIN = {"add_generation_prompt": True, "chat_template_kwargs": None, "method": "submit"}


@pytest.fixture
def parts() -> Parts:
    return toy_parts()


@pytest.fixture
def engine(parts: Parts) -> Iterator[Engine]:
    with Engine.from_parts(parts) as model:
        yield model
        executor_of(parts).gate.set()


def test_streams_that_are_asked_for_at_once_are_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second stream, once dropped, would cancel the request."""
    request = engine.submit(PROMPT, GREEDY)
    got: list[TokenStream] = []
    other = threading.Thread(target=lambda: got.append(request.stream()))

    class Slow(TokenStream):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if threading.current_thread() is not other:
                other.start()
                other.join(0.2)  # it has to wait for this one

    monkeypatch.setattr("edgellm.engine_api.TokenStream", Slow)
    stream = request.stream()
    other.join(10)
    assert got == [stream]
    got.clear()
    assert "".join(stream) == request.get(10).text


@pytest.mark.parametrize("cls", [Engine, LLM])
def test_a_shutdown_from_a_callback_is_refused_while_another_thread_shuts_down(cls: Any, parts: Parts) -> None:
    host = cls.from_parts(parts)
    shut_down = host.shutdown if cls is Engine else host.close
    executor_of(parts).gate.clear()
    handle = host._frontend.submit(host._frontend.prepare_one(PROMPT, GREEDY, RequestOptions.checked(), **PLAIN))
    refusals: list[str] = []

    def callback() -> None:
        try:
            shut_down()
        except ContractViolation as error:
            refusals.append(str(error))

    handle.add_done_callback(callback)
    ending = threading.Thread(target=shut_down, daemon=True)
    ending.start()
    while host._frontend.engine is not None:
        time.sleep(0.001)
    executor_of(parts).gate.set()
    ending.join(10)
    assert not ending.is_alive()
    assert len(refusals) == 1
    assert "the engine's own thread" in refusals[0]
    shut_down()


def test_every_thread_that_shuts_down_waits_for_the_end(parts: Parts) -> None:
    engine = Engine.from_parts(parts)
    inner = engine._frontend.engine
    standing = hold_after(parts, 3)
    engine.submit(PROMPT, LONG)
    while not standing():
        time.sleep(0.001)
    running: list[bool] = []

    def end() -> None:
        engine.shutdown(drain=False)
        running.append(inner.running())

    threads = [threading.Thread(target=end) for _ in range(3)]
    for thread in threads:
        thread.start()
    threads[0].join(0.1)
    assert running == []
    executor_of(parts).gate.set()
    for thread in threads:
        thread.join(10)
    assert running == [False] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_refuses_to_wait_for_the_parents_engine(engine: Engine, parts: Parts) -> None:
    executor_of(parts).gate.clear()
    request, stream = engine.submit(PROMPT, LONG), engine.stream(PROMPT, LONG)
    waits: list[Callable[[], object]] = [
        request.get,
        lambda: list(stream),
        lambda: list(request.stream()),
        lambda: stream.output,
        lambda: asyncio.run(stream.async_output()),
        lambda: engine.generate(PROMPT),
    ]
    for wait in waits:
        assert _exit_status_of_fork(lambda: _is_refused(wait)) == 0, wait  # noqa: B023
    for harmless in (request.cancel, stream.cancel, engine.shutdown, engine.metrics):
        assert _exit_status_of_fork(harmless) == 0
    assert engine.metrics().pending == 2
    stream.cancel()
    executor_of(parts).gate.set()
    assert len(request.get(10).token_ids) == 200


def _is_refused(wait: Callable[[], object]) -> None:
    with pytest.raises(ContractViolation, match="this is its fork"):
        wait()


def _exit_status_of_fork(action: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(10)  # a hang ends it, and says so by its status
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_what_has_one_owner_is_never_copied(engine: Engine) -> None:
    request = engine.submit(PROMPT, GREEDY, stream=True)
    stream = request.stream()
    with LLM.from_parts(toy_parts()) as llm, pytest.raises(TypeError, match="LLM has one owner"):
        copy.copy(llm)
    owned = [engine, engine._frontend.engine, request, stream, request._handle, StreamChannel.create()]
    for thing in owned:
        for copier in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=f"{type(thing).__name__} has one owner and cannot be copied"):
                copier(thing)
    assert "".join(stream) == request.get(10).text


@pytest.mark.parametrize("value", [5, None, "later"])
def test_a_callback_that_cannot_be_called_is_refused(engine: Engine, value: Any) -> None:
    request = engine.submit(PROMPT, GREEDY)
    with pytest.raises(InvalidArgumentError, match=r"callback is .*; pass a function"):
        request.add_done_callback(value)
    channel = StreamChannel.create()
    for add in (channel.add_listener, channel.add_cancel_listener):
        with pytest.raises(InvalidArgumentError, match="; pass a function"):
            add(value)
    request.get(10)
