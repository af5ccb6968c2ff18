"""`AttentionStep`: K and V of one step written to their pages and attended, on the CPU.

Rows that add few tokens read pages in place; rows that add more gather their pages and use torch's attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from edgellm.errors import ContractViolation
from edgellm.kernels.cpu.linear import SKINNY_ROWS
from edgellm.kernels.cpu.paged_attention import PagedAttention

if TYPE_CHECKING:
    import numpy.typing as npt

    from edgellm.models.config import KVLayer, ModelConfig
    from edgellm.runtime.batch import RaggedBatch
    from edgellm.runtime.kv_cache import KVCache


@dataclass(slots=True)
class _ManyTokens:
    """A sequence that adds a chunk of its prompt: its token rows [start, stop), pages, keys and mask.

    Attributes:
        page_ids: pages of the keys, from the first that a row sees.
        num_keys: keys in them up to the last token.
        mask: (query, num_keys) of the model's dtype, added to the scores; None where plain causal attention is right.
    """

    start: int
    stop: int
    page_ids: npt.NDArray[np.int32]
    num_keys: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class _Layout:
    """How the rows of a step attend in the layers of one kind."""

    kind: KVLayer
    few: PagedAttention | None
    many: list[_ManyTokens]


class AttentionStep:
    """What attention needs in one step, made once and used by every layer."""

    def __init__(self, batch: RaggedBatch, config: ModelConfig, kv_cache: KVCache, dtype: torch.dtype) -> None:
        self._num_heads = config.num_heads
        self._scale = config.attention_scale
        self._kv_cache = kv_cache
        self._dtype = dtype
        self._offsets = kv_offsets(batch, kv_cache.page_size, kv_cache.num_pages)
        self._batch = batch
        self._chosen: dict[KVLayer, PagedAttention] = {}
        apart = runs_token_by_token(batch)
        few, many = np.flatnonzero(apart), np.flatnonzero(~apart).tolist()
        layouts: dict[KVLayer, _Layout] = {}
        for layer, kind in enumerate(config.kv_layers):
            if kind not in layouts:
                layouts[kind] = _Layout(
                    kind,
                    self._lay_out_few(batch, few, layer, kind) if len(few) else None,
                    [self._lay_out_many(batch, sequence, kind) for sequence in many],
                )
        self._layouts = [layouts[kind] for kind in config.kv_layers]

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor, chosen: torch.Tensor | None = None) -> None:
        """Write K and V of all rows, then attend every row; see `edgellm.models.step.StepState`."""
        layout = self._layouts[layer]
        kind, q_size = layout.kind, out.shape[1]
        if chosen is not None:
            if kind not in self._chosen:
                self._chosen[kind] = self._lay_out_chosen(chosen.numpy(), layer, kind)
            self._chosen[kind].run(self._kv_cache.pages(layer), qkv, out)
            return
        if qkv.shape[1] > q_size:
            heads = (-1, kind.num_kv_heads, kind.head_dim)
            value_start = q_size + kind.num_kv_heads * kind.head_dim
            key, value = qkv[:, q_size:value_start].view(heads), qkv[:, value_start:].view(heads)
            self._kv_cache.write(layer, key, value, self._offsets)
        if layout.few is not None:
            layout.few.run(self._kv_cache.pages(layer), qkv, out)
        for row in layout.many:
            self._attend_many(layer, kind, row, qkv, out)

    def _attend_many(self, layer: int, kind: KVLayer, row: _ManyTokens, qkv: torch.Tensor, out: torch.Tensor) -> None:
        gathered = self._kv_cache.gather(layer, row.page_ids, row.num_keys).to(self._dtype)
        # The KV head is the batch axis and its query heads the head axis, so K and V are shared by stride, not copied.
        group = self._num_heads // kind.num_kv_heads
        shape = (kind.num_kv_heads, group, row.num_keys, kind.head_dim)
        key, value = gathered[:, :, None].expand(2, *shape).unbind(0)
        heads = (-1, kind.num_kv_heads, group, kind.head_dim)
        query = qkv[row.start : row.stop, : out.shape[1]].view(heads).permute(1, 2, 0, 3)
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=row.mask, is_causal=row.mask is None, scale=self._scale
        )
        out[row.start : row.stop].view(heads).copy_(attended.permute(2, 0, 1, 3))

    def _lay_out_few(
        self, batch: RaggedBatch, sequences: npt.NDArray[np.int64], layer: int, kind: KVLayer
    ) -> PagedAttention:
        """Every token a row of its own, which sees what stands before it.

        Its result is then the one it would have alone, so tokens that are verified together get the logits that plain
        decoding gives them.
        """
        counts = batch.query_len[sequences]
        offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.repeat(batch.query_start[sequences], counts).astype(np.int64) + offsets
        return self._rows_of_their_own(rows, rows, layer, kind, num_rows=batch.num_tokens)

    def _lay_out_chosen(self, rows: npt.NDArray[np.int64], layer: int, kind: KVLayer) -> PagedAttention:
        """Some token rows of the step, which stand together in the matrices of the layer."""
        return self._rows_of_their_own(rows, np.arange(len(rows)), layer, kind, num_rows=len(rows))

    def _rows_of_their_own(
        self,
        tokens: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        layer: int,
        kind: KVLayer,
        *,
        num_rows: int,
    ) -> PagedAttention:
        """Token rows of the step, each read from its row of matrices with `num_rows`."""
        batch = self._batch
        tree_mask, tree_start = batch.tree_mask, batch.past_len if batch.tree_start is None else batch.tree_start
        return PagedAttention(
            pages=self._kv_cache.pages(layer),
            num_heads=self._num_heads,
            query_dtype=self._dtype,
            query_rows=rows,
            page_rows=batch.page_rows,
            slots=np.repeat(batch.state_index, batch.query_len)[tokens],
            lengths=batch.positions[tokens] + 1,
            scale=self._scale,
            window=kind.window,
            short_step=num_rows <= SKINNY_ROWS,
            tree_mask=None if tree_mask is None else tree_mask[tokens],
            tree_start=None if tree_mask is None else np.repeat(tree_start, batch.query_len)[tokens],
        )

    def _lay_out_many(self, batch: RaggedBatch, seq: int, kind: KVLayer) -> _ManyTokens:
        start, query, past = int(batch.query_start[seq]), int(batch.query_len[seq]), int(batch.past_len[seq])
        page_size = self._kv_cache.page_size
        length = past + query
        first_block = max(past - kind.window + 1, 0) // page_size if kind.window else 0
        first_key = first_block * page_size
        page_ids = batch.page_rows[batch.state_index[seq], first_block : -(-length // page_size)]
        mask = None
        if past > first_key or 0 < kind.window < query:
            mask = _mask(past, length, first_key, kind.window, self._dtype)
        return _ManyTokens(start, start + query, page_ids, length - first_key, mask)


def _mask(past: int, length: int, first_key: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    """(length - past, length - first_key): 0 where the token at a position sees the key at another, else -inf."""
    keys, rows = torch.arange(first_key, length), torch.arange(past, length)[:, None]
    allowed = keys <= rows
    if window:
        allowed &= keys > rows - window
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, float("-inf"))


def runs_token_by_token(batch: RaggedBatch) -> npt.NDArray[np.bool_]:
    """(N,) which sequences attend one token after the other: single tokens, trees, and what a decoder verifies.

    A verified token then gets the logits that plain decoding gives it, to the bit.
    """
    selected = np.bincount(batch.logits_to_seq, minlength=batch.num_sequences)
    apart: npt.NDArray[np.bool_] = (batch.query_len == 1) | (selected > 1)
    if batch.tree_mask is not None:
        apart |= batch.tree_mask[batch.query_start[:-1]].any(axis=1)
    return apart


def kv_offsets(batch: RaggedBatch, page_size: int, num_pages: int) -> npt.NDArray[np.int64]:
    """(T,) int64 place of each token in the pool: page_id * page_size + place.

    Raises:
        ContractViolation: a sequence needs a page that its row does not have.
    """
    slots = np.repeat(batch.state_index, batch.query_len)
    places = batch.positions if batch.tree_mask is None else batch.places
    blocks = places // page_size
    if len(blocks) and int(blocks.max()) >= batch.page_rows.shape[1]:
        token = int(blocks.argmax())
        raise ContractViolation(
            f"position {places[token]} needs block {blocks[token]}, but a page row has "
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
    return batch.page_rows[slots, blocks].astype(np.int64) * page_size + places % page_size
