"""How an assistant's last rows become tokens of the base: the likeliest of a vocabulary, or of its nearest clusters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from edgellm.kernels.cpu.linear import linear


class ProposalHead(Protocol):
    """D the assistant's hidden size."""

    def choose(self, rows: torch.Tensor) -> list[int]:
        """The base's token that is likeliest for each of (R, D) normed rows."""
        ...


@dataclass(slots=True)
class VocabularyHead:
    """V tokens, all of the base's or a choice of them.

    Attributes:
        lm_head: (V, D).
        to_base: (V,) int64, the base's id of each.
    """

    lm_head: torch.Tensor
    to_base: torch.Tensor

    def choose(self, rows: torch.Tensor) -> list[int]:
        chosen: list[int] = self.to_base[product(rows, self.lm_head).argmax(dim=1)].tolist()
        return chosen


@dataclass(slots=True)
class ClusterHead:
    """The vocabulary in C clusters of equal size, of which a row looks at the nearest few only.

    Attributes:
        lm_head: (vocab_size, D).
        centroids: (C, D).
        clusters: (C, vocab_size / C) int64, the tokens of each.
        num_nearest: clusters that a row looks at.
    """

    lm_head: torch.Tensor
    centroids: torch.Tensor
    clusters: torch.Tensor
    num_nearest: int

    def choose(self, rows: torch.Tensor) -> list[int]:
        nearest = product(rows, self.centroids).topk(self.num_nearest, dim=1).indices
        tokens = self.clusters[nearest].flatten(start_dim=1)
        logits = (self.lm_head[tokens] @ rows[:, :, None])[:, :, 0]
        chosen: list[int] = tokens.gather(1, logits.argmax(dim=1, keepdim=True))[:, 0].tolist()
        return chosen


def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(R, M) rows times the transpose of an (M, K) weight."""
    return linear(rows, weight, rows.new_empty((len(rows), len(weight))))
