"""Reference of rings of the latest rows."""

from __future__ import annotations

import torch


def keep_rows(
    rows: torch.Tensor,
    places: torch.Tensor,
    token_seq: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    """ring[slots[n], p % room] = rows[t] for rows t of sequences n at places p >= lengths[n] - room.

    Rows of sequence -1, and of sequences whose slot is out of range, are skipped.
    Effects: writes ring (num_slots, room, width).
    """
    if not len(slots) or not ring.numel():
        return
    num_slots, room, width = ring.shape
    sequence = token_seq.clamp(0, len(slots) - 1).long()
    slot = slots[sequence].long()
    real = (token_seq >= 0) & (token_seq < len(slots)) & (slot >= 0) & (slot < num_slots)
    kept = torch.nonzero(real & (places >= 0) & (places >= lengths[sequence] - room)).flatten()
    ring.view(-1, width)[slot[kept] * room + places[kept] % room] = rows[kept]
