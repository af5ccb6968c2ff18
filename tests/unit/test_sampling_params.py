"""Bounds and derived values of `SamplingParams`."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest

from edgellm.errors import CallerError, InvalidArgumentError
from edgellm.foreign import describe_value
from edgellm.sampling.params import MAX_LOGIT_BIAS_ENTRIES, MAX_LOGPROBS, MAX_STOP_STRINGS, SamplingParams
from edgellm.sampling.structured import StructuredOutput

NAN, INF = math.nan, math.inf

ACCEPTED = {
    "max_tokens": [1, 2**31 - 1],
    "min_tokens": [0, 256],
    "temperature": [0, 0.0, 1e-9, 100.0],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "top_p": [1e-9, 0.5, 1.0, 1],
    "min_p": [0.0, 0.5, 1.0],
    "repetition_penalty": [1e-3, 1.0, 100.0],
    "presence_penalty": [-2.0, 0, 2.0],
    "frequency_penalty": [-2.0, 0, 2.0],
    "seed": [None, 0, 2**64 - 1],
    "logprobs": [None, 0, MAX_LOGPROBS],
}
REFUSED = {
    "max_tokens": [0, -1, 2**31, 1.5, True, NAN, "8"],
    "min_tokens": [-1, 257, 1.0, False],
    "temperature": [-0.1, 100.1, NAN, INF, 10**400, "1", True, None],
    "top_k": [-2, 2**31, 3.0, True],
    "top_p": [0.0, 0, -0.1, 1.0001, NAN],
    "min_p": [-0.1, 1.1, NAN],
    "repetition_penalty": [0.0, 5e-324, 1e-308, 0.9e-3, -1.0, 101.0, NAN, INF],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, NAN],
    "seed": [-1, 2**64, 1.0, True],
    "logprobs": [-1, MAX_LOGPROBS + 1, 2.0, True],
    "stop_token_ids": [[-1], [2**31], [1.5], [True]],
    "stop": ["", [""], ["a", 3], ["x"] * (MAX_STOP_STRINGS + 1)],
    "logit_bias": [{-1: 0.0}, {2**31: 0.0}, {0: 100.5}, {0: NAN}, {0: 10**400}, {0: "1"}, {"0": 1.0}],
}


def cases(table: dict) -> list:
    return [
        pytest.param(name, value, id=f"{name}={describe_value(value, 20)}")
        for name, values in table.items()
        for value in values
    ]


@pytest.mark.parametrize(("name", "value"), cases(ACCEPTED))
def test_value_in_range_is_kept(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_value_out_of_range_is_refused_and_named(name, value):
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)
    assert isinstance(caught.value, CallerError)
    assert isinstance(caught.value, ValueError)


def test_message_names_value_and_limits():
    with pytest.raises(InvalidArgumentError, match=r"^top_p is 1\.5; it must be a finite number in \(0\.0, 1\.0\]$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(InvalidArgumentError, match=r"^max_tokens is 0; it must be an integer from 1 to 2147483647$"):
        SamplingParams(max_tokens=0)
    with pytest.raises(InvalidArgumentError, match=r"^temperature is nan; it must be a finite number"):
        SamplingParams(temperature=NAN)
    with pytest.raises(InvalidArgumentError, match=r"^min_tokens is 9; it must be an integer from 0 to 8$"):
        SamplingParams(max_tokens=8, min_tokens=9)


def test_defaults_are_those_documented():
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (256, 1.0, 0, 1.0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.seed, params.logprobs, params.stop, params.stop_token_ids) == (None, None, (), ())
    assert (params.ignore_eos, params.skip_special_tokens, params.include_stop_str_in_output) == (False, True, False)
    assert dict(params.logit_bias) == {}
    assert not params.greedy


def test_one_stop_string_or_several_become_a_tuple():
    assert SamplingParams(stop="END").stop_strings == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop=None).stop_strings == ()
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


def test_values_do_not_change_with_what_they_were_made_from():
    bias, stops = {1: 2.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stops)
    bias[2] = 3.0
    stops.append("b")
    assert dict(params.logit_bias) == {1: 2.0}
    assert params.stop == ("a",)
    with pytest.raises(TypeError):
        params.logit_bias[1] = 0.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3


def test_greedy_means_temperature_zero():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=1e-6).greedy


def test_too_many_biases_are_refused():
    SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS_ENTRIES), 1.0))
    with pytest.raises(InvalidArgumentError, match="1025 entries, the limit is 1024"):
        SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS_ENTRIES + 1), 1.0))


def test_a_stop_string_of_unbounded_length_is_refused() -> None:
    assert SamplingParams(stop="x" * 1024).stop_strings == ("x" * 1024,)
    with pytest.raises(InvalidArgumentError, match="has 1025 characters, the limit is 1024"):
        SamplingParams(stop=["ok", "x" * 1025])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stop", 5, "stop is 5; it must be text or a list of texts"),
        ("stop", {"a": 1}, "stop is {'a': 1}; it must be text or a list of texts"),
        ("stop", b"x", "stop is b'x'; it must be text or a list of texts"),
        ("stop_token_ids", 5, "stop_token_ids is 5; it must be a list of token ids"),
        ("stop_token_ids", "5", "stop_token_ids is '5'; it must be a list of token ids"),
        ("logit_bias", [1], "logit_bias is [1]; it must be a dict from token id to bias"),
        ("logit_bias", 7, "logit_bias is 7; it must be a dict from token id to bias"),
    ],
)
def test_collections_of_a_wrong_type_are_named(field: str, value: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["ignore_eos", "skip_special_tokens", "include_stop_str_in_output"])
@pytest.mark.parametrize("value", ["no", None, 0, 1])
def test_switches_are_true_or_false(name: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} is .*must be True or False"):
        SamplingParams(**{name: value})


FULL = {
    "max_tokens": 7,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "logit_bias": {3: 1.0, 9: -2},
    "seed": 11,
    "stop": ["x", "yy"],
    "stop_token_ids": [4],
    "min_tokens": 2,
    "logprobs": 3,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "structured": StructuredOutput(json_schema={"type": "integer"}),
}


class TestValues:
    def test_every_field_is_in_the_full_example(self):
        names = {one.name for one in dataclasses.fields(SamplingParams)}
        assert names - set(FULL) == {"ignore_eos"}  # does not go with `structured`

    @pytest.mark.parametrize("values", [{}, FULL, {"ignore_eos": True, "logit_bias": {1: 2.0}}])
    def test_pickled_copied_and_hashed(self, values):
        params = SamplingParams(**values)
        copies = [pickle.loads(pickle.dumps(params, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
        for twin in (*copies, copy.copy(params), copy.deepcopy(params), dataclasses.replace(params)):
            assert twin == params
            assert hash(twin) == hash(params)
            assert type(twin.logit_bias) is type(params.logit_bias)
            with pytest.raises(TypeError):
                twin.logit_bias[5] = 1.0  # type: ignore[index]
        assert len({params, *copies}) == 1

    @pytest.mark.parametrize("name", sorted(FULL))
    def test_one_other_value_is_another_value(self, name):
        assert SamplingParams(**{name: FULL[name]}) != SamplingParams()
        others = {SamplingParams(**{one: FULL[one]}) for one in FULL if one != "min_tokens"}
        assert len(others) == len(FULL) - 1

    def test_the_order_of_biases_does_not_matter(self):
        first, second = SamplingParams(logit_bias={1: 2.0, 3: 4.0}), SamplingParams(logit_bias={3: 4.0, 1: 2.0})
        assert (first, hash(first)) == (second, hash(second))

    def test_a_dict_that_changes_later_changes_nothing(self):
        bias = {1: 2.0}
        params = SamplingParams(logit_bias=bias)
        bias[1] = 3.0
        assert dict(params.logit_bias) == {1: 2.0}
