"""The graph of Mamba-2 on CPU rows: each layer is a norm and a mixer on the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from edgellm.kernels.cpu.elementwise import rms_norm
from edgellm.kernels.cpu.linear import linear
from edgellm.models.mamba2_mixer import Mamba2Mixer
from edgellm.models.row_buffers import RowBuffers
from edgellm.models.step import GraphOutput, HiddenRows

if TYPE_CHECKING:
    from edgellm.models.families.mamba2 import Mamba2Config
    from edgellm.models.loader import LoadedModel
    from edgellm.models.mamba2_mixer import MixerWeights
    from edgellm.models.step import HiddenRequest, StepState


@dataclass(slots=True)
class Mamba2LayerWeights:
    """Attributes:
    norm: (D,), in front of the mixer.
    """

    norm: torch.Tensor
    mixer: MixerWeights


class Mamba2Graph:
    """Forward pass over rows.  Owns its scratch, so one pass at a time."""

    def __init__(self, model: LoadedModel) -> None:
        self.config: Mamba2Config = model.config  # type: ignore[assignment]
        self._weights = model.weights
        config, layers = self.config, model.weights.layers
        self._mixers = [Mamba2Mixer(config.mixer, layer.mixer, idx) for idx, layer in enumerate(layers)]
        self._norms = [layer.norm.float() for layer in layers]
        self._final_norm = model.weights.final_norm.float()
        self._residual_dtype = torch.float32 if config.float_residual else model.weights.dtype
        width = config.hidden_size
        self._buffers = RowBuffers(
            {"hidden": width, "normed": width, "branch": width} | config.mixer.buffer_widths(),
            model.weights.dtype,
            dtypes={"hidden": self._residual_dtype},
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_index: torch.Tensor,
        step: StepState,
        hidden_request: HiddenRequest | None = None,
    ) -> GraphOutput:
        """One pass; see `edgellm.models.step.Graph`.  Positions do not matter: the state has seen the order."""
        self._buffers.resize(len(token_ids))
        hidden, normed = self._buffers["hidden"], self._buffers["normed"]
        hidden.copy_(self._weights.embedding[token_ids])
        wanted = HiddenRows(hidden_request, len(token_ids), self.config.hidden_size, normed.dtype)
        for idx, (mixer, norm) in enumerate(zip(self._mixers, self._norms, strict=True)):
            wanted.enters(idx, hidden)
            self._normalise(hidden, norm, normed)
            mixed = mixer.forward(normed, step.recurrent, self._buffers)
            self._add(mixer, mixed, hidden)
        wanted.enters(self.config.num_layers, hidden)
        if wanted.wants_normed:
            wanted.normed(self._final(hidden))
        return GraphOutput(self._logits(hidden[logits_index]), wanted.rows)

    def _normalise(self, hidden: torch.Tensor, norm: torch.Tensor, normed: torch.Tensor) -> None:
        if hidden.dtype == normed.dtype:
            rms_norm(hidden, norm, self.config.rms_norm_eps, normed)
            return
        normed.copy_(hidden)
        rms_norm(normed, norm, self.config.rms_norm_eps, normed)

    def _add(self, mixer: Mamba2Mixer, mixed: torch.Tensor, hidden: torch.Tensor) -> None:
        if hidden.dtype == mixed.dtype:
            mixer.project(mixed, hidden, accumulate=True)
        else:
            hidden.add_(mixer.project(mixed, self._buffers["branch"]))

    def _final(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows behind the final norm, of the model's dtype; a new tensor."""
        normed = torch.empty_like(rows)
        rms_norm(rows, self._final_norm, self.config.rms_norm_eps, normed)
        return normed.to(self._weights.dtype)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = torch.empty((len(rows), self.config.vocab_size), dtype=torch.float32)
        return linear(self._final(rows), self._weights.lm_head, logits) if len(rows) else logits
