"""Which requests may share steps, field by field.

The classification is closed: every field of `LLMGenerationRequest` and of `SamplingParams` is in exactly one
of the sets below, and a test enumerates both classes.  The failure this guards against is silent: one
request generating with another's settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.foreign import describe_value
from edgellm.session.sampling_agreement import SEED_FIELDS, UNIFORM_SAMPLING_FIELDS, sampling_difference

if TYPE_CHECKING:
    from edgellm.request import LLMGenerationRequest

__all__ = [
    "COMPARED_REQUEST_FIELDS",
    "EXCLUSIVE_REQUEST_FIELDS",
    "EXEMPT_REQUEST_FIELDS",
    "EXEMPT_SAMPLING_FIELDS",
    "NESTED_REQUEST_FIELDS",
    "SEED_FIELDS",
    "UNIFORM_SAMPLING_FIELDS",
    "compatible",
    "first_difference",
]

COMPARED_REQUEST_FIELDS = (
    "adapter_name",
    "disable_spec_decode",
    "commit_policy",
    "speech_output",
    "save_system_prompt_kv_cache",
    "trajectory",
    "num_sequences",
)
"""Must be equal: they choose the decoder, or the session keeps one of each for all residents."""

EXCLUSIVE_REQUEST_FIELDS = ("token_callback",)
"""A request that sets one shares steps with nobody."""

EXEMPT_REQUEST_FIELDS = (
    "prompt_token_ids",
    "prompt",
    "messages",
    "lookup_policy",
    "cache_salt",
    "retention",
    "checkpoint_boundaries",
    "replay_tail_length",
    "stream_channel",
    "priority",
    "timeout_seconds",
    "add_generation_prompt",
    "chat_template_kwargs",
)
"""Belong to one sequence: consumed at admission, or kept per resident."""

NESTED_REQUEST_FIELDS = ("sampling",)
"""Classified below, field by field."""

EXEMPT_SAMPLING_FIELDS = (
    "max_tokens",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "structured",
)
"""Per sequence in every decoder."""

_COMPARABLE = frozenset({bool, int, str})
"""Types whose equality is Python's own; None and the members of an `Enum` are compared by identity."""


def compatible(resident: LLMGenerationRequest, candidate: LLMGenerationRequest, *, uniform_sampling: bool) -> bool:
    """Whether both may share steps.  Pure; symmetric.

    Args:
        uniform_sampling: either of them runs on a decoder with one sampling setting per batch.
    """
    return not first_difference(resident, candidate, uniform_sampling=uniform_sampling)


def first_difference(resident: LLMGenerationRequest, candidate: LLMGenerationRequest, *, uniform_sampling: bool) -> str:
    """The first field that keeps them apart, with both values; empty when they are compatible.

    Never raises, and asks no object of a caller whether it equals another: what no admission takes differs from
    everything but itself.
    """
    for name in EXCLUSIVE_REQUEST_FIELDS:
        if getattr(resident, name) is not None or getattr(candidate, name) is not None:
            return f"{name}: a request that sets it shares steps with nobody"
    for name in COMPARED_REQUEST_FIELDS:
        ours, theirs = getattr(resident, name), getattr(candidate, name)
        if not _equal(ours, theirs):
            return f"{name}: {describe_value(ours)} differs from {describe_value(theirs)}"
    return sampling_difference(resident.sampling, candidate.sampling) if uniform_sampling else ""


def _equal(ours: object, theirs: object) -> bool:
    if ours is theirs:
        return True
    return type(ours) is type(theirs) and type(ours) in _COMPARABLE and ours == theirs
