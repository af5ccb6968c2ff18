"""Chat messages: what is accepted, and how a template's failure is reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgellm.errors import AdmissionError, InvalidArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ALLOWED_ROLES = ("system", "developer", "user", "assistant", "tool")

# Arguments of transformers' method that would change what it returns.
_RESERVED_ARGUMENTS = frozenset(
    {
        "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
        "return_assistant_tokens_mask", "conversation",
    }
)  # fmt: skip


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as plain dicts with text content; OpenAI's lists of text parts are joined.

    Raises:
        AdmissionError: no messages, an unknown role, or content that is missing or not text.  The message
            names the place, the value and what is allowed.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise AdmissionError(
            f"messages is a {type(messages).__name__}; pass a list like [{{'role': 'user', 'content': 'Hello'}}]"
        )
    if not messages:
        raise AdmissionError("messages is empty; pass at least one, like {'role': 'user', 'content': 'Hello'}")
    return [_check_message(place, message) for place, message in enumerate(messages)]


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    template_arguments: Mapping[str, Any],
) -> str:
    """The conversation as the model's own template writes it, special tokens included as text.

    Raises:
        AdmissionError: bad messages, no template, or the template refused them.
        InvalidArgumentError: a template argument that would change the kind of result.
    """
    checked = check_messages(messages)
    reserved = sorted(_RESERVED_ARGUMENTS.intersection(template_arguments))
    if reserved:
        raise InvalidArgumentError(f"chat template argument {reserved[0]!r} is reserved; leave it out")
    if tokenizer.chat_template is None and template_arguments.get("chat_template") is None:
        raise AdmissionError(
            "this model has no chat template, so messages cannot be rendered; pass the prompt as text, or add a "
            "chat_template to the model's tokenizer_config.json"
        )
    try:
        text = tokenizer.apply_chat_template(
            checked, tokenize=False, add_generation_prompt=add_generation_prompt, **template_arguments
        )
    # A template is a program from the checkpoint: whatever it raises is about this request's messages.
    except Exception as error:
        raise AdmissionError(f"the chat template refused the messages: {error}; change the messages") from error
    if not isinstance(text, str):
        raise AdmissionError(f"the chat template returned {type(text).__name__}, not text; check chat_template")
    return text


def _check_message(place: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise AdmissionError(
            f"messages[{place}] is a {type(message).__name__}; pass a dict with the keys 'role' and 'content'"
        )
    role = message.get("role")
    if role not in ALLOWED_ROLES:
        raise AdmissionError(f"messages[{place}] has the role {role!r}; allowed are {', '.join(ALLOWED_ROLES)}")
    checked = dict(message)
    content = message.get("content")
    if content is None:
        # Tool calls stand in for text, as in the OpenAI API.
        if role != "assistant" or not message.get("tool_calls"):
            raise AdmissionError(f"messages[{place}] (role {role!r}) has no 'content'; pass text, possibly empty")
        checked["content"] = ""
    elif not isinstance(content, str):
        checked["content"] = _join_parts(place, content)
    return checked


def _join_parts(place: int, content: Any) -> str:
    if isinstance(content, Mapping) or not isinstance(content, Sequence) or isinstance(content, bytes):
        raise AdmissionError(f"messages[{place}] has content of type {type(content).__name__}; pass text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise AdmissionError(
                f"messages[{place}] has a content part of type {kind!r}; allowed is {{'type': 'text', 'text': ...}}"
            )
        texts.append(part["text"])
    return "".join(texts)
