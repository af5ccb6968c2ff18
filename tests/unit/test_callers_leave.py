"""Callers that go away: each way of leaving cancels its requests and frees their seats within one step."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import linecache
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from toy_parts import executor_of, hold_after, toy_parts, wait_until_idle

from edgellm import LLM, SamplingParams
from edgellm.assembly import Parts
from edgellm.engine.config import EngineConfig
from edgellm.engine.engine import RequestEngine
from edgellm.errors import RequestCancelled, RequestFailed
from edgellm.outputs import TokenStream
from edgellm.request import LLMGenerationRequest
from edgellm.session.types import FinishReason
from edgellm.streaming import StreamChannel
from edgellm.testing.recount import recount
from edgellm.testing.scripted_session import Script, ScriptedRuntime

pytestmark = pytest.mark.usefixtures("interrupts_arrive")
WAIT = 20
PROMPT = [10, 20, 30, 40, 50]
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture
def parts() -> Parts:
    return toy_parts()


@pytest.fixture
def llm(parts: Parts) -> Iterator[LLM]:
    with LLM.from_parts(parts) as model:
        yield model
        executor_of(parts).gate.set()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def main_waits() -> bool:
    """Whether the main thread is blocked on a lock in `get`, `wait_pop` or `shutdown`, not merely about to be."""
    frame = sys._current_frames()[threading.main_thread().ident]
    if "acquire(" not in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        return False
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[0] == "_acquire_in_slices" and bool({"get", "wait_pop", "shutdown"} & set(names))


def interrupt_main_when(condition: Callable[[], bool]) -> threading.Thread:
    """Ctrl-C, once `condition` holds and the main thread waits for its answer."""

    def press() -> None:
        until(condition)
        until(main_waits)
        time.sleep(0.02)  # a signal that comes before the lock is really waited for would not be heard
        until(main_waits)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def assert_freed_within_one_step(llm: LLM, parts: Parts, cancelled: int) -> None:
    """The step that was running ends, and the next one that names the requests runs nothing for them."""
    executor = executor_of(parts)
    before = executor.forwards
    executor.gate.set()
    wait_until_idle(llm)
    assert executor.forwards - before <= 1
    metrics = llm.engine_metrics()
    assert (metrics.cancelled, metrics.completed) == (cancelled, 0)
    assert recount(parts.runtime.coordinator).leased == 0


def test_an_interrupted_generate_cancels_all_its_prompts(llm: LLM, parts: Parts) -> None:
    standing = hold_after(parts, 5)
    presser = interrupt_main_when(standing)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, PROMPT[:3], PROMPT[1:], [1, 2], [3, 4], [5, 6, 7]], LONG)  # four seats: two wait
    presser.join()
    assert_freed_within_one_step(llm, parts, cancelled=6)


def test_an_interrupted_stream_cancels_though_the_traceback_keeps_it_alive(llm: LLM, parts: Parts) -> None:
    standing = hold_after(parts, 5)
    presser = interrupt_main_when(standing)
    stream = llm.stream(PROMPT, LONG)
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            pass
    presser.join()
    assert_freed_within_one_step(llm, parts, cancelled=1)
    del stream


def test_a_stream_that_is_dropped_half_read_is_cancelled(llm: LLM, parts: Parts) -> None:
    standing = hold_after(parts, 5)
    stream = llm.stream(PROMPT, LONG)
    pieces = iter(stream)
    next(pieces)
    until(standing)
    del stream, pieces
    gc.collect()
    assert_freed_within_one_step(llm, parts, cancelled=1)


def break_out(stream: TokenStream) -> None:
    for _ in stream:
        break


def break_out_of_the_chunks(stream: TokenStream) -> None:
    for _ in stream.chunks():
        break


def raise_in_the_body(stream: TokenStream) -> None:
    def read() -> None:
        for _ in stream:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()


def close_the_iterator(stream: TokenStream) -> None:
    pieces = iter(stream)
    next(pieces)
    pieces.close()


def close_the_chunks(stream: TokenStream) -> None:
    with contextlib.closing(stream.chunks()) as chunks:
        next(chunks)


def leave_the_block(stream: TokenStream) -> None:
    with stream:
        pieces = iter(stream)
        next(pieces)


LEAVING = [
    break_out,
    break_out_of_the_chunks,
    raise_in_the_body,
    close_the_iterator,
    close_the_chunks,
    leave_the_block,
]


@pytest.mark.parametrize("leave", LEAVING, ids=lambda leave: leave.__name__)
def test_a_loop_that_is_left_cancels_though_the_stream_is_kept(
    llm: LLM, parts: Parts, leave: Callable[[TokenStream], None]
) -> None:
    hold_after(parts, 5)  # so that a request that ran on would stand there
    stream = llm.stream(PROMPT, LONG)
    leave(stream)
    assert_freed_within_one_step(llm, parts, cancelled=1)
    with pytest.raises(RequestCancelled):
        _ = stream.output
    rest = list(stream)  # what had been generated before; the end is the caller's own doing and no error
    assert len(rest) < 10


@pytest.fixture
def unpublished(parts: Parts) -> Iterator[threading.Event]:
    """The actor waits for this event between the step that ends a request and the outcome."""
    go, session = threading.Event(), parts.runtime._session
    assert session is not None
    execute = session.execute

    def held_after_the_last_token(plan: object) -> object:
        result = execute(plan)
        assert not result.finished or go.wait(WAIT)
        return result

    session.execute = held_after_the_last_token  # type: ignore[method-assign]
    yield go
    go.set()


def test_a_reader_that_leaves_at_the_last_chunk_cancels_nothing(llm: LLM, unpublished: threading.Event) -> None:
    with llm.stream(PROMPT, SHORT) as stream:
        for chunk in stream.chunks():
            if chunk.finished:
                break
    unpublished.set()
    assert stream.output.finish_reason == "length"
    assert llm.engine_metrics().cancelled == 0


def test_a_task_that_leaves_at_the_last_chunk_cancels_nothing(llm: LLM, unpublished: threading.Event) -> None:
    async def main() -> None:
        stream = llm.stream(PROMPT, SHORT)
        async with stream:
            async for chunk in stream.async_chunks():
                if chunk.finished:
                    break
        unpublished.set()
        assert (await stream.async_output()).finish_reason == "length"

    asyncio.run(main())
    assert llm.engine_metrics().cancelled == 0


def test_one_iterator_reads_a_stream_in_parts(llm: LLM) -> None:
    stream = llm.stream(PROMPT, LONG)
    pieces = iter(stream)
    parts = [next(pieces), next(pieces), *pieces]
    assert "".join(parts) == stream.output.text
    pieces.close()
    assert list(stream) == []
    assert llm.engine_metrics().cancelled == 0


def test_an_iterator_that_was_never_started_leaves_the_request_alone(llm: LLM) -> None:
    stream = llm.stream(PROMPT, LONG)
    iter(stream).close()
    stream.chunks().close()
    assert "".join(stream) == stream.output.text


def test_a_cancelled_task_cancels_its_stream(llm: LLM, parts: Parts) -> None:
    standing = hold_after(parts, 5)

    async def main() -> None:
        async def read() -> None:
            async for _ in stream:
                pass

        stream = llm.stream(PROMPT, LONG)
        task = asyncio.create_task(read())
        while not standing():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert_freed_within_one_step(llm, parts, cancelled=1)


# ---- handles ------------------------------------------------------------------------------------------


class Gate:
    """A scripted token source that lets the test see every token before it exists."""

    def __init__(self) -> None:
        self.reached = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.asked = 0

    def __call__(self, prompt, index: int) -> int:
        self.asked += 1
        self.reached.release()
        assert self.go.acquire(timeout=WAIT)
        return 100

    def open(self) -> None:
        for _ in range(1000):
            self.go.release()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def scripted(gate: Gate) -> Iterator[tuple[RequestEngine, ScriptedRuntime]]:
    runtime = ScriptedRuntime(script=Script(next_token=gate))
    engine = RequestEngine(runtime, EngineConfig(max_batch_size=2))
    yield engine, runtime
    gate.open()
    engine.shutdown()
    assert runtime.leased == set()


def ask(max_tokens: int = 100, **fields) -> LLMGenerationRequest:
    return LLMGenerationRequest(prompt="hello", sampling=SamplingParams(max_tokens=max_tokens), **fields)


def test_an_interrupted_get_cancels_and_frees_within_one_step(scripted, gate: Gate) -> None:
    engine, runtime = scripted
    handle = engine.submit(ask())
    presser = interrupt_main_when(lambda: gate.reached.acquire(blocking=False))
    with pytest.raises(KeyboardInterrupt):
        handle.get()
    presser.join()
    gate.open()
    until(lambda: engine.pending() == 0)
    assert gate.asked == 1  # no token after the one that was under way
    assert runtime.leased == set()
    with pytest.raises(RequestCancelled):
        handle.get(0)


def test_a_cancelled_get_async_cancels_and_frees_within_one_step(scripted, gate: Gate) -> None:
    engine, _ = scripted

    async def main() -> None:
        task = asyncio.create_task(engine.submit(ask()).get_async())
        while not gate.reached.acquire(blocking=False):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gate.open()
    until(lambda: engine.pending() == 0)
    assert gate.asked == 1


def test_a_get_that_timed_out_leaves_the_request_running(scripted, gate: Gate) -> None:
    engine, _ = scripted
    handle = engine.submit(ask(max_tokens=3))
    with pytest.raises(TimeoutError):
        handle.get(0.01)
    gate.open()
    assert len(handle.get(WAIT).token_ids) == 3


def test_a_dropped_handle_is_fire_and_forget(scripted, gate: Gate) -> None:
    engine, _ = scripted
    engine.submit(ask(max_tokens=3))
    gc.collect()
    gate.open()
    until(lambda: engine.pending() == 0)
    assert engine.metrics().completed == 1


# ---- token callbacks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_token_callback_that_raises_fails_its_request_also_on_the_last_token(scripted, gate: Gate, call: int) -> None:
    engine, _ = scripted
    gate.open()
    seen = []

    def callback(token_ids: list[int]) -> None:
        seen.append(token_ids)
        if len(seen) == call:
            raise ValueError("callback bug")

    channel = StreamChannel.create()
    handle = engine.submit(ask(max_tokens=3, token_callback=callback, stream_channel=channel))
    with pytest.raises(RequestFailed, match="the token callback raised: ValueError: callback bug"):
        handle.get(WAIT)
    chunks = list(channel)
    assert [token for chunk in chunks for token in chunk.token_ids] == [100] * call
    assert (chunks[-1].finished, channel.reason()) == (True, FinishReason.ERROR)
    assert engine.submit(ask(max_tokens=2)).get(WAIT).token_ids == [100, 100]


def test_a_cancel_stays_a_cancel_when_the_callback_raises_too(scripted, gate: Gate) -> None:
    engine, _ = scripted
    gate.open()

    def callback(token_ids: list[int]) -> None:
        handle.cancel()
        raise ValueError("callback bug")

    ready = threading.Event()
    handle = engine.submit(ask(token_callback=lambda ids: (ready.wait(WAIT), callback(ids))))
    ready.set()
    with pytest.raises(RequestCancelled):
        handle.get(WAIT)


def test_a_close_that_was_interrupted_waits_the_next_time(llm: LLM, parts: Parts) -> None:
    engine = llm._engine
    standing = hold_after(parts, 5)
    stream = llm.stream(PROMPT, LONG)
    until(standing)
    presser = interrupt_main_when(standing)
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    presser.join()
    assert engine.running()
    again = threading.Thread(target=llm.close)
    again.start()
    again.join(0.1)
    assert again.is_alive()
    executor_of(parts).gate.set()
    again.join(WAIT)
    assert not again.is_alive()
    assert not engine.running()
    del stream
