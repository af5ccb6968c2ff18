"""`CpuExecutor`: one forward pass over a ragged batch, K and V in pages, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from edgellm.errors import ContractViolation, InvalidArgumentError, StepDeviceError
from edgellm.kernels.cpu.linear import SKINNY_ROWS
from edgellm.kernels.cpu.paged_attention import PagedAttention
from edgellm.models.llama import LlamaGraph
from edgellm.runtime.device import CpuDevice

if TYPE_CHECKING:
    import numpy.typing as npt

    from edgellm.models.config import ModelConfig
    from edgellm.models.loader import LoadedModel
    from edgellm.runtime.batch import RaggedBatch
    from edgellm.runtime.device import Device
    from edgellm.runtime.kv_cache import KVCache


class CpuExecutor:
    """Runs the model over its pages.  Not thread-safe: one session drives it.

    Rows that add one token read pages in place; rows that add more gather their pages and use torch's attention.
    """

    def __init__(self, model: LoadedModel, kv_cache: KVCache) -> None:
        config = model.config
        shape = (kv_cache.num_layers, kv_cache.num_kv_heads, kv_cache.head_dim)
        if shape != (config.num_layers, config.num_kv_heads, config.head_dim):
            raise InvalidArgumentError(
                f"the KV cache has {shape} (layers, kv heads, head_dim), the model "
                f"{(config.num_layers, config.num_kv_heads, config.head_dim)}; build it with KVCache.for_model"
            )
        self._graph = LlamaGraph(model)
        self._dtype = model.weights.dtype
        self._kv_cache = kv_cache
        self._device = CpuDevice()

    @property
    def device(self) -> Device:
        return self._device

    @property
    def kv_cache(self) -> KVCache:
        return self._kv_cache

    @property
    def vocab_size(self) -> int:
        return self._graph.config.vocab_size

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Write the batch's K and V into their pages; return (L, vocab_size) float32 logits.

        Raises:
            ContractViolation: the batch contradicts itself, a token id is out of range, or a page row does not
                cover its sequence.  Nothing was written.
            StepDeviceError: out of memory or a failed library call; state of the batch's sequences is unknown.
        """
        check_batch(batch, self.vocab_size)
        step = AttentionStep(batch, self._graph.config, self._kv_cache, self._dtype)
        try:
            return self._graph.forward(
                torch.from_numpy(batch.token_ids),
                torch.from_numpy(batch.positions),
                torch.from_numpy(batch.logits_index),
                step.attend,
            )
        except (RuntimeError, MemoryError) as error:
            raise StepDeviceError(
                f"the forward pass of {batch.num_tokens} tokens failed: {error}; close the session, and lower the step "
                "token budget or kv_budget if memory ran out"
            ) from error

    def copy_pages(self, source_pages: npt.NDArray[np.int32], target_pages: npt.NDArray[np.int32]) -> None:
        """Copy whole pages, all layers."""
        self._kv_cache.copy_pages(source_pages, target_pages)


@dataclass(slots=True)
class _ContextRow:
    """A sequence that adds more than one token: its token rows [start, stop), pages, keys and mask.

    Attributes:
        mask: (query, length) of the model's dtype, added to the scores; None where plain causal attention is right.
    """

    start: int
    stop: int
    page_ids: npt.NDArray[np.int32]
    length: int
    mask: torch.Tensor | None


class AttentionStep:
    """What attention needs in one step, made once and used by every layer."""

    def __init__(self, batch: RaggedBatch, config: ModelConfig, kv_cache: KVCache, dtype: torch.dtype) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._dtype = dtype
        self._scale = config.head_dim**-0.5
        self._offsets = kv_offsets(batch, kv_cache.page_size, kv_cache.num_pages)
        single = np.flatnonzero(batch.query_len == 1)
        self._single = self._lay_out_single(batch, single) if len(single) else None
        self._context = [self._lay_out_context(batch, seq) for seq in np.flatnonzero(batch.query_len > 1).tolist()]

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Write K and V of all rows, then attend every row; see `edgellm.models.llama.Attend`."""
        config = self._config
        heads = (-1, config.num_kv_heads, config.head_dim)
        key = qkv[:, config.q_size : config.q_size + config.kv_size].view(heads)
        value = qkv[:, config.q_size + config.kv_size :].view(heads)
        self._kv_cache.write(layer, key, value, self._offsets)
        if self._single is not None:
            self._single.run(self._kv_cache.pages(layer), qkv, out)
        for row in self._context:
            self._attend_context(layer, row, qkv, out)

    def _attend_context(self, layer: int, row: _ContextRow, qkv: torch.Tensor, out: torch.Tensor) -> None:
        config = self._config
        gathered = self._kv_cache.gather(layer, row.page_ids, row.length).to(self._dtype)
        # The KV head is the batch axis and its query heads the head axis, so K and V are shared by stride, not copied.
        shape = (config.num_kv_heads, config.group_size, row.length, config.head_dim)
        key, value = gathered[:, :, None].expand(2, *shape).unbind(0)
        query = qkv[row.start : row.stop, : config.q_size]
        query = query.view(-1, config.num_kv_heads, config.group_size, config.head_dim).permute(1, 2, 0, 3)
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=row.mask, is_causal=row.mask is None, scale=self._scale
        )
        target = out[row.start : row.stop].view(-1, config.num_kv_heads, config.group_size, config.head_dim)
        target.copy_(attended.permute(2, 0, 1, 3))

    def _lay_out_single(self, batch: RaggedBatch, sequences: npt.NDArray[np.int64]) -> PagedAttention:
        return PagedAttention(
            pages=self._kv_cache.pages(0),
            num_heads=self._config.num_heads,
            query_dtype=self._dtype,
            query_rows=batch.query_start[sequences].astype(np.int64),
            page_rows=batch.page_rows,
            slots=batch.state_index[sequences],
            lengths=batch.past_len[sequences] + 1,
            scale=self._scale,
            short_step=batch.num_tokens <= SKINNY_ROWS,
        )

    def _lay_out_context(self, batch: RaggedBatch, seq: int) -> _ContextRow:
        start, query, past = int(batch.query_start[seq]), int(batch.query_len[seq]), int(batch.past_len[seq])
        length = past + query
        num_blocks = -(-length // self._kv_cache.page_size)
        mask = None
        if past:
            allowed = torch.arange(length) <= torch.arange(past, length)[:, None]
            mask = torch.zeros((query, length), dtype=self._dtype).masked_fill_(~allowed, float("-inf"))
        return _ContextRow(start, start + query, batch.page_rows[batch.state_index[seq], :num_blocks], length, mask)


def kv_offsets(batch: RaggedBatch, page_size: int, num_pages: int) -> npt.NDArray[np.int64]:
    """(T,) int64 place of each token in the pool: page_id * page_size + place.

    Raises:
        ContractViolation: a sequence needs a page that its row does not have.
    """
    slots = np.repeat(batch.state_index, batch.query_len)
    blocks = batch.positions // page_size
    if len(blocks) and int(blocks.max()) >= batch.page_rows.shape[1]:
        token = int(blocks.argmax())
        raise ContractViolation(
            f"position {batch.positions[token]} needs block {blocks[token]}, but a page row has "
            f"{batch.page_rows.shape[1]} blocks of {page_size} tokens; refuse prompts beyond this length"
        )
    for slot, past, query in zip(
        batch.state_index.tolist(), batch.past_len.tolist(), batch.query_len.tolist(), strict=True
    ):
        pages = batch.page_rows[slot, : -(-(past + query) // page_size)]
        if pages.min() < 0 or pages.max() >= num_pages:
            raise ContractViolation(
                f"slot {slot} reads and writes positions [0, {past + query}), but its page row {pages.tolist()} has "
                f"entries outside [0, {num_pages}); grow the row before the step"
            )
    return batch.page_rows[slots, blocks].astype(np.int64) * page_size + batch.positions % page_size


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
    expected = np.arange(num_tokens) + np.repeat(batch.past_len - batch.query_start[:-1], batch.query_len)
    if not np.array_equal(batch.positions, expected):
        raise ContractViolation("positions do not continue past_len; rebuild the batch")
    if batch.token_ids.min() < 0 or batch.token_ids.max() >= vocab_size:
        bad = batch.token_ids[(batch.token_ids < 0) | (batch.token_ids >= vocab_size)]
        raise ContractViolation(f"token id {bad[0]} is not in [0, {vocab_size}); validate prompts before admission")
    index = batch.logits_index
    if len(index) and (index.min() < 0 or index.max() >= num_tokens):
        raise ContractViolation(f"logits rows {index.tolist()} are not all in [0, {num_tokens})")
