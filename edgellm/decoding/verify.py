"""Verification of proposed chains and trees: keep what the target would have chosen itself, then one token more.

Each position is sampled exactly as plain decoding would sample it: with the request's own parameters, penalties and
grammar, and with the random number of its absolute position.  So a proposal is kept if and only if it is the token
that plain decoding gives there, and speculation changes no text, greedy or not.

In a tree the walk goes on at the child that proposes the chosen token.  Draft trees hold the likeliest tokens, not
drawn ones; for such, trying the children of a node one after the other without replacement keeps one of them with the
sum of their probabilities, and that is how often the drawn token is among them: nothing is lost against it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from edgellm.decoding.draft_tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from edgellm.sampling.logprobs import TokenLogprobs
    from edgellm.sampling.sampler import Sampler, SampleResult, SamplingState

    Proposal: TypeAlias = Sequence[int] | DraftTree  # a chain, or a tree


@dataclass(slots=True)
class VerifiedRun:
    """Attributes:
    token_ids: proposals that were kept and one more token; fewer than one only with an `error`.
    logprobs: one for each token, or None where nobody asked.
    error: why no token could be chosen.
    nodes: of the proposal, behind which each token was chosen, rising from 0; of a chain 0, 1, 2 and so on.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    error: str = ""
    nodes: list[int] = field(default_factory=list)


def verify_runs(
    logits: torch.Tensor, proposals: Sequence[Proposal], sampler: Sampler, states: Sequence[SamplingState]
) -> list[VerifiedRun]:
    """Verify one chain or tree for each state; a row without proposals just samples its token.

    Args:
        logits: (L, vocab_size) float32; for each proposal one row more than it has tokens, in order.
        states: where each proposal begins; read, never recorded into.
    Cost: proposals whose choices depend on logits and position alone are sampled together, all places at once; others,
        with penalties, a grammar or log-probabilities, position by position.
    """
    starts = [0]
    for proposal in proposals:
        starts.append(starts[-1] + len(proposal) + 1)
    runs: list[VerifiedRun | None] = [None] * len(states)
    plain = [number for number, state in enumerate(states) if state.follows_position]
    if plain:
        rows = [row for number in plain for row in range(starts[number], starts[number + 1])]
        chosen = sampler.sample(
            logits if len(plain) == len(states) else logits[rows],
            [state for number in plain for state in _places(states[number], proposals[number])],
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


def _places(state: SamplingState, proposal: Proposal) -> list[SamplingState]:
    """What the sampler is given for the places of a proposal; a node of a tree is as far on as it is deep."""
    if not isinstance(proposal, DraftTree):
        return state.ahead(len(proposal))
    by_depth = state.ahead(proposal.depth)
    return [by_depth[depth] for depth in proposal.depths()]


def _agreed(chosen: SampleResult, first: int, proposal: Proposal) -> VerifiedRun:
    """The run of a proposal whose choices are known at every node."""
    if not (isinstance(proposal, DraftTree) or chosen.errors):
        return _agreed_chain(chosen.token_ids[first : first + len(proposal) + 1], list(proposal))
    run = VerifiedRun([])
    node: int | None = 0
    while node is not None:
        error = chosen.errors.get(first + node)
        if error is not None:
            return _stopped(run, error)
        run.token_ids.append(chosen.token_ids[first + node])
        run.nodes.append(node)
        node = _next(proposal, node, run.token_ids[-1])
    return run


def _agreed_chain(token_ids: list[int], chain: list[int]) -> VerifiedRun:
    """`_agreed` for a chain, every place of which has a choice."""
    kept = 0
    while kept < len(chain) and token_ids[kept] == chain[kept]:
        kept += 1
    return VerifiedRun(token_ids[: kept + 1], nodes=list(range(kept + 1)))


def _sampled(logits: torch.Tensor, proposal: Proposal, sampler: Sampler, state: SamplingState) -> VerifiedRun:
    """The run of a proposal node by node: what is kept moves penalties, grammar and random numbers."""
    scratch = state.clone() if len(proposal) else state
    run = VerifiedRun([], None if state.params.logprobs is None else [])
    node: int | None = 0
    while node is not None:
        chosen = sampler.sample(logits[node : node + 1], [scratch])
        if chosen.errors:
            return _stopped(run, chosen.errors[0])
        run.token_ids.append(chosen.token_ids[0])
        run.nodes.append(node)
        if run.logprobs is not None and chosen.logprobs[0] is not None:
            run.logprobs.append(chosen.logprobs[0])
        node = _next(proposal, node, run.token_ids[-1])
        if node is not None:
            scratch.record(run.token_ids[-1])
    return run


def _next(proposal: Proposal, node: int, token_id: int) -> int | None:
    """The node that proposes this token behind `node`."""
    if isinstance(proposal, DraftTree):
        return proposal.child(node, token_id)
    return node + 1 if node < len(proposal) and proposal[node] == token_id else None


def _stopped(run: VerifiedRun, error: str) -> VerifiedRun:
    """A position that allows no choice ends the run in front of it; the next step meets it again, as its first."""
    run.error = "" if run.token_ids else error
    return run
