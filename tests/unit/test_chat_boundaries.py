"""Where a later prompt will leave this one, as the template itself tells."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import TEMPLATE, byte_level

from edgellm.errors import AdmissionError
from edgellm.testing.toy_tokenizer import ToyTokenizer
from edgellm.tokenization.chat_boundaries import _common_length, build_chat_prompt
from edgellm.tokenization.tokenizer import load_tokenizer

SYSTEM = {"role": "system", "content": "be kind"}
USER = {"role": "user", "content": "hello"}
REPLY = {"role": "assistant", "content": "hi"}
THINKING = TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n\n</think>\n\n{% endif")


def text_of(tokenizer: ToyTokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], ["[user]", "[user]hello\n[assistant]"]),
        ([SYSTEM, USER], ["[system]be kind\n[user]", "[system]be kind\n[user]hello\n[assistant]"]),
        (
            [SYSTEM, USER, REPLY, {"role": "user", "content": "more"}],
            [
                "[system]be kind\n[user]",
                "[system]be kind\n[user]hello\n[assistant]hi\n[user]more\n[assistant]",
            ],
        ),
    ],
)
def test_boundaries_lie_after_the_system_prompt_and_the_repeated_part(
    messages: list[dict[str, str]], expected: list[str]
) -> None:
    tokenizer = ToyTokenizer(300)
    chat = tokenizer.encode_chat(messages)
    assert [text_of(tokenizer, chat.token_ids[:length]) for length in chat.boundaries] == expected
    assert chat.tail_length == 0  # this template writes its generation prompt into the history as well
    assert chat.token_ids == tokenizer.apply_chat_template(messages)


def test_a_generation_prompt_that_history_does_not_repeat_is_the_volatile_tail(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path, chat_template=THINKING))
    chat = tokenizer.encode_chat([SYSTEM, USER])
    tail = chat.token_ids[len(chat.token_ids) - chat.tail_length :]
    assert tokenizer.decode(tail, skip_special_tokens=False) == "<think>\n\n</think>\n\n"
    assert len(chat.token_ids) - chat.tail_length == chat.boundaries[-1]
    assert chat.token_ids == tokenizer.apply_chat_template([SYSTEM, USER])


def test_a_boundary_is_not_moved_by_markers_that_begin_alike() -> None:
    """`<think>` behind the generation prompt, `<end>` behind a text, and a message that begins with `<`."""

    def render(messages: list[dict[str, str]], opens: bool) -> str:
        text = "".join(f"{message['role']}:{message['content']}<end>" for message in messages)
        return text + ("assistant:<think></think>" if opens else "")

    def encode(text: str) -> tuple[list[int], list[int]]:
        return [ord(character) for character in text], list(range(1, len(text) + 1))

    chat = build_chat_prompt([SYSTEM, {"role": "user", "content": "<b>"}], True, render, encode)
    starts = ["system:be kind<end>user:", "system:be kind<end>user:<b><end>assistant:"]
    assert chat.boundaries == tuple(len(start) for start in starts)
    assert chat.tail_length == len("<think></think>")


def test_a_probe_that_the_template_refuses_costs_one_boundary_and_nothing_else() -> None:
    def render(messages: object, open_turn: bool) -> str:
        roles = [message["role"] for message in messages]  # type: ignore[attr-defined]
        if roles[-1] == "user" and len(roles) == 2 and roles[0] == "system":
            raise AdmissionError("no")
        return "".join(f"[{role}]" for role in roles) + ("[open]" if open_turn else "")

    def encode(text: str) -> tuple[list[int], list[int]]:
        return [ord(character) for character in text], list(range(1, len(text) + 1))

    chat = build_chat_prompt([SYSTEM, USER, REPLY, USER], True, render, encode)
    assert chat.boundaries == (len("[system][user][assistant][user]["),)
    assert chat.tail_length == len("open]")


def test_what_the_template_refuses_for_the_conversation_itself_is_raised() -> None:
    def render(messages: object, open_turn: bool) -> str:
        raise AdmissionError("refused")

    with pytest.raises(AdmissionError, match="refused"):
        build_chat_prompt([USER], True, render, lambda text: ([], []))


@given(left=st.text("ab", max_size=12), right=st.text("ab", max_size=12))
def test_common_length_is_the_first_difference(left: str, right: str) -> None:
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    assert _common_length(left, right) == shared
