"""Training-time test: a draft head run on its own rows, all starts of a sequence at once.

Entry m of a sequence belongs to token m and its successor.  A chain that starts at entry k reads the target's row
there (depth 0) and its own rows behind it: entry k + j at depth j.  So at depth j, row m of every tensor belongs to
the chain that started at m - j; rows m < j belong to none.  (Li et al., "EAGLE-3", 2025.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator

DEPTH_DISCOUNT = 0.8


class Drafter(Protocol):
    """A draft model that runs on its own rows."""

    @property
    def to_target(self) -> torch.Tensor:
        """(V,) int64, the target's token of each draft token."""
        ...

    def first(self, lesson: Lesson) -> torch.Tensor:
        """(B, T, D) rows that depth 0 reads, of what the target made."""
        ...

    def advance(
        self, rows: torch.Tensor, lesson: Lesson, depth: int, memory: DepthMemory
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The head's own rows (B, T, D) and its logits (B, T, V)."""
        ...


@dataclass(slots=True)
class Lesson:
    """What a drafter is taught on: T entries of B sequences.

    Attributes:
        successors: (B, T) int64, token m + 1 of entry m.
        teacher: (B, T, vocab) the target's logits behind token m + 1.
        counted: (B, T) bool, entries whose prediction counts.
        hidden: (B, T, H) rows of the target.
        keys, values: of the target's donor layers, (B, kv heads, T, head_dim) each.
    """

    successors: torch.Tensor
    teacher: torch.Tensor
    counted: torch.Tensor
    hidden: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class DepthMemory:
    """Keys and values of every depth so far, of one attention layer."""

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """What each row sees: depth 0 up to its chain's start, then its chain's own rows.

        Args:
            query: (B, heads, T, head_dim).
            key, value: (B, kv heads, T, head_dim) of the same depth.
        Effects: keeps key and value.
        """
        group = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(group, dim=1))
        self._values.append(value.repeat_interleave(group, dim=1))
        depth, count = len(self._keys) - 1, query.shape[2]
        query = query * query.shape[3] ** -0.5
        seen = torch.ones(count, count, dtype=torch.bool, device=query.device).tril(-depth)
        scores = [(query @ self._keys[0].transpose(2, 3)).float().masked_fill(~seen, float("-inf"))]
        own = [shift(self._keys[number], depth - number) for number in range(1, depth + 1)]
        scores += [(query * keys).sum(-1, keepdim=True).float() for keys in own]
        weights = torch.cat(scores, dim=-1).softmax(-1).to(query.dtype)
        attended = weights[..., :count] @ self._values[0]
        for number in range(1, depth + 1):
            values = shift(self._values[number], depth - number)
            attended = attended + weights[..., count + number - 1, None] * values
        return attended


def shift(rows: torch.Tensor, by: int) -> torch.Tensor:
    """Rows (..., T, D) moved `by` places back along T, zeros in front."""
    if not by:
        return rows
    return functional.pad(rows, (0, 0, by, 0))[..., : rows.shape[-2], :]


def depths(drafter: Drafter, lesson: Lesson, count: int) -> Iterator[torch.Tensor]:
    """Logits (B, T, V) of each depth in turn."""
    memory = DepthMemory()
    rows = drafter.first(lesson)
    for depth in range(count):
        own, logits = drafter.advance(rows, lesson, depth, memory)
        yield logits
        rows = shift(own, 1)


def unrolled_loss(drafter: Drafter, lesson: Lesson, count: int) -> tuple[torch.Tensor, list[float]]:
    """Cross entropy against the target's distribution over the draft vocabulary, summed over discounted depths.

    Entries whose most likely token lies outside the draft vocabulary teach nothing.

    Returns:
        the loss, and of each depth the share of counted entries whose best draft is the target's best.
    """
    best = lesson.teacher.argmax(-1)
    wanted = lesson.teacher[..., drafter.to_target].float().softmax(-1)
    known = torch.isin(best, drafter.to_target)
    total = lesson.teacher.new_zeros((), dtype=torch.float32)
    right, places = [], torch.arange(best.shape[1], device=best.device)
    for depth, logits in enumerate(depths(drafter, lesson, count)):
        counted = lesson.counted & (places >= depth)
        taught = counted & known
        loss = -(wanted[taught] * logits[taught].float().log_softmax(-1)).sum(-1).mean()
        total = total + DEPTH_DISCOUNT**depth * loss.nan_to_num()
        with torch.no_grad():
            hits = drafter.to_target[logits.argmax(-1)] == best
            right.append((hits & counted).sum().float() / counted.sum().clamp(min=1))
    return total, [float(share) for share in torch.stack(right)]


@torch.no_grad()
def correct_drafts(drafter: Drafter, lesson: Lesson, count: int) -> torch.Tensor:
    """(B, T, count) bool: whether draft j of the chain that starts at entry k is the target's best.

    Drafts are fed the right tokens in front of them, so the first wrong one ends what is meaningful.
    """
    best = lesson.teacher.argmax(-1)
    hits = []
    for depth, logits in enumerate(depths(drafter, lesson, count)):
        hit = drafter.to_target[logits.argmax(-1)] == best
        hits.append(functional.pad(hit[:, depth:], (0, depth)))
    return torch.stack(hits, dim=-1)
