"""`PackedWeight`: a matrix in 4 or 8 bits, in the order in which a warp of the CUDA kernels reads it.

A panel is 16 rows, two tiles of 8.  A unit is a panel's rows by 64 columns (4 bits) or 32 columns (e4m3): 512 bytes, 16
for each of 32 lanes.  Lane 4 * r + i has columns 8 * i to 8 * i + 7 of each 32 columns, of rows r and 8 + r; so one
16-byte load of a lane holds what it feeds to the tensor cores for both tiles, nothing has to change places.
The idea of a layout in the order of the fragments is that of Frantar et al., "MARLIN: mixed-precision auto-regressive
parallel inference on large language models" (2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

PANEL_ROWS = 16
BLOCK_COLUMNS = 32
UNIT_BYTES = 512
SYMMETRIC_ZERO = 8
WHOLE_ROW = 30  # `group_shift` of rows with one scale: no row has 2 ** 30 blocks
WORKSPACE_ELEMENTS = 16 << 20  # of an expanded piece: 32 MiB, which the L2 of a large card holds for the most part

# A word of 8 columns: bits 4 * j hold column 2 * j, bits 16 + 4 * j column 2 * j + 1.  By bytes, low and high halves:
_LOW_COLUMNS = [0, 4, 1, 5]
_HIGH_COLUMNS = [2, 6, 3, 7]


class PackedKind(Enum):
    """What an element is."""

    INT4 = "int4"
    FP8 = "fp8"

    @property
    def unit_columns(self) -> int:
        return 64 if self is PackedKind.INT4 else 32


@dataclass(slots=True)
class PackedWeight:
    """A weight (N, K): T((q - zero) * scale) for int4, T(q * scale) for fp8, T the type of the activations.

    Attributes:
        packed: (N / 16, K / unit columns, 512) uint8.
        scales: (N / 16, groups, 8, 2) by row of the tile and tile; T for int4, float32 for fp8.  (N / 16, groups, 1, 2)
            where the rows of a panel share a scale.
        zeros: (N / 16, groups, 8) uint8, tile 0 in the low half; None for fp8.
        workspace: (elements,) T, what pieces of the matrix are expanded into; all weights of a model share it.
        group_shift: a scale is for 32 << group_shift columns.
    """

    kind: PackedKind
    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    workspace: torch.Tensor
    group_shift: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0] * PANEL_ROWS, self.packed.shape[1] * self.kind.unit_columns

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix when expanded."""
        return self.workspace.dtype

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """Of the matrix, without the workspace."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.packed.nbytes + self.scales.nbytes + zeros

    def rows(self, start: int, end: int) -> PackedWeight:
        """Rows [start, end), multiples of 16, in the same memory."""
        panels = slice(start // PANEL_ROWS, end // PANEL_ROWS)
        zeros = None if self.zeros is None else self.zeros[panels]
        return PackedWeight(
            self.kind, self.packed[panels], self.scales[panels], zeros, self.workspace, self.group_shift
        )

    def __getitem__(self, rows: slice) -> PackedWeight:
        """As of a tensor: `weight[start:end]`."""
        return self.rows(rows.start, rows.stop)

    def piece_rows(self) -> int:
        """Rows of a piece that the workspace holds."""
        rows, columns = self.shape
        return min(rows, len(self.workspace) // columns // PANEL_ROWS * PANEL_ROWS)


def workspace_elements(shapes: list[tuple[int, int]]) -> int:
    """Elements of the workspace of weights of these shapes: the largest whole, or a piece of it of at least a panel."""
    most = max(rows * columns for rows, columns in shapes)
    panel = max(PANEL_ROWS * columns for _, columns in shapes)
    return max(panel, min(most, WORKSPACE_ELEMENTS))


def empty_packed(
    kind: PackedKind,
    rows: int,
    columns: int,
    *,
    group_columns: int,
    shares_scales: bool = False,
    workspace: torch.Tensor,
) -> PackedWeight:
    """Memory for a weight, on the device of the workspace.

    Args:
        rows: a multiple of 16.
        columns: a multiple of 64 (int4) or 32 (fp8).
        group_columns: 32 << n, or `columns`.
        shares_scales: the 16 rows of a panel have the same scales; fp8 only.
    """
    device, panels = workspace.device, rows // PANEL_ROWS
    groups = -(-columns // group_columns)
    scale_type = workspace.dtype if kind is PackedKind.INT4 else torch.float32
    return PackedWeight(
        kind,
        torch.empty((panels, columns // kind.unit_columns, UNIT_BYTES), dtype=torch.uint8, device=device),
        torch.empty((panels, groups, 1 if shares_scales else 8, 2), dtype=scale_type, device=device),
        torch.empty((panels, groups, 8), dtype=torch.uint8, device=device) if kind is PackedKind.INT4 else None,
        workspace,
        WHOLE_ROW if groups == 1 else (group_columns // BLOCK_COLUMNS).bit_length() - 1,
    )


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """(N, K) uint8 of 0 to 15 to (N / 16, K / 64, 512) uint8."""
    rows, columns = values.shape
    # panel, tile, row, unit, block, member, column -> panel, unit, row, member, block, tile, column
    words = values.view(rows // PANEL_ROWS, 2, 8, columns // 64, 2, 4, 8).permute(0, 3, 2, 5, 4, 1, 6)
    halves = words[..., _LOW_COLUMNS] | words[..., _HIGH_COLUMNS] << 4
    return halves.reshape(rows // PANEL_ROWS, columns // 64, UNIT_BYTES)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`."""
    panels, units, _ = packed.shape
    halves = packed.view(panels, units, 8, 4, 2, 2, 4)
    words = torch.empty((*halves.shape[:-1], 8), dtype=torch.uint8, device=packed.device)
    words[..., _LOW_COLUMNS] = halves & 15
    words[..., _HIGH_COLUMNS] = halves >> 4
    return words.permute(0, 5, 2, 1, 4, 3, 6).reshape(panels * PANEL_ROWS, units * 64)


def pack_bytes(values: torch.Tensor) -> torch.Tensor:
    """(N, K) uint8 to (N / 16, K / 32, 512)."""
    rows, columns = values.shape
    units = values.view(rows // PANEL_ROWS, 2, 8, columns // 32, 4, 8).permute(0, 3, 2, 4, 1, 5)
    return units.reshape(rows // PANEL_ROWS, columns // 32, UNIT_BYTES)


def unpack_bytes(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_bytes`."""
    panels, units, _ = packed.shape
    return packed.view(panels, units, 8, 4, 2, 8).permute(0, 4, 2, 1, 3, 5).reshape(panels * PANEL_ROWS, units * 32)


def pack_rows(values: torch.Tensor) -> torch.Tensor:
    """What each row has of each group, (N, groups), to (N / 16, groups, 8, 2)."""
    return values.view(values.shape[0] // PANEL_ROWS, 2, 8, values.shape[1]).permute(0, 3, 2, 1)


def unpack_rows(values: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_rows`; shared scales become those of each row."""
    panels, groups, _, _ = values.shape
    return values.expand(panels, groups, 8, 2).permute(0, 3, 2, 1).reshape(panels * PANEL_ROWS, groups)


def pack_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """(N, groups) uint8 of 0 to 15 to (N / 16, groups, 8)."""
    tiles = pack_rows(zeros)
    return tiles[..., 0] | tiles[..., 1] << 4


def unpack_zeros(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_zeros`."""
    return unpack_rows(torch.stack((packed & 15, packed >> 4), dim=-1))


def store_int4(
    target: PackedWeight, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
) -> None:
    """Fill an int4 weight.  Scales are rounded to the type of the activations.

    Args:
        values: (N, K) uint8 of 0 to 15.
        scales: (N, groups), any float type.
        zeros: (N, groups) uint8 of 0 to 15; None: 8 everywhere.
    """
    target.packed.copy_(pack_nibbles(values))
    target.scales.copy_(pack_rows(scales))
    assert target.zeros is not None
    if zeros is None:
        target.zeros.fill_(SYMMETRIC_ZERO | SYMMETRIC_ZERO << 4)
    else:
        target.zeros.copy_(pack_zeros(zeros))


def store_fp8(target: PackedWeight, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill an fp8 weight.

    Args:
        values: (N, K) uint8 or float8_e4m3fn.
        scales: (N, groups) float; of rows that share them the first row's are taken.
    """
    target.packed.copy_(pack_bytes(values.view(torch.uint8)))
    target.scales.copy_(pack_rows(scales)[:, :, : target.scales.shape[2]])
