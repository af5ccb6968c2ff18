"""Objects that raise when they are looked at, and requests that hold such values in place of plain ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

PROMPT = [3, 4, 5]
ARRAY = np.array([1, 2])


class Strange(BaseException):
    """No kind that anybody would think of."""


def _raises(*_: object, **__: object) -> Any:
    raise Strange("looked at")


class BadList(list):  # type: ignore[type-arg]
    __len__ = __iter__ = __getitem__ = _raises


class BadText(str):
    __slots__ = ()
    encode = __getitem__ = __eq__ = __ne__ = _raises  # type: ignore[assignment]
    __hash__ = _raises  # type: ignore[assignment]


class BadDict(dict):  # type: ignore[type-arg]
    get = __iter__ = keys = items = _raises  # type: ignore[assignment]


class BadArray:
    __array__ = __repr__ = _raises


class BadValue:
    """Cannot be compared, hashed, shown, or asked for its truth value."""

    __eq__ = __ne__ = __bool__ = __repr__ = __hash__ = _raises  # type: ignore[assignment]


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **message}]}


WITHOUT_A_KIND: list[tuple[str, dict[str, Any]]] = [
    ("commit_policy_array", {"commit_policy": ARRAY}),
    ("commit_policy_none", {"commit_policy": None}),
    ("commit_policy_bad", {"commit_policy": BadValue()}),
    ("lookup_policy_array", {"lookup_policy": ARRAY}),
    ("lookup_policy_text", {"lookup_policy": "bypass"}),
    ("disable_spec_decode_array", {"disable_spec_decode": ARRAY}),
    ("disable_spec_decode_text", {"disable_spec_decode": "no"}),
    ("disable_spec_decode_bad", {"disable_spec_decode": BadValue()}),
    ("speech_output_array", {"speech_output": ARRAY}),
    ("speech_output_bad", {"speech_output": BadValue()}),
    ("trajectory_bad", {"trajectory": BadValue()}),
    ("save_system_prompt_kv_cache_bad", {"save_system_prompt_kv_cache": BadValue()}),
    ("num_sequences_bad", {"num_sequences": BadValue()}),
    ("num_sequences_array", {"num_sequences": ARRAY}),
    ("num_sequences_float", {"num_sequences": 1.0}),
    ("adapter_name_bad", {"adapter_name": BadValue()}),
]
"""Fields that other requests are compared by; these beside a good prompt."""

MALFORMED: list[tuple[str, dict[str, Any]]] = [
    ("ids_meta", {"prompt_token_ids": torch.tensor([3, 4], device="meta")}),
    ("ids_sparse", {"prompt_token_ids": torch.eye(2).to_sparse()}),
    ("ids_grad", {"prompt_token_ids": torch.tensor([3.0, 4.0], requires_grad=True)}),
    ("ids_of_grad", {"prompt_token_ids": [torch.tensor(3.0, requires_grad=True)]}),
    ("ids_bad_array", {"prompt_token_ids": BadArray()}),
    ("ids_of_bad_arrays", {"prompt_token_ids": [BadArray()]}),
    ("ids_bad_list", {"prompt_token_ids": BadList(PROMPT)}),
    ("ids_bad_value", {"prompt_token_ids": [3, BadValue()]}),
    ("prompt_bad", {"prompt": BadText("abc")}),
    ("role_array", said(role=ARRAY)),
    ("role_tensor", said(role=torch.ones(2))),
    ("role_bad", said(role=BadValue())),
    ("role_bad_text", said(role=BadText("user"))),
    ("item_type_array", said(content=[{"type": ARRAY}])),
    ("item_type_tensor", said(content=[{"type": torch.ones(2)}])),
    ("item_type_bad", said(content=[{"type": BadValue()}])),
    ("tool_calls_array", said(content=None, tool_calls=ARRAY)),
    ("tool_calls_bad", said(content=None, tool_calls=BadValue())),
    ("tool_calls_bad_list", said(content=None, tool_calls=BadList([1]))),
    ("message_bad", {"messages": [BadDict(role="user", content="x")]}),
    ("messages_bad", {"messages": BadList([1])}),
    ("template_kwargs_number", {**said(), "chat_template_kwargs": 5}),
    ("template_kwargs_key", {**said(), "chat_template_kwargs": {1: 2}}),
    ("template_kwargs_bad", {**said(), "chat_template_kwargs": BadDict(a=1)}),
    ("add_generation_prompt_bad", {**said(), "add_generation_prompt": BadValue()}),
    ("add_generation_prompt_text", {**said(), "add_generation_prompt": "no"}),
    ("salt_list", {"prompt_token_ids": PROMPT * 30, "cache_salt": ["x"]}),
    ("salt_bad", {"prompt_token_ids": PROMPT, "cache_salt": BadText("x")}),
    ("boundaries_bad", {"prompt_token_ids": PROMPT, "checkpoint_boundaries": BadList([1])}),
    ("boundary_bad", {"prompt_token_ids": PROMPT, "checkpoint_boundaries": [BadValue()]}),
    ("tail_bad", {"prompt_token_ids": PROMPT, "replay_tail_length": BadValue()}),
]
"""Requests that admission refuses."""


def fields_of(cases: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Arguments of `pytest.mark.parametrize` after the name of the parameter."""
    return {"argvalues": [fields for _, fields in cases], "ids": [name for name, _ in cases]}
