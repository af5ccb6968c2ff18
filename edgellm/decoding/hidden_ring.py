"""`HiddenRing`: the latest hidden rows of each resident, which the target's own steps keep on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from edgellm.errors import BrokenInvariantError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.decoding.chain import KeptRow
    from edgellm.decoding.draft_ops import DraftExecutor
    from edgellm.runtime.step_inputs import StepTensors


class HiddenRing:
    """The row of place p of a sequence stands at p % room of its slot until a step writes place p + room.

    What a step wrote for nothing (proposals that were not kept, a step that was run ahead and dropped) lies behind the
    kept places of its sequence, and the step that comes to these places writes them again.

    Args:
        rows: (slots, room, width), contiguous, of the type of the target's hidden rows; borrowed.
    """

    def __init__(self, rows: torch.Tensor, executor: DraftExecutor) -> None:
        self._rows = rows
        self._flat = rows.flatten(0, 1)
        self._device = executor.device
        self._keep_rows = executor.ops.keep_rows

    @property
    def room(self) -> int:
        return self._rows.shape[1]

    def keep(self, step: StepTensors, hidden: torch.Tensor) -> None:
        """See `KeepHidden`; of each sequence the last `room` places of the step."""
        # The nodes of a tree share positions; their places in the pages are apart.
        places = step.positions if step.tree is None else step.tree.places
        self._keep_rows(hidden, places, step.token_seq, step.slots, step.lengths, self._rows)

    def put(self, rows: Sequence[KeptRow]) -> None:
        """Rows that do not stand where the step kept them: those of branches of trees.

        Args:
            rows: at least one, of one step, each of at most `room` inputs.
        Raises:
            BrokenInvariantError: they have no hidden rows, or those of several steps.
        """
        counts = np.array([len(row.inputs) for row in rows])
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        places = (np.repeat([row.past for row in rows], counts) + within) % self.room
        go = np.repeat([row.slot for row in rows], counts) * self.room + places
        lie = np.concatenate([np.array(row.rows) for row in rows])
        hidden = rows[0].step_hidden
        if hidden is None or any(row.step_hidden is not hidden for row in rows):
            raise BrokenInvariantError(f"slot {rows[0].slot} ran without the hidden rows that its draft needs")
        sources, targets = self._device.upload(np.stack((lie, go))).unbind(0)
        self._flat.index_copy_(0, targets, hidden.index_select(0, sources))

    def gathered(self, slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """(N, width) rows of (N,) int32 places of (N,) int32 slots, any row for slot -1; may be captured."""
        return self._flat.index_select(0, (slots * self.room + places % self.room).clamp_(min=0))

    def copy_of(self, slot: int, place: int) -> torch.Tensor:
        """(width,) one row."""
        return self._rows[slot, place % self.room].clone()
