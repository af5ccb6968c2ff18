"""Which tokens of a step belong to which sequence, and where its recurrent state lies: as the device reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """N rows of one step; the device counterpart of `edgellm.kernels.cpu.recurrent_rows.RecurrentRows`.

    Row i has the tokens [query_start[i], query_start[i + 1]) and reads and writes state row slots[i].  Where
    checkpoint_start[i] >= 0, the state after its j-th token goes to row checkpoint_start[i] + j of the checkpoint
    tensor as well.  Nothing is checked here: the values are the device's, and reading them would wait for it.

    Attributes:
        query_start: (N + 1,) int32, never falling; a row may be empty.  Tokens may stand behind the last row's end.
        slots: (N,) int32, no two equal but -1, a row of padding: nothing of it is read or written.
        checkpoint_start: (N,) int32, -1 for none; None: no row of the step has any.
    """

    query_start: torch.Tensor
    slots: torch.Tensor
    checkpoint_start: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    def spans(self) -> list[tuple[int, int, int, int]]:
        """(first token, end, slot, checkpoint row or -1) of each row that is no padding.

        Waits for the device: for references only.
        """
        starts, slots = self.query_start.tolist(), self.slots.tolist()
        kept = [-1] * len(slots) if self.checkpoint_start is None else self.checkpoint_start.tolist()
        rows = zip(starts[:-1], starts[1:], slots, kept, strict=True)
        return [row for row in rows if row[2] >= 0]
