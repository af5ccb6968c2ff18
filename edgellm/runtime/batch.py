"""The ragged execution batch: what one forward pass is given.

Host arrays only; an executor uploads what it needs.  N sequences, T tokens, L selected logits rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from edgellm.runtime.device import Device
    from edgellm.runtime.kv_cache import KVCache

    Int32Array = npt.NDArray[np.int32]


@dataclass(slots=True)
class RaggedBatch:
    """One step, context rows before decode rows, compact layout (T = sum of query lengths).

    Attributes:
        token_ids: (T,) int32.
        positions: (T,) int32, absolute position of each token.
        query_start: (N + 1,) int32, exclusive prefix sum of `query_len`.
        query_len: (N,) int32, tokens each sequence adds.
        past_len: (N,) int32, tokens that already have state.
        state_index: (N,) int32, resident slot of each sequence (its row of `page_rows`).
        page_rows: (num_slots, pages_per_slot) int32 view of the host page table; -1 is unused.
        logits_index: (L,) int64, token row of each selected logits row.
        logits_to_seq: (L,) int32, sequence of each selected logits row.
    """

    token_ids: Int32Array
    positions: Int32Array
    query_start: Int32Array
    query_len: Int32Array
    past_len: Int32Array
    state_index: Int32Array
    page_rows: Int32Array
    logits_index: npt.NDArray[np.int64]
    logits_to_seq: Int32Array

    @property
    def num_sequences(self) -> int:
        return len(self.query_len)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Executor(Protocol):
    """Runs forward passes over paged state.  The CPU, CUDA and toy executors all have this form."""

    @property
    def device(self) -> Device: ...

    @property
    def kv_cache(self) -> KVCache: ...

    @property
    def vocab_size(self) -> int: ...

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Write the batch's K and V into their pages; return (L, vocab_size) float32 logits.

        Raises:
            StepDeviceError: the device failed; state of the batch's sequences is unknown.
        """
        ...

    def copy_pages(self, source_pages: Int32Array, target_pages: Int32Array) -> None:
        """Copy whole pages, all layers, in stream order."""
        ...
