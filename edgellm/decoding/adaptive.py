"""`DraftLengths`: how many tokens to propose for each sequence, from what was accepted and what steps cost.

A step of s sequences and k proposals takes about `fixed + per_row * (s + k)` seconds, and proposing about `per_depth`
for each token of the longest chain; all three are learned from the steps that ran.  The j-th proposal of a sequence is
kept with probability a^j, where a is the share of its proposals that were kept so far.  For each length of the longest
chain proposals are added while the next best one raises tokens a second, which is optimal for this model because their
gains only fall; the best length is taken, and none at all where that is best.  (The trade-off is that of Leviathan et
al., "Fast Inference from Transformers via Speculative Decoding", 2023, section 3.3, for a batch and measured costs.)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_FORGET = 0.9  # weight of what was known, at each new observation
_FIRST_ACCEPTANCE = 0.7
_CERTAINTY = 4.0  # proposals that the first guess counts for
_FIRST_WAIT, _LONGEST_WAIT = 16, 128  # rounds after which a sequence for which nothing pays is tried again
_SETTLED_STEPS = 8
_OUTLIER = 3.0  # a step counts as at most so many times its prediction: a stall must not shape the fit


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
            seconds = min(seconds, _OUTLIER * self.predict(rows))
        self.observed += 1
        fade = 1.0 if self.observed < _SETTLED_STEPS else 0.98
        self.weight = fade * self.weight + 1
        self.rows = fade * self.rows + rows
        self.seconds = fade * self.seconds + seconds
        self.rows_rows = fade * self.rows_rows + rows * rows
        self.rows_seconds = fade * self.rows_seconds + rows * seconds

    @property
    def per_row(self) -> float:
        """Seconds that one more row costs, never negative; 0 while all steps had the same rows."""
        spread = self.weight * self.rows_rows - self.rows**2
        if spread <= 1e-9 * self.rows_rows * self.weight:
            return 0.0
        slope = (self.weight * self.rows_seconds - self.rows * self.seconds) / spread
        mean = self.seconds / self.rows
        return min(max(slope, 0.0), mean)

    def predict(self, rows: int) -> float:
        """Seconds of a step of so many rows."""
        if not self.weight:
            return 0.0
        return max(self.seconds / self.weight + self.per_row * (rows - self.rows / self.weight), 0.0)


@dataclass(slots=True)
class _Record:
    """What a sequence's proposals came to, with weights that fade."""

    kept: float = _FIRST_ACCEPTANCE * _CERTAINTY
    tried: float = _CERTAINTY
    idle: int = 0
    wait: int = _FIRST_WAIT

    @property
    def acceptance(self) -> float:
        return self.kept / self.tried


class DraftLengths:
    """Belongs to one decoder; sequences are named by resident slot."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.per_depth = 0.0  # seconds that proposing takes for each token of the longest chain
        self._records: dict[int, _Record] = {}

    def seat(self, slot: int) -> None:
        """A new sequence, of which nothing is known."""
        self._records[slot] = _Record()

    def unseat(self, slot: int) -> None:
        self._records.pop(slot, None)

    def acceptance(self, slot: int) -> float:
        """Expected share of the slot's proposals that are kept."""
        return self._record(slot).acceptance

    def observe(self, slot: int, proposed: int, kept: int) -> None:
        """`kept` of `proposed` tokens were accepted; those behind the first refused one say nothing of theirs."""
        if not proposed:
            return
        record = self._record(slot)
        tried = min(kept + 1, proposed)
        record.kept = _FORGET * record.kept + kept
        record.tried = _FORGET * record.tried + tried
        record.idle = 0
        if kept:
            record.wait = _FIRST_WAIT

    def observe_proposing(self, depth: int, seconds: float) -> None:
        """Proposing chains of which the longest has `depth` tokens took so long."""
        if depth:
            share = seconds / depth
            self.per_depth = share if not self.per_depth else _FORGET * self.per_depth + (1 - _FORGET) * share

    def limits(self, slots: Sequence[int], most: Sequence[int], other_rows: int = 0) -> list[int]:
        """Proposals worth making for each slot, at most `most` of it.

        Args:
            other_rows: rows of the step that are not of these slots: prompt chunks.
        """
        if not self.times.weight:
            return list(most)
        idle = self.times.predict(len(slots) + other_rows)
        best, best_rate = [0] * len(slots), len(slots) / idle if idle else 0.0
        for depth in range(1, max(most, default=0) + 1):
            allowed = [min(limit, depth) for limit in most]
            chosen, rate = self._spread(slots, allowed, idle + depth * self.per_depth)
            if rate <= best_rate and self.per_depth:
                break
            if rate > best_rate:
                best, best_rate = chosen, rate
        return self._with_probes(slots, most, best)

    def _spread(self, slots: Sequence[int], allowed: Sequence[int], seconds: float) -> tuple[list[int], float]:
        """The best lengths of chains of at most `allowed`, and their tokens a second.

        Args:
            seconds: of the step without any proposal's row.
        """
        per_row, expected = self.times.per_row, float(len(slots))
        chosen = [0] * len(slots)
        gains = [(-self.acceptance(slot), number) for number, slot in enumerate(slots) if allowed[number]]
        heapq.heapify(gains)
        while gains:
            gain, number = gains[0]
            if -gain * seconds < expected * per_row:
                break
            expected -= gain
            seconds += per_row
            chosen[number] += 1
            if chosen[number] < allowed[number]:
                heapq.heapreplace(gains, (gain * self.acceptance(slots[number]), number))
            else:
                heapq.heappop(gains)
        return chosen, expected / seconds if seconds else 0.0

    def _with_probes(self, slots: Sequence[int], most: Sequence[int], chosen: list[int]) -> list[int]:
        """What a sequence writes changes: one for which nothing paid is tried again from time to time."""
        for number, slot in enumerate(slots):
            record = self._record(slot)
            if chosen[number] or not most[number]:
                record.idle = 0
                continue
            record.idle += 1
            if record.idle >= record.wait:
                record.idle, record.wait = 0, min(2 * record.wait, _LONGEST_WAIT)
                chosen[number] = 1
        return chosen

    def _record(self, slot: int) -> _Record:
        return self._records.setdefault(slot, _Record())
