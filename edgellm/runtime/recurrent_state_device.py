"""`DeviceRecurrentState`: recurrent and conv state on a device, addresses that stay, and a way back without a wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.runtime.recurrent_state import RecurrentState
from edgellm.runtime.step_inputs import HostStaging

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edgellm.models.config import StatePiece


class DeviceRecurrentState(RecurrentState):
    """State of the layers that keep any, zero at first.  Nothing here waits for the device.

    Args:
        checkpoint_rows: checkpoints that there is room for from the start.
        scatter: `scatter_state` of the operators.
    """

    def __init__(
        self,
        pieces: Sequence[StatePiece],
        num_slots: int,
        *,
        device: torch.device,
        checkpoint_rows: int = 0,
        scatter: Callable[..., object],
    ) -> None:
        super().__init__(pieces, num_slots, device=device)
        self._scatter = scatter
        self._words = torch.full((2, num_slots), -1, dtype=torch.int32, device=device)
        self._staging = [HostStaging(2 * num_slots, device) for _ in range(2)]
        self._turn = 0
        self.reserve(checkpoint_rows)

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether there is room for any."""
        return bool(self._checkpoints)

    def checkpoint(self, layer: int, name: str) -> torch.Tensor:
        """(checkpoint rows, *shape), whether the latest step kept any or not: what a graph is bound to."""
        return self._checkpoints[layer, name]

    def stage_rewind(self, slots: Sequence[int], kept: Sequence[int]) -> None:
        """Send where `rewind_staged` takes state from, in stream order; no slots are none.

        Raises:
            BrokenInvariantError: as `rewind`.
        """
        places = self.places(slots, kept)
        self._turn ^= 1
        staging = self._staging[self._turn]
        staging.wait()
        words = staging.words.reshape(2, self.num_slots)
        words.fill(-1)
        words[0, : len(slots)], words[1, : len(slots)] = slots, places
        staging.send(self._words.view(-1), 0, 2 * self.num_slots)

    def rewind_staged(self) -> None:
        """Launch the copies; addresses are the same every time, so that they can be captured."""
        slots, sources = self._words.unbind(0)
        self._scatter(self.slabs, [self._checkpoints[key] for key in self._live], slots, sources)

    def rewind(self, slots: Sequence[int], kept: Sequence[int]) -> None:
        """See `RecurrentState.rewind`; in stream order."""
        if len(slots):
            self.stage_rewind(slots, kept)
            self.rewind_staged()
