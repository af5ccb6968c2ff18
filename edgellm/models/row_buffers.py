"""`RowBuffers`: the scratch memory of a graph, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROW_STEP = 64


class RowBuffers:
    """One (rows, width) tensor a name, grown to the largest step seen and reused.

    Args:
        widths: elements of a row of each buffer.
        dtype: of all buffers but those in `dtypes`.
    """

    def __init__(
        self, widths: Mapping[str, int], dtype: torch.dtype, *, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> None:
        self._widths = dict(widths)
        self._dtypes = {name: (dtypes or {}).get(name, dtype) for name in self._widths}
        self._buffers: dict[str, torch.Tensor] = {}
        self._capacity = 0
        self._num_rows = 0

    def resize(self, num_rows: int) -> None:
        """Make every buffer (num_rows, its width); contents are lost."""
        if num_rows > self._capacity:
            self._capacity = -(-num_rows // _ROW_STEP) * _ROW_STEP
            self._buffers = {
                name: torch.empty((self._capacity, width), dtype=self._dtypes[name])
                for name, width in self._widths.items()
            }
        self._num_rows = num_rows

    def __getitem__(self, name: str) -> torch.Tensor:
        """(num_rows, width) of that name, C-contiguous."""
        return self._buffers[name][: self._num_rows]
