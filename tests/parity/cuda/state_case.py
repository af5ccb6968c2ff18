"""Rows of kernels that keep state: ragged lengths, padding rows, checkpoints, and tensors whose rows lie apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgellm.kernels.cu.state_rows import StateRows


def state_rows(
    lengths: Sequence[int], slots: Sequence[int], *, verified: Sequence[int] = (), device: str = "cpu"
) -> StateRows:
    """Row i has lengths[i] tokens and slot slots[i], -1 for padding; of verified rows the last comes first."""
    starts, used = [-1] * len(lengths), 0
    for row in reversed(verified):
        starts[row] = used
        used += lengths[row]
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    arrays = (torch.tensor(values, dtype=torch.int32, device=device) for values in (bounds, list(slots), starts))
    return StateRows(*arrays)


def without_checkpoints(rows: StateRows) -> StateRows:
    return StateRows(rows.query_start, rows.slots)


def real_tokens(rows: StateRows, num_tokens: int) -> torch.Tensor:
    """(T,) whether a token belongs to a row that is no padding; on the CPU."""
    real = torch.zeros(num_tokens, dtype=torch.bool)
    for first, end, _, _ in rows.spans():
        real[first:end] = True
    return real


def apart(tensor: torch.Tensor, gap: int) -> torch.Tensor:
    """The same rows with `gap` elements of NaN between them."""
    width = tensor[0].numel()
    wide = torch.full((len(tensor), width + gap), float("nan"), dtype=tensor.dtype, device=tensor.device)
    return wide[:, :width].view(tensor.shape).copy_(tensor)


def poisoned_state(num_slots: int, shape: tuple[int, ...], slots: Sequence[int], *, seed: int) -> torch.Tensor:
    """Normal numbers in these slots, NaN in all others."""
    state = torch.randn(num_slots, *shape, generator=torch.Generator().manual_seed(seed))
    state[[slot for slot in range(num_slots) if slot not in slots]] = float("nan")
    return state


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    expected = expected.double().cpu()
    return float((actual.double().cpu() - expected).norm() / expected.norm())
