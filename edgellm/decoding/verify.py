"""Verification of proposed chains: keep what the target would have chosen itself, then one token more.

Each position is sampled exactly as plain decoding would sample it: with the request's own parameters, penalties and
grammar, and with the random number of its absolute position.  So a proposal is kept if and only if it is the token
that plain decoding gives there, and speculation changes no text, greedy or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from edgellm.sampling.logprobs import TokenLogprobs
    from edgellm.sampling.sampler import Sampler, SampleResult, SamplingState


@dataclass(slots=True)
class VerifiedRun:
    """Attributes:
    token_ids: proposals that were kept and one more token; fewer than one only with an `error`.
    logprobs: one for each token, or None where nobody asked.
    error: why no token could be chosen.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    error: str = ""


def verify_runs(
    logits: torch.Tensor, proposals: Sequence[Sequence[int]], sampler: Sampler, states: Sequence[SamplingState]
) -> list[VerifiedRun]:
    """Verify one chain for each state; a row without proposals just samples its token.

    Args:
        logits: (L, vocab_size) float32; for each chain one row more than it has proposals, in order.
        states: where each chain begins; read, never recorded into.
    Cost: chains that are plain greedy share one argmax; others sample position by position.
    """
    starts = [0]
    for chain in proposals:
        starts.append(starts[-1] + len(chain) + 1)
    runs: list[VerifiedRun | None] = [None] * len(states)
    plain = [number for number, state in enumerate(states) if state.plain_greedy]
    if plain:
        rows = [row for number in plain for row in range(starts[number], starts[number + 1])]
        chosen = sampler.sample(
            logits if len(plain) == len(states) else logits[rows],
            [states[number] for number in plain for _ in range(len(proposals[number]) + 1)],
        )
        first = 0
        for number in plain:
            runs[number] = _agreed(chosen, first, proposals[number])
            first += len(proposals[number]) + 1
    return [
        _sampled(logits[starts[number] : starts[number + 1]], proposals[number], sampler, states[number])
        if run is None
        else run
        for number, run in enumerate(runs)
    ]


def _agreed(chosen: SampleResult, first: int, chain: Sequence[int]) -> VerifiedRun:
    """The run of a chain whose choices are known at every position."""
    token_ids: list[int] = []
    for offset in range(len(chain) + 1):
        error = chosen.errors.get(first + offset)
        if error is not None:
            return _stopped(token_ids, None, error)
        token_ids.append(chosen.token_ids[first + offset])
        if offset == len(chain) or token_ids[-1] != chain[offset]:
            break
    return VerifiedRun(token_ids)


def _sampled(logits: torch.Tensor, chain: Sequence[int], sampler: Sampler, state: SamplingState) -> VerifiedRun:
    """The run of a chain position by position: what is kept moves penalties, grammar and random numbers."""
    scratch = state.clone() if chain else state
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None if state.params.logprobs is None else []
    for offset in range(len(chain) + 1):
        chosen = sampler.sample(logits[offset : offset + 1], [scratch])
        if chosen.errors:
            return _stopped(token_ids, logprobs, chosen.errors[0])
        token_ids.append(chosen.token_ids[0])
        if logprobs is not None and chosen.logprobs[0] is not None:
            logprobs.append(chosen.logprobs[0])
        if offset == len(chain) or token_ids[-1] != chain[offset]:
            break
        scratch.record(token_ids[-1])
    return VerifiedRun(token_ids, logprobs)


def _stopped(token_ids: list[int], logprobs: list[TokenLogprobs] | None, error: str) -> VerifiedRun:
    """A position that allows no choice ends the run in front of it; the next step meets it again, as its first."""
    return VerifiedRun(token_ids, logprobs, "" if token_ids else error)
