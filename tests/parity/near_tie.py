"""The near-tie rule: tokens are equal, or the first difference lies where two tokens were as good as tied.

Two correct float32 implementations may round differently; where the two best log-probabilities lie closer than
that rounding, either token is right, and everything after it is another text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEAR_TIE_NATS = 0.02


@dataclass(frozen=True)
class Comparison:
    """Outcome of one comparison: `equal` tokens in front, and the margin where the first difference lies."""

    equal: int
    total: int
    margin: float | None

    @property
    def identical(self) -> bool:
        return self.margin is None

    @property
    def acceptable(self) -> bool:
        return self.margin is None or self.margin < NEAR_TIE_NATS


def compare(tokens: Sequence[int], reference: Sequence[int], margins: Sequence[float]) -> Comparison:
    """Compare a continuation with its reference; `margins[i]` is the reference's top-2 margin at step i."""
    for step, (token, expected) in enumerate(zip(tokens, reference, strict=True)):
        if token != expected:
            return Comparison(step, len(reference), margins[step])
    return Comparison(len(reference), len(reference), None)
