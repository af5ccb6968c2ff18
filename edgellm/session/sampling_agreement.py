"""When do two requests sample alike?  Asked where a decoder takes one set of sampling parameters per batch.

Written once: the scheduler asks before it admits (`engine/compatibility.py`), the session checks that it did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellm.request import LLMGenerationRequest
    from edgellm.sampling.params import SamplingParams

UNIFORM_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Must be equal."""

SEED_FIELDS = ("seed",)
"""It must agree whether one is set; its value is per sequence."""


def sampling_difference(left: SamplingParams, right: SamplingParams) -> str:
    """The first field that keeps them apart, with both values; empty when they agree.  Pure; symmetric."""
    for name in UNIFORM_SAMPLING_FIELDS:
        ours, theirs = getattr(left, name), getattr(right, name)
        if ours != theirs:
            return f"sampling.{name}: {ours!r} differs from {theirs!r}, and the decoder takes one per batch"
    for name in SEED_FIELDS:
        if (getattr(left, name) is None) != (getattr(right, name) is None):
            return f"sampling.{name}: set in one and not in the other, and the decoder samples in one way per batch"
    return ""


def sampling_agrees(left: LLMGenerationRequest, right: LLMGenerationRequest) -> bool:
    """Whether two requests may share a decoder with one set of sampling parameters per batch."""
    return not sampling_difference(left.sampling, right.sampling)
