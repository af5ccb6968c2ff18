"""How an assistant's last rows become tokens of the base: the likeliest of a vocabulary, or of its nearest clusters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from edgellm.decoding.draft_ops import DraftOps


class ProposalHead(Protocol):
    """D the assistant's hidden size."""

    def choose(self, rows: torch.Tensor, ops: DraftOps) -> torch.Tensor:
        """(R,) int64, the base's token that is likeliest for each of (R, D) normed rows; reads nothing back."""
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

    def choose(self, rows: torch.Tensor, ops: DraftOps) -> torch.Tensor:
        return self.to_base.index_select(0, ops.linear(rows, self.lm_head).argmax(dim=1))


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

    def choose(self, rows: torch.Tensor, ops: DraftOps) -> torch.Tensor:
        nearest = ops.linear(rows, self.centroids).topk(self.num_nearest, dim=1).indices
        tokens = self.clusters[nearest].flatten(start_dim=1)
        logits = (self.lm_head[tokens] @ rows[:, :, None])[:, :, 0]
        return tokens.gather(1, logits.argmax(dim=1, keepdim=True))[:, 0]
