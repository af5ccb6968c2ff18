"""`DraftLengths`: how many tokens to propose for each sequence, from what was accepted and what steps cost.

A step of s sequences and k proposals takes about `fixed + per_row * (s + k)` seconds, and proposing about `per_depth`
for each token of the longest chain, beside what the draft does anyway; all of it is learned from the steps that ran,
whoever's they were.  The j-th proposal of a sequence is kept with probability a^j, where a is the share of its
proposals that were kept so far, and of a new sequence the share that was kept of all proposals lately: a useless draft
costs its first rounds once, not once a request.  For each length of the longest chain proposals are added while the
next best one raises tokens a second, which is optimal for this model because their gains only fall; the best length is
taken, and none at all where that is best.  (The trade-off is that of Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023, section 3.3, for a batch and measured costs.)

That model knows nothing of steps that run ahead of the host, which hide its work in rounds without proposals alone.  So
a guard (`_throughput_guard`) compares what rounds of both kinds bring, tokens by seconds from the end of one to the end
of the next; where proposing is not faster nothing is proposed, whatever the model says.  To know both speeds four
rounds in a row propose nothing behind the first four that propose, and again ever more rarely, down to every 512.

A sequence for which nothing pays is tried again after 16, 32, ... 512 rounds, and all others that are idle with it:
with one token, then with twice as many while all are kept.  Where the guard held proposals back a trial is up to four
rounds in a row, as long as they are promising.  While nothing pays at most one round of 100 goes to trials, the first
two apart.  How long a slot has waited is no matter of the sequence in it: short answers get their turn too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.decoding._length_records import LengthRecords

if TYPE_CHECKING:
    from collections.abc import Sequence

_SETTLED_STEPS = 8
_OUTLIER = 3.0  # a step counts as at most so many times what was expected: a stall must not shape the fit


@dataclass(slots=True)
class StepTimes:
    """Seconds of a step as a line over its rows, fitted with weights that fade (recursive least squares)."""

    weight: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    rows_rows: float = 0.0
    rows_seconds: float = 0.0
    observed: int = 0

    def observe(self, rows: int, seconds: float) -> None:
        if self.observed >= _SETTLED_STEPS:
            # Of sizes that seem to cost nothing too little is known: there the mean is what was expected.
            seconds = min(seconds, _OUTLIER * max(self.predict(rows), self.seconds / self.weight))
        elif _OUTLIER * seconds < self.predict(rows):
            self._forget()  # what came before was warming up
        self.observed += 1
        fade = 1.0 if self.observed < _SETTLED_STEPS else 0.98
        self.weight = fade * self.weight + 1
        self.rows = fade * self.rows + rows
        self.seconds = fade * self.seconds + seconds
        self.rows_rows = fade * self.rows_rows + rows * rows
        self.rows_seconds = fade * self.rows_seconds + rows * seconds

    def _forget(self) -> None:
        self.weight = self.rows = self.seconds = self.rows_rows = self.rows_seconds = 0.0
        self.observed = 0

    @property
    def per_row(self) -> float:
        """Seconds that one more row costs, never negative; 0 while all steps had the same rows."""
        spread = self.weight * self.rows_rows - self.rows**2
        if spread <= 1e-9 * self.rows_rows * self.weight:
            return self._per_row_of_one_size()
        slope = (self.weight * self.rows_seconds - self.rows * self.seconds) / spread
        mean = self.seconds / self.rows
        return min(max(slope, 0.0), mean)

    def _per_row_of_one_size(self) -> float:
        return 0.0

    def predict(self, rows: int) -> float:
        """Seconds of a step of so many rows."""
        if not self.weight:
            return 0.0
        return max(self.seconds / self.weight + self.per_row * (rows - self.rows / self.weight), 0.0)


class ProposingTimes(StepTimes):
    """The same of proposing, where a row is a token of the longest chain.

    While all chains were equally long their whole time is taken for theirs: a draft that is dear is cut short then,
    and other lengths are seen.
    """

    __slots__ = ()

    def _per_row_of_one_size(self) -> float:
        return self.seconds / self.rows if self.rows else 0.0


class DraftLengths:
    """Belongs to one decoder, and so learns over all its requests; sequences are named by resident slot.

    Attributes:
        times: of steps, without proposing.
        proposing: of what the draft does before a step, by the depth of its longest chain.
    """

    def __init__(self) -> None:
        self.times = StepTimes()
        self.proposing = ProposingTimes()
        self._records = LengthRecords()

    def seat(self, slot: int) -> None:
        """A new sequence: expected to keep the share that all sequences kept lately (0.7 at first)."""
        self._records.seat(slot)

    def unseat(self, slot: int) -> None:
        self._records.seat(slot)

    def acceptance(self, slot: int) -> float:
        """Expected share of the slot's proposals that are kept."""
        return self._records.acceptance(slot)

    def observe(self, slot: int, proposed: int, kept: int) -> None:
        """`kept` of `proposed` tokens were accepted; those behind the first refused one say nothing of theirs."""
        self._records.observe(slot, proposed, kept)

    @property
    def per_depth(self) -> float:
        """Seconds that proposing takes for each token of the longest chain."""
        return self.proposing.per_row

    def observe_proposing(self, depth: int, seconds: float) -> None:
        """Proposing chains of which the longest has `depth` tokens, 0 for none at all, took so long."""
        self.proposing.observe(depth, seconds)

    def limits(self, slots: Sequence[int], most: Sequence[int], other_rows: int = 0) -> list[int]:
        """Proposals worth making for each slot, at most `most` of it.

        Args:
            other_rows: rows of the step that are not of these slots: prompt chunks.
        """
        if not self.times.weight:
            self._records.start(list(slots), not other_rows)
            return list(most)
        idle = self.times.predict(len(slots) + other_rows) + self.proposing.predict(0)
        costs = idle, self.times.per_row, self.per_depth
        return self._records.limits(list(slots), list(most), *costs, not other_rows)

    def observe_round(self, tokens: int, seconds: float) -> None:
        """The latest round brought so many tokens; to be told of every round, behind `observe`.

        Args:
            seconds: since the end of the round before; 0 where it or this one had prompt work.
        """
        self._records.observe_round(tokens, seconds)

    def rest(self, slots: Sequence[int], most: Sequence[int]) -> bool:
        """Whether this round passes without proposals and without asking `limits`, which then counts as one.

        So it is where none of these slots proposed in the round before: what pays changes slowly, looking takes time.
        And so it is where the guard holds proposals back.

        Args:
            most: what each is allowed.
        """
        return self._records.rest(list(slots), list(most))

    def stay_idle(self, slots: Sequence[int], most: Sequence[int]) -> bool:
        """Whether none of these slots is likely to propose in the next round: a guess, from what `limits` said last.

        Args:
            most: what each was allowed in this round.
        """
        return self._records.stay_idle(list(slots), list(most))
