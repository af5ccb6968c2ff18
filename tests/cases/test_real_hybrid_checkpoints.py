"""Cases 11 to 15 on a real hybrid with tiny random weights: plain, with prompt lookup, and with its prediction head.

A warm text must be that of its cold twin, token for token, and so must the recurrent state, up to rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from decoder_plugins import use_decoder_plugins
from real_hybrid import FLAVOURS, RealHybrid, random_tokens, require_same_states
from tiny_model import CHAT_TEMPLATE, write_tiny_qwen_hybrid

from edgellm import LLM, ReuseStopReason, SamplingParams, SchedulingOptions, SpeculativeOptions
from edgellm.engine.config import SchedulingMode
from edgellm.outputs import RequestOutput

B = 8
EVERY_FLAVOUR = pytest.mark.parametrize("flavour", FLAVOURS)


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    use_decoder_plugins(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen_hybrid(tmp_path_factory.mktemp("hybrid"), max_position_embeddings=2048)


@EVERY_FLAVOUR
def test_case_11_a_shared_prefix_is_found_at_the_latest_by_the_third_request(folder: Path, flavour: str) -> None:
    """vllm-project/vllm #45238: three prompts share 3B tokens and differ in the 2B behind them."""
    shared = random_tokens(1, 3 * B)
    prompts = [shared + random_tokens(2 + number, 2 * B) for number in range(3)]
    with RealHybrid(folder, flavour) as warm, RealHybrid(folder, "plain") as twin:
        answers = [warm.ask(prompt) for prompt in prompts]
        assert [answer.token_ids for answer in answers] == [twin.ask(prompt, cold=True).token_ids for prompt in prompts]
    first, second, third = (answer.reuse for answer in answers)
    assert first.reused_tokens == 0
    if second.reused_tokens != 3 * B:
        assert (second.stop_reason, second.stop_position) == (ReuseStopReason.NO_CHECKPOINT, 3 * B)
    assert third.reused_tokens == 3 * B


@EVERY_FLAVOUR
@pytest.mark.parametrize("length", [3 * B, 3 * B + 1, 4 * B - 1])
def test_case_11_a_boundary_that_the_caller_names_is_found_at_once(folder: Path, flavour: str, length: int) -> None:
    shared = random_tokens(1, length)
    with RealHybrid(folder, flavour) as warm, RealHybrid(folder, "plain") as twin:
        warm.ask(shared + random_tokens(2, 2 * B), boundaries=[length])
        prompt = shared + random_tokens(3, 2 * B)
        answer = warm.ask(prompt)
        assert answer.reuse.reused_tokens == length
        assert answer.token_ids == twin.ask(prompt, boundaries=[length]).token_ids
        require_same_states(warm, twin, at_least=6 if flavour == "plain" else 2)


@EVERY_FLAVOUR
@pytest.mark.parametrize(("page", "spacing"), [(16, 48), (48, 16), (8, 48), (16, 8)])
def test_case_12_the_checkpoint_is_found_by_tokens_whatever_the_sizes(
    folder: Path, flavour: str, page: int, spacing: int
) -> None:
    """vllm-project/vllm #53142, #55600: page and checkpoint spacing differ; every checkpoint restores its own state."""
    prefix = random_tokens(21, 12 * spacing)
    ends = [spacing * count for count in range(1, 13)]
    options = {"page_size": page, "kv_budget": 65536}
    with RealHybrid(folder, flavour, **options) as warm, RealHybrid(folder, "plain", **options) as twin:
        warm.ask([*prefix, 1, 2], 2, boundaries=ends)
        for count in (10, *range(1, 13)):
            length = count * spacing
            prompt = prefix[:length] + random_tokens(100 + count, 9)
            answer = warm.ask(prompt, 3)
            assert answer.reuse.reused_tokens == length
            assert answer.token_ids == twin.ask(prompt, 3, boundaries=[length], salt=str(count)).token_ids
        require_same_states(warm, twin, at_least=12)


@EVERY_FLAVOUR
def test_case_13_packed_prompts_capture_their_own_states(folder: Path, flavour: str) -> None:
    """sgl-project/sglang #31833: prompts of 1.3, 2.7 and 4.1 chunks in one packed prefill, in several orders."""
    chunk = 10
    prompts = [random_tokens(30 + number, length) for number, length in enumerate((13, 27, 41))]
    ends = [list(range(chunk, len(prompt), chunk)) for prompt in prompts]
    with RealHybrid(folder, flavour, kv_budget=65536) as warm, RealHybrid(folder, "plain") as twin:
        wanted = {}
        for number, prompt in enumerate(prompts):
            for length in ends[number]:
                again = [*prompt[:length], 7, 8, 9]
                wanted[number, length] = twin.ask(again, boundaries=[length], salt=str(length)).token_ids
        for order in ((0, 1, 2), (2, 0, 1), (2, 1, 0)):
            salt = str(order)
            packed = [warm.submit(prompts[number], boundaries=ends[number], salt=salt) for number in order]
            for handle in packed:
                handle.get(60)
            for number, length in wanted:
                answer = warm.ask([*prompts[number][:length], 7, 8, 9], salt=salt)
                assert answer.reuse.reused_tokens == length
                assert answer.token_ids == wanted[number, length]
        require_same_states(warm, twin, at_least=7)


@EVERY_FLAVOUR
def test_case_14_mixed_steps_publish_only_what_they_wrote(folder: Path, flavour: str) -> None:
    """sgl-project/sglang #39342: r0 decodes, and ends somewhere, while r1's prompt crosses two boundaries in chunks."""
    steady, prompt = random_tokens(40, 9), random_tokens(41, 4 * B)
    prefix_again = prompt[: 2 * B] + random_tokens(42, 5)
    with RealHybrid(folder, "plain") as twin:
        wanted = [twin.ask(one, 12, cold=True).token_ids for one in (steady, prompt, prefix_again)]
    for mode in (SchedulingMode.MIXED, SchedulingMode.PREFILL_FIRST):
        chunks = {"max_chunk_tokens": B} if mode is SchedulingMode.MIXED else {}
        scheduling = SchedulingOptions(ifb_scheduling_mode=mode, max_prompt_step_tokens=B, **chunks)
        with RealHybrid(folder, flavour, scheduling=scheduling) as warm:
            for length in range(3, 8):
                salt = str(length)
                r0 = warm.submit(steady, length, salt=salt)
                next(iter(r0.stream()))  # it decodes
                r1 = warm.submit(prompt, 12, boundaries=[B, 2 * B], salt=salt)
                assert r1.get(60).token_ids == wanted[1]
                r2 = warm.ask(prefix_again, 12, salt=salt)
                assert r2.reuse.reused_tokens == 2 * B
                assert r2.token_ids == wanted[2]
                assert r0.get(60).token_ids == wanted[0][:length]


# ---- case 15: chats -----------------------------------------------------------------------------------------------

PAGE = 16
SYSTEM = {"role": "system", "content": "the cat sat on the mat " * 44}  # a thousand tokens of history
THINK = "<think></think>"
INJECTING = CHAT_TEMPLATE.replace("{{ 'assistant:' }}", "{{ 'assistant:" + THINK + "' }}")
LETTERS = dict.fromkeys(range(66, 92), 80.0)


def talk(llm: LLM, params: SamplingParams, shorten: int) -> list[tuple[RequestOutput, int]]:
    """Three turns; each output, and the tokens of what its turn added to the history.

    Args:
        shorten: characters at the beginning of every answer that the client does not keep.
    """
    messages: list[dict[str, Any]] = [SYSTEM]
    turns, added = [], len(SYSTEM["content"])
    for question in ("who sat?", "on what?", "why?"):
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, params)
        turns.append((output, added + len(f"user:{question}") + 1))
        reply = output.text[shorten:]
        messages.append({"role": "assistant", "content": reply})
        added = len(f"assistant:{reply}".encode()) + 1
    return turns


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


@EVERY_FLAVOUR
@pytest.mark.parametrize("cause", ["injected", "stripped", "retokenised"])
def test_case_15_turns_find_the_history(folder: Path, tmp_path: Path, flavour: str, cause: str) -> None:
    """lablup/mlxcel #1148, QwenLM/Qwen3.8 #48, ggml-org/llama.cpp PR #26398: what a next turn does not repeat.

    The generation prompt injects a block; the client drops a part of the answer; the answer's bytes come back as other
    tokens (a random model says bytes that are no text).
    Expect: a turn computes at most its message, the last reply and a page, and reuse ends where texts part.
    """
    write_tiny_qwen_hybrid(tmp_path, max_position_embeddings=2048)
    (tmp_path / "chat_template.jinja").write_text(INJECTING if cause == "injected" else CHAT_TEMPLATE)
    bias = {} if cause == "retokenised" else {"logit_bias": LETTERS}
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, **bias)
    kind = FLAVOURS[flavour]
    speculative = None if kind is None else SpeculativeOptions(decoder=kind)
    with LLM(tmp_path, device="cpu", kv_budget=16384, page_size=PAGE, max_batch_size=2, speculative=speculative) as llm:
        turns = talk(llm, params, shorten=10 if cause == "stripped" else 0)
    generation_prompt = len("assistant:") + (len(THINK) if cause == "injected" else 0)
    for (before, _), (after, added) in itertools.pairwise(turns):
        computed = after.reuse.prompt_tokens - after.reuse.reused_tokens
        assert computed <= added + generation_prompt + PAGE, after.reuse
        known = [*before.prompt_token_ids, *before.token_ids]
        assert after.reuse.reused_tokens <= first_difference(known, after.prompt_token_ids)
        assert after.reuse.stop_reason is not ReuseStopReason.FULL
