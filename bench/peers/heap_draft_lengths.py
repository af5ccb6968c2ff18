"""`HeapDraftLengths`: the superseded form of `edgellm.decoding.adaptive.DraftLengths`, a record a sequence and a heap.

What `bench_draft_lengths` compares with: the same choices, one proposal and one sequence at a time.  It measures no
rounds, so it has no guard.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from edgellm.decoding.adaptive import StepTimes

_FORGET = 0.9
_FIRST_ACCEPTANCE = 0.7
_CERTAINTY = 4.0
_FIRST_WAIT, _LONGEST_WAIT = 16, 512
_LONGEST_TRIED = 8
_TRIAL_SHARE, _MOST_TRIALS = 0.01, 2.0


@dataclass(slots=True)
class _Record:
    """What a sequence's proposals came to, with weights that fade."""

    kept: float = _FIRST_ACCEPTANCE * _CERTAINTY
    tried: float = _CERTAINTY
    idle: int = 0
    wait: int = _FIRST_WAIT
    trial: int = 0

    @property
    def acceptance(self) -> float:
        return self.kept / self.tried


class HeapDraftLengths:
    """See `DraftLengths`."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.per_depth = 0.0  # seconds that proposing takes for each token of the longest chain
        self._records: dict[int, _Record] = {}
        self._credit = _MOST_TRIALS  # rounds that trials may propose in while nothing pays

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
        record = self._record(slot)
        record.trial = 2 * record.trial if 0 < proposed == kept and record.trial < _LONGEST_TRIED else 0
        if not proposed:
            return
        tried = min(kept + 1, proposed)
        record.kept = _FORGET * record.kept + kept
        record.tried = _FORGET * record.tried + tried
        record.idle = 0

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
        return self._with_trials(slots, most, best)

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

    def _with_trials(self, slots: Sequence[int], most: Sequence[int], chosen: list[int]) -> list[int]:
        """What a sequence writes changes: those for which nothing paid are tried again from time to time, together."""
        records, pays = [self._record(slot) for slot in slots], any(chosen)
        ripe = any(record.idle + 1 >= record.wait for record, limit in zip(records, most, strict=True) if limit)
        begins = ripe and (pays or self._credit + _TRIAL_SHARE >= 1.0)
        for number, record in enumerate(records):
            if begins and most[number] and not (chosen[number] or record.trial):
                record.wait, record.trial = min(2 * record.wait, _LONGEST_WAIT), 1
                record.kept *= min(1.0, _CERTAINTY / record.tried)
                record.tried = min(record.tried, _CERTAINTY)
            elif chosen[number]:
                record.wait = _FIRST_WAIT
            chosen[number] = max(chosen[number], min(record.trial, most[number]))
            record.idle = 0 if chosen[number] or not most[number] else record.idle + 1
        if any(chosen) and not pays:
            self._credit -= 1.0
        self._credit = min(self._credit + _TRIAL_SHARE, _MOST_TRIALS)
        return chosen

    def _record(self, slot: int) -> _Record:
        return self._records.setdefault(slot, _Record())
