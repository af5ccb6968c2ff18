"""Gated delta net on the device: a short convolution, the gated delta rule, a gated norm (Yang et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import DeviceState, StepBuffers
    from edgellm.models.qwen_hybrid_config import DeltaNetConfig, QwenHybridConfig
    from edgellm.models.qwen_hybrid_weights import DeltaNetWeights


class DeviceDeltaNet:
    """The delta net of one layer."""

    def __init__(self, ops: DeviceOps, config: QwenHybridConfig, weights: DeltaNetWeights, layer: int) -> None:
        self._ops = ops
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
        """The row buffers of the model's type that it needs."""
        return {
            "projected": delta.conv_size + delta.value_size + 2 * delta.num_value_heads,
            "convolved": delta.conv_size,
            "recalled": delta.value_size,
        }

    @staticmethod
    def float_widths(delta: DeltaNetConfig) -> dict[str, int]:
        """The float32 ones."""
        return {"decay": delta.num_value_heads, "beta": delta.num_value_heads}

    @staticmethod
    def workspace_bytes(ops: DeviceOps, delta: DeltaNetConfig, dtype: torch.dtype, *, tokens: int, rows: int) -> int:
        """Bytes of workspace for up to so many tokens and rows."""
        return ops.gated_delta_workspace(
            tokens,
            rows,
            key_heads=delta.num_key_heads,
            heads=delta.num_value_heads,
            key_dim=delta.key_dim,
            value_dim=delta.value_dim,
            dtype=dtype,
        )

    def add(self, rows: torch.Tensor, stream: torch.Tensor, state: DeviceState, buffers: StepBuffers) -> None:
        """stream += what the delta net makes of rows, both (T, D); its state moves on."""
        ops, delta, projected = self._ops, self._delta, buffers["projected"]
        ops.linear(rows, self._projection, projected)
        sizes = [delta.conv_size, delta.value_size, delta.num_value_heads, delta.num_value_heads]
        mixed, z, b, a = torch.split(projected, sizes, dim=1)
        ops.causal_conv(
            mixed,
            self._conv,
            None,
            state.piece(self._layer, "conv"),
            state.rows,
            buffers["convolved"],
            silu=True,
            checkpoint=state.checkpoint(self._layer, "conv"),
        )
        ops.delta_gates(a, b, self._rate, self._dt_bias, buffers["decay"], buffers["beta"])
        recalled = buffers["recalled"]
        self._recall(recalled, state, buffers)
        ops.gated_norm(recalled, z, self._norm, self._eps, recalled)
        ops.linear(recalled, self._out, stream, residual=stream)

    def _recall(self, out: torch.Tensor, state: DeviceState, buffers: StepBuffers) -> None:
        delta = self._delta
        q, k, v = torch.split(buffers["convolved"], [delta.key_size, delta.key_size, delta.value_size], dim=1)
        self._ops.gated_delta(
            q.view(-1, delta.num_key_heads, delta.key_dim),
            k.view(-1, delta.num_key_heads, delta.key_dim),
            v.view(-1, delta.num_value_heads, delta.value_dim),
            buffers["decay"],
            buffers["beta"],
            state.piece(self._layer, "state"),
            state.rows,
            out.view(-1, delta.num_value_heads, delta.value_dim),
            scale=delta.key_dim**-0.5,
            l2norm=True,
            checkpoint=state.checkpoint(self._layer, "state"),
            workspace=buffers.workspace,
        )
