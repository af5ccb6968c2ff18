"""Log-probability records that travel with generated tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one generated position.

    Taken from the raw logits after logit bias, before temperature, filters and penalties.

    Attributes:
        token_id: the token that was chosen.
        logprob: its log-probability.
        top: (token id, logprob) of the most likely tokens, descending; empty when only the chosen
            token was asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
