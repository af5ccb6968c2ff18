"""Batch compatibility: which fields keep requests apart, and that none is forgotten."""

import dataclasses

import numpy as np
import pytest
from hostile_values import BadText, BadValue

from edgellm.cache.types import ContextCacheCommitPolicy, ContextCacheLookupPolicy, Retention
from edgellm.engine import compatibility as c
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.sampling.structured import StructuredOutput
from edgellm.streaming import StreamChannel

REQUEST_GROUPS = (
    c.COMPARED_REQUEST_FIELDS,
    c.EXCLUSIVE_REQUEST_FIELDS,
    c.EXEMPT_REQUEST_FIELDS,
    c.NESTED_REQUEST_FIELDS,
)
SAMPLING_GROUPS = (c.UNIFORM_SAMPLING_FIELDS, c.SEED_FIELDS, c.EXEMPT_SAMPLING_FIELDS)

# A value other than the default for every field, so that a difference is seen.
OTHER_REQUEST = {
    "prompt_token_ids": [1],
    "prompt": "other",
    "messages": [{"role": "user", "content": "x"}],
    "lookup_policy": ContextCacheLookupPolicy.BYPASS,
    "commit_policy": ContextCacheCommitPolicy.PREFILL_STATE_ONLY,
    "cache_salt": "salt",
    "retention": Retention(ttl_seconds=5.0),
    "checkpoint_boundaries": (3,),
    "replay_tail_length": 2,
    "stream_channel": StreamChannel.create(),
    "priority": -3,
    "timeout_seconds": 2.5,
    "add_generation_prompt": False,
    "chat_template_kwargs": {"a": 1},
    "disable_spec_decode": True,
    "token_callback": lambda ids: None,
    "adapter_name": "a",
    "speech_output": True,
    "save_system_prompt_kv_cache": True,
    "trajectory": True,
    "num_sequences": 2,
}
OTHER_SAMPLING = {
    "max_tokens": 7,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "logit_bias": {3: 1.0},
    "seed": 11,
    "stop": ("x",),
    "stop_token_ids": (4,),
    "ignore_eos": True,
    "min_tokens": 2,
    "logprobs": 3,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "structured": StructuredOutput(regex="[0-9]+"),
}


def request(**changes: object) -> LLMGenerationRequest:
    return LLMGenerationRequest(**changes)  # type: ignore[arg-type]


def sampled(**changes: object) -> LLMGenerationRequest:
    return LLMGenerationRequest(sampling=SamplingParams(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("cls", "groups"), [(LLMGenerationRequest, REQUEST_GROUPS), (SamplingParams, SAMPLING_GROUPS)])
def test_behaviour_15_every_field_is_classified_exactly_once(cls, groups):
    classified = [name for group in groups for name in group]
    assert sorted(classified) == sorted(field.name for field in dataclasses.fields(cls))


@pytest.mark.parametrize("name", c.COMPARED_REQUEST_FIELDS + c.EXCLUSIVE_REQUEST_FIELDS)
def test_behaviour_15_first_difference_names_the_request_field(name):
    left, right = request(), request(**{name: OTHER_REQUEST[name]})
    for pair in ((left, right), (right, left)):
        assert c.first_difference(*pair, uniform_sampling=False).startswith(f"{name}:")
        assert not c.compatible(*pair, uniform_sampling=False)


@pytest.mark.parametrize("name", c.EXEMPT_REQUEST_FIELDS)
def test_exempt_request_fields_never_keep_requests_apart(name):
    assert c.compatible(request(), request(**{name: OTHER_REQUEST[name]}), uniform_sampling=True)


@pytest.mark.parametrize("name", c.UNIFORM_SAMPLING_FIELDS + c.SEED_FIELDS)
def test_behaviour_15_sampling_is_compared_only_for_a_uniform_decoder(name):
    left, right = sampled(), sampled(**{name: OTHER_SAMPLING[name]})
    assert c.compatible(left, right, uniform_sampling=False)
    assert c.first_difference(left, right, uniform_sampling=True).startswith(f"sampling.{name}:")
    assert c.first_difference(right, left, uniform_sampling=True).startswith(f"sampling.{name}:")


@pytest.mark.parametrize("name", c.EXEMPT_SAMPLING_FIELDS)
def test_exempt_sampling_fields_never_keep_requests_apart(name):
    assert c.compatible(sampled(), sampled(**{name: OTHER_SAMPLING[name]}), uniform_sampling=True)


def test_seed_values_are_per_sequence_only_their_presence_counts():
    assert c.compatible(sampled(seed=1), sampled(seed=2), uniform_sampling=True)


def test_a_token_callback_shares_with_nobody_not_even_an_equal_one():
    def callback(ids: list[int]) -> None:
        pass

    both = request(token_callback=callback), request(token_callback=callback)
    assert not c.compatible(*both, uniform_sampling=False)


def test_equal_requests_are_compatible():
    assert c.first_difference(request(), request(), uniform_sampling=True) == ""


@pytest.mark.parametrize("name", c.COMPARED_REQUEST_FIELDS)
@pytest.mark.parametrize(
    "value", [np.array([1, 2]), BadValue(), BadText("x"), np.int64(1)], ids=lambda value: type(value).__name__
)
def test_foreign_values_are_neither_compared_nor_shown_by_themselves(name, value):
    """They differ from everything but themselves, and nothing they raise gets out."""
    left, right = request(), request(**{name: value})
    for pair in ((left, right), (right, left)):
        assert c.first_difference(*pair, uniform_sampling=True).startswith(f"{name}: ")
    assert c.compatible(right, right, uniform_sampling=True)
