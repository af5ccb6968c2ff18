"""Tree masks of a step as the device's attention reads them, and which rows have one.

On the device bit j of a token's mask is token j of its own row, and a row is masked as a whole: short rows without a
tree get the mask of a chain.  Longer ones (prompt chunks) attend beside, without any.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from edgellm.errors import ContractViolation

if TYPE_CHECKING:
    import numpy.typing as npt

    from edgellm.runtime.batch import RaggedBatch

    Int32Array = npt.NDArray[np.int32]
    BoolArray = npt.NDArray[np.bool_]

WORD_BITS = 32


def words_for(num_bits: int) -> int:
    """Words of a mask row of so many bits."""
    return -(-num_bits // WORD_BITS)


def masked_rows(batch: RaggedBatch, words: int, window: int) -> BoolArray:
    """(N,) which rows attend by masks of so many words: trees, and chains that are longer than neither mask nor window.

    Args:
        window: smallest of the model's layers; 0 is none.  Masked attention drops no token of its own row.
    """
    most = min(words * WORD_BITS, window) if window else words * WORD_BITS
    masked: BoolArray = batch.query_len <= most
    if batch.tree_mask is not None:
        masked |= batch.tree_mask[batch.query_start[:-1]].any(axis=1)
    return masked


def check_trees(batch: RaggedBatch, mask: Int32Array, window: int) -> None:
    """Refuse trees that masks of a step cannot say, in a batch that contradicts itself nowhere.

    Args:
        mask: of the batch.
    Raises:
        ContractViolation: trees began before the step, or a way through one is longer than a window.
    """
    if batch.tree_start is not None and not np.array_equal(batch.tree_start, batch.past_len):
        raise ContractViolation(
            f"trees begin at {batch.tree_start.tolist()} behind {batch.past_len.tolist()} tokens; on this device "
            "every token of a tree is in its step"
        )
    longest = int(np.unpackbits(mask.view(np.uint8), axis=1).sum(axis=1, dtype=np.int64).max())
    if 0 < window < longest:
        raise ContractViolation(
            f"a way of {longest} tokens through a tree is longer than the window of {window} tokens of a layer; "
            "propose trees of less depth"
        )


def pack_trees(
    batch: RaggedBatch,
    masked: BoolArray,
    places: Int32Array,
    slots: Int32Array,
    long_slots: Int32Array,
    mask: Int32Array,
) -> None:
    """Fill the sections of `TreeTensors` for a checked batch whose rows are all context rows.

    Args:
        masked: (rows of the batch,), see `masked_rows`.
        places: (T,) and mask: (T * words,), T with padding.
        slots, long_slots: (N,), N with padding.
    """
    count = batch.num_tokens
    places[count:], slots[:], long_slots[:] = 0, -1, -1
    places[:count] = batch.places
    rows = mask.reshape(len(places), -1)
    slots[: len(masked)][masked] = batch.state_index[masked]
    long_slots[: len(masked)][~masked] = batch.state_index[~masked]
    rows.fill(0)
    if batch.tree_mask is not None:
        rows[:count, : batch.tree_mask.shape[1]] = batch.tree_mask
    of_chain = np.flatnonzero(np.repeat(masked, batch.query_len) & ~rows[:count].any(axis=1))
    within = places[of_chain] - np.repeat(batch.past_len, batch.query_len)[of_chain]
    rows[of_chain] = _chain_mask(rows.shape[1])[within]


@lru_cache(maxsize=8)
def _chain_mask(words: int) -> Int32Array:
    """(32 * words, words) the mask of each token of a chain: all in front of it, and itself."""
    bits = np.tri(words * WORD_BITS, dtype=np.bool_)
    return np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)
