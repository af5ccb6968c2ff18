"""Reference of the update of page rows."""

from __future__ import annotations

import torch


def table_update(table: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """table[slots[i]] = rows[i]; slots out of range are skipped.  Effects: writes table."""
    for row, slot in enumerate(slots.tolist()):
        if 0 <= slot < table.shape[0]:
            table[slot] = rows[row]
