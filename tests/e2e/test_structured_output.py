"""Structured output through engine, session and cache: exact texts, shared batches, failures of single rows."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgellm import LLM, SamplingParams, StructuredOutput
from edgellm.engine.config import EngineConfig, Preemption, SchedulingOptions, SchedulingPolicy
from edgellm.engine.engine import RequestEngine
from edgellm.engine.records import RequestHandle
from edgellm.errors import AdmissionError, InvalidArgumentError, RequestCancelled, RequestFailed
from edgellm.request import LLMGenerationRequest, LLMGenerationResponse
from edgellm.session.types import FinishReason, SessionOptions
from edgellm.testing.session_driver import SessionDriver
from edgellm.testing.toy_runtime import ToyRuntime
from edgellm.testing.toy_tokenizer import ToyTokenizer

WAIT = 60.0
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
COLOURS = ["red", "green", "blue violet"]
LARK = 'start: NUM ("+" NUM)? "!"\nNUM: /[0-9]{1,3}/'
GBNF = 'root ::= "x" [0-9] [0-9]? "y"'


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and bool(re.fullmatch("[A-Z][a-z]{1,8}", value["name"]))
        and isinstance(value["age"], int)
        and 0 <= value["age"] <= 150
        and len(value["tags"]) <= 2
        and set(value["tags"]) <= {"a", "b"}
    )


FORMS: list[tuple[StructuredOutput, Callable[[str], Any]]] = [
    (StructuredOutput(json_schema=PERSON), is_person),
    (StructuredOutput(regex="[0-9]{3}-[a-f]{2,6}"), lambda text: re.fullmatch("[0-9]{3}-[a-f]{2,6}", text)),
    (StructuredOutput(choice=COLOURS), lambda text: text in COLOURS),
    (StructuredOutput(ebnf=LARK), lambda text: re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3})?!", text)),
    (StructuredOutput(ebnf=GBNF), lambda text: re.fullmatch("x[0-9]{1,2}y", text)),
]


def ask(
    number: int, structured: StructuredOutput | None = None, *, max_tokens: int = 300, **params: Any
) -> LLMGenerationRequest:
    """A request with a prompt and a seed of its own; the toy model's choice is drowned by a high temperature."""
    fields = {name: params.pop(name) for name in ("priority", "token_callback") if name in params}
    params = {"temperature": 100.0, "seed": number, **params}
    return LLMGenerationRequest(
        prompt_token_ids=[(number * 31 + place) % 250 + 2 for place in range(5 + number % 7)],
        sampling=SamplingParams(max_tokens=max_tokens, structured=structured, **params),
        **fields,
    )


def toy(**options: Any) -> ToyRuntime:
    return ToyRuntime(**{"max_kv_capacity": 512, "max_input_length": 128, "page_size": 8, "num_pages": 512, **options})


def run(engine: RequestEngine, requests: list[LLMGenerationRequest]) -> list[LLMGenerationResponse]:
    handles = [engine.submit(request) for request in requests]
    return [handle.get(WAIT) for handle in handles]


def num_steps(engine: RequestEngine) -> int:
    metrics = engine.metrics()
    return metrics.steps_context + metrics.steps_decode


@pytest.fixture
def engine() -> Iterator[RequestEngine]:
    with RequestEngine(toy(max_batch_size=8), EngineConfig(max_batch_size=8)) as made:
        yield made


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path) -> Iterator[LLM]:
    with LLM(tiny_model_dir, dtype="float32", kv_budget=4096, page_size=8, max_batch_size=4) as model:
        yield model


class TestTexts:
    @pytest.mark.parametrize("form", range(len(FORMS)))
    def test_every_form(self, engine: RequestEngine, form: int) -> None:
        structured, fits = FORMS[form]
        for response in run(engine, [ask(number, structured) for number in range(6)]):
            assert response.finish_reason is FinishReason.END_ID
            assert fits(response.text), response.text

    def test_greedy(self, engine: RequestEngine) -> None:
        (response,) = run(engine, [ask(1, StructuredOutput(choice=COLOURS), temperature=0.0)])
        assert response.text in COLOURS

    def test_cut_text_is_a_beginning(self, engine: RequestEngine) -> None:
        (response,) = run(engine, [ask(1, StructuredOutput(choice=["aaaaaaaa"]), max_tokens=3)])
        assert (response.finish_reason, response.text) == (FinishReason.LENGTH, "aaa")

    def test_stop_strings_end_it_earlier(self, engine: RequestEngine) -> None:
        (response,) = run(engine, [ask(1, StructuredOutput(choice=["aab"]), stop="b")])
        assert (response.finish_reason, response.text) == (FinishReason.STOP_WORDS, "aa")

    def test_streamed_text_is_the_text(self, engine: RequestEngine) -> None:
        handle = engine.submit(ask(3, FORMS[0][0]))
        text = "".join(chunk.text for chunk in handle.stream())
        assert text == handle.get(WAIT).text
        assert is_person(text)


class TestSharing:
    def test_five_guided_and_three_free_rows_equal_their_solo_runs(self, engine: RequestEngine) -> None:
        requests = [ask(number, form) for number, (form, _) in enumerate(FORMS)]
        requests += [ask(10, temperature=0.0, max_tokens=30), ask(11, max_tokens=30), ask(12, logprobs=2, max_tokens=9)]
        alone = [run(engine, [replace(request)])[0] for request in requests]
        for seed in range(4):
            order = random.Random(seed).sample(range(8), 8)
            before = num_steps(engine)
            together = run(engine, [replace(requests[index]) for index in order])
            assert num_steps(engine) - before < sum(len(one.token_ids) for one in alone)
            for index, response in zip(order, together, strict=True):
                assert response.token_ids == alone[index].token_ids
                assert response.text == alone[index].text
                assert response.logprobs == alone[index].logprobs

    def test_scheduler_behaviour_18_guided_runs_share_steps_and_a_callback_still_runs_alone(self) -> None:
        """Lifted: a guided head waits for nobody, since its matcher belongs to its resident and not to a row."""
        runtime = toy(max_batch_size=4)
        sizes: list[set[int]] = []
        forward = runtime.executor.forward

        def watched(batch: Any) -> Any:
            sizes.append({int(slot) for slot in batch.state_index})
            return forward(batch)

        runtime.executor.forward = watched  # type: ignore[method-assign]
        with RequestEngine(runtime, EngineConfig(max_batch_size=4)) as engine:
            run(engine, [ask(number, StructuredOutput(choice=["abcdefgh" * 4])) for number in range(4)])
            assert max(map(len, sizes)) == 4
            sizes.clear()
            seen: list[int] = []
            guided = ask(5, StructuredOutput(choice=["abcdefgh"]), token_callback=seen.extend)
            responses = run(engine, [guided, ask(6, StructuredOutput(choice=["abc"]))])
            assert [response.text for response in responses] == ["abcdefgh", "abc"]
            assert seen == responses[0].token_ids
            assert max(map(len, sizes)) == 1

    def test_pauses_change_nothing(self) -> None:
        options = SchedulingOptions(
            scheduling_policy=SchedulingPolicy.PRIORITY, preemption=Preemption.PAUSE, max_num_tokens=64
        )
        requests = [ask(number, form) for number, (form, _) in enumerate(FORMS)]
        with RequestEngine(toy(max_batch_size=8), EngineConfig(max_batch_size=8)) as plain:
            alone = [run(plain, [replace(request)])[0].token_ids for request in requests]
        with RequestEngine(toy(max_batch_size=8), EngineConfig(max_batch_size=8, scheduling=options)) as pausing:
            handles: list[RequestHandle] = []
            for number, request in enumerate(requests):
                handles.append(pausing.submit(replace(request)))
                next(iter(handles[-1].stream()))  # it decodes when the urgent one comes
                urgent = ask(20, max_tokens=2, priority=-1)
                urgent.prompt_token_ids = [7 + (place + number) % 200 for place in range(120)]
                pausing.submit(urgent).get(WAIT)
            assert [handle.get(WAIT).token_ids for handle in handles] == alone
            assert pausing.metrics().paused_resident_steps > 0

    def test_a_request_again_starts_anew(self, engine: RequestEngine) -> None:
        request = ask(4, FORMS[0][0])
        first, second = run(engine, [request])[0], run(engine, [replace(request)])[0]
        assert first.text == second.text
        assert is_person(second.text)

    def test_cancelled_in_the_middle(self, engine: RequestEngine) -> None:
        endless = StructuredOutput(regex="[a-z]*0")
        long = engine.submit(ask(1, endless, max_tokens=400, logit_bias={ToyTokenizer().encode("0")[0]: -100.0}))
        other = engine.submit(ask(2, FORMS[0][0]))
        next(iter(long.stream()))
        long.cancel()
        with pytest.raises(RequestCancelled):
            long.get(WAIT)
        assert is_person(other.get(WAIT).text)


class TestFailures:
    def test_session_behaviour_80_a_dead_end_in_one_row_ends_that_row_with_its_text_so_far(self) -> None:
        tokenizer = ToyTokenizer(101)  # bytes up to "b": a "c" cannot be written
        runtime = toy(tokenizer=tokenizer)
        drive = SessionDriver(runtime.open_session(SessionOptions(allow_compact_execution=True)))
        forms = (StructuredOutput(regex="ab[ac]c"), StructuredOutput(choice=["abababab"]), None)
        for number, form in enumerate(forms):
            request = ask(number, form, max_tokens=9)
            request.prompt_token_ids = [number * 10 + 5, 7, 9]
            drive.admit(request)
        drive.run()
        dead, guided, free = (drive.finished[number] for number in (1, 2, 3))
        assert dead.terminal_reason is FinishReason.ERROR
        assert dead.error_message.startswith("the grammar is at a dead end: the text is not complete")
        assert drive.session.materialize(dead, ()).text == "aba"
        assert drive.session.materialize(guided, ()).text == "abababab"
        assert guided.terminal_reason is FinishReason.END_ID
        assert free.generate_length == 9 or free.terminal_reason is FinishReason.END_ID
        drive.session.close()
        runtime.close()

    def test_min_tokens_beyond_the_grammar_fails_its_request_alone(self, engine: RequestEngine) -> None:
        failing = engine.submit(ask(1, StructuredOutput(choice=["ab"]), min_tokens=5))
        other = engine.submit(ask(2, FORMS[2][0]))
        with pytest.raises(RequestFailed, match="min_tokens=5 excludes every token that the grammar leaves"):
            failing.get(WAIT)
        assert other.get(WAIT).text in COLOURS

    def test_what_does_not_go_with_the_model_fails_its_request_alone(self, engine: RequestEngine) -> None:
        failing = engine.submit(ask(1, StructuredOutput(ebnf='start: <|nobody|> "a"')))
        other = engine.submit(ask(2, FORMS[2][0]))
        with pytest.raises(RequestFailed, match=r"ebnf cannot be enforced with this model: .*unknown special token"):
            failing.get(WAIT)
        assert other.get(WAIT).text in COLOURS

    def test_an_unknown_keyword_never_becomes_a_request(self) -> None:
        with pytest.raises(InvalidArgumentError, match=r"properties\['a'\] has the keyword 'uniqueItems'"):
            StructuredOutput(json_schema={"properties": {"a": {"type": "array", "uniqueItems": True}}})

    def test_a_big_schema(self, engine: RequestEngine) -> None:
        names = [f"field_{number}" for number in range(1000)]
        schema = {
            "type": "object",
            "properties": {name: {"type": "object", "properties": {"v": {"enum": [1, 2]}}} for name in names},
            "additionalProperties": False,
            "required": names[:3],
        }
        assert 60_000 < len(json.dumps(schema)) < 128 << 10
        (response,) = run(engine, [ask(1, StructuredOutput(json_schema=schema), temperature=0.0, max_tokens=400)])
        if response.finish_reason is FinishReason.END_ID:
            assert set(names[:3]) <= set(json.loads(response.text))
        else:
            assert response.text.startswith("{")


class TestLLM:
    def test_generate(self, llm: LLM) -> None:
        params = [SamplingParams(structured=form, max_tokens=480, seed=1, temperature=1.5) for form, _ in FORMS]
        outputs = llm.generate([[5 + number] for number in range(len(FORMS))], params)
        for output, (_, fits) in zip(outputs, FORMS, strict=True):
            assert output.finish_reason == "stop"
            assert fits(output.text), output.text

    def test_what_does_not_go_with_the_model_is_refused_before_anything_runs(self, llm: LLM) -> None:
        before = llm.engine_metrics().submitted
        bad = SamplingParams(structured=StructuredOutput(ebnf='start: <|nobody|> "a"'))
        with pytest.raises(AdmissionError, match="unknown special token"):
            llm.generate([[5], [6]], [SamplingParams(max_tokens=2), bad])
        assert llm.engine_metrics().submitted == before

    def test_from_several_threads(self, llm: LLM) -> None:
        texts: list[str] = []

        def one(seed: int) -> None:
            params = SamplingParams(structured=FORMS[0][0], max_tokens=480, seed=seed)
            texts.append(llm.generate([[5 + seed]], params)[0].text)

        threads = [threading.Thread(target=one, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(texts) == 6
        assert all(map(is_person, texts))


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_default_model(default_model: Path, temperature: float) -> None:
    conversations = [[{"role": "user", "content": f"Answer number {number}, please."}] for number in range(5)]
    params = [SamplingParams(structured=form, max_tokens=120, temperature=temperature, seed=3) for form, _ in FORMS]
    with LLM(default_model, kv_budget=4096) as model:
        for output, (_, fits) in zip(model.chat(conversations, params), FORMS, strict=True):
            assert output.finish_reason == "stop"
            assert fits(output.text), output.text


SPECIAL_NAMES: list[tuple[dict[str, Any], str]] = [
    ({"choice": ["<|im_end|>"]}, "<|im_end|>"),
    ({"choice": ["a<|im_start|>b"]}, "a<|im_start|>b"),
    ({"choice": ["<|endoftext|>"]}, "<|endoftext|>"),
    ({"regex": r"x<\|im_end\|>y"}, "x<|im_end|>y"),
    ({"json_schema": {"const": "<|im_end|>"}}, '"<|im_end|>"'),
    ({"ebnf": 'start: "<|im_end|>" "z"'}, "<|im_end|>z"),
]


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_default_model_writes_the_names_of_special_tokens(default_model: Path, temperature: float) -> None:
    params = [
        SamplingParams(structured=StructuredOutput(**form), max_tokens=40, temperature=temperature, seed=3)
        for form, _ in SPECIAL_NAMES
    ]
    with LLM(default_model, kv_budget=4096) as model:
        outputs = model.generate(["Say something:"] * len(params), params)
    assert [(output.text, output.finish_reason) for output in outputs] == [(text, "stop") for _, text in SPECIAL_NAMES]
