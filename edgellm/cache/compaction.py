"""Checks of the old-to-new mapping of a batch compaction."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.errors import InvalidArgumentError


def check_mapping(old_to_new: Sequence[int], new_batch_size: int, *, num_sequences: int) -> None:
    """One entry per sequence; -1 retires, survivors keep their order and are dense from 0.

    Raises:
        InvalidArgumentError: wrong length, a gap, a duplicate, a reordering, or a wrong batch size.
    """
    if len(old_to_new) != num_sequences:
        raise InvalidArgumentError(
            f"the mapping has {len(old_to_new)} entries for {num_sequences} sequences; pass one for each"
        )
    survivors = [new for new in old_to_new if new != -1]
    if survivors != list(range(len(survivors))):
        raise InvalidArgumentError(
            f"the mapping is {list(old_to_new)}; -1 retires, and survivors must be numbered 0, 1, 2 ... in their order"
        )
    if new_batch_size != len(survivors):
        raise InvalidArgumentError(
            f"new_batch_size is {new_batch_size} and the mapping keeps {len(survivors)}; they must agree"
        )
