"""How long it takes to choose how many tokens to propose, and to note what became of them, for the residents of a step.

    pytest -o python_files='bench_*.py' bench/bench_draft_lengths.py -s       # times; ratios in extra_info
    pytest -o python_files='bench_*.py' bench/bench_draft_lengths.py --benchmark-disable       # smoke test

The peer goes through the sequences one by one (`HeapDraftLengths`).  Both are fed the same rounds; their choices are
compared in every one.  A round is one call of `limits`, and the notes of all its sequences.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from bench.comparison import alternate, report, timed
from bench.peers.heap_draft_lengths import HeapDraftLengths
from edgellm.decoding.adaptive import DraftLengths

ROUNDS = 60


class Fed:
    """Lengths that learn from rounds in which sequence i keeps each token with a probability of its own."""

    def __init__(self, lengths: Any, residents: int, most: int) -> None:
        self.lengths = lengths
        self.slots = list(range(residents))
        self.most = [most] * residents
        self.chosen: list[list[int]] = []
        self._chance = random.Random(7)
        self._acceptances = [self._chance.random() for _ in self.slots]
        for slot in self.slots:
            lengths.seat(slot)

    def round(self) -> float:
        """One round; nanoseconds that the lengths took for it."""
        spent = timed(lambda: self.chosen.append(self.lengths.limits(self.slots, self.most)))
        chosen = self.chosen[-1]
        kept = [self._kept(slot, number) for slot, number in zip(self.slots, chosen, strict=True)]
        spent += timed(lambda: self._note(chosen, kept))
        # A step costs a base and a little for each row, so that lengths are worth choosing.
        self.lengths.times.observe(len(chosen) + sum(chosen), 5e-3 + 4e-5 * (len(chosen) + sum(chosen)))
        self.lengths.observe_proposing(max(chosen), 2e-4 * max(chosen))
        return spent

    def _kept(self, slot: int, proposed: int) -> int:
        kept = 0
        while kept < proposed and self._chance.random() < self._acceptances[slot]:
            kept += 1
        return kept

    def _note(self, proposed: list[int], kept: list[int]) -> None:
        for slot, number, right in zip(self.slots, proposed, kept, strict=True):
            self.lengths.observe(slot, number, right)


@pytest.mark.parametrize("most", [4, 15])
@pytest.mark.parametrize("residents", [1, 8, 64, 256])
def test_choosing_lengths(benchmark: Any, residents: int, most: int) -> None:
    ours, peer = Fed(DraftLengths(), residents, most), Fed(HeapDraftLengths(), residents, most)
    peer_ns, ours_ns = alternate(benchmark, peer.round, ours.round, ROUNDS)
    assert ours.chosen == peer.chosen
    ratio = report(benchmark, peer_ns, ours_ns, residents=residents, most=most)
    if residents >= 64 and benchmark.enabled:
        assert ratio > 2.0
