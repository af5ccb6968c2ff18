"""Draft models that keep pages of their own: what a pass is given, what a head computes, and a head on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from edgellm.kernels.cpu.elementwise import rope_
from edgellm.runtime.attention_cpu import AttentionStep
from edgellm.runtime.batch import RaggedBatch

if TYPE_CHECKING:
    import numpy.typing as npt

    from edgellm.models.config import ModelConfig
    from edgellm.models.device_step import Attend
    from edgellm.runtime.kv_cache import KVCache

    Int32Array = npt.NDArray[np.int32]


@dataclass(slots=True)
class DraftRows:
    """N sequences of one draft pass, compact (T = sum of counts).

    Attributes:
        slots: (N,) resident slots.
        past: (N,) entries that each sequence has.
        counts: (N,) entries that each adds.
        token_ids: (T,) int32, token k + 1 of entry k.
        hidden: (T, hidden_width) the target's hidden row of token k, or the draft's own behind written entries.
        projected: whether `hidden` are rows of the draft's own.
        page_rows: (num_slots, pages_per_slot) int32 page table of the draft's pool.
    """

    slots: Int32Array
    past: Int32Array
    counts: Int32Array
    token_ids: Int32Array
    hidden: torch.Tensor
    projected: bool
    page_rows: Int32Array


class DraftModel(Protocol):
    """A draft model over pages of its own.  Owned by its decoder."""

    def forward(self, rows: DraftRows) -> tuple[list[int], torch.Tensor]:
        """Write the entries; propose what comes behind the last of each sequence.

        Returns:
            (N,) token ids of the target's vocabulary, the most likely ones; (N, draft width) the draft's hidden rows of
            the last entries.
        """
        ...


@dataclass(frozen=True, slots=True)
class DraftStep:
    """What a pass remembers.

    Attributes:
        positions: (T,) int32 of the rows.
        attend: see `edgellm.models.device_step.Attend`; the layers are those of the draft's pages.
    """

    positions: torch.Tensor
    attend: Attend


class DraftHead(Protocol):
    """A draft model as a function of rows, written against `DraftOps`: once for every device."""

    @property
    def config(self) -> ModelConfig:
        """Of its own attention layers; its pages have their shape."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def hidden_width(self) -> int:
        """Elements of the target's hidden row that it reads."""
        ...

    @property
    def width(self) -> int:
        """Elements of a hidden row of its own."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        step: DraftStep,
        ends: torch.Tensor | None,
        *,
        projected: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass.  Reads nothing back from the device, so that a chain of passes can be captured.

        Args:
            token_ids: (T,) int32.
            hidden: (T, hidden_width), or (T, width) where `projected`; see `DraftRows`.
            ends: (N,) int64, rows whose proposals are wanted; None is all.
        Returns:
            (N,) int64 token ids of the target's vocabulary, and (N, width) hidden rows of the head's own.
        """
        ...


class HostDraft:
    """A head over its pages on the CPU; see `DraftModel`.  Borrows both."""

    def __init__(self, head: DraftHead, kv_cache: KVCache) -> None:
        self._head = head
        self._kv_cache = kv_cache

    @torch.inference_mode()
    def forward(self, rows: DraftRows) -> tuple[list[int], torch.Tensor]:
        batch = draft_batch(rows)
        step = host_step(batch, self._head.config, self._kv_cache, rows.hidden.dtype)
        ends = torch.from_numpy(batch.logits_index)
        token_ids = torch.from_numpy(rows.token_ids)
        tokens, own = self._head.forward(token_ids, rows.hidden, step, ends, projected=rows.projected)
        return tokens.tolist(), own


def host_step(batch: RaggedBatch, config: ModelConfig, kv_cache: KVCache, dtype: torch.dtype) -> DraftStep:
    """The step of a pass on the CPU.

    Raises:
        ContractViolation: a page row does not cover its sequence.
    """
    attention, kinds = AttentionStep(batch, config, kv_cache, dtype), config.kv_layers

    def attend(
        kv_layer: int,
        qkv: torch.Tensor,
        angles: torch.Tensor,
        out: torch.Tensor,
        *,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
    ) -> None:
        rope_(
            qkv,
            angles,
            num_heads=config.num_heads,
            num_kv_heads=kinds[kv_layer].num_kv_heads,
            head_dim=kinds[kv_layer].head_dim,
            query_norm=query_norm,
            key_norm=key_norm,
            eps=config.rms_norm_eps,
        )
        attention.attend(kv_layer, qkv, out)

    return DraftStep(torch.from_numpy(batch.positions), attend)


def draft_batch(rows: DraftRows) -> RaggedBatch:
    """The batch of a draft pass: one logits row for the last entry of each sequence."""
    return entries_batch(rows.slots, rows.past, rows.counts, rows.token_ids, rows.page_rows)


def entries_batch(
    slots: Int32Array, past: Int32Array, counts: Int32Array, token_ids: Int32Array, page_rows: Int32Array
) -> RaggedBatch:
    """`draft_batch` of what a pass has on the host; see `DraftRows`."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    positions = np.arange(int(starts[-1]), dtype=np.int32) + np.repeat(past - starts[:-1], counts)
    return RaggedBatch(
        token_ids=token_ids,
        positions=positions.astype(np.int32),
        query_start=starts,
        query_len=counts,
        past_len=past,
        state_index=slots,
        page_rows=page_rows,
        logits_index=(starts[1:] - 1).astype(np.int64),
        logits_to_seq=np.arange(len(counts), dtype=np.int32),
    )
