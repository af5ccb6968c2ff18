"""`CpuExecutor`: one forward pass over a ragged batch on the CPU; K and V in pages, other state by resident slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from edgellm.errors import ContractViolation, StepDeviceError
from edgellm.models.registry import family_of
from edgellm.runtime.attention_cpu import AttentionStep
from edgellm.runtime.batch import StateResources, VerifyForward
from edgellm.runtime.device import CpuDevice
from edgellm.runtime.recurrent_state import check_recurrent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from edgellm.models.config import ModelConfig
    from edgellm.models.loader import LoadedModel
    from edgellm.models.step import GraphOutput, HiddenRequest, RecurrentStep
    from edgellm.runtime.batch import RaggedBatch
    from edgellm.runtime.device import Device
    from edgellm.runtime.kv_cache import KVCache
    from edgellm.runtime.recurrent_state import RecurrentState
    from edgellm.runtime.snapshot_storage import HybridSnapshotStorage

    Attend = Callable[..., None]


class CpuExecutor:
    """Runs a model over its pages and its recurrent state.  Not thread-safe: one session drives it.

    How rows attend: `edgellm.runtime.attention_cpu`.

    Args:
        kv_cache: pages of the model's shape; a model without attention layers takes one that stores nothing.
        recurrent: state of the model's recurrent layers, where it has any.
        snapshots: storage of the checkpoints of that state.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv_cache: KVCache,
        *,
        recurrent: RecurrentState | None = None,
        snapshots: HybridSnapshotStorage | None = None,
    ) -> None:
        kv_cache.check_model(model.config)
        check_recurrent(model.config, recurrent)
        self._graph = family_of(model.config.architecture).build_graph(model)
        self._dtype = model.weights.dtype
        self._kv_cache = kv_cache
        self._recurrent = recurrent
        self._snapshots = snapshots
        self._device = CpuDevice()
        self._hidden: HiddenRequest | None = None
        self._page_rows: npt.NDArray[np.int32] | None = None  # of the latest forward

    @property
    def device(self) -> Device:
        return self._device

    @property
    def kv_cache(self) -> KVCache:
        return self._kv_cache

    @property
    def vocab_size(self) -> int:
        return self._graph.config.vocab_size

    def resources(self) -> StateResources:
        """What the cache keeps in step with: see `StatefulExecutor`."""
        return StateResources(base_state_kind=self._graph.config.base_state_kind, snapshot_storage=self._snapshots)

    def request_hidden(self, request: HiddenRequest) -> None:
        """From now on `forward_verify` returns these hidden rows of every token."""
        self._hidden = request

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Write the batch's state; return (L, vocab_size) float32 logits.

        Raises:
            ContractViolation: the batch contradicts itself, a token id is out of range, or a page row does not
                cover its sequence.  Nothing was written.
            StepDeviceError: out of memory or a failed library call; state of the batch's sequences is unknown.
        """
        return self._run(batch, None, ()).logits

    def forward_verify(self, batch: RaggedBatch) -> VerifyForward:
        """`forward`, with the hidden rows that were requested, and a checkpoint after each token of verified rows.

        Verified are the rows of which more than one logits row is selected.

        Raises: as `forward`.
        """
        verified: list[int] = []
        if self._recurrent is not None:
            selected = np.bincount(batch.logits_to_seq, minlength=batch.num_sequences)
            verified = np.flatnonzero(selected > 1).tolist()
        output = self._run(batch, self._hidden, verified)
        return VerifyForward(output.logits, output.hidden)

    def rewind(self, state_index: Sequence[int], kept: Sequence[int]) -> None:
        """See `VerifyingExecutor`."""
        if self._recurrent is not None:
            self._recurrent.rewind(state_index, kept)

    def commit_rows(self, state_index: Sequence[int], past: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """See `TreeExecutor`."""
        page_size, table = self._kv_cache.page_size, self._page_rows
        if table is None:
            raise ContractViolation("rows are committed and no forward ran before")
        sources: list[npt.NDArray[np.int64]] = []
        targets: list[npt.NDArray[np.int64]] = []
        for slot, length, kept in zip(state_index, past, rows, strict=True):
            for offsets, places in ((sources, np.array(kept)), (targets, np.arange(len(kept)))):
                places = length + places
                offsets.append(table[slot, places // page_size].astype(np.int64) * page_size + places % page_size)
        self._kv_cache.move_tokens(np.concatenate(sources), np.concatenate(targets))

    @torch.inference_mode()
    def _run(self, batch: RaggedBatch, hidden: HiddenRequest | None, verified: Sequence[int]) -> GraphOutput:
        check_batch(batch, self.vocab_size)
        if batch.tree_mask is not None and self._recurrent is not None:
            raise ContractViolation("trees branch, and recurrent state does not; propose chains to this model")
        self._page_rows = batch.page_rows
        step = CpuStep(batch, self._graph.config, self._kv_cache, self._dtype, self._recurrent)
        try:
            if self._recurrent is not None:
                self._recurrent.begin(batch, verified)
            return self._graph.forward(
                torch.from_numpy(batch.token_ids),
                torch.from_numpy(batch.positions),
                torch.from_numpy(batch.logits_index),
                step,
                hidden,
            )
        except (RuntimeError, MemoryError) as error:
            raise StepDeviceError(
                f"the forward pass of {batch.num_tokens} tokens failed: {error}; close the session, and lower the step "
                "token budget or kv_budget if memory ran out"
            ) from error

    def copy_pages(self, source_pages: npt.NDArray[np.int32], target_pages: npt.NDArray[np.int32]) -> None:
        """Copy whole pages, all layers."""
        self._kv_cache.copy_pages(source_pages, target_pages)


class CpuStep:
    """What the sequences of one step remember; see `edgellm.models.step.StepState`."""

    def __init__(
        self,
        batch: RaggedBatch,
        config: ModelConfig,
        kv_cache: KVCache,
        dtype: torch.dtype,
        recurrent: RecurrentState | None,
    ) -> None:
        self._recurrent = recurrent
        self.attend: Attend = _no_attention
        if config.num_kv_layers:
            self.attend = AttentionStep(batch, config, kv_cache, dtype).attend

    @property
    def recurrent(self) -> RecurrentStep:
        if self._recurrent is None:
            raise ContractViolation("the model's config names no recurrent state, and a layer asks for it")
        return self._recurrent


def _no_attention(kv_layer: int, qkv: torch.Tensor, out: torch.Tensor, chosen: torch.Tensor | None = None) -> None:
    raise ContractViolation("the model's config names no layer that owns K and V, and a layer attends")


def check_batch(batch: RaggedBatch, vocab_size: int) -> None:
    """Refuse a batch that contradicts itself.

    Raises:
        ContractViolation: see the message.
    """
    num_tokens = batch.num_tokens
    if not num_tokens or batch.query_len.min() < 1:
        raise ContractViolation(f"a step needs at least one token a sequence; query lengths {batch.query_len.tolist()}")
    if batch.past_len.min() < 0:
        raise ContractViolation(f"past lengths {batch.past_len.tolist()} must be 0 or more")
    if batch.state_index.min() < 0 or batch.state_index.max() >= len(batch.page_rows):
        raise ContractViolation(f"slots {batch.state_index.tolist()} are not all in [0, {len(batch.page_rows)})")
    ends = np.cumsum(batch.query_len)
    if batch.query_start[0] != 0 or not np.array_equal(batch.query_start[1:], ends) or ends[-1] != num_tokens:
        raise ContractViolation(
            f"query_start {batch.query_start.tolist()} is not the prefix sum of query_len {batch.query_len.tolist()} "
            f"over {num_tokens} tokens"
        )
    if not np.array_equal(batch.positions, _positions(batch)):
        raise ContractViolation("positions do not continue past_len, or the tree of the batch; rebuild the batch")
    if batch.token_ids.min() < 0 or batch.token_ids.max() >= vocab_size:
        bad = batch.token_ids[(batch.token_ids < 0) | (batch.token_ids >= vocab_size)]
        raise ContractViolation(f"token id {bad[0]} is not in [0, {vocab_size}); validate prompts before admission")
    index = batch.logits_index
    if len(index) and (index.min() < 0 or index.max() >= num_tokens):
        raise ContractViolation(f"logits rows {index.tolist()} are not all in [0, {num_tokens})")


def _positions(batch: RaggedBatch) -> npt.NDArray[np.int32]:
    """(T,) int32, the positions that lengths and trees give.

    Raises:
        ContractViolation: a tree's bits are not those of a token and of tokens in front of it.
    """
    places, mask = batch.places, batch.tree_mask
    if mask is None:
        return places
    if mask.dtype != np.int32 or mask.ndim != 2 or len(mask) != batch.num_tokens:
        raise ContractViolation(f"tree_mask is {mask.shape} {mask.dtype}; ({batch.num_tokens}, words) int32 is needed")
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), axis=1, bitorder="little")
    of_tree = bits.any(axis=1)
    starts = np.repeat(batch.past_len if batch.tree_start is None else batch.tree_start, batch.query_len)
    last = bits.shape[1] - 1 - bits[:, ::-1].argmax(axis=1)
    if not np.array_equal((starts + last)[of_tree], places[of_tree]):
        raise ContractViolation("a token of a tree does not see itself, or sees one behind it; rebuild the mask")
    return np.where(of_tree, starts + bits.sum(axis=1, dtype=np.int32) - 1, places)
