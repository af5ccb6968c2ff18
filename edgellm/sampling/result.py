"""`SampleResult`: what one call of the sampler chose, and its words for rows without a choice."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgellm.foreign import describe_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.sampling.logprobs import TokenLogprobs
    from edgellm.sampling.state import SamplingState

NO_TOKEN = -1


@dataclass(slots=True)
class SampleResult:
    """What one call chose; rows in the order they were given.

    Attributes:
        token_ids: one id per row; `NO_TOKEN` (-1) in rows that failed.
        logprobs: per row, None where the request did not ask.
        errors: row to reason, for rows whose logits or grammar allow no choice (NaN, +inf, nothing left, a dead
            end), or whose sampling failed.  Other rows are unaffected.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)

    @classmethod
    def nothing_yet(cls, rows: Sequence[SamplingState]) -> SampleResult:
        return cls([NO_TOKEN] * len(rows), [None] * len(rows))

    def fail(self, row: int, reason: str) -> None:
        self.token_ids[row] = NO_TOKEN
        self.logprobs[row] = None
        self.errors[row] = reason


def sampling_failed(error: BaseException) -> str:
    """Why a row has no token whose own parameters, counts or grammar made the sampler raise `error`."""
    return f"sampling this sequence failed ({describe_error(error)}); change its parameters or its grammar"


def bad_logits(largest: float) -> str:
    """Why a row cannot be sampled whose largest logit is NaN, +inf or -inf."""
    found = "NaN" if math.isnan(largest) else "+inf" if largest > 0 else "no finite value"
    return f"the model's logits contain {found}: no token can be chosen; check the weights and the dtype"


def min_tokens_leaves_nothing(state: SamplingState) -> str:
    """Why a row cannot be sampled whose only possible tokens are those that `min_tokens` excludes."""
    what = "logits leave" if state.guide is None else "grammar leaves"
    return f"min_tokens={state.params.min_tokens} excludes every token that the {what}"
