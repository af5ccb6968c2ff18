"""Reference of `logit_edit` and `remap_ids`: one row at a time in float64."""

from __future__ import annotations

import math

import torch

from edgellm.kernels.cu.logit_edit import EditFlag, IdLists, LogitEdits


def logit_edit(
    logits: torch.Tensor,
    edits: LogitEdits,
    out: torch.Tensor,
    flags: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
) -> None:
    """As `edgellm.kernels.cu.logit_edit.logit_edit`, on any device."""
    for row in range(out.shape[0]):
        values = logits[row if row_index is None else int(row_index[row])].double()
        found = _raw_flags(values)
        if edits.bias is not None and edits.bias.values is not None:
            values[_ids(edits.bias, row)] += edits.bias.values[_span(edits.bias, row)]
        if edits.mask is not None and edits.mask_index is not None and int(edits.mask_index[row]) >= 0:
            values[~allowed_ids(edits.mask[int(edits.mask_index[row])], len(values))] = -math.inf
        found |= EditFlag.LEFT_BY_GRAMMAR if values.isfinite().any() else 0
        _penalise(values, edits, row)
        if edits.excluded is not None:
            values[_ids(edits.excluded, row)] = -math.inf
        found |= EditFlag.LEFT_AT_LAST if values.isfinite().any() else 0
        out[row] = values
        flags[row] |= int(found)


def _raw_flags(values: torch.Tensor) -> EditFlag:
    found = EditFlag(0)
    found |= EditFlag.RAW_NAN if values.isnan().any() else 0
    found |= EditFlag.RAW_INFINITY if (values == math.inf).any() else 0
    return found | (EditFlag.RAW_FINITE if values.isfinite().any() else 0)


def _penalise(values: torch.Tensor, edits: LogitEdits, row: int) -> None:
    if edits.seen is not None and edits.repetition is not None:
        ids, penalty = _ids(edits.seen, row), edits.repetition[row]
        values[ids] = torch.where(values[ids] > 0.0, values[ids] / penalty, values[ids] * penalty)
    presence, frequency, output = edits.presence, edits.frequency, edits.output
    if output is not None and output.values is not None and presence is not None and frequency is not None:
        counts = output.values[_span(output, row)].double()
        values[_ids(output, row)] -= frequency[row] * counts + presence[row]


def _span(lists: IdLists, row: int) -> slice:
    return slice(int(lists.start[row]), int(lists.start[row + 1]))


def _ids(lists: IdLists, row: int) -> torch.Tensor:
    return lists.ids[_span(lists, row)].long()


def allowed_ids(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """(vocab_size,) bool from packed words; bit (id % 32) of word (id / 32)."""
    ids = torch.arange(vocab_size, device=words.device)
    return (words[ids // 32] >> (ids % 32) & 1).bool()


def remap_ids(ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """As `edgellm.kernels.cu.logit_edit.remap_ids`, on any device."""
    inside = ids.clamp(0, len(table) - 1).long()
    out.copy_(torch.where(ids < 0, ids, torch.where(ids < len(table), table[inside], -1)))
