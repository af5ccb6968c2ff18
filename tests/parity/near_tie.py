"""The near-tie rule: tokens are equal, or the first difference lies where two tokens were as good as tied.

Two correct implementations may round differently; where the two best log-probabilities lie closer than that rounding,
either token is right, and everything after it is another text.  Margins are the reference's, in float32; in bfloat16
(8 bits, logits of about 20) the default model's texts part at margins of up to 0.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEAR_TIE_NATS = 0.02
NEAR_TIE_NATS_16_BIT = 0.2


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
        return self.is_acceptable(NEAR_TIE_NATS)

    def is_acceptable(self, nats: float) -> bool:
        return self.margin is None or self.margin < nats


def compare(tokens: Sequence[int], reference: Sequence[int], margins: Sequence[float]) -> Comparison:
    """Compare a continuation with its reference; `margins[i]` is the reference's top-2 margin at step i."""
    for step, (token, expected) in enumerate(zip(tokens, reference, strict=True)):
        if token != expected:
            return Comparison(step, len(reference), margins[step])
    return Comparison(len(reference), len(reference), None)
