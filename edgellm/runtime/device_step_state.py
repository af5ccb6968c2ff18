"""`DeviceStepState`: what the sequences of a step remember, as a device graph reaches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.errors import ContractViolation

if TYPE_CHECKING:
    import torch

    from edgellm.kernels.cu.state_rows import StateRows
    from edgellm.models.device_step import Attend
    from edgellm.runtime.recurrent_state_device import DeviceRecurrentState


@dataclass(frozen=True, slots=True)
class DeviceStepState:
    """Bound to the memory of one kind of step; see `edgellm.models.device_step.DeviceState`.

    Attributes:
        recurrent: state of the model's recurrent layers, where it has any.
        keeps_checkpoints: rows of the step are verified, so that their state is kept after each token.
    """

    attend: Attend
    rows: StateRows
    recurrent: DeviceRecurrentState | None
    keeps_checkpoints: bool

    def piece(self, layer: int, name: str) -> torch.Tensor:
        if self.recurrent is None:
            raise ContractViolation("the model's config names no recurrent state, and a layer asks for it")
        return self.recurrent.piece(layer, name)

    def checkpoint(self, layer: int, name: str) -> torch.Tensor | None:
        if self.recurrent is None or not self.keeps_checkpoints:
            return None
        return self.recurrent.checkpoint(layer, name)
