"""The ragged execution batch: what one forward pass is given.

Host arrays (but see `late_tokens`); an executor uploads what it needs.  N sequences, T tokens, L selected logits rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from edgellm.cache.types import BaseStateKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from edgellm.models.step import HiddenRequest
    from edgellm.runtime.device import Device
    from edgellm.runtime.kv_cache import KVCache
    from edgellm.runtime.late_tokens import LateTokens

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
        draft_page_rows: the same view of the draft model's page table, where it has pages of its own.
        max_drafts: (N,) int32, longest run a speculative decoder may propose for each sequence; None is no limit.
        tree_mask: (T, words) int32, for batches with trees of proposals: where bit j % 32 of word j // 32 is set, the
            token sees the one at place `tree_start` + j of its sequence, and no others from there on.  Its own bit is
            set, none above it is, and `positions` counts the bits: siblings have one position and places of their own.
            A row of zeros sees what stands before it, as without a mask.
        late_tokens: tokens that only the device knows yet, of batches that `CudaExecutor.forward_verify` is given.
        tree_start: (N,) int32, first place that each sequence's bits speak of; None is `past_len`.
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
    draft_page_rows: Int32Array | None = None
    max_drafts: Int32Array | None = None
    tree_mask: Int32Array | None = None
    tree_start: Int32Array | None = None
    late_tokens: LateTokens | None = None

    @property
    def places(self) -> Int32Array:
        """(T,) int32, where in its sequence each token's K and V are kept: its position, but for tokens of a tree."""
        shifts: Int32Array = np.repeat(self.past_len - self.query_start[:-1], self.query_len)
        places: Int32Array = np.arange(self.num_tokens, dtype=np.int32)
        places += shifts
        return places

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


@dataclass(frozen=True, slots=True)
class StateResources:
    """What an executor holds for its sequences beside base K and V; borrowed by the runtime.

    Attributes:
        base_state_kind: which kinds of state the base model keeps.
        base_page_table, draft_page_table: tables the executor built and reads itself; None lets the runtime build them.
        draft_cache: paged store of the draft model, where that has pages of its own.
        snapshot_storage: `HybridSnapshotStorage`, for models with recurrent state; its slots size the snapshot pools.
    """

    base_state_kind: BaseStateKind = BaseStateKind.ATTENTION_ONLY
    base_page_table: Any = None
    draft_cache: Any = None
    draft_page_table: Any = None
    snapshot_storage: Any = None


@runtime_checkable
class StatefulExecutor(Protocol):
    """An executor that keeps more state than base K and V."""

    def resources(self) -> StateResources: ...


def resources_of(executor: object) -> StateResources:
    """What the executor says it holds; base K and V alone when it says nothing."""
    return executor.resources() if isinstance(executor, StatefulExecutor) else StateResources()


@dataclass(slots=True)
class VerifyForward:
    """What a forward over verification rows gave.

    Attributes:
        logits: (L, vocab_size) float32, one row for each selected token.
        hidden: (T, hidden_width), the base model's hidden rows of every token, as requested; None where nobody did.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class VerifyingExecutor(Executor, Protocol):
    """An executor that speculative decoders can run on."""

    def request_hidden(self, request: HiddenRequest) -> None:
        """From now on `forward_verify` returns these hidden rows; before, none or those that the executor chooses."""
        ...

    def forward_verify(self, batch: RaggedBatch) -> VerifyForward:
        """`forward`, with hidden rows, and with one checkpoint of recurrent state after each token of every row."""
        ...

    def rewind(self, state_index: Sequence[int], kept: Sequence[int]) -> None:
        """Put recurrent and conv state of some rows of the latest forward back to after their `kept`-th token.

        Args:
            state_index: resident slots, each of which had a row in the latest forward.
            kept: at least 1, at most the row's tokens.
        Attention state behind the kept tokens may stay: it is written again.  Without recurrent state a no-op.
        """
        ...


class TreeExecutor(Protocol):
    """A `VerifyingExecutor` that takes batches with a `tree_mask`."""

    def commit_rows(self, state_index: Sequence[int], past: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Move K and V of accepted tree rows side by side: place past + rows[i] to place past + i, in all layers.

        Args:
            state_index: resident slots, each of which had a row in the latest forward.
            past: (N,) tokens before each tree.
            rows: rows of each sequence in the latest forward, rising.
        """
        ...
