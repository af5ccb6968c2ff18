"""Decode rows of a step that lease the pages of one prefix: those pages are then read once for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edgellm.kernels.cu.paged_cascade import MAX_GROUPS
from edgellm.runtime._shared_prefix import MIN_SHARED_ROWS, find_shared_prefixes, group_pays

if TYPE_CHECKING:
    import numpy.typing as npt

    from edgellm.runtime.batch import RaggedBatch

    Int32Array = npt.NDArray[np.int32]

__all__ = ["MAX_GROUPS", "MIN_SAVED_TOKENS", "MIN_SHARED_ROWS", "SharedPrefixes", "sharing_pays"]

# What the launches of a group cost, in tokens that are not read again.  On an H200, 8 kv heads of 128 in 16 bits: 16
# rows of 4,096 tokens and 64 of 1,024 take as long together as apart, 32 of 1,024 longer, 8 of 16,384 less.
MIN_SAVED_TOKENS = 65_536


def sharing_pays(rows: int, tokens: int) -> bool:
    """Whether to read a prefix of `tokens` tokens once for `rows` rows instead of once for each."""
    return group_pays(rows, tokens, MIN_SAVED_TOKENS)


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of decode rows, counted from the first of them; see `edgellm.kernels.cu.paged_cascade`.

    Attributes:
        shared: (rows,) int32, tokens of each row's prefix; 0 in no group.
        members: (rows,) int32, group by group; what stands behind the last group is undefined.
        group_start: (MAX_GROUPS + 1,) int32.
        count: groups.
    """

    shared: Int32Array
    members: Int32Array
    group_start: Int32Array
    count: int

    @classmethod
    def of(cls, batch: RaggedBatch, rows: int, page_rows: Int32Array, page_size: int) -> SharedPrefixes | None:
        """Those of the last `rows` sequences of a checked batch, all of one token; None where none pay.

        A pure function of page-table rows and lengths: pages of whole blocks that nobody writes in the step.
        """
        if rows < MIN_SHARED_ROWS:
            return None
        shared, members = np.empty(rows, np.int32), np.zeros(rows, np.int32)
        starts = np.empty(MAX_GROUPS + 1, np.int32)
        first = batch.num_sequences - rows
        count = find_shared_prefixes(
            batch.past_len, batch.state_index, page_rows, first, page_size, MIN_SAVED_TOKENS, shared, members, starts
        )
        return cls(shared, members, starts, count) if count else None

    @property
    def rows(self) -> int:
        """Rows that are in a group."""
        return int(self.group_start[-1])

    @property
    def tokens_saved(self) -> int:
        """Tokens whose K and V are not read again: of each group all prefixes but one."""
        leaders = self.members[self.group_start[: self.count]]
        return int(self.shared.sum(dtype=np.int64) - self.shared[leaders].sum(dtype=np.int64))
