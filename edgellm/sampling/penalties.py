"""Repetition, presence and frequency penalties, and the token counts they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgellm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from edgellm.sampling.params import SamplingParams

    FloatArray = npt.NDArray[np.float64]


class TokenCounter:
    """How often each token was seen, with the distinct ids kept as one array.

    Memory is O(vocab): make one only when a penalty needs it.  Not thread-safe.
    """

    __slots__ = ("_counts", "_ids", "_num_ids")

    def __init__(self, vocab_size: int) -> None:
        self._counts: npt.NDArray[np.int32] = np.zeros(vocab_size, np.int32)
        self._ids: npt.NDArray[np.int64] = np.empty(64, np.int64)
        self._num_ids = 0

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """(n,) int64, distinct ids in order of first appearance; a view that the next `add` may outdate."""
        return self._ids[: self._num_ids]

    def counts_of(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        return self._counts[ids]

    def add(self, token_id: int) -> None:
        if self._counts[token_id] == 0:
            if self._num_ids == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._ids[self._num_ids] = token_id
            self._num_ids += 1
        self._counts[token_id] += 1

    def add_prompt(self, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Count a whole prompt at once.

        Raises:
            InvalidArgumentError: an id is outside the vocabulary.  Nothing was counted.
        """
        distinct, counts = np.unique(np.asarray(token_ids, dtype=np.int64), return_counts=True)
        if len(distinct) and not 0 <= distinct[0] <= distinct[-1] < len(self._counts):
            bad = distinct[0] if distinct[0] < 0 else distinct[-1]
            raise InvalidArgumentError(
                f"prompt_token_ids contains token id {bad}, which is outside the vocabulary of {len(self._counts)} "
                f"tokens; use ids from 0 to {len(self._counts) - 1}"
            )
        new = distinct[self._counts[distinct] == 0]
        self._ids = np.concatenate((self.ids, new, np.empty(64, np.int64)))
        self._num_ids += len(new)
        self._counts[distinct] += counts.astype(np.int32)

    def clone(self) -> TokenCounter:
        """An independent copy."""
        other = TokenCounter.__new__(TokenCounter)
        other._counts = self._counts.copy()
        other._ids = self._ids.copy()
        other._num_ids = self._num_ids
        return other


def needs_repetition(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0


def needs_output_counts(params: SamplingParams) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def apply_repetition(logits: FloatArray, seen: TokenCounter, penalty: float) -> None:
    """Divide positive and multiply other logits of seen tokens by `penalty`, in place ("CTRL", 2019)."""
    ids = seen.ids
    values = logits[ids]
    logits[ids] = np.where(values > 0.0, values / penalty, values * penalty)


def apply_output_penalties(logits: FloatArray, output: TokenCounter, *, presence: float, frequency: float) -> None:
    """Subtract `frequency` per occurrence and `presence` once for each token of the output, in place."""
    ids = output.ids
    logits[ids] -= frequency * output.counts_of(ids) + presence
