"""`RecurrentState`: recurrent and conv state of every resident slot, and the checkpoints that verification leaves.

Rows are resident slots, never batch rows.  A step that verifies proposals keeps the state after each token of its rows
in checkpoints; `rewind` puts one of them back, so nothing of a refused proposal is left.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from edgellm.errors import BrokenInvariantError, InvalidArgumentError
from edgellm.kernels.cpu.recurrent_rows import RecurrentRows
from edgellm.runtime.kv_cache import FP8
from edgellm.runtime.snapshot_storage import HybridSnapshotStorage

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from edgellm.models.config import ModelConfig, StatePiece
    from edgellm.runtime.batch import RaggedBatch
    from edgellm.runtime.kv_cache import KVCache

_ROW_STEP = 16
_TOKEN_DIM = -2  # of pages, (..., page_size, head_dim)


def state_bytes(pieces: Sequence[StatePiece]) -> int:
    """Recurrent and conv state of one sequence."""
    return sum(math.prod(piece.shape) * getattr(torch, piece.dtype).itemsize for piece in pieces)


def check_recurrent(config: ModelConfig, recurrent: RecurrentState | None) -> None:
    """
    Raises:
        InvalidArgumentError: the model keeps recurrent state and none is given, or the other way round.
    """
    if (recurrent is None) is not (not config.recurrent_pieces):
        raise InvalidArgumentError(
            f"the model has {len(config.recurrent_pieces)} pieces of recurrent state; recurrent is {recurrent!r}, so "
            "build it with RecurrentState(model.config.recurrent_pieces, slots)"
        )


class RecurrentState:
    """State of the layers that keep any, zero at first.

    Args:
        pieces: what a sequence has in each layer.
        num_slots: resident slots.
    """

    def __init__(self, pieces: Sequence[StatePiece], num_slots: int, *, device: torch.device | str = "cpu") -> None:
        self.num_slots = num_slots
        self._live = {
            (piece.layer, piece.name): torch.zeros(
                (num_slots, *piece.shape), dtype=getattr(torch, piece.dtype), device=device
            )
            for piece in pieces
        }
        self._checkpoints: dict[tuple[int, str], torch.Tensor] = {}
        self._rows = _no_rows()
        self._first: dict[int, tuple[int, int]] = {}  # slot: its first checkpoint row, and how many it has

    @property
    def slabs(self) -> list[torch.Tensor]:
        """Every piece, (num_slots, *shape): what snapshots are captured from and restored to."""
        return list(self._live.values())

    @property
    def num_bytes(self) -> int:
        """Live state of all slots; checkpoints come on top, as large as the largest verification step needs."""
        return sum(slab.nbytes for slab in self._live.values())

    # ---- one step -------------------------------------------------------------------------------------

    @property
    def rows(self) -> RecurrentRows:
        return self._rows

    def piece(self, layer: int, name: str) -> torch.Tensor:
        return self._live[layer, name]

    def checkpoint(self, layer: int, name: str) -> torch.Tensor | None:
        return self._checkpoints[layer, name] if self._first else None

    def begin(self, batch: RaggedBatch, verified: Sequence[int] = ()) -> None:
        """Lay out a step.

        Args:
            verified: sequences of the batch after each of whose tokens the state is kept.
        """
        self._rows = RecurrentRows(batch.query_start, batch.state_index, self.lay_out(batch, verified))

    def lay_out(self, batch: RaggedBatch, verified: Sequence[int] = ()) -> npt.NDArray[np.int32]:
        """(N,) int32: checkpoint row of the first token of each sequence, -1 for those that are not verified."""
        starts = np.full(batch.num_sequences, -1, np.int32)
        self._first = {}
        used = 0
        for sequence in verified:
            count = int(batch.query_len[sequence])
            starts[sequence] = used
            self._first[int(batch.state_index[sequence])] = (used, count)
            used += count
        self.reserve(used)
        return starts

    def rewind(self, slots: Sequence[int], kept: Sequence[int]) -> None:
        """State of `slots` as it was after the `kept`-th token of their rows in the latest step.

        Raises:
            BrokenInvariantError: a slot had no verified row in the latest step, or fewer tokens.
        """
        if not len(slots):
            return
        targets, sources = torch.tensor(list(slots)), torch.tensor(self.places(slots, kept))
        for key, live in self._live.items():
            live[targets] = self._checkpoints[key][sources]

    def places(self, slots: Sequence[int], kept: Sequence[int]) -> list[int]:
        """Checkpoint row after the `kept`-th token of each slot's row in the latest step.

        Raises:
            BrokenInvariantError: as `rewind`.
        """
        places = []
        for slot, count in zip(slots, kept, strict=True):
            start, length = self._first.get(slot, (0, 0))
            if not 1 <= count <= length:
                raise BrokenInvariantError(
                    f"slot {slot} is to go back to its token {count}; the latest step kept {length} checkpoints of it"
                )
            places.append(start + count - 1)
        return places

    def reserve(self, rows: int) -> bool:
        """Room for so many checkpoints; True when they moved."""
        held = len(next(iter(self._checkpoints.values()))) if self._checkpoints else 0
        if rows <= held:
            return False
        capacity = -(-rows // _ROW_STEP) * _ROW_STEP
        self._checkpoints = {}  # both together may not fit
        self._checkpoints = {key: live.new_empty((capacity, *live.shape[1:])) for key, live in self._live.items()}
        return True


def _no_rows() -> RecurrentRows:
    return RecurrentRows(np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32))


def snapshot_storage(
    recurrent: RecurrentState,
    kv_cache: KVCache | None,
    draft_cache: KVCache | None,
    *,
    num_slots: int,
    page_size: int,
    hidden_width: int,
    hidden_dtype: torch.dtype,
) -> HybridSnapshotStorage:
    """Room for `num_slots` checkpoints of a sequence: its state, and the page that straddles the boundary.

    Args:
        kv_cache: pages of the base; None for models without attention.
        draft_cache: pages of a draft model that has its own.
        hidden_width: elements of the hidden row that the draft's checkpoints save; 0 saves none.
    """
    per_slot = sum(slab[0].nbytes for slab in recurrent.slabs) + hidden_width * hidden_dtype.itemsize
    pages = [] if kv_cache is None else kv_cache.layers
    by_token = kv_cache is not None and kv_cache.dtype != FP8  # values and scales of fp8 pages lie apart
    draft_pages = [] if draft_cache is None else draft_cache.layers
    per_page = sum(layer[0].nbytes for layer in [*pages, *draft_pages])
    return HybridSnapshotStorage(
        recurrent.slabs,
        pages,
        draft_pages,
        hidden_width=hidden_width,
        hidden_dtype=hidden_dtype if hidden_width else None,
        recurrent_budget_bytes=num_slots * per_slot,
        partial_budget_bytes=num_slots * per_page,
        page_size=page_size,
        token_dim=_TOKEN_DIM if by_token else None,
    )
