"""`ChainDecoder`: speculation with chains or trees, whatever proposes them.

A step widens the decode rows of its batch by their proposals, runs one forward, keeps what the target agrees with, and
rolls recurrent state back to it.  Prompt chunks share that forward.  A subclass proposes, and notes hidden rows.

A step of decode rows in which nothing is proposed is plain decoding: while the next one will be such a step too, it is
enqueued before the host reads the tokens of this one (`edgellm.runtime.run_ahead`).  Whether it will be is a guess;
a wrong one costs that step's time on the device.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, cast

import numpy as np

from edgellm.cache.types import DecodingKvHeadroom
from edgellm.decoding.base import DecodingSeat, DecodingStrategy, StepTokens
from edgellm.decoding.draft_tree import depth_of, mark_trees
from edgellm.decoding.unread_chains import UnreadChain, late_tokens
from edgellm.decoding.verify import verify_runs
from edgellm.errors import BrokenInvariantError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt
    import torch

    from edgellm.decoding.adaptive import DraftLengths
    from edgellm.decoding.verify import Proposal, VerifiedRun
    from edgellm.runtime.batch import Executor, RaggedBatch, TreeExecutor, VerifyingExecutor
    from edgellm.sampling.sampler import Sampler, SamplingState

    Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class KeptRow:
    """What one row of a step leaves behind.

    Attributes:
        slot: resident slot.
        past: tokens that had state before.
        inputs: tokens whose state is kept.
        token_ids: tokens chosen; the last one has no state yet.  Empty for a chunk that does not end its prompt.
        step_hidden: (T, hidden_width) hidden rows of the whole step, the executor's own memory: valid until its next
            forward.  None where it gives none.
        first: row of `step_hidden` that belongs to the first of `inputs`; the others follow.
        branch: of a tree, the rows of `inputs` behind `first`, where they did not follow each other.  None where they
            did.
    """

    slot: int
    past: int
    inputs: Int32Array
    token_ids: list[int]
    step_hidden: torch.Tensor | None = None
    first: int = 0
    branch: list[int] | None = None

    @property
    def hidden(self) -> torch.Tensor | None:
        """(len(inputs), hidden_width) the hidden rows of `inputs`: a view, or of a branch a copy."""
        if self.step_hidden is None:
            return None
        if self.branch is not None:
            return self.step_hidden[self.first :][self.branch]
        return self.step_hidden[self.first : self.first + len(self.inputs)]

    @property
    def rows(self) -> range | list[int]:
        """Rows of `step_hidden` that belong to `inputs`."""
        if self.branch is None:
            return range(self.first, self.first + len(self.inputs))
        return [self.first + row for row in self.branch]


class ChainDecoder(DecodingStrategy):
    """Args:
    num_drafts: K, most tokens proposed in a round.
    lengths: chooses how many of them are worth it; None always proposes as many as it may.
    """

    is_speculative = True
    absorbs_plain_steps = False  # whether `pass_round`, `hold_plain` and `note_plain` are there

    def __init__(self, num_drafts: int, lengths: DraftLengths | None = None) -> None:
        self.num_drafts = num_drafts
        self._lengths = lengths
        self._prompt_ends: dict[int, int] = {}
        # Seconds between two rounds, which one without proposals costs too, and when the latest ended; 0 where it had
        # prompt work.
        self._between = self._ended = 0.0
        self._asked: tuple[list[int], list[int]] = ([], [])  # slots of this round, and most proposals of each

    def required_kv_headroom(self) -> DecodingKvHeadroom:
        contract = self.spec_reuse_contract()
        paired = contract is not None and contract.owns_paged_spec_state
        return DecodingKvHeadroom(self.num_drafts + 1, self.num_drafts + 1 if paired else 0)

    def seat(self, executor: Executor, seat: DecodingSeat) -> None:
        self._prompt_ends[seat.slot] = len(seat.prompt)
        if self._lengths is not None:
            self._lengths.seat(seat.slot)

    def unseat(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._prompt_ends.pop(slot, None)
            if self._lengths is not None:
                self._lengths.unseat(slot)

    def settle(self, executor: Executor, slots: Sequence[int], kept: Sequence[int]) -> None:
        cast("VerifyingExecutor", executor).rewind(slots, kept)

    def run_step(
        self, executor: Executor, batch: RaggedBatch, sampler: Sampler, rows: Sequence[SamplingState]
    ) -> StepTokens:
        slots: list[int] = batch.state_index.tolist()
        decoding = self._decode_rows(batch, slots)
        only_decodes = len(decoding) == len(slots)
        tokens = self._run_round(cast("VerifyingExecutor", executor), batch, slots, decoding, sampler, rows)
        ended = perf_counter() if only_decodes else 0.0
        if self._lengths is not None:
            self._lengths.observe_round(sum(tokens.committed), ended - self._ended if ended and self._ended else 0.0)
        self._ended = ended
        return tokens

    def _run_round(
        self,
        verifier: VerifyingExecutor,
        batch: RaggedBatch,
        slots: list[int],
        decoding: list[int],
        sampler: Sampler,
        rows: Sequence[SamplingState],
    ) -> StepTokens:
        plain = self.absorbs_plain_steps and len(decoding) == len(slots) == len(rows)
        if plain and self._rests(batch, slots):
            self.pass_round(batch, slots)
            return self._run_plain(verifier, batch, slots, sampler, rows)
        started = perf_counter()
        if self._ended and len(decoding) == len(slots):
            self._between = started - self._ended
        proposals = self._propose(verifier, batch, decoding)
        proposed = perf_counter()
        if plain and not any(proposals):
            tokens = self._run_plain(verifier, batch, slots, sampler, rows)
            spent = (proposed - started, perf_counter() - proposed)
            self._learn(batch, proposals, tokens.committed, decoding, spent)
            return tokens
        wide = mark_trees(widen(batch, proposals), proposals)
        wide.late_tokens = late_tokens(proposals)
        forward = verifier.forward_verify(wide)
        selected: list[int] = batch.logits_to_seq.tolist()
        runs = verify_runs(forward.logits, [proposals[row] for row in selected], sampler, rows)
        chosen = dict(zip(selected, runs, strict=True))
        committed = batch.query_len.tolist()
        for row in decoding:
            committed[row] = max(1, len(chosen[row].token_ids))
        short = [row for row in chosen if committed[row] < int(wide.query_len[row])]
        if short:
            verifier.rewind(batch.state_index[short].tolist(), [committed[row] for row in short])
        kept = _kept_rows(wide, committed, chosen, forward.hidden)
        _commit_branches(verifier, kept)
        self.absorb_step(verifier, kept)
        self._learn(wide, proposals, committed, decoding, (proposed - started, perf_counter() - proposed))
        return StepTokens(
            token_ids=[run.token_ids for run in runs],
            committed=committed,
            logprobs=[run.logprobs for run in runs],
            errors={number: run.error for number, run in enumerate(runs) if run.error},
            proposed=[len(chain) for chain in proposals],
        )

    def _rests(self, batch: RaggedBatch, slots: list[int]) -> bool:
        """Whether nothing is proposed in this round, and it is not even looked whether that would pay."""
        if self._lengths is None:
            return False
        most = self._most(batch)
        self._asked = slots, most
        return self._lengths.rest(slots, most)

    def _most(self, batch: RaggedBatch) -> list[int]:
        """Most proposals of each row that decodes."""
        if batch.max_drafts is None:
            return [self.num_drafts] * batch.num_sequences
        most: list[int] = np.minimum(batch.max_drafts, self.num_drafts).tolist()
        return most

    def _run_plain(
        self,
        executor: VerifyingExecutor,
        batch: RaggedBatch,
        slots: list[int],
        sampler: Sampler,
        rows: Sequence[SamplingState],
    ) -> StepTokens:
        """A step in which every row decodes and nothing is proposed."""
        forward = executor.forward_verify(batch)
        run_ahead = self._run_ahead(executor, rows)
        held = False

        def beside(token_ids: torch.Tensor) -> None:
            nonlocal held
            self.hold_plain(slots, forward.hidden)  # first: the next step's rows take the place of these
            held = True
            if run_ahead is not None:
                run_ahead(batch, token_ids, hidden=forward.hidden is not None)

        chosen = sampler.sample(forward.logits, rows, beside=beside)
        if not held:
            self.hold_plain(slots, forward.hidden)
        elif run_ahead is not None:
            executor.ran_ahead_with(chosen.token_ids)  # type: ignore[attr-defined]
        self.note_plain(slots, chosen.token_ids)
        return StepTokens(
            token_ids=[[token_id] for token_id in chosen.token_ids],
            committed=[1] * len(slots),
            logprobs=[None if logprobs is None else [logprobs] for logprobs in chosen.logprobs],
            errors=chosen.errors,
        )

    def _run_ahead(self, executor: VerifyingExecutor, rows: Sequence[SamplingState]) -> Callable[..., None] | None:
        """How the next step is enqueued before it is asked for; None where it would hardly be."""
        if all(state.num_output + 1 >= state.params.max_tokens for state in rows):
            return None
        slots, most = self._asked
        idle = not any(most) if self._lengths is None else self._lengths.stay_idle(slots, most)
        return getattr(executor, "run_ahead", None) if idle else None

    def _decode_rows(self, batch: RaggedBatch, slots: list[int]) -> list[int]:
        """Rows whose prompt is complete."""
        pasts = batch.past_len.tolist()
        try:
            return [row for row, slot in enumerate(slots) if pasts[row] >= self._prompt_ends[slot]]
        except KeyError as error:
            raise BrokenInvariantError(f"slot {error} runs and was never seated with the decoder") from error

    def _propose(self, executor: VerifyingExecutor, batch: RaggedBatch, rows: Sequence[int]) -> list[Proposal]:
        """Per row of the batch its proposals; none for prompt chunks.

        Args:
            rows: those that decode.
        """
        proposals: list[Proposal] = [[] for _ in range(batch.num_sequences)]
        if rows:
            of_all = self._most(batch)
            limits = most = [of_all[row] for row in rows]
            slots: list[int] = batch.state_index[rows].tolist()
            if self._lengths is not None:
                limits = self._lengths.limits(slots, limits, batch.num_tokens - len(rows))
            self._asked = slots, most
            for row, chain in zip(rows, self.propose(executor, batch, rows, limits), strict=True):
                proposals[row] = chain
        return proposals

    def _learn(
        self,
        wide: RaggedBatch,
        proposals: Sequence[Proposal],
        committed: Sequence[int],
        decoding: Sequence[int],
        seconds: tuple[float, float],
    ) -> None:
        """Remember what the step cost, where prompt work does not hide it, and what became of its proposals.

        Args:
            seconds: of proposing, and of everything behind it.
        """
        if self._lengths is None:
            return
        for row in decoding:
            self._lengths.observe(int(wide.state_index[row]), depth_of(proposals[row]), committed[row] - 1)
        self._lengths.observe_proposing(self.drafted_depth(proposals), seconds[0])
        if len(decoding) == wide.num_sequences:
            self._lengths.times.observe(wide.num_tokens, seconds[1] + self._between)

    def drafted_depth(self, proposals: Sequence[Proposal]) -> int:
        """Tokens that the draft was asked for one behind the other in this round: of the longest proposal, or more."""
        return max(map(depth_of, proposals), default=0)

    @abstractmethod
    def propose(
        self, executor: VerifyingExecutor, batch: RaggedBatch, rows: Sequence[int], limits: Sequence[int]
    ) -> Sequence[Proposal]:
        """A chain or tree for each of `rows`, which decode; `limits` says how deep each may be (0: none at all).

        Draft state of what was accepted in the round before is written here, whether or not anything is proposed.
        """

    def absorb_step(self, executor: VerifyingExecutor, rows: Sequence[KeptRow]) -> None:
        """All rows of a step ran.  For decoders that treat them together; otherwise each is absorbed."""
        for row in rows:
            self.absorb(executor, row)

    def pass_round(self, batch: RaggedBatch, slots: Sequence[int]) -> None:
        """`propose` is not called in this round, whose rows, of these slots, all decode: write what cannot wait."""

    def hold_plain(self, slots: Sequence[int], hidden: torch.Tensor | None) -> None:
        """A step of one token for each of `slots` is enqueued: keep copies of what is needed of it, in stream order.

        With `note_plain` it takes the place of `absorb_step`, in decoders that say so (`absorbs_plain_steps`).

        Args:
            hidden: (len(slots), hidden_width) the step's hidden rows; the next step overwrites them.
        """

    def note_plain(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """The tokens that were chosen behind those of `hold_plain`; -1 for a sequence that ends with an error."""

    @abstractmethod
    def absorb(self, executor: VerifyingExecutor, row: KeptRow) -> None:
        """A row ran: keep what the next proposals need.  Called for every row of every step, chunks too."""


def widen(batch: RaggedBatch, proposals: Sequence[Proposal]) -> RaggedBatch:
    """The batch with proposals behind the tokens of their rows, and a logits row for each of these tokens.

    Tokens that nobody has read yet are 0, see `late_tokens`.
    """
    counts = np.fromiter((len(chain) for chain in proposals), np.int32, len(proposals))
    if not counts.any():
        return batch
    query_len = batch.query_len + counts
    query_start = np.zeros(len(query_len) + 1, np.int32)
    np.cumsum(query_len, out=query_start[1:])
    token_ids = np.zeros(int(query_start[-1]), np.int32)
    # Tokens of the batch move back by the proposals in front of their row.
    shifts = np.repeat(query_start[:-1] - batch.query_start[:-1], batch.query_len)
    token_ids[np.arange(batch.num_tokens) + shifts] = batch.token_ids
    for end, chain in zip(query_start[1:].tolist(), proposals, strict=True):
        if len(chain) and not (isinstance(chain, UnreadChain) and not chain.source.is_read):
            token_ids[end - len(chain) : end] = list(chain)
    positions = np.arange(len(token_ids), dtype=np.int32) + np.repeat(batch.past_len - query_start[:-1], query_len)
    each = counts[batch.logits_to_seq] + 1
    # Of a row that proposes, the tokens from its last own one on.
    lasts = (query_start[1:] - counts)[batch.logits_to_seq] - 1
    starts = np.cumsum(each) - each
    logits_index = np.arange(int(each.sum())) + np.repeat(lasts - starts, each)
    return replace(
        batch,
        token_ids=token_ids,
        positions=positions.astype(np.int32),
        query_start=query_start,
        query_len=query_len,
        logits_index=logits_index.astype(np.int64),
        logits_to_seq=np.repeat(batch.logits_to_seq, each).astype(np.int32),
    )


def _kept_rows(
    wide: RaggedBatch, counts: Sequence[int], runs: Mapping[int, VerifiedRun], hidden: torch.Tensor | None
) -> list[KeptRow]:
    slots, pasts, starts = wide.state_index.tolist(), wide.past_len.tolist(), wide.query_start.tolist()
    kept = []
    for row, count in enumerate(counts):
        run, start = runs.get(row), starts[row]
        token_ids = [] if run is None else run.token_ids
        branch = None if run is None else _branch(wide, start, run.nodes[:count])
        inputs = wide.token_ids[start : start + count].copy() if branch is None else wide.token_ids[start:][branch]
        if branch is None and len(token_ids) > 1:
            inputs[1:] = token_ids[: count - 1]  # proposals that were kept, which may have been unread when they ran
        kept.append(KeptRow(slots[row], pasts[row], inputs, token_ids, hidden, start, branch))
    return kept


def _branch(wide: RaggedBatch, start: int, nodes: list[int]) -> list[int] | None:
    """The nodes of a run where they are some of a tree's and do not follow each other.

    Args:
        start: row of the batch at which the proposal begins.
    """
    if wide.tree_mask is None or not wide.tree_mask[start].any() or nodes == list(range(len(nodes))):
        return None
    return nodes


def _commit_branches(executor: VerifyingExecutor, rows: Sequence[KeptRow]) -> None:
    """K and V of accepted branches move to where those of a chain would be."""
    apart = [row for row in rows if row.branch is not None]
    if apart:
        cast("TreeExecutor", executor).commit_rows(
            [row.slot for row in apart], [row.past for row in apart], [row.branch or [] for row in apart]
        )
