"""Attention of one step on the device: which operator serves which rows of which layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from edgellm.models.config import KVLayer, ModelConfig
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import Attend
    from edgellm.runtime.kv_cache import KVCache
    from edgellm.runtime.step_inputs import StepShape, StepTensors

TENSOR_CORE_HEADS = (64, 128, 256)
WIDE_HEAD = 512  # these have a tensor-core kernel of their own


class AttentionMode(Enum):
    """SPLIT: ragged attention for context rows, decode attention for the rest.  EXACT: plain loops, for float32.

    DETERMINISTIC: ragged attention for all rows, in an order of summation that depends on positions alone.
    """

    SPLIT = "split"
    EXACT = "exact"
    DETERMINISTIC = "deterministic"

    @property
    def decode_apart(self) -> bool:
        """Whether rows of one token have an operator of their own."""
        return self is AttentionMode.SPLIT


@dataclass(frozen=True, slots=True)
class _Layer:
    """The keys and values of a layer, and which operators attend to them.

    Attributes:
        mode: EXACT where the usual kernels do not take such heads.
        is_wide: they have a tensor-core kernel of their own still, for rows of any number of tokens.
    """

    kind: KVLayer
    mode: AttentionMode
    is_wide: bool = False

    @property
    def shares_prefixes(self) -> bool:
        """Whether decode rows may attend in groups: with a window each sees keys of its own."""
        return self.mode is AttentionMode.SPLIT and not self.kind.window

    @classmethod
    def of(cls, kind: KVLayer, mode: AttentionMode) -> _Layer:
        """In a model that is served in `mode`."""
        if kind.head_dim in TENSOR_CORE_HEADS:
            return cls(kind, mode)
        return cls(kind, AttentionMode.EXACT, mode is not AttentionMode.EXACT and kind.head_dim == WIDE_HEAD)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a step: their tokens, and what ragged attention reads of them.

    Attributes:
        mask: (tokens, words) int32, which tokens of its row each sees; None is those in front of it.
    """

    tokens: slice
    slots: torch.Tensor
    query_start: torch.Tensor
    past_len: torch.Tensor
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Some token rows of a step, each of which attends by itself in a layer that owns no K and V.

    Attributes:
        index: (C,) int32, which token rows.
        slots, past_len, lengths: (C,) int32, as in `StepTensors`, of each token.
    """

    index: torch.Tensor
    slots: torch.Tensor
    past_len: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of_logits(cls, step: StepTensors, room: torch.Tensor) -> ChosenRows:
        """The rows whose logits are wanted, laid out on the device.

        Args:
            room: (4, L) int32, memory for them.
        """
        sequence, slots, past_len, lengths = room.unbind(0)
        torch.index_select(step.token_seq, 0, step.logits_index, out=sequence)
        # Padding takes the place of a row that is there: it reads what that one reads, and nobody reads it.
        torch.index_select(step.slots, 0, sequence.clamp_(min=0), out=slots)
        torch.index_select(step.positions, 0, step.logits_index, out=past_len)
        torch.add(past_len, 1, out=lengths)
        return cls(step.logits_index, slots, past_len, lengths)


class DeviceAttention:
    """Holds what every step shares: pool, page table and workspace.

    Args:
        page_table: (num_slots, pages_per_slot) int32, the device's copy.
        shares_prefixes: steps may have decode rows that attend in groups.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        ops: DeviceOps,
        kv_cache: KVCache,
        page_table: torch.Tensor,
        mode: AttentionMode,
        shares_prefixes: bool = False,
    ) -> None:
        self._num_heads = config.num_heads
        self._scale = config.attention_scale
        self._eps = config.rms_norm_eps
        self._ops = ops
        self._kv_cache = kv_cache
        self._page_table = page_table
        self._layers = [_Layer.of(kind, mode) for kind in config.kv_layers]
        self._shares_prefixes = shares_prefixes and any(layer.shares_prefixes for layer in self._layers)
        self._decode_workspace = self._new_workspace(0)
        self._prefill_workspace = self._new_workspace(0)
        self._single_starts: list[torch.Tensor] = []

    @property
    def shares_prefixes(self) -> bool:
        """Whether there is a layer whose decode rows may attend in groups that share a prefix."""
        return self._shares_prefixes

    def workspace_bytes(self, max_rows: int, max_keys: int) -> tuple[int, int]:
        """Bytes that decode attention and ragged attention need beside the pool.

        Args:
            max_rows: sequences of a step.  max_keys: tokens of one sequence.
        """
        return _workspace_bytes(
            self._layers, self._ops, self._num_heads, max_rows, max_keys, shares_prefixes=self._shares_prefixes
        )

    @staticmethod
    def bytes_for(config: ModelConfig, ops: DeviceOps, mode: AttentionMode, max_rows: int, max_keys: int) -> int:
        """All that `reserve` allocates."""
        layers = [_Layer.of(kind, mode) for kind in config.kv_layers]
        return sum(_workspace_bytes(layers, ops, config.num_heads, max_rows, max_keys)) + 4 * (max_rows + 1)

    def reserve(self, max_rows: int, max_keys: int) -> None:
        """Allocate for the largest step; once, before anything is captured."""
        decode, prefill = self.workspace_bytes(max_rows, max_keys)
        self._decode_workspace = self._new_workspace(decode)
        self._prefill_workspace = self._new_workspace(prefill)
        self._starts_of_single_tokens(max_rows)

    def _new_workspace(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._page_table.device)

    def bind(self, step: StepTensors, shape: StepShape, *, shares_prefixes: bool = False) -> Attend:
        """The attention of a step of `shape` over its input tensors; see `device_step.Attend`.

        What a layer may add: `query_norm`, `key_norm` and `value_norm`, (head_dim,) float32 weights of norms over each
        head; `chosen`, the token rows of the step that the rows of qkv are, where K and V are another layer's.
        A qkv as wide as out has no K and V of its own; angles may be None.

        Args:
            shares_prefixes: the step was staged with groups of decode rows.
        """

        def attend(
            kv_layer: int,
            qkv: torch.Tensor,
            angles: torch.Tensor | None,
            out: torch.Tensor,
            *,
            query_norm: torch.Tensor | None = None,
            key_norm: torch.Tensor | None = None,
            value_norm: torch.Tensor | None = None,
            chosen: ChosenRows | None = None,
        ) -> None:
            layer, pages = self._layers[kv_layer], self._kv_cache.pages(kv_layer)
            writes = qkv.shape[1] > out.shape[1]
            positions = step.positions if step.tree is None else step.tree.places
            places = (step.slots, step.token_seq, positions) if chosen is None else (None, None, None)
            self._ops.rope_kv_write(
                qkv,
                angles,
                pages if writes else None,
                self._page_table,
                *places,
                num_heads=self._num_heads,
                num_kv_heads=layer.kind.num_kv_heads if writes else 0,
                head_dim=layer.kind.head_dim,
                rotary_dim=None if angles is None else 2 * angles.shape[2],
                query_norm=query_norm,
                key_norm=key_norm,
                value_norm=value_norm,
                eps=self._eps,
            )
            if chosen is None:
                shares = shares_prefixes and layer.shares_prefixes
                self._attend(kv_layer, layer, qkv, pages, step, shape, out, shares=shares)
            elif step.tree is None:
                self._attend_chosen(layer, qkv, pages, chosen, out)
            else:
                self._attend_chosen_of_trees(layer, qkv, pages, step, shape, chosen, out)

        return attend

    def _attend(
        self,
        kv_layer: int,
        layer: _Layer,
        qkv: torch.Tensor,
        pages: torch.Tensor,
        step: StepTensors,
        shape: StepShape,
        out: torch.Tensor,
        *,
        shares: bool,
    ) -> None:
        apart = layer.mode is AttentionMode.SPLIT
        for rows in self._ragged_rows(step, shape, with_decode=not apart):
            self._attend_ragged(layer, qkv, pages, rows, out)
        if apart and shape.decode_rows:
            tokens, rows_before = shape.context_tokens, shape.context_rows
            places = step.slots[rows_before:], step.lengths[rows_before:]
            # The decode kernel of the layer below has waited for the step's inputs, and for every step before.
            attend = partial(self._attend_in_groups, step) if shares else self._attend_decode
            attend(layer, qkv[tokens:], pages, *places, out[tokens:], early_reads=kv_layer > 0)

    def _attend_chosen(
        self, layer: _Layer, query: torch.Tensor, pages: torch.Tensor, chosen: ChosenRows, out: torch.Tensor
    ) -> None:
        """Every row as a sequence of one token."""
        if layer.mode is AttentionMode.SPLIT:
            self._attend_decode(layer, query, pages, chosen.slots, chosen.lengths, out, early_reads=False)
            return
        starts = self._starts_of_single_tokens(len(query))
        self._attend_ragged(layer, query, pages, _Rows(slice(None), chosen.slots, starts, chosen.past_len), out)

    def _attend_chosen_of_trees(
        self,
        layer: _Layer,
        query: torch.Tensor,
        pages: torch.Tensor,
        step: StepTensors,
        shape: StepShape,
        chosen: ChosenRows,
        out: torch.Tensor,
    ) -> None:
        """Every row where it stands in its tree, since masks are of whole rows; others come to nothing that is read."""
        all_rows = query.new_zeros((shape.tokens, query.shape[1])).index_copy_(0, chosen.index.long(), query)
        attended = out.new_zeros((shape.tokens, out.shape[1]))
        for rows in self._ragged_rows(step, shape, with_decode=False):
            self._attend_ragged(layer, all_rows, pages, rows, attended)
        torch.index_select(attended, 0, chosen.index, out=out)

    def _ragged_rows(self, step: StepTensors, shape: StepShape, *, with_decode: bool) -> Iterator[_Rows]:
        """Context rows, and then decode rows, which are sequences of one token.

        Padding may stand between the two, so each part has starts of its own.  In a step with trees masked rows and
        long ones stand as they come: each part leaves out what is the other's, as if it were padding.
        """
        if step.tree is not None:
            yield _Rows(slice(None), step.tree.slots, step.query_start, step.past_len, step.tree.mask)
            if shape.has_long_rows:
                yield _Rows(slice(None), step.tree.long_slots, step.query_start, step.past_len)
            return
        context = shape.context_rows
        if context:
            tokens = slice(0, shape.context_tokens)
            yield _Rows(tokens, step.slots[:context], step.query_start[: context + 1], step.past_len[:context])
        if with_decode and shape.decode_rows:
            starts = self._starts_of_single_tokens(shape.decode_rows)
            tokens = slice(shape.context_tokens, None)
            yield _Rows(tokens, step.slots[context:], starts, step.past_len[context:])

    def _starts_of_single_tokens(self, count: int) -> torch.Tensor:
        """(count + 1,) int32: 0, 1, 2, ..., at an address that stays."""
        for starts in self._single_starts:
            if count < len(starts):
                return starts[: count + 1]
        starts = torch.arange(count + 1, dtype=torch.int32, device=self._page_table.device)
        self._single_starts.append(starts)
        return starts

    def _attend_ragged(
        self, layer: _Layer, qkv: torch.Tensor, pages: torch.Tensor, rows: _Rows, out: torch.Tensor
    ) -> None:
        arguments = (
            qkv[rows.tokens],
            pages,
            self._page_table,
            rows.slots,
            rows.query_start,
            rows.past_len,
            out[rows.tokens],
        )
        heads, scale, window = self._num_heads, self._scale, layer.kind.window
        if layer.mode is AttentionMode.EXACT:
            attend = self._ops.paged_attention_wide if layer.is_wide else self._ops.paged_attention_exact
            attend(*arguments, num_heads=heads, scale=scale, window=window, tree_mask=rows.mask)
            return
        self._ops.paged_prefill(
            *arguments,
            num_heads=heads,
            scale=scale,
            window=window,
            tree_mask=rows.mask,
            deterministic=layer.mode is AttentionMode.DETERMINISTIC,
            workspace=self._prefill_workspace,
        )

    def _attend_decode(
        self,
        layer: _Layer,
        query: torch.Tensor,
        pages: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
        *,
        early_reads: bool,
    ) -> None:
        self._ops.paged_decode(
            query,
            pages,
            self._page_table,
            slots,
            lengths,
            out,
            self._decode_workspace,
            num_heads=self._num_heads,
            scale=self._scale,
            window=layer.kind.window,
            early_reads=early_reads,
        )

    def _attend_in_groups(
        self,
        step: StepTensors,
        layer: _Layer,
        query: torch.Tensor,
        pages: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
        *,
        early_reads: bool,
    ) -> None:
        self._ops.paged_cascade(
            query,
            pages,
            self._page_table,
            slots,
            lengths,
            step.shared,
            step.members,
            step.group_start,
            out,
            self._decode_workspace,
            num_heads=self._num_heads,
            scale=self._scale,
            early_reads=early_reads,
        )


def _workspace_bytes(
    layers: Sequence[_Layer],
    ops: DeviceOps,
    num_heads: int,
    max_rows: int,
    max_keys: int,
    *,
    shares_prefixes: bool = False,
) -> tuple[int, int]:
    """Of decode attention, of ragged attention."""
    decode, prefill = 0, 0
    for mode, head_dim in dict.fromkeys((layer.mode, layer.kind.head_dim) for layer in layers):
        if mode is AttentionMode.DETERMINISTIC:
            prefill = max(prefill, ops.prefill_workspace_bytes(max_rows, max_keys, num_heads, head_dim))
        elif mode is AttentionMode.SPLIT:
            decode = max(decode, ops.decode_workspace_bytes(max_rows, num_heads, head_dim))
            prefill = max(prefill, ops.prefill_workspace_bytes(0, 0, num_heads, head_dim))
    for layer in layers:
        if shares_prefixes and layer.shares_prefixes:
            heads = num_heads, layer.kind.num_kv_heads, layer.kind.head_dim
            decode = max(decode, ops.cascade_workspace_bytes(max_rows, *heads))
    return decode, prefill
