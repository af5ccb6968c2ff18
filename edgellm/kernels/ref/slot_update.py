"""Reference of updates of per-slot state."""

from __future__ import annotations

import torch


def slot_update(
    state: torch.Tensor, slots: torch.Tensor, values: torch.Tensor | None = None, *, add: bool = False
) -> None:
    """state[slots[i]] = values[i], or += with `add`, or 0 without values; slots out of range are skipped.

    Effects: writes state (num_slots, ...).
    """
    for entry, slot in enumerate(slots.tolist()):
        if not 0 <= slot < state.shape[0]:
            continue
        if values is None:
            state[slot] = 0
        elif add:
            state[slot] += values[entry]
        else:
            state[slot] = values[entry]
