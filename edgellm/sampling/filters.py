"""Temperature, top-k, top-p and min-p over one row, and the draw.

Everything is float64 NumPy on one row at a time: the arithmetic, and so the result, is the same whatever else
is in the batch.  Candidates are kept in ascending token-id order throughout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float64]
    IdArray = npt.NDArray[np.int64]

# Floors, relative to the largest weight, below which top-p first ignores tokens so that it sorts few of them.
_TOP_P_FLOORS = (1e-2, 1e-4, 1e-7, 0.0)


def top_k_ids(logits: npt.NDArray[np.floating], k: int) -> IdArray:
    """Ids of exactly `min(k, n)` largest logits, ascending; equal logits: the lower id is kept.

    Args:
        logits: (n,) without NaN.
    Cost: O(n).
    """
    num_logits = len(logits)
    if k >= num_logits:
        return np.arange(num_logits, dtype=np.int64)
    if k == 1:
        return np.array([logits.argmax()], dtype=np.int64)
    threshold = np.partition(logits, num_logits - k)[num_logits - k]
    ids = np.flatnonzero(logits >= threshold)
    if len(ids) > k:
        values = logits[ids]
        num_above = int(np.count_nonzero(values > threshold))
        tied = np.flatnonzero(values == threshold)[: k - num_above]
        keep = values > threshold
        keep[tied] = True
        ids = ids[keep]
    return ids


def weights_of(logits: FloatArray, temperature: float) -> FloatArray:
    """Unnormalised probabilities, `exp((logit - max) / temperature)`; the largest is 1.

    Args:
        logits: (n,) float64, no NaN, at least one finite, none +inf.
    """
    # The maximum is taken off first so that a tiny temperature gives 0 / t and -inf, never inf - inf.
    with np.errstate(over="ignore", under="ignore"):
        scaled: FloatArray = logits - logits.max()
        if temperature != 1.0:
            scaled /= temperature
        np.exp(scaled, out=scaled)
    return scaled


def top_p_indices(weights: FloatArray, top_p: float) -> IdArray:
    """Indices, ascending, of the smallest set of most likely tokens whose share reaches `top_p`.

    Equal weights: the lower index is kept first.  At least one index remains.
    """
    goal = top_p * float(np.cumsum(weights)[-1])
    largest = float(weights.max())
    for floor in _TOP_P_FLOORS:
        candidates = np.flatnonzero(weights >= floor * largest)
        order = candidates[np.argsort(-weights[candidates], kind="stable")]
        reached = np.cumsum(weights[order])
        # Rounding may leave the last sum a hair below the goal: then everything is kept.
        if reached[-1] >= goal or floor == 0.0:
            break
    num_kept = int(np.searchsorted(reached, goal, side="left")) + 1
    return np.sort(order[:num_kept])


def min_p_indices(weights: FloatArray, min_p: float) -> IdArray:
    """Indices, ascending, of tokens at least `min_p` times as likely as the most likely one."""
    return np.flatnonzero(weights >= min_p * float(weights.max()))


def draw(weights: FloatArray, uniform: float) -> int:
    """Inverse CDF: the first index at which the running sum exceeds `uniform` times the total.

    Args:
        weights: (n,) float64, >= 0, not all zero.
        uniform: in [0, 1).
    Returns:
        an index whose weight is positive.
    """
    running = np.cumsum(weights)
    total = running[-1]
    index = int(np.searchsorted(running, uniform * total, side="right"))
    # `uniform * total` may round up to the total; the last token with any weight is meant then.
    return min(index, int(np.searchsorted(running, total, side="left")))
