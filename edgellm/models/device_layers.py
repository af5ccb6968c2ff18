"""What the graphs on the device share: rotary angles, and the way from the residual stream to logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.models.rope import inverse_frequencies

if TYPE_CHECKING:
    from edgellm.models.config import RopeConfig
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import HiddenTaps, StepBuffers
    from edgellm.runtime.step_inputs import StepTensors


class DeviceAngles:
    """Cosine and sine of a step's positions.

    Args:
        rotary_dim: dims of a head that turn.
    """

    def __init__(self, ops: DeviceOps, rope: RopeConfig, rotary_dim: int, device: torch.device) -> None:
        inv_freq, self._scale = inverse_frequencies(rope, rotary_dim)
        self._inv_freq = inv_freq.to(device)
        self._ops = ops

    def __call__(self, positions: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """(2, T, rotary_dim / 2) float32 in the memory of `buffer`, (T, rotary_dim)."""
        angles = buffer.view(2, len(positions), -1)
        self._ops.rotary_angles(positions, self._inv_freq, self._scale, angles)
        return angles


class OutputHead:
    """Final norm and output matrix.

    Args:
        final_norm: (D,) float32.
        lm_head: (vocab_size, D), of the model's type.
    """

    def __init__(self, ops: DeviceOps, final_norm: torch.Tensor, eps: float, lm_head: torch.Tensor) -> None:
        self._ops = ops
        self._norm = final_norm
        self._eps = eps
        self._lm_head = lm_head

    def run(self, step: StepTensors, stream: torch.Tensor, taps: HiddenTaps, buffers: StepBuffers) -> bool:
        """Fill `buffers.logits` and the normed rows of `taps`; returns whether the step has logits.

        Args:
            stream: (T, D), what leaves the last layer, of the model's type or float32; scratch from here on.
        """
        has_logits = len(step.logits_index) > 0
        if has_logits:
            torch.index_select(stream, 0, step.logits_index, out=buffers.selected)
            self.logits_of(buffers.selected, buffers)
        if taps.wants_normed:
            self._ops.rms_norm(stream, self._norm, self._eps, stream)
            taps.normed(stream)
        return has_logits

    def logits_of(self, rows: torch.Tensor, buffers: StepBuffers) -> None:
        """Fill `buffers.logits`, from the rows (L, D) whose logits are wanted; they are scratch from here on."""
        self._normalise(rows, buffers.selected_normed)
        self._ops.linear(buffers.selected_normed, self._lm_head, buffers.logits)

    def _normalise(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """The norm of rows, rounded to out's type; rows of another type are overwritten."""
        if rows.dtype == out.dtype:
            self._ops.rms_norm(rows, self._norm, self._eps, out)
            return
        self._ops.rms_norm(rows, self._norm, self._eps, rows)
        out.copy_(rows)
