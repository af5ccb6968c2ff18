"""Reference of batch compaction."""

from __future__ import annotations

import torch


def compact_rows(tensor: torch.Tensor, mapping: torch.Tensor, *, rows: int = 1) -> None:
    """Entry i of `rows` rows to mapping[i]; -1 evicts.  Effects: writes tensor (n * rows, ...)."""
    entries = tensor.view(mapping.shape[0], rows, *tensor.shape[1:])
    for old, new in enumerate(mapping.tolist()):
        if new >= 0:
            entries[new] = entries[old].clone()
