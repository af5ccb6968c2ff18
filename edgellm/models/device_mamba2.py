"""The graph of Mamba-2 on the device: each layer is a norm and a mixer on the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.models.device_layers import OutputHead
from edgellm.models.device_mamba2_mixer import DeviceMamba2Mixer
from edgellm.models.device_step import HiddenTaps

if TYPE_CHECKING:
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import DeviceState, StepBuffers
    from edgellm.models.families.mamba2 import Mamba2Config
    from edgellm.models.loader import LoadedModel
    from edgellm.models.step import HiddenRequest
    from edgellm.runtime.step_inputs import StepTensors


class DeviceMamba2Graph:
    """Forward pass over rows; see `edgellm.models.device_step.DeviceFamilyGraph`.

    Args:
        model: weights on the device that `ops` compute on.
    """

    def __init__(self, model: LoadedModel, ops: DeviceOps) -> None:
        self.config: Mamba2Config = model.config  # type: ignore[assignment]
        config, weights = self.config, model.weights
        width = config.hidden_size
        self.row_widths = {"normed": width} | DeviceMamba2Mixer.widths(config.mixer)
        self.float_widths = DeviceMamba2Mixer.float_widths(config.mixer)
        if config.float_residual and weights.dtype != torch.float32:
            self.float_widths["hidden"] = self.row_widths["branch"] = width
        else:
            self.row_widths["hidden"] = width
        self._ops = ops
        self._embedding = weights.embedding
        self._mixers = [
            DeviceMamba2Mixer(ops, config.mixer, layer.mixer, idx) for idx, layer in enumerate(weights.layers)
        ]
        self._norms = [layer.norm.float() for layer in weights.layers]
        self._head = OutputHead(ops, weights.final_norm.float(), config.rms_norm_eps, weights.lm_head)

    def workspace_bytes(self, *, tokens: int, rows: int) -> int:
        return 0

    def forward(
        self,
        step: StepTensors,
        buffers: StepBuffers,
        state: DeviceState,
        hidden: torch.Tensor | None = None,
        request: HiddenRequest | None = None,
    ) -> None:
        """One pass.  Positions do not matter: the state has seen the order."""
        stream, normed = buffers["hidden"], buffers["normed"]
        taps = HiddenTaps(request, hidden, self.config.hidden_size)
        self._ops.embedding(step.token_ids, self._embedding, normed)
        stream.copy_(normed)
        run = self._run_layer if stream.dtype == normed.dtype else self._run_layer_beside_float_stream
        for idx, (mixer, norm) in enumerate(zip(self._mixers, self._norms, strict=True)):
            taps.enters(idx, stream)
            run(mixer, norm, stream, state, buffers)
        taps.enters(self.config.num_layers, stream)
        self._head.run(step, stream, taps, buffers)

    def _run_layer(
        self,
        mixer: DeviceMamba2Mixer,
        norm: torch.Tensor,
        stream: torch.Tensor,
        state: DeviceState,
        buffers: StepBuffers,
    ) -> None:
        normed = buffers["normed"]
        self._ops.rms_norm(stream, norm, self.config.rms_norm_eps, normed)
        mixer.mix(normed, state, buffers, stream, residual=stream)

    def _run_layer_beside_float_stream(
        self,
        mixer: DeviceMamba2Mixer,
        norm: torch.Tensor,
        stream: torch.Tensor,
        state: DeviceState,
        buffers: StepBuffers,
    ) -> None:
        normed, branch = buffers["normed"], buffers["branch"]
        normed.copy_(stream)
        self._ops.rms_norm(normed, norm, self.config.rms_norm_eps, normed)
        mixer.mix(normed, state, buffers, branch)
        stream.add_(branch)
