"""`LateTokens`: tokens of a step that are on the device already, and on the host later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from edgellm.runtime.batch import RaggedBatch
    from edgellm.runtime.device import Device


@dataclass(frozen=True, slots=True)
class LateTokens:
    """The last tokens of some sequences of a batch; in its `token_ids` they are 0.

    Attributes:
        source: (depth, columns) int32 on the device.
        rows: those sequences, rising.
        columns: the column of `source` that each takes from, beginning at the top.
        counts: tokens of each, at least 1 and fewer than it adds.
    """

    source: torch.Tensor
    rows: Sequence[int]
    columns: Sequence[int]
    counts: Sequence[int]

    def place(self, batch: RaggedBatch, token_ids: torch.Tensor, device: Device) -> None:
        """Copy them to where they belong, in stream order.

        Args:
            token_ids: (>= T,) int32 on the device, sent from the batch's.
        """
        count, each = batch.num_sequences, self.counts[0]
        everybody, alike = list(range(count)), count * (each + 1) == batch.num_tokens
        if alike and self.rows == everybody == self.columns and set(self.counts) == {each}:
            token_ids[: batch.num_tokens].view(count, each + 1)[:, 1:].copy_(self.source[:each, :count].T)
            return
        ends, width = batch.query_start[1:][list(self.rows)].tolist(), self.source.shape[1]
        targets = [np.arange(end - length, end) for end, length in zip(ends, self.counts, strict=True)]
        sources = [np.arange(n) * width + column for n, column in zip(self.counts, self.columns, strict=True)]
        to, take = device.upload(np.stack((np.concatenate(targets), np.concatenate(sources)))).unbind(0)
        token_ids.index_copy_(0, to, self.source.reshape(-1).index_select(0, take))
