"""`StepCostModel`: how long a step will take, learned from the steps that ran.

    duration  ~  c0  +  c1 * decode rows  +  c2 * prompt tokens  +  c3 * sum over chunks of tokens * (past + tokens / 2)

The last term is attention: each prompt token reads its whole past.  The coefficients are the non-negative least
squares fit over past steps, older ones counting less (`_FORGET`), so the constant also follows what is no feature:
the contexts of the decode rows, clocks, other load.  A prediction is raised by a margin that is tracked so that
one step in `1 / (1 - _QUANTILE)` takes longer than predicted, whatever the noise.

Cautious at first: no more prompt tokens than twice what was tried before, beginning with a page.
Thread-free and deterministic in what it observed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.session.types import SequenceWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.session.types import ScheduledSequenceDescriptor

# Scales that bring the features of usual steps near 1, for the conditioning of the fit.
_ROW_SCALE = 1 / 16
_TOKEN_SCALE = 1 / 256
_ATTENTION_SCALE = 1 / (256 * 1024)
_NUM_FEATURES = 4

_FORGET = 0.98  # the weight of an observation halves in 34 steps
_RIDGE = 1e-4  # keeps directions that were never seen at 0
_SWEEPS = 12  # of coordinate descent; it starts from the fit before
_QUANTILE = 0.98
_MARGIN_GAIN = 0.1
_MARGIN_RANGE = (1.0, 4.0)
_FIRST_MARGIN = 1.2
_WARM_STEPS = 8  # before so many steps nothing is taken for an outlier
_SETTLED_STEPS = 16  # before so many steps, of which the first are slow, nothing is said of the least there is
_OUTLIER = 3.0  # a step counts as at most so many times its prediction: a page fault must not shape the fit


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes, as far as its duration depends on it.

    Attributes:
        decode_rows, prompt_tokens: how many of each.
        attention: sum over prompt chunks of tokens * (past + tokens / 2).
    """

    decode_rows: int = 0
    prompt_tokens: int = 0
    attention: float = 0.0

    @classmethod
    def of_plan(cls, plan: Sequence[ScheduledSequenceDescriptor]) -> StepWork:
        """Chunks stand at the end of a plan, so that decode rows are not looked at one by one."""
        chunks = tokens = 0
        attention = 0.0
        for descriptor in reversed(plan):
            if descriptor.work is SequenceWork.DECODE:
                break
            length = descriptor.query_length
            chunks += 1
            tokens += length
            attention += length * (descriptor.past_length + length / 2)
        return cls(len(plan) - chunks, tokens, attention)


class StepCostModel:
    """Predicts durations in seconds and says how many prompt tokens fit; belongs to the actor.

    Attributes:
        margin: factor from the fit to what is promised.
        observed: steps it learned from.
        largest: most prompt tokens in a step so far.
    """

    def __init__(self) -> None:
        size = _NUM_FEATURES
        self._gram = [[_RIDGE if i == j else 0.0 for j in range(size)] for i in range(size)]
        self._moment = [0.0] * size
        self._weights = [0.0] * size
        self.margin = _FIRST_MARGIN
        self.observed = 0
        self.largest = 0

    def predict(self, work: StepWork) -> float:
        """Seconds the step is promised to take; 0.0 before the first observation."""
        return self.margin * self._fit(_features(work))

    def prompt_tokens_within(self, seconds: float, *, decode_rows: int, past: int, page_size: int) -> int:
        """Prompt tokens that a step may carry beside its decode rows.

        Args:
            seconds: how long it may take.
            past: committed length of the prompt that gets them; where several do, the longest.
            page_size: the least that is returned, so that the first prompt always progresses.
        Returns:
            At least a page, at most twice the most tried so far.
        """
        most = max(page_size, 2 * self.largest)
        if not self.observed:
            return page_size
        constant, per_row, per_token, per_pair = self._weights
        rest = seconds / self.margin - constant - per_row * decode_rows * _ROW_SCALE
        if rest <= 0:
            return page_size
        # a n^2 + b n = rest
        a = per_pair * _ATTENTION_SCALE / 2
        b = per_token * _TOKEN_SCALE + 2 * a * past
        if b <= 0 and a <= 0:
            return most
        # The root in the form that loses no digits where a is tiny.
        fits = 2 * rest / (b + math.sqrt(b * b + 4 * a * rest))
        return max(page_size, int(min(fits, most)))

    def least(self, page_size: int) -> float | None:
        """Seconds that a prompt's first page takes in a step of its own; None before `_SETTLED_STEPS` observations.

        Without the margin: what is expected, not what is promised.  No step with a page of prompt work is cheaper,
        and where only decode rows were seen so far it is what a step costs without any.
        """
        if self.observed < _SETTLED_STEPS:
            return None
        return self._fit(_features(StepWork(prompt_tokens=page_size, attention=page_size * page_size / 2)))

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that ran."""
        features = _features(work)
        expected = self._fit(features)
        if work.prompt_tokens and expected > 0 and self.observed >= _WARM_STEPS:
            over = seconds > expected * self.margin
            self.margin += _MARGIN_GAIN * (_QUANTILE if over else _QUANTILE - 1)
            self.margin = min(max(self.margin, _MARGIN_RANGE[0]), _MARGIN_RANGE[1])
            seconds = min(seconds, _OUTLIER * expected)
        self.observed += 1
        self.largest = max(self.largest, work.prompt_tokens)
        self._add(features, seconds)
        self._solve()

    def _fit(self, features: Sequence[float]) -> float:
        return sum(weight * feature for weight, feature in zip(self._weights, features, strict=True))

    def _add(self, features: Sequence[float], seconds: float) -> None:
        for i, feature in enumerate(features):
            row = self._gram[i]
            for j, other in enumerate(features):
                row[j] = _FORGET * row[j] + feature * other
            row[i] += (1 - _FORGET) * _RIDGE
            self._moment[i] = _FORGET * self._moment[i] + feature * seconds

    def _solve(self) -> None:
        """Non-negative least squares by coordinate descent on the normal equations."""
        weights = self._weights
        for _ in range(_SWEEPS):
            for i, row in enumerate(self._gram):
                rest = self._moment[i] + row[i] * weights[i]
                for coefficient, weight in zip(row, weights, strict=True):
                    rest -= coefficient * weight
                weights[i] = max(0.0, rest / row[i])


def _features(work: StepWork) -> tuple[float, ...]:
    return (
        1.0,
        work.decode_rows * _ROW_SCALE,
        work.prompt_tokens * _TOKEN_SCALE,
        work.attention * _ATTENTION_SCALE,
    )
