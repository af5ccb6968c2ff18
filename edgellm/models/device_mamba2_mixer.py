"""The Mamba-2 mixer on the device: projection, causal convolution, selective scan, gated norm, projection.

Dao and Gu, "Transformers are SSMs" (2024); see `edgellm.models.mamba2_mixer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import DeviceState, StepBuffers
    from edgellm.models.mamba2_mixer import MixerShape, MixerWeights


class DeviceMamba2Mixer:
    """One layer's mixer; borrows its weights."""

    def __init__(self, ops: DeviceOps, shape: MixerShape, weights: MixerWeights, layer: int) -> None:
        self._ops = ops
        self._shape = shape
        self._weights = weights
        self._layer = layer
        self._conv = weights.conv[:, 0].float().contiguous()
        self._conv_bias = None if weights.conv_bias is None else weights.conv_bias.float()
        self._step_bias = weights.step_bias.float()
        self._decay = -torch.exp(weights.log_decay.float())
        self._skip = weights.skip.float()
        self._norm = weights.norm.float()

    @staticmethod
    def widths(shape: MixerShape) -> dict[str, int]:
        """The row buffers of the model's type that it needs."""
        return shape.buffer_widths()

    @staticmethod
    def float_widths(shape: MixerShape) -> dict[str, int]:
        """The float32 ones."""
        return {"steps": shape.num_heads}

    def mix(
        self,
        rows: torch.Tensor,
        state: DeviceState,
        buffers: StepBuffers,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        """out (T, D) = what the mixer makes of rows (T, D), normed; the state of every sequence moves on.

        Args:
            residual: (T, D), added to it; may be out.
        """
        ops, shape, weights = self._ops, self._shape, self._weights
        projected, convolved, scanned = (buffers[name] for name in ("projected", "convolved", "scanned"))
        ops.linear(rows, weights.in_proj, projected, weights.in_proj_bias)
        gate, conv_input, steps = torch.split(
            projected, [shape.inner_size, shape.conv_channels, shape.num_heads], dim=1
        )
        ops.causal_conv(
            conv_input,
            self._conv,
            self._conv_bias,
            state.piece(self._layer, "conv"),
            state.rows,
            convolved,
            silu=True,
            checkpoint=state.checkpoint(self._layer, "conv"),
        )
        least, greatest = shape.step_limits
        ops.step_sizes(steps, self._step_bias, buffers["steps"], least=least, greatest=greatest)
        self._scan(convolved, buffers["steps"], state, scanned)
        ops.group_norm_gate(scanned, gate, self._norm, shape.norm_eps, scanned, num_groups=shape.num_groups)
        ops.linear(scanned, weights.out_proj, out, weights.out_proj_bias, residual=residual)

    def _scan(self, convolved: torch.Tensor, steps: torch.Tensor, state: DeviceState, scanned: torch.Tensor) -> None:
        shape = self._shape
        x, b, c = torch.split(convolved, [shape.inner_size, shape.group_size, shape.group_size], dim=1)
        heads = (-1, shape.num_heads, shape.head_dim)
        groups = (-1, shape.num_groups, shape.state_size)
        self._ops.mamba2(
            x.view(heads),
            steps,
            self._decay,
            b.view(groups),
            c.view(groups),
            self._skip,
            state.piece(self._layer, "state"),
            state.rows,
            scanned.view(heads),
            checkpoint=state.checkpoint(self._layer, "state"),
        )
