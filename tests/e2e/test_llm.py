"""The public API.  On the toy model its text is exact and known; a tiny real checkpoint runs the real loader."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from toy_parts import VOCAB, toy_parts, wait_until_idle

from edgellm import LLM, ReuseReport, ReuseStopReason, SamplingParams
from edgellm.assembly import Parts
from edgellm.errors import (
    AdmissionError,
    ContractViolation,
    InputTooLongError,
    InvalidArgumentError,
    RequestCancelled,
    UnsupportedModelError,
    WeightFileError,
)
from edgellm.testing.recount import recount, require_baseline
from edgellm.testing.toy import toy_generate
from edgellm.testing.toy_tokenizer import ToyTokenizer

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
PROMPT = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]


@pytest.fixture
def parts() -> Parts:
    return toy_parts()


@pytest.fixture
def llm(parts: Parts) -> Iterator[LLM]:
    """An LLM over the toy model; at the end every page must be accounted for."""
    with LLM.from_parts(parts) as model:
        yield model
        wait_until_idle(model)
        assert recount(parts.runtime.coordinator).leased == 0
    require_baseline(parts.runtime.coordinator)


# ---- generate -------------------------------------------------------------------------------------------


def test_generate_gives_exactly_the_models_tokens(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, GREEDY)
    assert output.token_ids == toy_generate(PROMPT, 8, VOCAB)
    assert output.text == ToyTokenizer(VOCAB).decode(output.token_ids)
    assert output.prompt_token_ids == PROMPT
    assert output.finish_reason == "length"
    assert output.logprobs is None


def test_every_form_of_a_prompt_gives_the_same_answer(llm: LLM) -> None:
    text = "hello"
    ids = ToyTokenizer(VOCAB).encode(text)
    forms = [text, ids, tuple(ids), np.array(ids), {"prompt_token_ids": ids}, {"prompt": text}]
    answers = [output.token_ids for form in forms for output in llm.generate(form, GREEDY)]
    answers += [output.token_ids for output in llm.generate(forms, GREEDY)]
    assert answers == [toy_generate(ids, 8, VOCAB)] * (2 * len(forms))


def test_a_list_keeps_its_order_and_its_params(llm: LLM) -> None:
    prompts = [[10 + index, 20, 30] for index in range(9)]
    params = [SamplingParams(max_tokens=1 + index, temperature=0.0, ignore_eos=True) for index in range(9)]
    outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in outputs] == [
        toy_generate(prompt, 1 + index, VOCAB) for index, prompt in enumerate(prompts)
    ]


def test_more_prompts_than_the_engine_queues(llm: LLM) -> None:
    prompts = [[10 + index % 200, 20 + index // 200] for index in range(400)]
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in outputs] == [toy_generate(prompt, 1, VOCAB) for prompt in prompts]


def test_stop_token_stop_string_and_length_are_told_apart(llm: LLM) -> None:
    tokens = toy_generate(PROMPT, 8, VOCAB)
    stop_id = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=[tokens[3]])
    (by_id,) = llm.generate(PROMPT, stop_id)
    cut = tokens.index(tokens[3]) + 1
    assert (by_id.finish_reason, by_id.token_ids) == ("stop", tokens[:cut])
    text = ToyTokenizer(VOCAB).decode(tokens)
    stop_text = text[3:5]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, stop=stop_text)
    (by_text,) = llm.generate(PROMPT, params)
    assert by_text.finish_reason == "stop"
    assert by_text.text == text[: text.index(stop_text)]


def test_logprobs_are_one_entry_a_token(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=2)
    (output,) = llm.generate(PROMPT, params)
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert all(len(entry.top) == 2 and entry.top[0][0] == entry.token_id for entry in output.logprobs)


def test_timings_add_up(llm: LLM) -> None:
    started = time.perf_counter()
    (output,) = llm.generate(PROMPT, GREEDY)
    elapsed_ms = 1000 * (time.perf_counter() - started)
    timings = output.timings
    assert 0 <= timings.queue_ms <= timings.time_to_first_token_ms <= timings.total_ms <= elapsed_ms
    expected = 1000 * 7 / (timings.total_ms - timings.time_to_first_token_ms)
    assert timings.tokens_per_second == pytest.approx(expected)


# ---- reuse ----------------------------------------------------------------------------------------------


def test_the_reuse_report_is_exact(llm: LLM) -> None:
    reports = [llm.generate(PROMPT, GREEDY)[0].reuse for _ in range(2)]
    assert reports[0] == ReuseReport(10, 0, 0, ReuseStopReason.NO_RECORD, 0)
    # All of it is known, and one token is computed again for its logits.
    assert reports[1] == ReuseReport(10, 9, 10, ReuseStopReason.FULL, 10)


def test_the_metrics_count_what_was_reused(llm: LLM) -> None:
    for _ in range(3):
        llm.generate(PROMPT, GREEDY)
    metrics = llm.cache_metrics()
    assert (metrics.admitted_sequences, metrics.hit_sequences, metrics.reused_tokens) == (3, 2, 18)
    assert (llm.engine_metrics().submitted, llm.engine_metrics().completed) == (3, 3)


def test_a_known_prompt_computes_one_token_whatever_its_length(llm: LLM) -> None:
    for length in (3, 4, 5, 8, 9, 16):
        prompt = [11 + length, *range(20, 19 + length)]
        first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
        assert first.token_ids == second.token_ids == toy_generate(prompt, 8, VOCAB)
        assert second.reuse.computed_tokens == 1


def test_bypass_computes_everything_and_says_so(llm: LLM) -> None:
    llm.generate(PROMPT, GREEDY)
    (output,) = llm.generate(PROMPT, GREEDY, use_cache=False)
    assert (output.reuse.reused_tokens, output.reuse.stop_reason) == (0, ReuseStopReason.BYPASS)
    assert output.token_ids == toy_generate(PROMPT, 8, VOCAB)


def test_a_salt_shares_with_itself_only(llm: LLM) -> None:
    salts = (None, "a", "b", "", "a", "b", None, "")
    reports = [llm.generate(PROMPT, GREEDY, cache_salt=salt)[0].reuse for salt in salts]
    assert [report.reused_tokens for report in reports] == [0, 0, 0, 0, 9, 9, 9, 9]
    # A salt that was never seen is the reason; whether others have the same text must not show.
    assert [report.stop_reason for report in reports[:4]] == [ReuseStopReason.NO_RECORD] + [ReuseStopReason.SALT] * 3


def test_a_chat_reuses_its_whole_last_prompt(llm: LLM) -> None:
    messages = [{"role": "system", "content": "s" * 40}]
    previous = 0
    for question in ("one", "two", "three"):
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, GREEDY)
        assert output.token_ids == toy_generate(output.prompt_token_ids, 8, VOCAB)
        # The toy template opens the assistant's turn the same way in the prompt and in the history.
        assert output.reuse.reused_tokens >= previous
        previous = len(output.prompt_token_ids)
        messages.append({"role": "assistant", "content": output.text})
    assert output.reuse.reused_tokens > 40


def test_chat_takes_several_conversations(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("a", "bb")]
    outputs = llm.chat(conversations, GREEDY)
    tokenizer = ToyTokenizer(VOCAB)
    assert [tokenizer.decode(output.prompt_token_ids) for output in outputs] == [
        "[user]a\n[assistant]",
        "[user]bb\n[assistant]",
    ]
    assert [output.token_ids for output in outputs] == [
        toy_generate(output.prompt_token_ids, 8, VOCAB) for output in outputs
    ]


# ---- stream ---------------------------------------------------------------------------------------------


def test_a_stream_adds_up_to_the_answer(llm: LLM) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    text = "".join(stream)
    (output,) = llm.generate(PROMPT, GREEDY)
    assert text == stream.output.text == output.text
    assert stream.output.token_ids == output.token_ids
    assert stream.prompt_token_ids == PROMPT


def test_chunks_carry_the_token_ids(llm: LLM) -> None:
    chunks = list(llm.stream(PROMPT, GREEDY).chunks())
    assert [token for chunk in chunks for token in chunk.token_ids] == toy_generate(PROMPT, 8, VOCAB)
    assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_a_stream_of_messages_is_templated(llm: LLM) -> None:
    stream = llm.stream([{"role": "user", "content": "hi"}], GREEDY)
    assert stream.output.token_ids == toy_generate(stream.prompt_token_ids, 8, VOCAB)
    assert ToyTokenizer(VOCAB).decode(stream.prompt_token_ids) == "[user]hi\n[assistant]"


def test_async_streams_run_side_by_side(llm: LLM) -> None:
    async def collect(prompt: list[int]) -> tuple[str, list[int]]:
        stream = llm.stream(prompt, GREEDY)
        text = "".join([piece async for piece in stream])
        return text, stream.output.token_ids

    async def main() -> list[tuple[str, list[int]]]:
        return await asyncio.gather(*(collect([10 + index, 20]) for index in range(6)))

    expected = [toy_generate([10 + index, 20], 8, VOCAB) for index in range(6)]
    decode = ToyTokenizer(VOCAB).decode
    assert asyncio.run(main()) == [(decode(tokens), tokens) for tokens in expected]


def test_cancel_ends_the_iteration_and_the_output_raises(llm: LLM) -> None:
    stream = llm.stream(PROMPT, LONG)
    seen = 0
    for chunk in stream.chunks():
        seen += len(chunk.token_ids)
        if seen >= 3:
            stream.cancel()
    assert 3 <= seen < 200
    with pytest.raises(RequestCancelled):
        _ = stream.output


def test_leaving_the_block_or_dropping_the_stream_cancels_it(llm: LLM) -> None:
    with llm.stream(PROMPT, LONG) as stream:
        next(iter(stream))
    wait_until_idle(llm)
    for _ in llm.stream(PROMPT, LONG):
        break
    del _
    gc.collect()
    wait_until_idle(llm)
    assert llm.engine_metrics().cancelled == 2


def test_cancelling_the_reading_task_cancels_the_request(llm: LLM) -> None:
    async def main() -> None:
        async def read() -> None:
            async for _ in llm.stream(PROMPT, LONG):
                await asyncio.sleep(0)

        task = asyncio.create_task(read())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gc.collect()
    wait_until_idle(llm)


# ---- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "kind", "message"),
    [
        ([PROMPT, []], AdmissionError, r"prompts\[1\]: the prompt is empty \(0 tokens\)"),
        ([PROMPT, [5, VOCAB]], AdmissionError, r"prompts\[1\]: prompt token 300 at position 1.*0 to 299"),
        ([PROMPT, [5] * 300], InputTooLongError, r"prompts\[1\]: .*300 tokens and never fits: .* 256"),
        ([PROMPT, 7.5], InvalidArgumentError, r"prompts\[1\]: a prompt is a float"),
    ],
)
def test_a_bad_prompt_fails_the_call_before_any_starts(
    llm: LLM, prompts: list[object], kind: type[Exception], message: str
) -> None:
    stream = llm.stream([7, 7, 7], LONG)
    with pytest.raises(kind, match=message):
        llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
    assert llm.engine_metrics().submitted == 1
    assert stream.output.token_ids == toy_generate([7, 7, 7], 200, VOCAB)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"cache_salt": 5}, AdmissionError, "cache_salt is a int; it must be text"),
        ({"cache_salt": b"x"}, AdmissionError, "cache_salt is a bytes; it must be text"),
        ({"cache_salt": "\ud800"}, AdmissionError, "cache_salt is not valid Unicode text"),
        ({"use_cache": "no"}, InvalidArgumentError, "use_cache is 'no'; it must be True or False"),
        ({"use_cache": 0}, InvalidArgumentError, "use_cache is 0; it must be True or False"),
        ({"use_cache": None}, InvalidArgumentError, "use_cache is None; it must be True or False"),
    ],
)
def test_bad_cache_options_are_refused_at_once_and_a_stream_goes_on(
    llm: LLM, options: dict[str, object], kind: type[Exception], message: str
) -> None:
    stream = llm.stream([7, 7, 7], LONG)
    user = [{"role": "user", "content": "hi"}]
    for call, prompt in ((llm.generate, PROMPT), (llm.chat, user), (llm.stream, PROMPT), (llm.generate, [])):
        with pytest.raises(kind, match=message):
            call(prompt, GREEDY, **options)  # type: ignore[operator]
    assert llm.engine_metrics().submitted == 1
    assert stream.output.token_ids == toy_generate([7, 7, 7], 200, VOCAB)


def test_a_stop_token_id_outside_the_vocabulary_is_refused_before_it_starts(llm: LLM) -> None:
    params = SamplingParams(stop_token_ids=[VOCAB])
    with pytest.raises(AdmissionError, match="stop_token_ids names token id 300, ids go from 0 to 299"):
        llm.generate(PROMPT, params)
    assert llm.engine_metrics().submitted == 0


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.generate((), []) == []
    assert llm.engine_metrics().submitted == 0


@pytest.mark.parametrize(
    "prompts",
    [
        [PROMPT, PROMPT],
        ["one", "two"],
        ["one"],
        [{"prompt": "one"}, {"prompt": "two"}],
        np.zeros((2, 3), np.int64),
        [np.array([1, 2]), np.array([3])],
        [[{"role": "user", "content": "hi"}]],
    ],
)
def test_stream_takes_one_prompt(llm: LLM, prompts: object) -> None:
    with pytest.raises(InvalidArgumentError, match="stream takes one prompt or conversation, this is a list of"):
        llm.stream(prompts, GREEDY)  # type: ignore[arg-type]


def test_async_with_cancels_what_was_left(llm: LLM) -> None:
    async def main() -> str:
        async with llm.stream([10, 20], GREEDY) as stream:
            text = "".join([piece async for piece in stream])
        async with llm.stream(PROMPT, LONG) as left:
            async for _ in left:
                break
        return text

    assert asyncio.run(main()) == ToyTokenizer(VOCAB).decode(toy_generate([10, 20], 8, VOCAB))
    wait_until_idle(llm)
    assert llm.engine_metrics().cancelled == 1


def test_the_repr_names_model_pool_and_state(parts: Parts, tiny_model_dir: Path) -> None:
    model = LLM.from_parts(parts)
    assert repr(model) == "LLM('toy', dtype='int64', kv_pool='512 tokens', open)"
    model.close()
    assert repr(model) == "LLM('toy', dtype='int64', kv_pool='512 tokens', closed)"
    with LLM(tiny_model_dir, kv_budget=1024, page_size=16) as tiny:
        assert repr(tiny) == f"LLM({str(tiny_model_dir)!r}, dtype='float32', kv_pool='1,024 tokens', open)"


def test_the_package_lists_public_names_only() -> None:
    import edgellm

    assert dir(edgellm) == sorted(edgellm.__all__)


def test_an_unknown_role_is_refused(llm: LLM) -> None:
    with pytest.raises(AdmissionError, match=r"messages\[0\] has the role 'robot'"):
        llm.chat([{"role": "robot", "content": "x"}])


def test_a_prompt_longer_than_the_pool_never_fits() -> None:
    with LLM.from_parts(toy_parts(num_pages=8)) as small:
        with pytest.raises(InputTooLongError, match=r"40 tokens and never fits: .* 32 tokens that the KV pool holds"):
            small.generate([5] * 40, GREEDY)
        (output,) = small.generate([5] * 20, GREEDY)
        assert output.token_ids == toy_generate([5] * 20, 8, VOCAB)


def test_calls_after_close_raise(parts: Parts) -> None:
    model = LLM.from_parts(parts)
    model.generate(PROMPT, GREEDY)
    model.close()
    model.close()
    for call in (model.generate, model.chat, model.stream):
        with pytest.raises(ContractViolation, match="this LLM is closed; make a new one"):
            call(PROMPT, GREEDY)  # type: ignore[operator]


def test_close_cancels_what_runs(parts: Parts) -> None:
    model = LLM.from_parts(parts)
    stream = model.stream(PROMPT, LONG)
    iterator = iter(stream)
    next(iterator)
    model.close()
    with pytest.raises(RequestCancelled):
        list(iterator)
    require_baseline(parts.runtime.coordinator)


def test_close_lets_go_of_the_memory(tiny_model_dir: Path) -> None:
    model = LLM(tiny_model_dir, kv_budget=1024, page_size=16)
    model.generate("hello", GREEDY)
    executor = weakref.ref(model._runtime.executor)  # type: ignore[union-attr]
    model.close()
    gc.collect()
    assert executor() is None
    with pytest.raises(ContractViolation, match="cache_metrics: this LLM is closed"):
        model.cache_metrics()


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True])
def test_a_bad_seed_is_refused(parts: Parts, seed: object) -> None:
    with pytest.raises(InvalidArgumentError, match="seed is"):
        LLM.from_parts(parts, seed=seed)  # type: ignore[arg-type]


# ---- threads --------------------------------------------------------------------------------------------


def test_calls_from_several_threads_equal_their_solo_runs(llm: LLM) -> None:
    prompts = [[10 + index, 20, 30 + index] for index in range(24)]
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda prompt: llm.generate(prompt, GREEDY)[0], prompts))
    assert [output.token_ids for output in outputs] == [toy_generate(prompt, 8, VOCAB) for prompt in prompts]


def test_cancelled_streams_leave_their_neighbours_alone(llm: LLM) -> None:
    streams = [llm.stream([10 + index, 20, 30], LONG) for index in range(8)]
    for stream in streams[::2]:
        threading.Thread(target=stream.cancel).start()
    for index, stream in enumerate(streams):
        if index % 2:
            assert stream.output.token_ids == toy_generate([10 + index, 20, 30], 200, VOCAB)
        else:
            with pytest.raises(RequestCancelled):
                _ = stream.output


# ---- a real checkpoint ----------------------------------------------------------------------------------

SUNSET = "The light is lit at sunset and put out at sunrise."


@pytest.fixture(scope="module")
def tiny(tiny_model_dir: Path) -> Iterator[LLM]:
    with LLM(tiny_model_dir, kv_budget=2048, page_size=16, max_batch_size=4, seed=5) as model:
        yield model


def test_a_checkpoint_generates_the_same_cold_warm_and_streamed(tiny: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    (cold,) = tiny.generate(SUNSET, params, use_cache=False)
    (first,) = tiny.generate(SUNSET, params)
    (warm,) = tiny.generate(SUNSET, params)
    streamed = "".join(tiny.stream(SUNSET, params))
    assert len(set(cold.token_ids)) > 1
    assert cold.token_ids == first.token_ids == warm.token_ids
    assert streamed == cold.text == warm.text
    # Bypass keeps nothing, so the first one after it finds nothing; then one of 50 tokens is computed again.
    assert [output.reuse.reused_tokens for output in (cold, first, warm)] == [0, 0, 49]


def test_a_batch_equals_its_solo_runs(tiny: LLM) -> None:
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    prompts = [SUNSET[: 5 + 9 * index] for index in range(5)]
    solo = [tiny.generate(prompt, params, use_cache=False)[0].token_ids for prompt in prompts]
    assert [output.token_ids for output in tiny.generate(prompts, params)] == solo


def test_a_seed_makes_samples_repeatable_and_different_from_each_other(tiny_model_dir: Path) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True)
    runs = []
    for seed in (1, 1, 2):
        with LLM(tiny_model_dir, kv_budget=1024, page_size=16, seed=seed) as model:
            runs.append([output.token_ids for output in model.generate([SUNSET] * 2, params)])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_the_memory_budget_follows_kv_budget(tiny: LLM) -> None:
    budget = tiny.memory_budget
    # 2 layers x (K, V) x 2 heads x 16 dims x 4 bytes = 512 bytes a token.
    assert (budget.tokens, budget.page_size, budget.bytes_per_page) == (2048, 16, 16 * 512)
    assert budget.max_model_len == 512
    assert budget.full_length_sequences == 4.0


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("device", "tpu", "device is 'tpu'"),
        ("dtype", "int3", "dtype is 'int3'; supported: auto, float32, bfloat16"),
        ("page_size", 0, "page_size is 0; it must be an integer from 1"),
        ("page_size", 32.0, "page_size is 32.0"),
        ("max_batch_size", 0, "max_batch_size is 0"),
        ("max_model_len", 1000, "max_model_len is 1000, the model's context is 512"),
        ("max_model_len", 1, "max_model_len is 1;"),
        ("kv_budget", -5, "kv_budget"),
        ("kv_budget", "many", "kv_budget"),
        ("kv_budget", float("nan"), "kv_budget"),
    ],
)
def test_bad_options_name_value_and_limit(tiny_model_dir: Path, option: str, value: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        LLM(tiny_model_dir, **{"kv_budget": 1024, option: value})  # type: ignore[arg-type]


def test_a_missing_or_damaged_model_is_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="'no/such/model' is neither an existing file or folder"):
        LLM("no/such/model")
    with pytest.raises(WeightFileError, match=r"config\.json"):
        LLM(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match=r"\.gguf"):
        LLM(tmp_path / "weights.bin")


# ---- the default model ----------------------------------------------------------------------------------


@pytest.mark.model
def test_the_default_model_passes_the_doctors_self_test(default_model: Path) -> None:
    from edgellm import doctor

    check = doctor._self_test()
    assert check.status is doctor.Status.OK, check.detail
    assert "22 known tokens agree, cold and with 58 of 59 prompt tokens reused" in check.detail
