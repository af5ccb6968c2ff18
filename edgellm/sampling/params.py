"""`SamplingParams`: how one request chooses its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from edgellm.argument_check import check_flag, check_int, check_number
from edgellm.errors import InvalidArgumentError
from edgellm.foreign import describe_value
from edgellm.sampling.structured import StructuredOutput

MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGPROBS = 50
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024  # every text piece is compared with every beginning of a stop string


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request; field names as in vLLM.

    Attributes:
        max_tokens: most tokens to generate; at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set whose probability reaches top_p; in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one; in [0, 1].
        repetition_penalty: in [0.001, 100]; divides positive and multiplies negative logits of tokens seen in prompt
            or output (Keskar et al. 2019, "CTRL").
        presence_penalty, frequency_penalty: in [-2, 2]; subtracted once, or per occurrence, for tokens of
            the output.
        logit_bias: token id to a bias in [-100, 100] added to its logit.
        seed: makes sampling reproducible; the result depends on (seed, position) only.  None draws a
            fresh seed.
        stop: a string or several; generation ends where one appears, and it is cut from the text.
        stop_token_ids: ids that end generation beside the model's own end tokens.
        ignore_eos: go on after the model's end token (fixed-length runs).
        min_tokens: end tokens and stop token ids are not chosen before so many tokens.
        logprobs: None, or 0..50 most likely alternatives beside the chosen token's own.
        skip_special_tokens: leave special tokens out of the text (never out of the ids).
        include_stop_str_in_output: keep the matched stop string in the text.
        structured: a form that the text is guaranteed to have; see `StructuredOutput`.  The end token is chosen where
            the text is complete, so `ignore_eos` does not go with it, and `min_tokens` may leave nothing to choose.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] = ()
    stop_token_ids: list[int] | tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        set_field(self, "stop", _as_tuple("stop", stop, "text or a list of texts"))
        set_field(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids, "a list of token ids"))
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise InvalidArgumentError(
                f"logit_bias is {describe_value(self.logit_bias)}; it must be a dict from token id to bias"
            )
        set_field(self, "logit_bias", MappingProxyType(dict(self.logit_bias or {})))
        self._check()

    def __hash__(self) -> int:
        values = (getattr(self, one.name) for one in fields(self) if one.name != "logit_bias")
        return hash((*values, frozenset(self.logit_bias.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: made anew from its values, since a read-only mapping cannot be pickled."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return _rebuild, ({**values, "logit_bias": dict(self.logit_bias)},)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)

    def _check(self) -> None:
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            check_flag(name, getattr(self, name))
        check_int("max_tokens", self.max_tokens, low=1)
        check_int("min_tokens", self.min_tokens, low=0, high=self.max_tokens)
        check_int("top_k", self.top_k, low=-1)
        check_number("temperature", self.temperature, low=0.0, high=100.0)
        check_number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        check_number("min_p", self.min_p, low=0.0, high=1.0)
        check_number("repetition_penalty", self.repetition_penalty, low=1e-3, high=100.0)  # no logit overflows by it
        check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        if self.seed is not None:
            check_int("seed", self.seed, low=0, high=2**64 - 1)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        self._check_stops()
        self._check_logit_bias()
        self._check_structured()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidArgumentError(
                f"stop has {len(self.stop)} strings, the limit is {MAX_STOP_STRINGS}; use fewer stop strings"
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidArgumentError(
                    f"stop contains {describe_value(text)}; each stop string must be non-empty text"
                )
            if len(text) > MAX_STOP_STRING_LENGTH:
                raise InvalidArgumentError(
                    f"a stop string has {len(text)} characters, the limit is {MAX_STOP_STRING_LENGTH}; shorten it"
                )
        for token_id in self.stop_token_ids:
            check_int("stop_token_ids entry", token_id, low=0)

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise InvalidArgumentError(
                f"logit_bias has {len(self.logit_bias)} entries, the limit is {MAX_LOGIT_BIAS_ENTRIES}; pass fewer"
            )
        for token_id, bias in self.logit_bias.items():
            check_int("logit_bias token id", token_id, low=0)
            check_number(f"logit_bias[{token_id}]", bias, low=-100.0, high=100.0)

    def _check_structured(self) -> None:
        if self.structured is None:
            return
        if not isinstance(self.structured, StructuredOutput):
            raise InvalidArgumentError(
                f"structured is a {type(self.structured).__name__}; pass edgellm.StructuredOutput(json_schema=...), or "
                "another of its forms"
            )
        if self.ignore_eos:
            raise InvalidArgumentError(
                "ignore_eos is True and structured is set; a text of a given form ends with the end token, leave "
                "ignore_eos False"
            )


def _rebuild(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**values)


def _as_tuple(name: str, value: object, wanted: str) -> tuple[Any, ...]:
    """A list, tuple or set as a tuple; None is an empty one."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidArgumentError(f"{name} is {describe_value(value)}; it must be {wanted}")
    return tuple(value)
