"""The finish decision: when does a sequence end, and why?  Written once, for every decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.session.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Collection

    from edgellm.sampling.params import SamplingParams

# A stop string found late (while flushing, or in the one-shot decode) replaces these reasons only.
OVERRIDDEN_BY_STOP_STRING = frozenset({FinishReason.NOT_FINISHED, FinishReason.END_ID, FinishReason.LENGTH})


@dataclass(frozen=True, slots=True)
class FinishRule:
    """What ends one sequence.

    Attributes:
        end_ids: the model's end tokens (none under `ignore_eos`) and the request's stop token ids.
        max_new_tokens: the clamped generate budget.
    """

    end_ids: frozenset[int]
    max_new_tokens: int

    @classmethod
    def of(cls, params: SamplingParams, *, eos_token_ids: Collection[int], max_new_tokens: int) -> FinishRule:
        eos = () if params.ignore_eos else eos_token_ids
        return cls(frozenset(eos).union(params.stop_token_ids), max_new_tokens)

    def decide(self, token_id: int, num_generated: int, stop_matched: bool) -> FinishReason:
        """Reason after `token_id` became generated token number `num_generated` (counted from 1).

        A stop string overrides an end token and the length; a reason set before (cancelled, error) is
        never handed to this function.
        """
        if stop_matched:
            return FinishReason.STOP_WORDS
        if token_id in self.end_ids:
            return FinishReason.END_ID
        if num_generated >= self.max_new_tokens:
            return FinishReason.LENGTH
        return FinishReason.NOT_FINISHED
