"""Gated delta net on CPU rows: a short convolution, the gated delta rule, a gated norm (Yang et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.kernels.cpu.causal_conv import causal_conv
from edgellm.kernels.cpu.elementwise import rms_norm
from edgellm.kernels.cpu.gated_delta import gated_delta
from edgellm.kernels.cpu.gates import delta_gates, gate_
from edgellm.kernels.cpu.linear import linear

if TYPE_CHECKING:
    from edgellm.models.qwen_hybrid_config import DeltaNetConfig, QwenHybridConfig
    from edgellm.models.qwen_hybrid_weights import DeltaNetWeights
    from edgellm.models.row_buffers import RowBuffers
    from edgellm.models.step import RecurrentStep


class DeltaNet:
    """The delta net of one layer."""

    def __init__(self, config: QwenHybridConfig, weights: DeltaNetWeights, layer: int) -> None:
        self._delta = config.delta
        self._eps = config.rms_norm_eps
        self._layer = layer
        self._projection = weights.projection
        self._conv = weights.conv.squeeze(1).float().contiguous()
        self._rate = -weights.a_log.float().exp()
        self._dt_bias = weights.dt_bias.float()
        self._norm = weights.norm.float()
        self._out = weights.out

    @staticmethod
    def widths(delta: DeltaNetConfig) -> dict[str, int]:
        """Row buffers it needs."""
        return {
            "projected": delta.conv_size + delta.value_size + 2 * delta.num_value_heads,
            "recalled": delta.value_size,
        }

    def add(self, rows: torch.Tensor, hidden: torch.Tensor, recurrent: RecurrentStep, buffers: RowBuffers) -> None:
        """hidden += what the delta net makes of rows; its state moves on.

        Args:
            rows, hidden: (T, D).
        Effects: writes hidden, the step's state and checkpoints, buffers.
        """
        delta = self._delta
        projected = linear(rows, self._projection, buffers["projected"])
        sizes = [delta.conv_size, delta.value_size, delta.num_value_heads, delta.num_value_heads]
        mixed, z, b, a = torch.split(projected, sizes, dim=1)
        recalled = buffers["recalled"]
        causal_conv(
            mixed,
            self._conv,
            None,
            recurrent.piece(self._layer, "conv"),
            recurrent.rows,
            mixed,
            silu=True,
            checkpoint=recurrent.checkpoint(self._layer, "conv"),
        )
        self._recall(mixed, a, b, recalled, recurrent)
        self._gated_norm(recalled, z)
        linear(recalled, self._out, hidden, accumulate=True)

    def _recall(
        self, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, recurrent: RecurrentStep
    ) -> None:
        delta = self._delta
        decay, beta = torch.empty((2, *a.shape)).unbind(0)
        delta_gates(a, b, self._rate, self._dt_bias, decay, beta)
        q, k, v = torch.split(mixed, [delta.key_size, delta.key_size, delta.value_size], dim=1)
        gated_delta(
            q.view(-1, delta.num_key_heads, delta.key_dim),
            k.view(-1, delta.num_key_heads, delta.key_dim),
            v.view(-1, delta.num_value_heads, delta.value_dim),
            decay,
            beta,
            recurrent.piece(self._layer, "state"),
            recurrent.rows,
            out.view(-1, delta.num_value_heads, delta.value_dim),
            scale=delta.key_dim**-0.5,
            l2norm=True,
            checkpoint=recurrent.checkpoint(self._layer, "state"),
        )

    def _gated_norm(self, recalled: torch.Tensor, z: torch.Tensor) -> None:
        """RMS norm of each head, times silu of the gate."""
        heads = recalled.view(-1, self._delta.value_dim)
        rms_norm(heads, self._norm, self._eps, heads)
        gate_(recalled, z, silu=True)
