"""Reference of the gather of page rows."""

from __future__ import annotations

import torch


def page_table_gather(table: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """out[n] = table[slots[n]], or -1 throughout where the slot is out of range.  Effects: writes out."""
    for row, slot in enumerate(slots.tolist()):
        out[row] = table[slot] if 0 <= slot < table.shape[0] else -1
