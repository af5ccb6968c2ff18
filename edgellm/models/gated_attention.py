"""Attention whose output is scaled by a sigmoid gate, on CPU rows (the attention layers of the Qwen hybrids)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.kernels.cpu.elementwise import rope_
from edgellm.kernels.cpu.gates import gate_
from edgellm.kernels.cpu.linear import linear

if TYPE_CHECKING:
    import torch

    from edgellm.models.qwen_hybrid_config import QwenHybridConfig
    from edgellm.models.qwen_hybrid_weights import GatedAttentionWeights
    from edgellm.models.row_buffers import RowBuffers
    from edgellm.models.step import StepState


class GatedAttention:
    """The attention of one layer.

    Args:
        kv_layer: of the step's pages.
    """

    def __init__(self, config: QwenHybridConfig, weights: GatedAttentionWeights, kv_layer: int) -> None:
        self._config = config
        self._kv_layer = kv_layer
        self._gate, self._qkv = _split(weights.gate_qkv, config.q_size)
        self._gate_bias, self._qkv_bias = None, None
        if weights.gate_qkv_bias is not None:
            self._gate_bias, self._qkv_bias = _split(weights.gate_qkv_bias, config.q_size)
        self._o = weights.o
        self._o_bias = weights.o_bias
        self._query_norm = 1.0 + weights.q_norm.float()
        self._key_norm = 1.0 + weights.k_norm.float()

    @staticmethod
    def widths(config: QwenHybridConfig) -> dict[str, int]:
        """Row buffers it needs."""
        return {"qkv": config.q_size + 2 * config.kv_size, "gate": config.q_size, "attended": config.q_size}

    def add(
        self, rows: torch.Tensor, hidden: torch.Tensor, angles: torch.Tensor, step: StepState, buffers: RowBuffers
    ) -> None:
        """hidden += what attention makes of rows; K and V go to the step's pages.

        Args:
            rows, hidden: (T, D).
            angles: (2, T, rotary_dim / 2) float32, cosine and sine.
        Effects: writes hidden, pages, buffers.
        """
        config = self._config
        gate = linear(rows, self._gate, buffers["gate"], bias=self._gate_bias)
        qkv = linear(rows, self._qkv, buffers["qkv"], bias=self._qkv_bias)
        rope_(
            qkv,
            angles,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            query_norm=self._query_norm,
            key_norm=self._key_norm,
            eps=config.rms_norm_eps,
        )
        attended = buffers["attended"]
        step.attend(self._kv_layer, qkv, attended)
        gate_(attended, gate)
        linear(attended, self._o, hidden, bias=self._o_bias, accumulate=True)


def _split(fused: torch.Tensor, gate_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return fused[:gate_rows], fused[gate_rows:]
