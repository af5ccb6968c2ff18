"""Reference of putting recurrent state back to what it was after an earlier token."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def scatter_state(
    live: torch.Tensor | Sequence[torch.Tensor],
    checkpoint: torch.Tensor | Sequence[torch.Tensor],
    slots: torch.Tensor,
    sources: torch.Tensor,
) -> None:
    """live[slots[i]] = checkpoint[sources[i]] wherever slots[i] >= 0.

    Args:
        live: (S, *shape) state of every resident slot; or one tensor a piece.
        checkpoint: (CK, *shape), dtype of live; or as many tensors.
        slots: (N,) int32, no two equal but -1.
        sources: (N,) int32; anything where the slot is -1.
    Effects: writes live.
    """
    if not isinstance(live, torch.Tensor):
        for target, source in zip(live, checkpoint, strict=True):
            scatter_state(target, source, slots, sources)
        return
    assert isinstance(checkpoint, torch.Tensor)
    kept = slots >= 0
    live[slots[kept].long()] = checkpoint[sources[kept].long()]
