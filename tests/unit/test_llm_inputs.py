"""Prompts, conversations and parameters as callers write them: what is accepted, and what each refusal says."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.errors import AdmissionError, InputTooLongError, InvalidArgumentError
from edgellm.memory import MemoryBudget, format_bytes
from edgellm.prompts import (
    PromptLimits,
    PromptPreparer,
    is_conversation,
    params_per_prompt,
    request_of_prompt,
    split_conversations,
    split_prompts,
)
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.testing.toy_tokenizer import ToyTokenizer

LIMITS = PromptLimits(vocab_size=512, max_model_len=32, pool_tokens=64, headroom_tokens=1)
USER = {"role": "user", "content": "hi"}


def prepare(request: LLMGenerationRequest, where: str = "", limits: PromptLimits = LIMITS) -> list[int]:
    return PromptPreparer(ToyTokenizer(512), limits).prepare(request, where).token_ids.tolist()


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("text", 1),
        ([1, 2, 3], 1),
        ([np.int64(1), 2], 1),
        (np.array([1, 2, 3]), 1),
        ((4, 5), 1),
        ({"prompt_token_ids": [1]}, 1),
        ({"prompt": "text"}, 1),
        (["a", "b"], 2),
        ([[1, 2], [3]], 2),
        (["a", [1], {"prompt_token_ids": [2]}], 3),
        ([np.array([1]), np.array([2])], 2),
    ],
)
def test_one_prompt_or_several(prompt: object, count: int) -> None:
    requests, is_list = split_prompts(prompt)
    assert len(requests) == count
    assert is_list is (count > 1)


def test_a_list_with_one_prompt_is_a_list() -> None:
    requests, is_list = split_prompts(["text"])
    assert (len(requests), is_list, requests[0].prompt) == (1, True, "text")


def test_all_forms_of_one_prompt_give_the_same_ids() -> None:
    forms = ["hi", [106, 107], (106, 107), np.array([106, 107]), {"prompt_token_ids": [106, 107]}, {"prompt": "hi"}]
    assert [prepare(request_of_prompt(form)) for form in forms] == [[106, 107]] * len(forms)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": [1], "prompt": "a"}, r"keys \['prompt', 'prompt_token_ids'\]; it must have exactly one"),
        ({}, r"keys \[\]; it must have exactly one"),
        ({"text": "a"}, r"keys \['text'\]"),
        (3, "a prompt is a int; pass text"),
        (None, "a prompt is a NoneType; pass text"),
        (b"bytes", "a prompt is a bytes; pass text"),
    ],
)
def test_other_forms_are_refused(prompt: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        split_prompts(prompt)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], r"the prompt is empty \(0 tokens\); it needs at least 1 token"),
        ([5, 512], "prompt token 512 at position 1 is outside the vocabulary; ids go from 0 to 511"),
        ([5, -1], "prompt token -1 at position 1 is outside the vocabulary"),
        ([2**70], "type object; pass a flat list of integers"),
        ([1.5], "type float64; pass a flat list of integers"),
        ([[1, 2]], r"shape \(1, 2\)"),
    ],
)
def test_bad_token_ids_name_value_and_limit(ids: list[object], message: str) -> None:
    with pytest.raises(AdmissionError, match=message):
        prepare(LLMGenerationRequest(prompt_token_ids=ids))  # type: ignore[arg-type]


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(AdmissionError, match=r"the prompt is empty \(0 tokens\)"):
        prepare(request_of_prompt(""))


@pytest.mark.parametrize("length", [1, 29, 30])
def test_a_prompt_that_leaves_room_for_one_token_is_taken(length: int) -> None:
    assert len(prepare(request_of_prompt("x" * length))) == length


def test_a_prompt_longer_than_the_model_says_which_setting_helps() -> None:
    with pytest.raises(InputTooLongError, match=r"31 tokens and never fits: a sequence may reach 32 .*max_model_len"):
        prepare(request_of_prompt("x" * 31))


def test_a_prompt_longer_than_the_pool_says_which_setting_helps() -> None:
    limits = PromptLimits(vocab_size=512, max_model_len=1000, pool_tokens=64, headroom_tokens=1)
    assert len(prepare(request_of_prompt("x" * 62), limits=limits)) == 62
    with pytest.raises(InputTooLongError, match=r"63 tokens and never fits: the whole KV pool holds 64 .*kv_budget"):
        prepare(request_of_prompt("x" * 63), limits=limits)


def test_the_message_says_which_prompt_of_a_list() -> None:
    with pytest.raises(AdmissionError, match=r"prompts\[3\]: the prompt is empty"):
        prepare(request_of_prompt(""), where="prompts[3]")
    with pytest.raises(InputTooLongError, match=r"prompts\[1\]: "):
        prepare(request_of_prompt("x" * 40), where="prompts[1]")


def test_conversations() -> None:
    assert split_conversations([USER]) == ([[USER]], False)
    assert split_conversations([[USER], [USER, USER]]) == ([[USER], [USER, USER]], True)
    assert is_conversation([USER])
    for other in ("hi", [1, 2], ["a"], [{"prompt_token_ids": [1]}], {"role": "user"}, []):
        assert not is_conversation(other)


@pytest.mark.parametrize("messages", ["hi", USER, 3, [USER, "hi"], ["hi"]])
def test_other_conversations_are_refused(messages: object) -> None:
    def prepare_all() -> list[list[int]]:
        return [prepare(LLMGenerationRequest(messages=one)) for one in split_conversations(messages)[0]]

    with pytest.raises((InvalidArgumentError, AdmissionError), match="messages"):
        prepare_all()


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "robot", "content": "x"}, "role 'robot'; known roles are system, developer, user, assistant, tool"),
        ({"content": "x"}, "role None"),
        ({"role": "user"}, "has no content"),
        ({"role": "user", "content": 3}, "'content'] is a int"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "'image_url' item; no encoder is loaded"),
    ],
)
def test_bad_messages_name_role_and_remedy(message: dict[str, object], expected: str) -> None:
    with pytest.raises(AdmissionError) as caught:
        prepare(LLMGenerationRequest(messages=[message]))
    assert expected in str(caught.value)


def test_messages_go_through_the_template() -> None:
    tokenizer = ToyTokenizer(512)
    limits = PromptLimits(vocab_size=512, max_model_len=999, pool_tokens=999, headroom_tokens=1)
    assert tokenizer.decode(prepare(LLMGenerationRequest(messages=[USER]), limits=limits)) == "[user]hi\n[assistant]"
    without = LLMGenerationRequest(messages=[USER], add_generation_prompt=False)
    assert tokenizer.decode(prepare(without, limits=limits)) == "[user]hi\n"


def test_one_params_for_all_or_one_each() -> None:
    one, two = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert params_per_prompt(None, 2) == [SamplingParams()] * 2
    assert params_per_prompt(one, 3) == [one] * 3
    assert params_per_prompt([one, two], 2) == [one, two]
    with pytest.raises(InvalidArgumentError, match="sampling_params has 2 entries for 3 prompts"):
        params_per_prompt([one, two], 3)
    with pytest.raises(InvalidArgumentError, match="sampling_params is a dict"):
        params_per_prompt({"max_tokens": 3}, 1)
    request = LLMGenerationRequest(prompt="a", sampling={"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(AdmissionError, match=r"prompts\[1\]: sampling is a dict"):
        prepare(request, where="prompts[1]")


def test_a_logit_bias_outside_the_vocabulary_is_refused() -> None:
    request = LLMGenerationRequest(prompt="a", sampling=SamplingParams(logit_bias={512: 1.0}))
    with pytest.raises(AdmissionError, match="logit_bias names token id 512, ids go from 0 to 511"):
        prepare(request)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (4 << 30, "4.0 GiB"), (3 << 50, "3072.0 TiB")],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_the_memory_budget_states_every_number() -> None:
    budget = MemoryBudget(bytes_per_page=1 << 20, num_pages=256, page_size=32, max_model_len=2048)
    assert (budget.tokens, budget.total_bytes, budget.full_length_sequences) == (8192, 256 << 20, 4.0)
    assert budget.describe() == (
        "KV cache 256.0 MiB: 256 pages of 32 tokens (1.0 MiB each) = 8,192 tokens, "
        "room for 4.0 sequences of 2,048 tokens"
    )
