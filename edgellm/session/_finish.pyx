"""The finish decision in C: the same rule for a row of the decode lane and for a row with text."""

cimport cython
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t
from libcpp.algorithm cimport binary_search

from edgellm.session.types import FinishReason

cdef object NOT_FINISHED = FinishReason.NOT_FINISHED
cdef object END_ID = FinishReason.END_ID
cdef object LENGTH = FinishReason.LENGTH
cdef object STOP_WORDS = FinishReason.STOP_WORDS


@cython.final
cdef class FinishRule:
    """What ends one sequence.

    Attributes:
        end_ids: the model's end tokens (none under `ignore_eos`) and the request's stop token ids.
        max_new_tokens: the clamped generate budget.
    """

    def __init__(self, end_ids, max_new_tokens):
        self.end_ids = frozenset(end_ids)
        self.max_new_tokens = max_new_tokens
        # An id beyond int32 is no token of any vocabulary and cannot be generated.
        self._sorted_ends = sorted(token_id for token_id in self.end_ids if INT32_MIN <= token_id <= INT32_MAX)

    @classmethod
    def of(cls, params, *, eos_token_ids, max_new_tokens):
        eos = () if params.ignore_eos else eos_token_ids
        return cls(frozenset(eos).union(params.stop_token_ids), max_new_tokens)

    cdef bint ends_with(self, int32_t token_id) noexcept:
        return binary_search(self._sorted_ends.begin(), self._sorted_ends.end(), token_id)

    def decide(self, token_id, num_generated, stop_matched):
        """Reason after `token_id` became generated token number `num_generated` (counted from 1).

        A stop string overrides an end token and the length; a reason set before (cancelled, error) is
        never handed to this function.
        """
        if stop_matched:
            return STOP_WORDS
        if self.ends_with(token_id):
            return END_ID
        if num_generated >= self.max_new_tokens:
            return LENGTH
        return NOT_FINISHED

    def __repr__(self):
        return f"FinishRule(end_ids={self.end_ids!r}, max_new_tokens={self.max_new_tokens})"
