"""`TreeSizes`: how deep trees are drafted, and how many of their nodes are worth a row of the step.

How deep is decided as for chains, from how often a level went on.  Then nodes of all trees are taken in the order of
their chances, while the next one raises tokens a second: a sibling that hardly ever is the answer gets no row, so that
a tree whose branches do not pay is a chain, and one whose levels do not pay is nothing.  A chance is the draft's own
probability, corrected by how many tokens it promised and how many were kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edgellm.decoding.adaptive import DraftLengths

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

_FORGET = 0.9  # weight of what was known, at each new observation
_FIRST_PROMISE = 4.0  # tokens that the first guess, a draft that promises what it keeps, counts for


@dataclass(slots=True)
class _Promise:
    """Tokens that a sequence's trees promised, and that were kept, with weights that fade."""

    promised: float = _FIRST_PROMISE
    kept: float = _FIRST_PROMISE

    @property
    def worth(self) -> float:
        return self.kept / self.promised


class TreeSizes(DraftLengths):
    """Belongs to one decoder; sequences are named by resident slot."""

    def __init__(self) -> None:
        super().__init__()
        self._promises: dict[int, _Promise] = {}

    def seat(self, slot: int) -> None:
        super().seat(slot)
        self._promises[slot] = _Promise()

    def unseat(self, slot: int) -> None:
        super().unseat(slot)
        self._promises.pop(slot, None)

    def worth(self, slot: int) -> float:
        """Tokens kept for each that the slot's trees promise."""
        return self._promise(slot).worth

    def observe_tree(self, slot: int, chances: Sequence[float], kept: int) -> None:
        """Of a tree of nodes with these chances `kept` were accepted."""
        if chances:
            promise = self._promise(slot)
            promise.promised = _FORGET * promise.promised + sum(chances)
            promise.kept = _FORGET * promise.kept + kept

    def counts(
        self,
        slots: Sequence[int],
        chances: Sequence[npt.NDArray[np.float64]],
        most: int,
        *,
        num_rows: int,
        other_rows: int = 0,
        spent: float = 0.0,
    ) -> list[int]:
        """Nodes worth a row of each slot's tree; of its best so many.  One at least: it was drafted, and teaches.

        Args:
            chances: of each tree, falling.
            most: nodes of one tree.
            num_rows: sequences that decode in this step, those without a tree included.
            other_rows: rows of prompt chunks.
            spent: seconds that drafting took.
        """
        counts = [min(1, len(tree)) for tree in chances]
        if not self.times.weight:
            return [min(most, len(tree)) for tree in chances]
        per_row = self.times.per_row
        seconds = self.times.predict(num_rows + other_rows + sum(counts)) + spent
        gains = [np.minimum(1.0, self.worth(slot) * tree) for slot, tree in zip(slots, chances, strict=True)]
        expected = num_rows + float(sum(tree[0] for tree in gains if len(tree)))
        ahead = [(gain, number) for number, tree in enumerate(gains) for gain in tree[1:most].tolist()]
        for gain, number in sorted(ahead, key=lambda one: -one[0]):
            if gain * seconds < expected * per_row:
                break
            expected += gain
            seconds += per_row
            counts[number] += 1
        return counts

    def _promise(self, slot: int) -> _Promise:
        return self._promises.setdefault(slot, _Promise())
