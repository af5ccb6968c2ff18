"""Request checks of admission: kinds that are never served, and limits of what is.

Pure: nothing is tokenised and nothing is modified.  `UnsupportedRequestError` for a kind of request, and
`AdmissionError` for a request of a served kind that is malformed.  A field may hold any object, so its type is tested
before it is compared or asked for its truth value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from edgellm.argument_check import INT32_MAX, check_flag, check_int, check_positive
from edgellm.cache.types import ContextCacheCommitPolicy, ContextCacheLookupPolicy, Retention, RetentionPriority
from edgellm.errors import AdmissionError, EdgeLLMError, InvalidArgumentError, UnsupportedRequestError
from edgellm.foreign import call_foreign, describe_error, describe_value
from edgellm.log import get_logger
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.streaming import StreamChannel

MAX_PROMPT_TEXT_BYTES = 1 << 20
MAX_CONTENT_ITEM_BYTES = 128 << 10
MAX_MESSAGES = 4096  # a guard against nonsense; the text limit and the context bound real chats
MAX_CONTENT_ITEMS = 18
MAX_CACHE_SALT_BYTES = 4096
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
_NEVER_SERVED = {
    "speech_output": "this runtime generates text only",
    "save_system_prompt_kv_cache": "context reuse captures every prompt by itself",
    "trajectory": "trajectory execution is not served",
}

_logger = get_logger(__name__)
_T = TypeVar("_T")


def read_foreign(read: Callable[[], _T]) -> _T:
    """What `read` returns, which looks into a request: whatever the objects in there raise refuses that request.

    Raises:
        AdmissionError: something raised that is not edgellm's own.
        EdgeLLMError: what `read` itself raised.
    """
    found: list[_T] = []
    error = call_foreign(lambda: found.append(read()))
    if error is None:
        return found[0]
    if isinstance(error, EdgeLLMError):
        raise error
    _logger.warning("a request is refused: a value in it raised", exc_info=error)
    raise AdmissionError(
        f"a value of the request could not be read ({describe_error(error)}); pass plain text, numbers and lists"
    ) from error


def check_supported(request: LLMGenerationRequest) -> None:
    """Refuse the kinds of request this runtime never serves, and fields of which no kind can be told.

    What passes may be compared with other requests, see `edgellm.engine.compatibility`.

    Raises:
        UnsupportedRequestError: per-request adapter, speech output, system-prompt capture, trajectory, or a
            number of sequences other than 1.
        InvalidArgumentError: no request, a flag that is neither True nor False, or an unknown cache policy.
        AdmissionError: a field raised when it was looked at.
    """
    if not isinstance(request, LLMGenerationRequest):
        raise InvalidArgumentError(f"request is {describe_value(request)}; pass an LLMGenerationRequest")
    read_foreign(lambda: _check_kind(request))


def _check_kind(request: LLMGenerationRequest) -> None:
    if type(request.num_sequences) is not int or request.num_sequences != 1:
        raise UnsupportedRequestError(
            f"num_sequences is {describe_value(request.num_sequences)}, the limit is 1; submit one request per sequence"
        )
    if request.adapter_name is not None:
        raise UnsupportedRequestError(
            f"adapter_name is {describe_value(request.adapter_name)}; adapters per request are not served, load a "
            "merged checkpoint"
        )
    for name, why in _NEVER_SERVED.items():
        value = getattr(request, name)
        if value is not False:
            check_flag(name, value)
            raise UnsupportedRequestError(f"{name} is True; {why}, leave it False")
    check_flag("disable_spec_decode", request.disable_spec_decode)
    _check_member("lookup_policy", request.lookup_policy, ContextCacheLookupPolicy)
    _check_member("commit_policy", request.commit_policy, ContextCacheCommitPolicy)


def _check_member(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise InvalidArgumentError(f"{name} is {describe_value(value)}; pass a {kind.__name__}")


def check_request(request: LLMGenerationRequest, *, vocab_size: int) -> None:
    """Validate a request of a served kind, before it is templated and tokenised.

    Raises:
        AdmissionError: no prompt or several, a limit exceeded, a malformed message, malformed boundaries, a malformed
            stream, callback or template argument, a bias or a stop token id outside the vocabulary.
    """
    if not isinstance(request.sampling, SamplingParams):
        raise AdmissionError(
            f"sampling is a {type(request.sampling).__name__}; pass an edgellm.SamplingParams (or leave it out)"
        )
    forms = {
        "prompt_token_ids": request.prompt_token_ids is not None,
        "prompt": request.prompt is not None,
        "messages": request.messages is not None,
    }
    given = [name for name, present in forms.items() if present]
    if len(given) != 1:
        raise AdmissionError(
            f"a request has exactly one of prompt_token_ids, prompt and messages; "
            f"this one has {', '.join(given) if given else 'none'}"
        )
    check_cache_salt(request.cache_salt)
    check_retention(request.retention)
    _check_boundaries(request)
    _check_readers(request)
    if request.prompt is not None:
        _check_text(request.prompt, "prompt", MAX_PROMPT_TEXT_BYTES)
    if request.messages is not None:
        _check_messages(request.messages)
        check_template_arguments(request.add_generation_prompt, request.chat_template_kwargs)
    for name in ("logit_bias", "stop_token_ids"):
        for token_id in getattr(request.sampling, name):
            if token_id >= vocab_size:
                raise AdmissionError(
                    f"{name} names token id {token_id}, ids go from 0 to {vocab_size - 1}; remove the entry"
                )


def check_priority(priority: object) -> None:
    """An integer of 32 bits; smaller is more urgent.

    Raises:
        InvalidArgumentError: it is not.
    """
    check_int("priority", priority, low=-INT32_MAX)


def check_timeout_seconds(seconds: object) -> None:
    """A number of seconds above 0, or None for no limit.

    Raises:
        InvalidArgumentError: it is neither.
    """
    if seconds is not None:
        check_positive("timeout_seconds", seconds, wanted="a number of seconds above 0, or None for no limit")


def check_cache_salt(salt: object) -> None:
    """None, or text of at most `MAX_CACHE_SALT_BYTES`.

    Raises:
        AdmissionError: it is neither.
    """
    if salt is not None:
        _check_text(salt, "cache_salt", MAX_CACHE_SALT_BYTES)


def check_template_arguments(add_generation_prompt: object, chat_template_kwargs: object) -> None:
    """A flag, and a dict of variables for the chat template.

    Raises:
        InvalidArgumentError: they are something else.
    """
    check_flag("add_generation_prompt", add_generation_prompt)
    if not isinstance(chat_template_kwargs, Mapping):
        raise InvalidArgumentError(
            f"chat_template_kwargs is {describe_value(chat_template_kwargs)}; pass a dict of variables for the chat "
            "template, or leave it out"
        )
    for name in chat_template_kwargs:
        if not isinstance(name, str):
            raise InvalidArgumentError(
                f"chat_template_kwargs has the key {describe_value(name)}; keys are texts, the names of variables"
            )


def check_retention(retention: object) -> None:
    """A `Retention` with a known priority and a time to live above 0 seconds, or none.

    Raises:
        AdmissionError: it is something else.
    """
    if not isinstance(retention, Retention):
        raise AdmissionError(f"retention is a {type(retention).__name__}; pass an edgellm.Retention")
    if not isinstance(retention.priority, RetentionPriority):
        raise AdmissionError(
            f"retention priority is {describe_value(retention.priority)}; pass RetentionPriority.LOW, NORMAL or HIGH"
        )
    ttl: Any = retention.ttl_seconds
    if ttl is None:
        return
    if type(ttl) is not float or not 0 < ttl < math.inf:  # `Retention` made a float of every number
        raise AdmissionError(
            f"retention ttl_seconds is {describe_value(ttl)}; pass a number of seconds above 0, or None"
        )


def _is_length(value: Any) -> bool:
    """An integer of Python or numpy, 0 or more."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


def _check_boundaries(request: LLMGenerationRequest) -> None:
    """Lengths of the prompt; those beyond its end are dropped once it is tokenised."""
    boundaries: Any = request.checkpoint_boundaries
    tail: Any = request.replay_tail_length
    if isinstance(boundaries, (str, bytes)) or not isinstance(boundaries, (Sequence, np.ndarray)):
        raise AdmissionError(
            f"checkpoint_boundaries is {describe_value(boundaries)}; pass a list of prompt lengths, or leave it out"
        )
    for boundary in boundaries:
        if not _is_length(boundary):
            raise AdmissionError(
                f"checkpoint_boundaries holds {describe_value(boundary)}; each must be an integer of at least 0, a "
                "length of the prompt"
            )
    if not _is_length(tail):
        raise AdmissionError(
            f"replay_tail_length is {describe_value(tail)}; it must be a number of tokens from 0 to the prompt's length"
        )


def _check_readers(request: LLMGenerationRequest) -> None:
    """Who reads the tokens while they are generated."""
    channel: Any = request.stream_channel
    callback: Any = request.token_callback
    if channel is not None and not isinstance(channel, StreamChannel):
        raise AdmissionError(f"stream_channel is {describe_value(channel)}; pass StreamChannel.create(), or None")
    if callback is not None and not callable(callback):
        raise AdmissionError(
            f"token_callback is {describe_value(callback)}; pass a function of the new token ids, or None"
        )


def _check_text(text: object, name: str, limit: int) -> int:
    """Bytes of `text`."""
    if not isinstance(text, str):
        raise AdmissionError(f"{name} is a {type(text).__name__}; it must be text")
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise AdmissionError(f"{name} is not valid Unicode text ({error.reason}); remove lone surrogates") from error
    if size > limit:
        raise AdmissionError(f"{name} has {size} bytes, the limit is {limit}; shorten it")
    return size


def _check_messages(messages: object) -> None:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise AdmissionError(f"messages is a {type(messages).__name__}; it must be a list of messages")
    if len(messages) == 0:
        raise AdmissionError("messages is empty; it needs at least one message")
    if len(messages) > MAX_MESSAGES:
        raise AdmissionError(
            f"messages has {len(messages)} entries, the limit is {MAX_MESSAGES}; drop or summarise the oldest"
        )
    total = sum(_check_message(message, f"messages[{index}]") for index, message in enumerate(messages))
    if total > MAX_PROMPT_TEXT_BYTES:
        raise AdmissionError(
            f"messages hold {total} bytes of text, the limit is {MAX_PROMPT_TEXT_BYTES}; drop or summarise the oldest"
        )


def _check_message(message: object, name: str) -> int:
    """Bytes of text in one message."""
    if not isinstance(message, Mapping):
        raise AdmissionError(f"{name} is a {type(message).__name__}; it must be a dict with 'role' and 'content'")
    role = message.get("role")
    if not isinstance(role, str) or role not in KNOWN_ROLES:
        raise AdmissionError(f"{name} has the role {describe_value(role)}; known roles are {', '.join(KNOWN_ROLES)}")
    content = message.get("content")
    if content is None:
        if _has_tool_calls(message, name):
            return 0
        raise AdmissionError(f"{name} has no content; give it text")
    if isinstance(content, str):
        return _check_text(content, f"{name}['content']", MAX_CONTENT_ITEM_BYTES)
    return _check_content_items(content, f"{name}['content']")


def _has_tool_calls(message: Mapping[Any, Any], name: str) -> bool:
    calls = message.get("tool_calls")
    if calls is None:
        return False
    if isinstance(calls, (str, bytes)) or not isinstance(calls, Sequence):
        raise AdmissionError(f"{name}['tool_calls'] is a {type(calls).__name__}; it must be a list of tool calls")
    return len(calls) > 0


def _check_content_items(content: Any, name: str) -> int:
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise AdmissionError(f"{name} is a {type(content).__name__}; it must be text or a list of content items")
    if len(content) > MAX_CONTENT_ITEMS:
        raise AdmissionError(f"{name} has {len(content)} items, the limit is {MAX_CONTENT_ITEMS}; join text items")
    total = 0
    for index, item in enumerate(content):
        kind = item.get("type") if isinstance(item, Mapping) else type(item).__name__
        if not isinstance(kind, str) or kind != "text":
            raise AdmissionError(
                f"{name}[{index}] is a {describe_value(kind)} item; no encoder is loaded for it, use text items"
            )
        total += _check_text(item.get("text"), f"{name}[{index}]['text']", MAX_CONTENT_ITEM_BYTES)
    return total
