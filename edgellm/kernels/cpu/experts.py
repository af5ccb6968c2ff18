"""Routed experts of few CPU rows in one call; more rows go expert by expert through `linear`."""

from __future__ import annotations

import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cpu import _ops
from edgellm.kernels.cpu.elementwise import check_rows
from edgellm.kernels.cpu.linear import SKINNY_ROWS
from edgellm.kernels.cpu.threads import helper_threads


def few_experts(
    rows: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """total[t] += sum over j of shares[t, j] * (down(silu(gate) * up) of expert chosen[t, j]) of rows[t].

    A row's sum is taken in ascending order of experts, so it depends on no other row.

    Args:
        rows: (T, D) float32 or bfloat16, T up to `SKINNY_ROWS`.
        shares: (T, k) float32.
        chosen: (T, k) int64 in [0, E), each at most once in a row.
        gate_up: (E, 2F, D), rows gate, up.  down: (E, D, F).  Both of the dtype of rows.
        total: (T, D) float32.
    Raises:
        InvalidArgumentError: shapes, dtypes or expert numbers that do not fit; nothing was written.
    Effects: writes total.
    """
    check_rows("rows", rows)
    check_rows("total", total, rows.shape[1])
    num_rows, hidden = rows.shape
    num_experts, inner = down.shape[0], down.shape[2]
    fits = gate_up.shape == (num_experts, 2 * inner, hidden) and down.shape == (num_experts, hidden, inner)
    if not fits or gate_up.dtype != rows.dtype or down.dtype != rows.dtype or total.dtype != torch.float32:
        raise InvalidArgumentError(
            f"rows {tuple(rows.shape)} {rows.dtype}, gate_up {tuple(gate_up.shape)} {gate_up.dtype}, down "
            f"{tuple(down.shape)} {down.dtype} and total {total.dtype} do not fit together"
        )
    if not (gate_up.is_contiguous() and down.is_contiguous() and len(total) == num_rows <= SKINNY_ROWS):
        raise InvalidArgumentError(
            f"{num_rows} rows, {len(total)} in total, contiguous weights: {gate_up.is_contiguous()}, "
            f"{down.is_contiguous()}; up to {SKINNY_ROWS} rows and C-contiguous weights are needed"
        )
    if shares.shape != chosen.shape or len(chosen) != num_rows or shares.dtype != torch.float32:
        raise InvalidArgumentError(f"shares {tuple(shares.shape)} and chosen {tuple(chosen.shape)} do not fit the rows")
    if chosen.dtype != torch.int64 or (
        chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < num_experts
    ):
        raise InvalidArgumentError(f"chosen is {chosen.tolist()}; int64 in [0, {num_experts}) is needed")
    shares, chosen = shares.contiguous(), chosen.contiguous()
    scratch = torch.empty(num_rows * (2 * hidden + 3 * inner), dtype=torch.float32)
    _ops.experts(
        rows.data_ptr(),
        gate_up.data_ptr(),
        down.data_ptr(),
        chosen.data_ptr(),
        shares.data_ptr(),
        total.data_ptr(),
        scratch.data_ptr(),
        (num_rows, chosen.shape[1], hidden, inner),
        rows.dtype == torch.bfloat16,
        helper_threads(),
    )
