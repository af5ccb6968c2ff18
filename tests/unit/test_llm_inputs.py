"""Prompts, conversations and parameters as callers write them: what is accepted, and what each refusal says."""

from __future__ import annotations

import array
import dataclasses

import numpy as np
import pytest
import torch

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
        ([5, 2**70], r"prompt token 1180591620717411303424 at position 1 is outside the vocabulary"),
        ([5, -(2**70)], r"prompt token -1180591620717411303424 at position 1 is outside the vocabulary"),
        ([1, 1.5], r"prompt_token_ids\[1\] is 1.5; a token id is an integer"),
        ([1, "two"], r"prompt_token_ids\[1\] is 'two'; a token id is an integer"),
        ([True], r"prompt_token_ids\[0\] is True; a token id is an integer"),
        ([None], r"prompt_token_ids\[0\] is None; a token id is an integer"),
        (["a", "b" * 24], r"prompt_token_ids\[0\] is 'a'; a token id is an integer"),
        ([[1, 2]], r"prompt_token_ids\[0\] is itself a list; pass one flat list of integers"),
        ([1, [1, 2]], r"prompt_token_ids\[1\] is itself a list; pass one flat list of integers"),
        (np.zeros((2, 3), np.int64), "prompt_token_ids has 2 dimensions; pass one flat list of integers"),
        (np.array([0.5]), r"prompt_token_ids\[0\] is 0.5; a token id is an integer"),
        ("text", "prompt_token_ids is a str; pass one flat list of integers"),
        (7, "prompt_token_ids is a int; pass one flat list of integers"),
    ],
)
def test_bad_token_ids_name_value_and_limit(ids: list[object], message: str) -> None:
    with pytest.raises(AdmissionError, match=message):
        prepare(LLMGenerationRequest(prompt_token_ids=ids))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ids", [torch.tensor([5, 6]), array.array("i", [5, 6]), range(5, 7), np.array([5, 6], np.uint64)]
)
def test_token_ids_come_in_any_flat_sequence_of_integers(ids: object) -> None:
    assert prepare(LLMGenerationRequest(prompt_token_ids=ids)) == [5, 6]  # type: ignore[arg-type]


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(AdmissionError, match=r"the prompt is empty \(0 tokens\)"):
        prepare(request_of_prompt(""))


@pytest.mark.parametrize("length", [1, 30, 31])
def test_a_prompt_that_leaves_room_for_one_token_is_taken(length: int) -> None:
    assert len(prepare(request_of_prompt("x" * length))) == length


def test_a_prompt_longer_than_the_model_says_which_setting_helps() -> None:
    with pytest.raises(InputTooLongError) as caught:
        prepare(request_of_prompt("x" * 32))
    assert str(caught.value) == (
        "EDGELLM_INPUT_TOO_LONG: the prompt has 32 tokens and never fits: together with an answer of at least 1 token "
        "it exceeds the 32 tokens that a sequence may reach; shorten the prompt or raise max_model_len"
    )


def test_no_longer_sequences_are_promised_than_the_model_has() -> None:
    limits = dataclasses.replace(LIMITS, model_context=32)
    with pytest.raises(InputTooLongError, match=r"that a sequence may reach; shorten the prompt$"):
        prepare(request_of_prompt("x" * 32), limits=limits)
    limits = dataclasses.replace(LIMITS, model_context=64)
    with pytest.raises(InputTooLongError, match=r"or raise max_model_len \(the model's context is 64\)$"):
        prepare(request_of_prompt("x" * 32), limits=limits)


def test_a_prompt_longer_than_the_pool_says_which_setting_helps() -> None:
    limits = PromptLimits(vocab_size=512, max_model_len=1000, pool_tokens=64, headroom_tokens=1)
    assert len(prepare(request_of_prompt("x" * 63), limits=limits)) == 63
    with pytest.raises(InputTooLongError, match=r"64 tokens and never fits: .* 64 tokens that the KV pool .*kv_budget"):
        prepare(request_of_prompt("x" * 64), limits=limits)


def test_the_message_says_which_prompt_of_a_list() -> None:
    with pytest.raises(AdmissionError, match=r"prompts\[3\]: the prompt is empty"):
        prepare(request_of_prompt(""), where="prompts[3]")
    with pytest.raises(InputTooLongError) as caught:
        prepare(request_of_prompt("x" * 40), where="prompts[1]")
    assert str(caught.value).startswith("EDGELLM_INPUT_TOO_LONG: prompts[1]: the prompt has 40 tokens")
    assert str(caught.value).count("EDGELLM_INPUT_TOO_LONG") == 1


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


def test_a_stop_token_id_outside_the_vocabulary_is_refused() -> None:
    request = LLMGenerationRequest(prompt="a", sampling=SamplingParams(stop_token_ids=[511, 512]))
    with pytest.raises(AdmissionError, match="stop_token_ids names token id 512, ids go from 0 to 511"):
        prepare(request)


@pytest.mark.parametrize("prompts", [[], ()])
def test_an_empty_list_of_prompts_is_no_prompt(prompts: object) -> None:
    assert split_prompts(prompts) == ([], True)


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
        "enough for 4 sequences of full length (2,048 tokens)"
    )


@pytest.mark.parametrize(
    ("num_pages", "words"),
    [
        (1, "1 page of 32 tokens (1.0 MiB) = 32 tokens, less than one sequence of full length (2,048 tokens)"),
        (63, "= 2,016 tokens, less than one sequence of full length (2,048 tokens)"),
        (64, "= 2,048 tokens, enough for 1 sequence of full length (2,048 tokens)"),
        (127, "= 4,064 tokens, enough for 1 sequence of full length (2,048 tokens)"),
    ],
)
def test_the_memory_budget_counts_whole_sequences(num_pages: int, words: str) -> None:
    assert MemoryBudget(1 << 20, num_pages, 32, 2048).describe().endswith(words)
