"""Attention of one step on the device: which operator serves which rows."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from edgellm.models.config import ModelConfig
    from edgellm.models.device_graph import Attend, HeadNorms
    from edgellm.models.device_ops import DeviceOps
    from edgellm.runtime.kv_cache import KVCache
    from edgellm.runtime.step_inputs import StepShape, StepTensors


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


class DeviceAttention:
    """Holds what every step shares: pool, page table and workspace.

    Args:
        page_table: (num_slots, pages_per_slot) int32, the device's copy.
        head_norms: of each layer.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        ops: DeviceOps,
        kv_cache: KVCache,
        page_table: torch.Tensor,
        head_norms: list[HeadNorms],
        mode: AttentionMode,
    ) -> None:
        self._config = config
        self._ops = ops
        self._kv_cache = kv_cache
        self._page_table = page_table
        self._head_norms = head_norms
        self._mode = mode
        self._scale = config.head_dim**-0.5
        self._decode_workspace = self._new_workspace(0)
        self._prefill_workspace = self._new_workspace(0)

    def workspace_bytes(self, max_rows: int, max_keys: int) -> tuple[int, int]:
        """Bytes that decode attention and ragged attention need beside the pool.

        Args:
            max_rows: sequences of a step.  max_keys: tokens of one sequence.
        """
        if self._mode is AttentionMode.EXACT:
            return 0, 0
        if self._mode is AttentionMode.DETERMINISTIC:
            return 0, self._ops.prefill_workspace_bytes(max_rows, max_keys, self._config)
        decode = self._ops.decode_workspace_bytes(max_rows, self._config)
        return decode, self._ops.prefill_workspace_bytes(0, 0, self._config)

    def reserve(self, max_rows: int, max_keys: int) -> None:
        """Allocate for the largest step; once, before anything is captured."""
        decode, prefill = self.workspace_bytes(max_rows, max_keys)
        self._decode_workspace = self._new_workspace(decode)
        self._prefill_workspace = self._new_workspace(prefill)

    def _new_workspace(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._page_table.device)

    def bind(self, step: StepTensors, shape: StepShape) -> Attend:
        """The attention of a step of `shape` over its input tensors."""

        def attend(layer: int, qkv: torch.Tensor, angles: torch.Tensor, out: torch.Tensor) -> None:
            pages = self._kv_cache.pages(layer)
            self._write(layer, qkv, angles, pages, step)
            if shape.context_rows:
                self._attend_context(qkv, pages, step, shape, out)
            if shape.decode_rows:
                self._attend_decode(layer, qkv, pages, step, shape, out)

        return attend

    def _write(
        self, layer: int, qkv: torch.Tensor, angles: torch.Tensor, pages: torch.Tensor, step: StepTensors
    ) -> None:
        norms = self._head_norms[layer]
        self._ops.rope_kv_write(
            qkv,
            angles,
            pages,
            self._page_table,
            step.slots,
            step.token_seq,
            step.positions,
            num_heads=self._config.num_heads,
            num_kv_heads=self._config.num_kv_heads,
            head_dim=self._config.head_dim,
            query_norm=norms.query,
            key_norm=norms.key,
            eps=self._config.rms_norm_eps,
        )

    def _attend_context(
        self, qkv: torch.Tensor, pages: torch.Tensor, step: StepTensors, shape: StepShape, out: torch.Tensor
    ) -> None:
        tokens, rows = shape.context_tokens, shape.context_rows
        arguments = (
            qkv[:tokens],
            pages,
            self._page_table,
            step.slots[:rows],
            step.query_start[: rows + 1],
            step.past_len[:rows],
            out[:tokens],
        )
        heads, scale = self._config.num_heads, self._scale
        if self._mode is AttentionMode.EXACT:
            self._ops.paged_attention_exact(*arguments, num_heads=heads, scale=scale)
        elif self._mode is AttentionMode.DETERMINISTIC:
            self._ops.paged_prefill(
                *arguments, num_heads=heads, scale=scale, deterministic=True, workspace=self._prefill_workspace
            )
        else:
            self._ops.paged_prefill(*arguments, num_heads=heads, scale=scale, workspace=self._prefill_workspace)

    def _attend_decode(
        self,
        layer: int,
        qkv: torch.Tensor,
        pages: torch.Tensor,
        step: StepTensors,
        shape: StepShape,
        out: torch.Tensor,
    ) -> None:
        self._ops.paged_decode(
            qkv[shape.context_tokens :],
            pages,
            self._page_table,
            step.slots[shape.context_rows :],
            step.lengths[shape.context_rows :],
            out[shape.context_tokens :],
            self._decode_workspace,
            num_heads=self._config.num_heads,
            scale=self._scale,
            # The decode kernel of the layer below has waited for the step's inputs, and for every step before.
            early_reads=layer > 0,
        )
