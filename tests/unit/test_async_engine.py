"""`AsyncEngine`, over the toy model: exact texts, many tasks, and what happens to a request nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from toy_parts import VOCAB, HeldExecutor, executor_of, toy_parts, wait_until_idle

from edgellm import LLM, AsyncEngine, RequestOutput, SamplingParams
from edgellm.assembly import Parts
from edgellm.engine.config import EngineConfig
from edgellm.errors import (
    AdmissionError,
    ContractViolation,
    InvalidArgumentError,
    RequestCancelled,
    RequestTimedOut,
    SubmitError,
)
from edgellm.sampling.guidance import Guidance, Guide
from edgellm.sampling.structured import StructuredOutput
from edgellm.testing.recount import recount
from edgellm.testing.toy import toy_generate
from edgellm.testing.toy_tokenizer import ToyTokenizer

PROMPT = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
ANSWER = toy_generate(PROMPT, 8, VOCAB)


def decode(tokens: list[int]) -> str:
    return ToyTokenizer(VOCAB).decode(tokens)


def run(test: Callable[[AsyncEngine, HeldExecutor], Coroutine[Any, Any, Any]], parts: Parts | None = None) -> Any:
    """Run `test(engine, executor)` in a loop; at the end every page must be accounted for."""
    parts = parts or toy_parts()

    async def main() -> Any:
        async with AsyncEngine.from_parts(parts) as engine:
            result = await asyncio.wait_for(test(engine, executor_of(parts)), 120)
            executor_of(parts).gate.set()
            await asyncio.to_thread(wait_until_idle, engine)
            assert recount(parts.runtime.coordinator).leased == 0
            return result

    return asyncio.run(main())


async def steps(executor: HeldExecutor, count: int) -> None:
    while executor.forwards < count:
        await asyncio.sleep(0.001)


# ---- answers --------------------------------------------------------------------------------------------


def test_generate_and_chat_give_one_answer_each() -> None:
    async def test(engine: AsyncEngine, executor: HeldExecutor) -> tuple[RequestOutput, ...]:
        messages = [{"role": "user", "content": "hi"}]
        return (
            await engine.generate(PROMPT, GREEDY),
            await engine.generate("hello", GREEDY),
            await engine.chat(messages, GREEDY),
            await engine.chat(messages, GREEDY, add_generation_prompt=False),
        )

    ids, text, chat, bare = run(test)
    assert ids.token_ids == ANSWER
    assert ids.text == decode(ANSWER)
    assert text.token_ids == toy_generate(ToyTokenizer(VOCAB).encode("hello"), 8, VOCAB)
    assert decode(chat.prompt_token_ids) == "[user]hi\n[assistant]"
    assert decode(bare.prompt_token_ids) == "[user]hi\n"


def test_a_stream_yields_text_and_chunks_and_has_an_output() -> None:
    async def test(engine: AsyncEngine, executor: HeldExecutor) -> None:
        assert "".join([piece async for piece in engine.stream(PROMPT, GREEDY)]) == decode(ANSWER)
        stream = engine.stream(PROMPT, GREEDY)
        chunks = [chunk async for chunk in stream.chunks()]
        assert [token for chunk in chunks for token in chunk.token_ids] == ANSWER
        assert chunks[-1].finished
        output = await stream.output()
        assert output.token_ids == ANSWER
        assert await stream.output() is output
        assert [piece async for piece in stream] == []

    run(test)


def test_three_hundred_tasks_at_once_each_get_their_own_answer() -> None:
    async def test(engine: AsyncEngine, executor: HeldExecutor) -> None:
        async def ask(index: int) -> list[int]:
            prompt = [10 + index % 200, 20 + index // 200]
            if index % 3:
                return (await engine.generate(prompt, GREEDY)).token_ids
            tokens: list[int] = []
            async for chunk in engine.stream(prompt, GREEDY).chunks():
                tokens += chunk.token_ids
            return tokens

        answers = await asyncio.gather(*(ask(index) for index in range(300)))
        assert answers == [toy_generate([10 + index % 200, 20 + index // 200], 8, VOCAB) for index in range(300)]

    run(test, toy_parts(config=EngineConfig(command_queue_capacity=512, max_pending_requests=512)))


def test_streams_cost_no_thread() -> None:
    async def test(engine: AsyncEngine, executor: HeldExecutor) -> int:
        async def read() -> str:
            return "".join([piece async for piece in engine.stream(PROMPT, GREEDY)])

        before = threading.active_count()
        executor.gate.clear()
        readers = [asyncio.create_task(read()) for _ in range(20)]
        while engine.metrics().pending < 20:
            await asyncio.sleep(0.001)
        during = threading.active_count()
        executor.gate.set()
        assert set(await asyncio.gather(*readers)) == {decode(ANSWER)}
        return during - before

    assert run(test) <= 1  # the one that tokenises


def test_the_loop_runs_on_while_a_step_is_held() -> None:
    async def test(engine: AsyncEngine, executor: HeldExecutor) -> None:
        executor.gate.clear()
        task = asyncio.create_task(engine.generate(PROMPT, GREEDY))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not task.done()
        executor.gate.set()
        assert (await task).token_ids == ANSWER

    run(test)


# ---- cancelling -----------------------------------------------------------------------------------------


async def cancel_generate(engine: AsyncEngine, executor: HeldExecutor) -> None:
    task = asyncio.create_task(engine.generate(PROMPT, LONG))
    await steps(executor, 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_reader(engine: AsyncEngine, executor: HeldExecutor) -> None:
    async def read() -> None:
        async for _ in engine.stream(PROMPT, LONG):
            pass

    task = asyncio.create_task(read())
    await steps(executor, 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_reader_that_works(engine: AsyncEngine, executor: HeldExecutor) -> None:
    async def read() -> None:
        async for _ in engine.stream(PROMPT, LONG):
            await asyncio.sleep(60)

    task = asyncio.create_task(read())
    await steps(executor, 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def break_out(engine: AsyncEngine, executor: HeldExecutor) -> None:
    async for _ in engine.stream(PROMPT, LONG):
        break


async def break_out_and_keep_the_stream(engine: AsyncEngine, executor: HeldExecutor) -> None:
    stream = engine.stream(PROMPT, LONG)
    async for _ in stream:
        break
    with pytest.raises(RequestCancelled):
        await stream.output()


async def leave_the_block(engine: AsyncEngine, executor: HeldExecutor) -> None:
    async with engine.stream(PROMPT, LONG) as stream:
        pieces = stream.__aiter__()
        await pieces.__anext__()
    assert len([piece async for piece in pieces]) < 200


async def close_the_iterator(engine: AsyncEngine, executor: HeldExecutor) -> None:
    async with contextlib.aclosing(engine.stream(PROMPT, LONG).chunks()) as chunks:
        await chunks.__anext__()


async def cancel_the_stream(engine: AsyncEngine, executor: HeldExecutor) -> None:
    stream = engine.stream(PROMPT, LONG)
    seen = 0
    async for chunk in stream.chunks():
        seen += len(chunk.token_ids)
        if seen >= 3:
            stream.cancel()
    assert 3 <= seen < 200


async def time_out(engine: AsyncEngine, executor: HeldExecutor) -> None:
    task = asyncio.create_task(engine.generate(PROMPT, LONG))
    await steps(executor, 3)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(task, 0.01)


async def raise_in_the_body(engine: AsyncEngine, executor: HeldExecutor) -> None:
    async def read() -> None:
        async for _ in engine.stream(PROMPT, LONG):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await read()


LEAVING = [
    cancel_generate,
    cancel_reader,
    cancel_reader_that_works,
    break_out,
    break_out_and_keep_the_stream,
    leave_the_block,
    close_the_iterator,
    cancel_the_stream,
    time_out,
    raise_in_the_body,
]


@pytest.mark.parametrize("leave", LEAVING, ids=lambda leave: leave.__name__)
def test_a_request_nobody_waits_for_ends_at_the_next_step(
    leave: Callable[[AsyncEngine, HeldExecutor], Coroutine[Any, Any, None]],
) -> None:
    async def test(engine: AsyncEngine, executor: HeldExecutor) -> None:
        executor.seconds = 0.005
        await leave(engine, executor)
        left_at = executor.forwards
        await asyncio.to_thread(wait_until_idle, engine)
        assert executor.forwards <= left_at + 2  # the step that ran, and one that had begun
        assert engine.metrics().engine.cancelled == 1
        assert (await engine.generate(PROMPT, GREEDY)).token_ids == ANSWER

    run(test)


def test_a_neighbour_does_not_notice_a_cancelled_task() -> None:
    async def test(engine: AsyncEngine, executor: HeldExecutor) -> None:
        executor.seconds = 0.001
        stays = asyncio.create_task(engine.generate([5, 6, 7], LONG))
        goes = asyncio.create_task(engine.generate(PROMPT, LONG))
        await steps(executor, 5)
        goes.cancel()
        assert (await stays).token_ids == toy_generate([5, 6, 7], 200, VOCAB)
        assert goes.cancelled()

    run(test)


def test_two_tasks_that_start_one_stream_submit_one_request() -> None:
    async def test(engine: AsyncEngine, executor: HeldExecutor) -> None:
        stream = engine.stream(PROMPT, GREEDY)

        async def read() -> str:
            return "".join([piece async for piece in stream])

        text, output = await asyncio.gather(read(), stream.output())
        assert text == output.text == decode(ANSWER)
        assert engine.metrics().engine.submitted == 1

    run(test)


def test_an_iterator_closed_before_its_first_item_starts_nothing() -> None:
    async def test(engine: AsyncEngine, executor: HeldExecutor) -> None:
        stream = engine.stream(PROMPT, GREEDY)
        async with contextlib.aclosing(stream.chunks()) as chunks:
            pass
        assert [chunk async for chunk in chunks] == []
        assert engine.metrics().engine.submitted == 0
        assert "".join([piece async for piece in stream]) == decode(ANSWER)

    run(test)


def test_a_stream_cancelled_before_it_starts_yields_nothing() -> None:
    async def test(engine: AsyncEngine, executor: HeldExecutor) -> None:
        executor.gate.clear()
        stream = engine.stream(PROMPT, LONG)
        stream.cancel()
        assert [piece async for piece in stream] == []
        with pytest.raises(RequestCancelled):
            await stream.output()

    run(test)


# ---- structured output ----------------------------------------------------------------------------------


def test_a_form_that_takes_long_holds_up_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    compile_form = Guidance._compile

    def compile_slowly(guidance: Guidance, structured: StructuredOutput) -> Guide:
        if structured.regex == "b":
            begun.set()
            assert go.wait(60)
        return compile_form(guidance, structured)

    monkeypatch.setattr(Guidance, "_compile", compile_slowly)

    async def test(engine: AsyncEngine, executor: HeldExecutor) -> None:
        slow = SamplingParams(max_tokens=4, temperature=0.0, structured=StructuredOutput(regex="b"))
        fast = SamplingParams(max_tokens=4, temperature=0.0, structured=StructuredOutput(regex="c"))
        guided = [asyncio.create_task(engine.generate(PROMPT, slow)) for _ in range(3)]
        try:
            assert await asyncio.to_thread(begun.wait, 60)
            assert (await asyncio.wait_for(engine.generate(PROMPT, GREEDY), 60)).token_ids == ANSWER
            assert "".join([piece async for piece in engine.stream(PROMPT, GREEDY)]) == decode(ANSWER)
            assert (await asyncio.wait_for(engine.generate(PROMPT, fast), 60)).text == "c"
            guided[0].cancel()  # the others still get theirs
            assert not any(task.done() for task in guided[1:])
        finally:
            go.set()
        assert [output.text for output in await asyncio.gather(*guided[1:])] == ["b", "b"]

    run(test)


def test_a_form_that_the_model_cannot_follow_is_refused_and_others_go_on() -> None:
    async def test(engine: AsyncEngine, executor: HeldExecutor) -> None:
        nothing = SamplingParams(max_tokens=4, structured=StructuredOutput(ebnf="start: A\nA: /b/ & /c/"))
        for _ in range(2):
            with pytest.raises(AdmissionError, match="ebnf: no text has this form"):
                await engine.generate(PROMPT, nothing)
        assert (await engine.generate(PROMPT, GREEDY)).token_ids == ANSWER

    run(test)


# ---- refusals -------------------------------------------------------------------------------------------


def test_bad_requests_raise_what_the_engine_raises() -> None:
    async def test(engine: AsyncEngine, executor: HeldExecutor) -> None:
        with pytest.raises(AdmissionError, match=r"the prompt is empty \(0 tokens\)"):
            await engine.generate([])
        with pytest.raises(AdmissionError, match="prompt token 300 at position 1"):
            async for _ in engine.stream([5, VOCAB]):
                pass
        with pytest.raises(
            InvalidArgumentError, match="generate takes one prompt or conversation, this is a list of 2"
        ):
            await engine.generate([PROMPT, PROMPT])  # type: ignore[list-item]
        with pytest.raises(InvalidArgumentError, match="priority is 'x'"):
            engine.stream(PROMPT, priority="x")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="use_cache is 'x'"):
            await engine.chat([{"role": "user", "content": "a"}], use_cache="x")  # type: ignore[arg-type]
        assert engine.metrics().engine.submitted == 0

    run(test)


def test_when_full_a_stream_is_refused_and_generate_waits_its_turn() -> None:
    async def test(engine: AsyncEngine, executor: HeldExecutor) -> None:
        executor.gate.clear()
        first = asyncio.create_task(engine.generate([1, 2], GREEDY))
        while engine.metrics().pending == 0:
            await asyncio.sleep(0.001)
        with pytest.raises(SubmitError, match="1 requests are pending"):
            async for _ in engine.stream(PROMPT, GREEDY):
                pass
        hurried = asyncio.create_task(engine.generate(PROMPT, GREEDY, timeout_seconds=0.03))
        second = asyncio.create_task(engine.generate(PROMPT, GREEDY))
        while engine.metrics().pending < 3:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # the deadline passes while both stand in line
        assert not second.done()
        executor.gate.set()
        with pytest.raises(RequestTimedOut, match=r"timed out 0\.03 s after its submit"):
            await hurried
        assert engine.metrics().engine.refused == 1
        assert (await second).token_ids == ANSWER
        assert (await first).token_ids == toy_generate([1, 2], 8, VOCAB)

    run(test, toy_parts(config=EngineConfig(max_pending_requests=1)))


def test_a_timeout_is_told_from_a_cancel() -> None:
    async def test(engine: AsyncEngine, executor: HeldExecutor) -> None:
        executor.seconds = 0.01
        with pytest.raises(RequestTimedOut):
            await engine.generate(PROMPT, LONG, timeout_seconds=0.05)
        with pytest.raises(RequestTimedOut):
            async for _ in engine.stream(PROMPT, LONG, timeout_seconds=0.05):
                pass
        assert engine.metrics().engine.timed_out == 2

    run(test)


# ---- starting and ending --------------------------------------------------------------------------------


def test_the_first_request_starts_the_engine_and_shutdown_ends_it_for_good() -> None:
    async def main() -> None:
        engine = AsyncEngine.from_parts(toy_parts())
        assert repr(engine) == "AsyncEngine(not started)"
        with pytest.raises(ContractViolation, match="metrics: this AsyncEngine is not started; use async with"):
            engine.metrics()
        outputs = await asyncio.gather(*(engine.generate(PROMPT, GREEDY) for _ in range(4)))
        assert [output.token_ids for output in outputs] == [ANSWER] * 4
        assert repr(engine) == "AsyncEngine('toy', open)"
        assert engine.tokenizer.decode(ANSWER) == decode(ANSWER)
        assert engine.memory_budget.tokens == 512
        await engine.shutdown()
        await engine.shutdown(drain=False)
        assert repr(engine) == "AsyncEngine('toy', shut down)"
        with pytest.raises(ContractViolation, match="generate: this AsyncEngine is closed"):
            await engine.generate(PROMPT)
        with pytest.raises(ContractViolation, match="stream: this AsyncEngine is closed"):
            await engine.stream(PROMPT).output()
        with pytest.raises(ContractViolation, match="start: this AsyncEngine is closed"):
            await engine.start()

    asyncio.run(main())


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown_drains_or_cancels_without_holding_the_loop_up(drain: bool) -> None:
    async def main() -> None:
        parts = toy_parts()
        engine = AsyncEngine.from_parts(parts)
        executor_of(parts).seconds = 0.001
        tasks = [asyncio.create_task(engine.generate([10 + index, 20], LONG)) for index in range(6)]
        await steps(executor_of(parts), 3)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(tick())
        await engine.shutdown(drain=drain)
        ticking.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        if drain:
            assert ticks > 10
            expected = [toy_generate([10 + index, 20], 200, VOCAB) for index in range(6)]
            assert [outcome.token_ids for outcome in outcomes] == expected  # type: ignore[union-attr]
        else:
            assert {type(outcome) for outcome in outcomes} == {RequestCancelled}

    asyncio.run(main())


def test_a_block_that_ends_by_an_exception_cancels() -> None:
    async def main() -> asyncio.Task[RequestOutput]:
        parts = toy_parts()
        executor_of(parts).seconds = 0.005
        async with AsyncEngine.from_parts(parts) as engine:
            task = asyncio.create_task(engine.generate(PROMPT, LONG))
            await steps(executor_of(parts), 2)
            waiting.append(task)
            raise ZeroDivisionError

    waiting: list[asyncio.Task[RequestOutput]] = []
    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
    with pytest.raises((RequestCancelled, asyncio.CancelledError)):
        waiting[0].result()


def test_one_engine_serves_two_loops() -> None:
    engine = AsyncEngine.from_parts(toy_parts())
    answers: list[list[int]] = []

    async def ask() -> None:
        answers.append((await engine.generate(PROMPT, GREEDY)).token_ids)
        answers.append([token async for chunk in engine.stream(PROMPT, GREEDY).chunks() for token in chunk.token_ids])

    threads = [threading.Thread(target=lambda: asyncio.run(ask())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    asyncio.run(engine.shutdown())
    assert answers == [ANSWER] * 4


def test_options_are_checked_at_once_and_the_model_when_it_starts(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="device is 'tpu'"):
        AsyncEngine(device="tpu")
    with pytest.raises(InvalidArgumentError, match="seed is -1"):
        AsyncEngine(seed=-1)
    engine = AsyncEngine(tmp_path / "absent")

    async def main() -> None:
        for _ in range(2):  # a failed start may be tried again
            with pytest.raises(InvalidArgumentError, match="absent' is neither an existing file or folder"):
                await engine.start()
        await engine.shutdown()

    asyncio.run(main())


def test_a_real_checkpoint(tiny_model_dir: Path) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with LLM(tiny_model_dir, kv_budget=1024) as llm:
        (expected,) = llm.generate("hello", params)

    async def main() -> tuple[RequestOutput, str]:
        async with AsyncEngine(tiny_model_dir, kv_budget=1024, step_time_budget_ms=20.0) as engine:
            output = await engine.generate("hello", params)
            return output, "".join([piece async for piece in engine.stream("hello", params)])

    output, text = asyncio.run(main())
    assert output.token_ids == expected.token_ids
    assert text == output.text == expected.text


def test_an_async_generator_may_wrap_a_stream() -> None:
    async def test(engine: AsyncEngine, executor: HeldExecutor) -> None:
        async def upper() -> AsyncIterator[str]:
            async for piece in engine.stream(PROMPT, GREEDY):
                yield piece.upper()

        assert "".join([piece async for piece in upper()]) == decode(ANSWER).upper()

    run(test)
