"""`prefix_key`: equal for requests that begin alike, None where there is nothing to gain, never an error."""

import numpy as np
import pytest
from hostile_values import BadList, BadText, BadValue

from edgellm.cache.types import ContextCacheLookupPolicy
from edgellm.engine.prefix import KEY_CHARACTERS, KEY_TOKENS, prefix_key
from edgellm.request import LLMGenerationRequest

LONG = "x" * KEY_CHARACTERS


def of(**fields):
    return prefix_key(LLMGenerationRequest(**fields))


def chat(*contents, role="user"):
    return [{"role": role, "content": content} for content in contents]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": LONG + "a"}, {"prompt": LONG + "b"}),
        ({"messages": chat(LONG, "a")}, {"messages": chat(LONG, "b")}),
        ({"prompt_token_ids": [*range(KEY_TOKENS), 1]}, {"prompt_token_ids": np.arange(KEY_TOKENS + 9)}),
        ({"prompt": LONG, "cache_salt": "s"}, {"prompt": LONG + "b", "cache_salt": "s"}),
        ({"prompt": LONG, "priority": 3}, {"prompt": LONG}),
    ],
)
def test_requests_that_begin_alike_have_one_key(one, other):
    assert of(**one) == of(**other) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": LONG}, {"prompt": "y" + LONG}),
        ({"prompt": LONG}, {"messages": chat(LONG)}),
        ({"prompt": LONG, "cache_salt": "s"}, {"prompt": LONG}),
        ({"messages": chat(LONG)}, {"messages": chat(LONG, role="system")}),
        ({"messages": chat("a", LONG)}, {"messages": chat("b", LONG)}),
        ({"messages": chat(LONG)}, {"messages": chat(LONG), "chat_template_kwargs": {"tools": [1]}}),
        ({"prompt_token_ids": [1] * KEY_TOKENS}, {"prompt_token_ids": [2] * KEY_TOKENS}),
    ],
)
def test_requests_that_begin_otherwise_differ(one, other):
    assert of(**one) != of(**other)
    assert None not in (of(**one), of(**other))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "short"},
        {"messages": chat("short")},
        {"prompt_token_ids": [1] * (KEY_TOKENS - 1)},
        {"prompt": LONG, "lookup_policy": ContextCacheLookupPolicy.BYPASS},
        {},
        {"messages": [7]},
        {"messages": 7},
        {"prompt": 7},
        {"prompt_token_ids": ["x"] * KEY_TOKENS},
        {"messages": [{"content": LONG}], "chat_template_kwargs": {1: 1, "a": 2}},
        {"prompt": LONG, "cache_salt": ["x"]},
        {"prompt_token_ids": [1] * KEY_TOKENS, "cache_salt": np.array([1, 2])},
        {"messages": BadList(chat(LONG))},
        {"messages": np.array([1, 2])},
        {"prompt_token_ids": BadList([1] * KEY_TOKENS)},
        {"messages": chat(LONG, role=BadValue())},
    ],
)
def test_short_bypassing_and_malformed_requests_have_none(fields):
    assert of(**fields) is None


@pytest.mark.parametrize(
    ("foreign", "plain"),
    [
        ({"prompt": BadText(LONG)}, {"prompt": LONG}),
        ({"prompt": LONG, "cache_salt": BadText("s")}, {"prompt": LONG, "cache_salt": "s"}),
        ({"messages": chat(BadText(LONG))}, {"messages": chat(LONG)}),
        ({"prompt_token_ids": np.ones(KEY_TOKENS, np.uint8)}, {"prompt_token_ids": [1] * KEY_TOKENS}),
    ],
)
def test_a_key_can_be_hashed_and_compared_whatever_the_request_holds(foreign, plain):
    key = of(**foreign)
    assert key in {of(**plain)}
    assert {type(part) for part in leaves(key)} <= {str, int, type(None)}


def leaves(key):
    return [leaf for part in key for leaf in leaves(part)] if isinstance(key, tuple) else [key]


def test_parts_of_a_message_count_as_their_text():
    parts = [{"type": "text", "text": LONG}]
    assert of(messages=chat(parts)) == of(messages=chat(parts, "more")) is not None
