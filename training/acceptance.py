"""How many drafts of a chain greedy decoding would accept, counted as the runtime counts: round after round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts over rounds of chains of one length.

    Attributes:
        proposed, accepted: of each depth, over all rounds; a depth is proposed when all in front of it were right.
        rounds, tokens: rounds made and tokens they gave, the target's own included.
    """

    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    rounds: int
    tokens: int

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / max(self.rounds, 1)

    def table(self) -> str:
        """Depth by depth: share accepted where all before were, and tokens a round with a chain of that length."""
        lines = ["depth  accepted of proposed      share"]
        for depth, (proposed, accepted) in enumerate(zip(self.proposed, self.accepted, strict=True), 1):
            lines.append(f"{depth:5d}  {accepted:8d} of {proposed:8d}  {accepted / max(proposed, 1):8.3f}")
        lines.append(f"{self.rounds} rounds, {self.tokens} tokens, {self.tokens_per_round:.3f} tokens a round")
        return "\n".join(lines)


def count_rounds(hits: torch.Tensor, spans: Iterable[tuple[int, int]]) -> Acceptance:
    """
    Args:
        hits: (B, T, K) bool, whether draft j of the chain that starts at entry k is right.
        spans: for each sequence the entries [first, end) that generation passes over.
    """
    depth = hits.shape[2]
    lengths = hits.long().cumprod(-1).sum(-1).cpu()
    proposed, accepted, rounds, tokens = [0] * depth, [0] * depth, 0, 0
    for row, (first, end) in enumerate(spans):
        place = first
        while place < end:
            room = min(depth, end - place - 1)  # the last token is the target's own in any case
            length = min(int(lengths[row, place]), room)
            for level in range(room):
                proposed[level] += level <= length
                accepted[level] += level < length
            rounds += 1
            tokens += length + 1
            place += length + 1
    return Acceptance(tuple(proposed), tuple(accepted), rounds, tokens)


def add(results: Iterable[Acceptance]) -> Acceptance:
    """The counts of several, together.

    Raises:
        ValueError: there are none.
    """
    every = list(results)
    if not every:
        raise ValueError("no sequence to count acceptance on; generate held-out continuations first")
    return Acceptance(
        tuple(map(sum, zip(*(one.proposed for one in every), strict=True))),
        tuple(map(sum, zip(*(one.accepted for one in every), strict=True))),
        sum(one.rounds for one in every),
        sum(one.tokens for one in every),
    )
