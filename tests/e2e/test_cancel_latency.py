"""From a cancel to freed pages: at most one step, in every state, whoever goes away.

An engine's actor is driven boundary by boundary on this thread over the integer toy model, so steps can be counted and
pages read in between.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
from engine_hand import Hand
from toy_parts import executor_of, hold_after, toy_parts

from edgellm.engine.config import EngineConfig
from edgellm.engine.engine import RequestEngine
from edgellm.engine.records import RequestHandle, RequestRecord, TerminalStatus
from edgellm.errors import RequestCancelled
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.streaming import StreamChannel
from edgellm.testing.recount import recount
from edgellm.testing.toy import toy_generate
from edgellm.testing.toy_runtime import TOY_VOCAB_SIZE, ToyRuntime

WAIT = 20


def request(prompt: list[int], max_tokens: int, channel: StreamChannel | None = None) -> LLMGenerationRequest:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    return LLMGenerationRequest(prompt_token_ids=prompt, sampling=params, stream_channel=channel)


@pytest.fixture
def hand() -> Iterator[Hand]:
    hand = Hand(ToyRuntime(page_size=4, max_batch_size=2, max_input_length=64))
    yield hand
    hand.close()


LONG = list(range(10, 50))
STATES = {
    "in the command queue": lambda hand, record: True,
    "first chunk done": lambda hand, record: 0 < hand.remaining(record) < len(LONG),
    "third chunk done": lambda hand, record: hand.committed(record) >= 24,
    "prompt done": lambda hand, record: hand.remaining(record) == 0,
    "decoding": lambda hand, record: hand.committed(record) == len(LONG) + 3,
    "last token next": lambda hand, record: hand.committed(record) == len(LONG) + 8,
}


@pytest.mark.parametrize("through_stream", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_at_most_one_boundary_frees_pages_and_publishes_the_outcome(
    hand: Hand, state: str, through_stream: bool
) -> None:
    neighbour = hand.submit(request([5, 6, 7], 60))
    hand.until(lambda: hand.committed(neighbour) > 4, "the neighbour never decoded")
    channel = StreamChannel.create() if through_stream else None
    record = hand.submit(request(LONG, 10, channel))
    hand.until(lambda: STATES[state](hand, record), f"never {state}")
    steps = hand.steps()
    if channel is None:
        record.cancel()
    else:
        channel.cancel()
    hand.boundary()
    assert record.status is TerminalStatus.CANCELLED
    assert hand.steps() - steps <= 1
    assert hand.residents() == {neighbour.id}
    assert hand.leased() <= -(-(hand.committed(neighbour) + 2) // 4) + 1  # the neighbour's own pages
    hand.until(lambda: neighbour.outcome_published, "the neighbour never ended")
    assert neighbour.response is not None
    assert neighbour.response.token_ids == toy_generate([5, 6, 7], 60, TOY_VOCAB_SIZE)
    assert hand.leased() == 0


def test_a_request_that_waits_for_a_seat_leaves_without_a_step(hand: Hand) -> None:
    residents = [hand.submit(request([5, n], 30)) for n in (6, 7)]
    hand.until(lambda: len(hand.actor._coordinator) == 2, "nobody was seated")
    waiting = hand.submit(request(LONG, 10))
    hand.boundary()
    assert hand.actor.queued() == 1
    leased, steps = hand.leased(), hand.steps()
    waiting.cancel()
    hand.actor._drain()
    assert waiting.status is TerminalStatus.CANCELLED
    assert (hand.leased(), hand.steps()) == (leased, steps)
    hand.until(lambda: all(record.outcome_published for record in residents), "the residents never ended")


# ---- callers that go away, of a real engine whose step is held -------------------------------------------


def interrupted_get(handle: RequestHandle) -> None:
    """A `KeyboardInterrupt` in a waiting `get`, as Ctrl-C delivers it."""

    def interrupt(timeout: float | None) -> bool:
        raise KeyboardInterrupt

    record = handle._record
    handle._record = _Interrupting(record, interrupt)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        handle.get()
    handle._record = record


class _Interrupting:
    def __init__(self, record: RequestRecord, wait: object) -> None:
        self.cancel = record.cancel
        self.wait = wait


def cancelled_task(handle: RequestHandle) -> None:
    async def leave() -> None:
        task = asyncio.ensure_future(handle.get_async())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())


def timed_out_wait_for(handle: RequestHandle) -> None:
    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handle.get_async(), 0.01)

    asyncio.run(leave())


def closed_generator(handle: RequestHandle) -> None:
    def pieces() -> Iterator[str]:
        channel = handle.stream()
        try:
            for chunk in channel:
                yield chunk.text
        finally:
            channel.cancel()

    reading = pieces()
    next(reading)
    reading.close()


@pytest.mark.parametrize("leave", [interrupted_get, cancelled_task, timed_out_wait_for, closed_generator])
def test_a_caller_that_goes_away_frees_its_pages_with_the_next_step(leave: Callable[[RequestHandle], None]) -> None:
    parts = toy_parts()
    executor, standing = executor_of(parts), hold_after(parts, 5)
    with RequestEngine(parts.runtime, EngineConfig(step_token_budget=32)) as engine:
        executor.gate.clear()
        handle = engine.submit(request(LONG[:12], 200))
        if leave is closed_generator:
            handle.stream()  # before the first token: something will have come when the actor is held
        executor.gate.set()
        until_true(standing)
        steps = executor.forwards
        leave(handle)
        executor.gate.set()
        until_true(lambda: engine.pending() == 0 and engine.resident() == 0)
        assert executor.forwards - steps <= 1  # the one that was held
        assert recount(parts.runtime.coordinator).leased == 0
        with pytest.raises(RequestCancelled):
            handle.get(WAIT)


def until_true(condition: Callable[[], bool]) -> None:
    for _ in range(4000):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it never came to that")
