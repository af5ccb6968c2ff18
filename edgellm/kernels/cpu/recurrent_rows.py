"""Which tokens of a step belong to which sequence, and where the recurrent state of each sequence lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from edgellm.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentRows:
    """N sequences of one step, checked once and used by every recurrent layer.

    Sequence i has the tokens [query_start[i], query_start[i + 1]) and reads and writes state row slots[i].  Where
    checkpoint_start[i] >= 0, the state after its j-th token goes to row checkpoint_start[i] + j of the checkpoint
    tensor as well.  The arrays are read-only copies, since the kernels read them by address.

    Args:
        query_start: (N + 1,) integers, from 0 upwards; a sequence may be empty.
        slots: (N,) integers, no two equal.
        checkpoint_start: (N,) integers, -1 for none; None: no sequence has one.
    Raises:
        InvalidArgumentError: shapes that do not fit, starts that fall, a slot that is negative or appears twice,
            checkpoints of two sequences in one row.
    """

    query_start: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    checkpoint_start: npt.NDArray[np.int32] | None = None
    num_tokens: int = field(init=False)
    min_slots: int = field(init=False)  # rows that a state tensor must have at least
    min_checkpoints: int = field(init=False)  # rows that a checkpoint tensor must have at least
    longest: int = field(init=False)  # most tokens of one sequence
    addresses: tuple[int, int, int] = field(init=False)  # of the three arrays

    def __post_init__(self) -> None:
        slots = _own_copy("slots", self.slots, None)
        num_sequences = len(slots)
        query_start = _own_copy("query_start", self.query_start, num_sequences + 1)
        given = np.full(num_sequences, -1, np.int32) if self.checkpoint_start is None else self.checkpoint_start
        checkpoint_start = _own_copy("checkpoint_start", given, num_sequences)
        # Sequences are few: lists are faster than array operations.
        starts, numbers = query_start.tolist(), slots.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        _check_starts(starts, lengths)
        _check_slots(numbers)
        values = {
            "query_start": query_start,
            "slots": slots,
            "checkpoint_start": checkpoint_start,
            "num_tokens": starts[-1],
            "min_slots": max(numbers, default=-1) + 1,
            "min_checkpoints": _end_of_checkpoints(checkpoint_start.tolist(), lengths),
            "longest": max(lengths, default=0),
            "addresses": (query_start.ctypes.data, slots.ctypes.data, checkpoint_start.ctypes.data),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def num_sequences(self) -> int:
        return len(self.slots)

    def spans(self) -> list[tuple[int, int, int, int]]:
        """(first token, end, slot, checkpoint row or -1) of each sequence."""
        starts = self.query_start.tolist()
        checkpoints = [] if self.checkpoint_start is None else self.checkpoint_start.tolist()
        return list(zip(starts[:-1], starts[1:], self.slots.tolist(), checkpoints, strict=True))


def _own_copy(name: str, values: npt.ArrayLike, length: int | None) -> npt.NDArray[np.int32]:
    array = np.asarray(values)
    if (
        array.ndim != 1
        or (array.size and array.dtype.kind not in "iu")
        or (length is not None and len(array) != length)
    ):
        wanted = "(N,)" if length is None else f"({length},)"
        raise InvalidArgumentError(f"{name} is {array.shape} {array.dtype}; {wanted} int32 is needed")
    copy = np.array(array, np.int32, order="C")
    if copy.dtype != array.dtype and not np.array_equal(copy, array):
        raise InvalidArgumentError(f"{name} is {array.tolist()}; every value must fit int32")
    copy.flags.writeable = False
    return copy


def _check_starts(query_start: list[int], lengths: list[int]) -> None:
    if query_start[0] != 0 or min(lengths, default=0) < 0:
        raise InvalidArgumentError(f"query_start is {query_start}; it must start at 0 and never fall")


def _check_slots(slots: list[int]) -> None:
    if min(slots, default=0) < 0 or len(set(slots)) != len(slots):
        raise InvalidArgumentError(
            f"slots is {slots}; every sequence needs a state row of its own, 0 or more: two sequences of one step "
            "would overwrite each other"
        )


def _end_of_checkpoints(starts: list[int], lengths: list[int]) -> int:
    """One past the last checkpoint row; refuses sequences that share one."""
    end = 0
    for start, length in sorted(zip(starts, lengths, strict=True)):
        if start < 0 or length == 0:
            continue
        if start < end:
            raise InvalidArgumentError(
                f"checkpoint_start is {starts} for {lengths} tokens; two sequences share row {start}: each needs as "
                "many rows as it has tokens"
            )
        end = start + length
    return end
