"""Ledgers of residents as C rows, and the loops over all of them that every step runs.

A row is an object with C members, so that Python reads and changes it by name and the loops below touch no Python
integer.  Resident order is a list of rows; nothing here keeps a row longer than a call.
"""

cimport cython
from libc.stdint cimport int32_t

from edgellm.errors import ContractViolation, InvariantError
from edgellm.session.types import FinishReason

cdef object NOT_FINISHED = FinishReason.NOT_FINISHED
cdef object END_ID = FinishReason.END_ID
cdef object LENGTH = FinishReason.LENGTH
cdef object CANCELLED = FinishReason.CANCELLED


@cython.final
cdef class CancelToken:
    """A request's cancellation bit: set from any thread, polled by the session at every step."""

    def cancel(self):
        self.flag = True

    @property
    def cancelled(self):
        return self.flag


cdef class LengthRow:
    """Identity and lengths of one resident; the session's truth and the engine's mirror are both such rows.

    Attributes:
        committed: positions with materialised state.
        prompt_remaining: prompt tokens not yet run.
        exclusive: it needs the session to itself.
    """

    def __init__(self, identity, *, committed=0, prompt_remaining=0, exclusive=False):
        ref = identity.resident
        try:
            self.request_id = identity.request_id
            self.slot = ref.slot
            self.epoch = ref.epoch
        except OverflowError as error:
            raise ContractViolation(
                f"{identity} does not fit: request id and epoch are unsigned 64-bit, the slot is 32-bit"
            ) from error
        self.identity = identity
        self.ref = ref
        self.committed = committed
        self.prompt_remaining = prompt_remaining
        self.exclusive = exclusive


cdef class ResidentRow(LengthRow):
    """What a decode step reads and changes of one resident.

    Attributes:
        rule: what ends the sequence.
        cancel_token: the request's cancellation bit, or None.
        generated: generated ids, the end token included.
        state_length: positions that really have state; at least `committed`.
        iterations: steps that gave it tokens.
        reported: generated tokens that a delta already carried.
        index: its place in resident order, -1 before it is seated.
        terminal, reason: whether and why it ended.
        channel, text, logprobs, sampling: None where the request asked for none.
    """

    def __init__(self, identity, *, rule, cancel_token=None, prompt_remaining=0, exclusive=False):
        LengthRow.__init__(self, identity, prompt_remaining=prompt_remaining, exclusive=exclusive)
        self.rule = rule
        self.cancel_token = cancel_token
        self.generated = []
        self.index = -1
        self.reason = NOT_FINISHED

    cdef bint needs_text_lane(self) noexcept:
        """Whether somebody reads its tokens while it runs: text, stream, log-probabilities or a callback."""
        return self.text is not None or self.channel is not None or self.logprobs is not None or self.exclusive

    cdef bint wants_to_leave(self) except -1:
        token = self.cancel_token
        if token is not None:
            if type(token) is CancelToken:
                if (<CancelToken>token).flag:
                    return True
            elif token.cancelled:
                return True
        return self.channel is not None and self.channel.is_cancelled()

    cdef int take(self, int32_t token_id) except -1:
        """Append one token of a row that nobody reads while it runs, and decide whether it ended."""
        self.iterations += 1
        self.generated.append(token_id)
        if self.sampling is not None:
            self.sampling.record(token_id)
        if self.rule.ends_with(token_id):
            self.reason = END_ID
            self.terminal = True
        elif len(self.generated) >= self.rule.max_new_tokens:
            self.reason = LENGTH
            self.terminal = True
        return 0

    @property
    def cancel_requested(self):
        """The request's cancellation bit, or its stream channel's."""
        return self.wants_to_leave()


def with_prompt_left(list rows):
    """The rows whose prompt is incomplete, in order; empty in most steps."""
    cdef list found = []
    cdef LengthRow row
    for row in rows:
        if row.prompt_remaining:
            found.append(row)
    return found


def poll_cancelled(list rows):
    """End every row whose cancellation was asked for; how many there are.

    Raises:
        InvariantError: a row had ended before (V16); such rows leave in the step in which they end.
    """
    cdef Py_ssize_t count = 0
    cdef ResidentRow row
    for row in rows:
        if row.terminal:
            raise InvariantError(f"V16 terminal resident: {row.identity} ended before this step and was not evicted")
        if row.wants_to_leave():
            row.reason = CANCELLED
            row.terminal = True
            count += 1
    return count


def still_running(list rows):
    """Indices of the rows that have not ended, or None when that is all of them."""
    cdef ResidentRow row
    cdef Py_ssize_t i
    for row in rows:
        if row.terminal:
            return [i for i in range(len(rows)) if not (<ResidentRow?>rows[i]).terminal]
    return None


def with_readers(list rows):
    """The rows whose tokens somebody reads while they run."""
    cdef list found = []
    cdef ResidentRow row
    for row in rows:
        if row.needs_text_lane():
            found.append(row)
    return found


def split_ended(list order):
    """(ended rows, running rows, per row its new index or -1); nothing is changed."""
    cdef list ended = [], running = [], old_to_new = []
    cdef ResidentRow row
    for row in order:
        if row.terminal:
            ended.append(row)
            old_to_new.append(-1)
        else:
            old_to_new.append(len(running))
            running.append(row)
    return ended, running, old_to_new


def renumber(list order):
    """Tell each row its place in resident order."""
    cdef Py_ssize_t i
    for i in range(len(order)):
        (<ResidentRow?>order[i]).index = i
