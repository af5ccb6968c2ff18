"""Reference of the embedding lookup."""

from __future__ import annotations

import torch


def embedding(
    ids: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    *,
    media: torch.Tensor | None = None,
    media_index: torch.Tensor | None = None,
    error: torch.Tensor | None = None,
) -> None:
    """out[t] = media[media_index[t]] where that is not -1, else table[ids[t]]; zeros for id -1 and for bad indices.

    Args: as the kernel's wrapper.
    Effects: writes out; error[0] = 1 after a bad index.
    """
    for token, token_id in enumerate(ids.tolist()):
        index = -1 if media_index is None else int(media_index[token])
        source, row = (table, token_id) if index < 0 or media is None else (media, index)
        if 0 <= row < source.shape[0]:
            out[token] = source[row]
            continue
        out[token] = 0
        if row != -1 and error is not None:
            error[0] = 1
