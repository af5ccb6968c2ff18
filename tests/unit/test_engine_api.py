"""`Engine`, over the toy model, whose text is exact and known; and how options reach the engine."""

from __future__ import annotations

import dataclasses
import inspect
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from toy_parts import VOCAB, executor_of, hold_after, toy_parts, wait_until_idle

from edgellm import LLM, AsyncEngine, Engine, SamplingParams, SchedulingOptions
from edgellm.assembly import LoadOptions, Parts, _engine_config
from edgellm.engine.config import EngineConfig
from edgellm.errors import (
    AdmissionError,
    ContractViolation,
    InvalidArgumentError,
    RequestCancelled,
    RequestTimedOut,
    SubmitError,
)
from edgellm.testing.recount import recount
from edgellm.testing.toy import toy_generate
from edgellm.testing.toy_tokenizer import ToyTokenizer

PROMPT = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
ANSWER = toy_generate(PROMPT, 8, VOCAB)


@pytest.fixture
def parts() -> Parts:
    return toy_parts()


@pytest.fixture
def engine(parts: Parts) -> Iterator[Engine]:
    with Engine.from_parts(parts) as model:
        yield model
        executor_of(parts).gate.set()
        wait_until_idle(model)
        assert recount(parts.runtime.coordinator).leased == 0


# ---- submit ---------------------------------------------------------------------------------------------


def test_submit_gives_the_answer_of_generate(engine: Engine) -> None:
    request = engine.submit(PROMPT, GREEDY)
    output = request.get(timeout=10)
    assert output.token_ids == ANSWER
    assert output.text == ToyTokenizer(VOCAB).decode(ANSWER)
    assert output.prompt_token_ids == request.prompt_token_ids == PROMPT
    assert request.ready()
    assert request.get() is output
    assert repr(request) == f"SubmittedRequest(id={request.id}, ready)"
    assert engine.generate(PROMPT, GREEDY)[0].token_ids == ANSWER


def test_submit_takes_text_and_messages(engine: Engine) -> None:
    text = engine.submit("hello", GREEDY).get(10)
    assert text.token_ids == toy_generate(ToyTokenizer(VOCAB).encode("hello"), 8, VOCAB)
    messages = [{"role": "user", "content": "hi"}]
    chat = engine.submit(messages, GREEDY).get(10)
    assert ToyTokenizer(VOCAB).decode(chat.prompt_token_ids) == "[user]hi\n[assistant]"
    assert chat.token_ids == engine.chat(messages, GREEDY)[0].token_ids
    bare = engine.submit(messages, GREEDY, add_generation_prompt=False).get(10)
    assert ToyTokenizer(VOCAB).decode(bare.prompt_token_ids) == "[user]hi\n"


def test_submit_never_waits_for_a_step(engine: Engine, parts: Parts) -> None:
    executor_of(parts).gate.clear()
    requests = [engine.submit([10 + index, 20], GREEDY) for index in range(20)]
    assert len({request.id for request in requests}) == 20
    with pytest.raises(TimeoutError, match=r"has no outcome after 0\.01 s"):
        requests[0].get(timeout=0.01)
    assert not any(request.ready() for request in requests)
    executor_of(parts).gate.set()
    outputs = [request.get(10) for request in requests]
    assert [output.token_ids for output in outputs] == [toy_generate([10 + index, 20], 8, VOCAB) for index in range(20)]


@pytest.mark.parametrize("streamed", [True, False])
def test_the_stream_of_a_request_is_its_whole_text(engine: Engine, streamed: bool) -> None:
    request = engine.submit(PROMPT, GREEDY, stream=streamed)
    if not streamed:
        request.get(10)  # late: everything is delivered nevertheless
    assert "".join(request.stream()) == ToyTokenizer(VOCAB).decode(ANSWER)
    assert request.stream() is request.stream()
    assert request.get(10).token_ids == request.stream().output.token_ids == ANSWER


def test_a_stream_that_is_asked_for_while_it_runs_begins_with_what_there_is(engine: Engine, parts: Parts) -> None:
    executor_of(parts).seconds = 0.002
    request = engine.submit(PROMPT, LONG)
    while executor_of(parts).forwards < 20:
        time.sleep(0.002)
    tokens = [token for chunk in request.stream().chunks() for token in chunk.token_ids]
    assert tokens == toy_generate(PROMPT, 200, VOCAB)


def test_cancel_frees_the_pages_at_the_next_step(engine: Engine, parts: Parts) -> None:
    executor = executor_of(parts)
    standing = hold_after(parts, 3)
    request = engine.submit(PROMPT, LONG)
    while not standing():
        time.sleep(0.001)
    request.cancel()
    executor.gate.set()
    with pytest.raises(RequestCancelled):
        request.get(10)
    wait_until_idle(engine)
    assert executor.forwards == 4  # the one that was held; the next runs nothing for it
    assert recount(parts.runtime.coordinator).leased == 0
    assert engine.metrics().engine.cancelled == 1


def test_done_callbacks_run_once_before_and_after_the_end(engine: Engine, parts: Parts) -> None:
    executor_of(parts).gate.clear()
    called = threading.Event()
    request = engine.submit(PROMPT, GREEDY)
    request.add_done_callback(called.set)
    assert not called.is_set()
    executor_of(parts).gate.set()
    assert called.wait(10)
    late: list[int] = []
    request.add_done_callback(lambda: late.append(1))
    assert late == [1]
    assert request.get(0).token_ids == ANSWER


def test_a_timeout_ends_the_request_and_says_so(engine: Engine, parts: Parts) -> None:
    executor_of(parts).seconds = 0.01
    request = engine.submit(PROMPT, LONG, timeout_seconds=0.05)
    with pytest.raises(RequestTimedOut, match=r"timed out 0\.05 s after its submit"):
        request.get(10)
    wait_until_idle(engine)
    metrics = engine.metrics().engine
    assert (metrics.timed_out, metrics.cancelled, metrics.submitted) == (1, 1, 1)
    with pytest.raises(RequestTimedOut):
        engine.generate([PROMPT, [7, 7]], LONG, timeout_seconds=0.02)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"priority": 1.5}, InvalidArgumentError, r"priority is 1.5; it must be an integer"),
        ({"priority": True}, InvalidArgumentError, r"priority is True; it must be an integer"),
        ({"timeout_seconds": 0}, InvalidArgumentError, r"timeout_seconds is 0; it must be a number of seconds above 0"),
        ({"timeout_seconds": float("nan")}, InvalidArgumentError, r"timeout_seconds is nan"),
        ({"timeout_seconds": "1"}, InvalidArgumentError, r"timeout_seconds is '1'"),
        ({"cache_salt": 5}, AdmissionError, "cache_salt is a int; it must be text"),
        ({"use_cache": "no"}, InvalidArgumentError, "use_cache is 'no'; it must be True or False"),
    ],
)
def test_bad_options_are_refused_by_every_call(
    engine: Engine, options: dict[str, object], kind: type[Exception], message: str
) -> None:
    user = [{"role": "user", "content": "hi"}]
    for call, prompt in ((engine.submit, PROMPT), (engine.generate, PROMPT), (engine.chat, user), (engine.stream, "a")):
        with pytest.raises(kind, match=message):
            call(prompt, GREEDY, **options)  # type: ignore[operator]
    assert engine.metrics().engine.submitted == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_generation_prompt": "no"}, r"add_generation_prompt is 'no'; it must be True or False"),
        ({"add_generation_prompt": 1}, r"add_generation_prompt is 1; it must be True or False"),
        ({"chat_template_kwargs": 5}, r"chat_template_kwargs is 5; pass a dict of variables"),
        ({"chat_template_kwargs": "ab"}, r"chat_template_kwargs is 'ab'; pass a dict"),
        ({"chat_template_kwargs": [("a", 1)]}, r"chat_template_kwargs is \[\('a', 1\)\]; pass a dict"),
        ({"chat_template_kwargs": {1: 2}}, r"chat_template_kwargs has the key 1; keys are texts"),
    ],
)
def test_bad_template_arguments_are_refused_by_every_call(
    engine: Engine, options: dict[str, object], message: str
) -> None:
    user = [{"role": "user", "content": "hi"}]
    for call, prompt in ((engine.submit, PROMPT), (engine.submit, user), (engine.chat, user)):
        with pytest.raises(InvalidArgumentError, match=message):
            call(prompt, GREEDY, **options)  # type: ignore[operator]
    assert engine.metrics().engine.submitted == 0


@pytest.mark.parametrize("stream", ["x", 1, None])
def test_whether_to_stream_is_a_flag(engine: Engine, stream: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"stream is .*; it must be True or False"):
        engine.submit(PROMPT, GREEDY, stream=stream)  # type: ignore[arg-type]
    assert engine.metrics().engine.submitted == 0


def test_a_role_that_is_an_array_is_refused_by_name(engine: Engine) -> None:
    user = [{"role": np.array([1, 2]), "content": "hi"}]
    with pytest.raises(AdmissionError, match=r"messages\[0\] has the role array\(\[1, 2\]\); known roles are"):
        engine.chat(user, GREEDY)


def test_submit_takes_one_prompt(engine: Engine) -> None:
    with pytest.raises(InvalidArgumentError, match="submit takes one prompt or conversation, this is a list of 2"):
        engine.submit([PROMPT, PROMPT], GREEDY)  # type: ignore[list-item]


def test_priorities_decide_who_gets_the_next_seat() -> None:
    config = EngineConfig(scheduling=SchedulingOptions(scheduling_policy="priority"))  # type: ignore[arg-type]
    parts = toy_parts(max_batch_size=1, config=config)
    with Engine.from_parts(parts) as engine:
        executor_of(parts).gate.clear()
        first = engine.submit(PROMPT, GREEDY)
        while engine.metrics().resident == 0:
            time.sleep(0.001)
        order: list[str] = []
        for name, priority in (("low", 5), ("high", -5), ("middle", 0)):
            request = engine.submit([len(name), 20], GREEDY, priority=priority)
            request.add_done_callback(lambda name=name: order.append(name))
        executor_of(parts).gate.set()
        first.get(10)
        wait_until_idle(engine)
    assert order == ["high", "middle", "low"]


@pytest.mark.parametrize("method", ["generate", "stream", "submit"])
def test_a_priority_that_arrival_order_ignores_is_refused(engine: Engine, method: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"priority is -2 with scheduling_policy fcfs .* set scheduling_policy to priority"
    ):
        getattr(engine, method)(PROMPT, GREEDY, priority=-2)
    assert engine.metrics().engine.submitted == 0
    assert engine.generate(PROMPT, GREEDY, priority=0)[0].token_ids == ANSWER


def test_seats_kept_for_urgent_requests_give_a_priority_its_meaning() -> None:
    config = EngineConfig(scheduling=SchedulingOptions(priority_reserved_slots=1))
    with Engine.from_parts(toy_parts(config=config)) as engine:
        assert engine.submit(PROMPT, GREEDY, priority=-1).get(10).token_ids == ANSWER


def test_a_request_without_the_cache_shares_steps_with_others(parts: Parts, engine: Engine) -> None:
    executor = executor_of(parts)
    executor.gate.clear()
    requests = [
        engine.submit([*PROMPT, last], GREEDY, use_cache=use) for last, use in ((1, True), (2, False), (3, True))
    ]
    executor.gate.set()
    for request in requests:
        assert request.get(10).token_ids == toy_generate(request.prompt_token_ids, 8, VOCAB)
    metrics = engine.metrics().engine
    assert metrics.decode_tokens == 3 * 7
    assert metrics.steps_decode < 2 * 7  # one after the other it were 21
    assert metrics.overtakes == 0
    assert not any(metrics.stalls.values())


# ---- wrong arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [LLM, Engine, AsyncEngine])
def test_an_unknown_option_names_the_class_that_was_called(cls: type) -> None:
    with pytest.raises(TypeError, match=rf"^{cls.__name__}\.__init__\(\) got an unexpected keyword argument 'pages'"):
        cls("nowhere", pages=5)


@pytest.mark.parametrize("method", ["generate", "chat", "stream"])
@pytest.mark.parametrize("cls", [LLM, Engine])
def test_an_unknown_argument_of_a_method_names_the_class_that_was_called(cls: type, method: str) -> None:
    with (
        Engine.from_parts(toy_parts()) if cls is Engine else LLM.from_parts(toy_parts()) as model,
        pytest.raises(TypeError, match=rf"^{cls.__name__}\.{method}\(\) got an unexpected keyword argument 'pages'"),
    ):
        getattr(model, method)(PROMPT, pages=5)
    assert inspect.signature(getattr(LLM, method)) == inspect.signature(getattr(Engine, method))


def test_a_subclass_may_replace_a_shared_method() -> None:
    class Loud(LLM):
        def generate(self, prompts: object, *rest: object, **named: object) -> list:  # type: ignore[override]
            return [output.text.upper() for output in super().generate(prompts, *rest, **named)]  # type: ignore[arg-type]

    with Loud.from_parts(toy_parts()) as model:
        assert model.generate(PROMPT, GREEDY) == [ToyTokenizer(VOCAB).decode(ANSWER).upper()]
        with pytest.raises(TypeError, match=r"^LLM\.stream\(\) got an unexpected"):
            model.stream(PROMPT, pages=5)  # type: ignore[call-arg]


def test_too_many_are_refused_and_generate_waits_its_turn() -> None:
    parts = toy_parts(config=EngineConfig(max_pending_requests=2))
    executor = executor_of(parts)
    with Engine.from_parts(parts) as engine:
        executor.gate.clear()
        held = [engine.submit([10 + index, 20], GREEDY) for index in range(2)]
        with pytest.raises(SubmitError, match="2 requests are pending, the limit max_pending_requests is 2"):
            engine.submit(PROMPT, GREEDY)
        with ThreadPoolExecutor(2) as pool:
            hurried = pool.submit(engine.generate, PROMPT, GREEDY, timeout_seconds=0.03)
            waiting = pool.submit(engine.generate, PROMPT, GREEDY)
            while engine.metrics().pending < 4:
                time.sleep(0.001)
            time.sleep(0.05)  # the deadline passes while both stand in line
            assert not waiting.done()
            executor.gate.set()
            assert waiting.result(10)[0].token_ids == ANSWER
            with pytest.raises(RequestTimedOut, match=r"timed out 0\.03 s after its submit"):
                hurried.result(10)
        assert engine.metrics().engine.refused == 1
        assert [request.get(10).finish_reason for request in held] == ["length", "length"]


def test_a_seed_gives_each_request_its_own_and_the_same_in_every_run() -> None:
    params = SamplingParams(max_tokens=8, temperature=100.0, ignore_eos=True)
    runs = []
    for _ in range(2):
        with Engine.from_parts(toy_parts(), seed=11) as engine:
            runs.append([engine.submit(PROMPT, params).get(10).token_ids for _ in range(3)])
    with LLM.from_parts(toy_parts(), seed=11) as llm:
        runs.append([llm.generate(PROMPT, params)[0].token_ids for _ in range(3)])
    assert runs[0] == runs[1] == runs[2]
    assert len({tuple(tokens) for tokens in runs[0]}) > 1


# ---- metrics, ending ------------------------------------------------------------------------------------


def test_metrics_hold_engine_cache_and_memory_and_are_frozen(engine: Engine, parts: Parts) -> None:
    engine.generate([PROMPT, PROMPT], GREEDY)
    metrics = engine.metrics()
    assert (metrics.engine.submitted, metrics.engine.completed) == (2, 2)
    assert metrics.cache.admitted_sequences == 2
    assert metrics.memory == engine.memory_budget
    assert (metrics.pending, metrics.queued, metrics.resident) == (0, 0, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        metrics.pending = 3  # type: ignore[misc]
    executor_of(parts).gate.clear()
    request = engine.submit(PROMPT, GREEDY)
    assert engine.metrics().pending == 1
    executor_of(parts).gate.set()
    request.get(10)
    assert metrics.engine.submitted == 2  # a copy


def test_shutdown_drains_or_cancels_and_later_calls_raise() -> None:
    for drain in (True, False):
        parts = toy_parts()
        engine = Engine.from_parts(parts)
        channel = engine._frontend.engine._channel
        executor_of(parts).gate.clear()
        requests = [engine.submit([10 + index, 20], LONG) for index in range(6)]
        ending = threading.Thread(target=engine.shutdown, kwargs={"drain": drain})
        ending.start()
        while channel.shutdown_mode is None:
            time.sleep(0.001)
        executor_of(parts).gate.set()
        ending.join(10)
        assert not ending.is_alive()
        for index, request in enumerate(requests):
            if drain:
                assert request.get(0).token_ids == toy_generate([10 + index, 20], 200, VOCAB)
            else:
                with pytest.raises(RequestCancelled):
                    request.get(0)
        for call in (engine.metrics, lambda: engine.submit(PROMPT), lambda: engine.generate(PROMPT)):  # noqa: B023
            with pytest.raises(ContractViolation, match="this Engine is closed; make a new one"):
                call()
        engine.shutdown()


def test_a_block_that_ends_by_an_exception_cancels() -> None:
    parts = toy_parts()
    executor_of(parts).seconds = 0.005
    engine = Engine.from_parts(parts)
    request = engine.submit(PROMPT, LONG)
    engine.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    with pytest.raises(RequestCancelled):
        request.get(0)


def test_shutdown_on_the_engines_own_thread_is_refused_and_changes_nothing(engine: Engine, parts: Parts) -> None:
    refusals: list[BaseException] = []

    def shut_down() -> None:
        try:
            engine.shutdown()
        except ContractViolation as error:
            refusals.append(error)

    executor_of(parts).gate.clear()
    request = engine.submit(PROMPT, GREEDY)
    request.add_done_callback(shut_down)
    executor_of(parts).gate.set()
    request.get(10)
    wait_until_idle(engine)
    assert [str(error) for error in refusals] == [
        "shutdown: called on the engine's own thread; call it from another one"
    ]
    assert engine.generate(PROMPT, GREEDY)[0].token_ids == ANSWER


def test_many_threads_share_one_engine(engine: Engine) -> None:
    def ask(index: int) -> list[int]:
        request = engine.submit([10 + index, 20], GREEDY, stream=index % 2 == 0)
        if index % 2 == 0:
            return [token for chunk in request.stream().chunks() for token in chunk.token_ids]
        return request.get(10).token_ids

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(40)))
    assert answers == [toy_generate([10 + index, 20], 8, VOCAB) for index in range(40)]


# ---- options --------------------------------------------------------------------------------------------


def test_the_three_front_ends_take_the_same_options() -> None:
    signatures = [inspect.signature(cls.__init__) for cls in (LLM, Engine, AsyncEngine)]
    assert signatures[0] == signatures[1] == signatures[2]
    assert {field.name for field in dataclasses.fields(LoadOptions)} <= set(signatures[0].parameters)


def test_scheduling_options_reach_the_engine() -> None:
    options = LoadOptions(
        "m",
        max_batch_size=3,
        max_pending_requests=40,
        step_time_budget_ms=25.0,
        scheduling=SchedulingOptions(max_chunk_tokens=64, max_overtakes=2),
    )
    config = _engine_config(options, 4096, 256)
    assert config.scheduling.step_time_budget_ms == 25.0
    assert (config.scheduling.max_chunk_tokens, config.scheduling.max_overtakes) == (64, 2)
    assert config.scheduling.max_prompt_step_tokens == 256
    assert (config.max_pending_requests, config.command_queue_capacity) == (40, 40)
    kept = LoadOptions("m", scheduling=SchedulingOptions(max_prompt_step_tokens=512))
    assert _engine_config(kept, 4096, 256).scheduling.max_prompt_step_tokens == 512
    assert _engine_config(kept, 4096, 2048).step_token_budget == 2048


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduling": "fcfs"}, r"scheduling is a str; pass edgellm\.SchedulingOptions"),
        ({"step_time_budget_ms": -1.0}, r"step_time_budget_ms is -1\.0"),
        ({"step_time_budget_ms": "fast"}, r"step_time_budget_ms is 'fast'"),
        (
            {"step_time_budget_ms": 5.0, "scheduling": SchedulingOptions(step_time_budget_ms=6.0)},
            r"step_time_budget_ms is 5\.0, and 6\.0 in scheduling; set one of them",
        ),
        ({"max_pending_requests": 0}, r"max_pending_requests is 0; it must be an integer from 1"),
        ({"max_batch_size": 0}, r"max_batch_size is 0; it must be an integer from 1"),
        ({"device": "tpu"}, r"device is 'tpu'"),
        ({"seed": -1}, r"seed is -1; it must be an integer from 0"),
        ({"model": "no/such/model"}, r"model 'no/such/model' is neither"),
    ],
)
def test_bad_load_options_are_the_same_errors_in_llm_and_engine(options: dict[str, object], message: str) -> None:
    for cls in (LLM, Engine):
        with pytest.raises(InvalidArgumentError, match=message):
            cls(**{"model": "m-that-is-not-there", **options})  # type: ignore[arg-type]


def test_a_real_checkpoint_with_a_tokenizer_at_home_and_a_time_budget(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tiny_model_dir.parent))
    at_home = f"~/{tiny_model_dir.name}"
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with LLM(tiny_model_dir, kv_budget=1024) as llm:
        (expected,) = llm.generate("hello", params)
    with Engine(at_home, tokenizer=at_home, kv_budget=1024, step_time_budget_ms=20.0, max_batch_size=3) as engine:
        assert engine.submit("hello", params).get(30).token_ids == expected.token_ids
        assert repr(engine) == f"Engine({at_home!r}, dtype='float32', kv_pool='1,024 tokens', open)"
    with pytest.raises(InvalidArgumentError, match=r"tokenizer '~nobody-here/x' names no home that exists"):
        Engine(tiny_model_dir, tokenizer="~nobody-here/x")
