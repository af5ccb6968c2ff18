"""Packed weights with random contents, and operands around them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from linear_case import LinearCase, poisoned

from edgellm.kernels.packed_weight import PackedKind, PackedWeight, empty_packed, store_fp8, store_int4


@dataclass(frozen=True, slots=True)
class PackedShape:
    """(N, K) and how its scales lie: one for `group_columns` of a row, or (fp8) of the 16 rows of a panel.

    `group_columns` 0: one for the whole row.
    """

    kind: PackedKind
    rows: int
    columns: int
    group_columns: int = 128
    symmetric: bool = False
    shares_scales: bool = False


INT4, FP8 = PackedKind.INT4, PackedKind.FP8
# Layers of small and large models, odd numbers of panels and of 32-column blocks a slice, every kind of scales.
SHAPES = (
    PackedShape(INT4, 4096, 1024),
    PackedShape(INT4, 1024, 2048, symmetric=True),
    PackedShape(INT4, 1024, 3072),
    PackedShape(INT4, 528, 1536),
    PackedShape(INT4, 4096, 12288),
    PackedShape(INT4, 560, 4096, 64),
    PackedShape(INT4, 96, 3584, 0),
    PackedShape(INT4, 16, 64, 64),
    PackedShape(INT4, 48, 192, 64, symmetric=True),
    PackedShape(FP8, 4096, 1024, shares_scales=True),
    PackedShape(FP8, 1024, 3072, shares_scales=True),
    PackedShape(FP8, 528, 4096, 0),
    PackedShape(FP8, 112, 1568, 0),
    PackedShape(FP8, 1040, 1600, shares_scales=True),
    PackedShape(FP8, 16, 32, 0),
)


def random_weight(shape: PackedShape, dtype: torch.dtype, device: str, *, pieces: int = 1) -> PackedWeight:
    """A weight whose results are of magnitude about one; its workspace holds 1 / `pieces` of it."""
    rows, columns = shape.rows, shape.columns
    group = shape.group_columns or columns
    workspace = torch.empty(rows * columns // pieces, dtype=dtype, device=device)
    weight = empty_packed(
        shape.kind,
        rows,
        columns,
        group_columns=group,
        shares_scales=shape.shares_scales,
        workspace=workspace,
    )
    generator = torch.Generator().manual_seed(rows + columns)
    groups = -(-columns // group)
    scales = (torch.rand(rows, groups, generator=generator) + 0.5) / columns**0.5
    if shape.kind is PackedKind.INT4:
        values = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
        zeros = torch.randint(0, 16, (rows, groups), dtype=torch.uint8, generator=generator)
        store_int4(weight, values, scales / 4, None if shape.symmetric else zeros)
    else:
        store_fp8(weight, torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn), scales)
    return weight


def operands(rows: int, shape: PackedShape, dtype: torch.dtype, device: str, *, gated: bool = False) -> LinearCase:
    """x, bias and residual as `linear_case` makes them; its weight is empty."""
    torch.manual_seed(rows + shape.rows)
    out_width = shape.rows // 2 if gated else shape.rows
    return LinearCase(
        poisoned(rows, shape.columns, 24, dtype, device),
        torch.empty(0),
        torch.randn(shape.rows, device=device).to(dtype),
        poisoned(rows, out_width, 3, dtype, device),
    )
