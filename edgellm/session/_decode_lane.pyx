"""The part of a decode step that is equal for all rows: completion check, tokens, finish decisions, mirror.

A row is handled here when nobody reads its tokens while it runs (`ResidentRow.needs_text_lane`); the others, and those
that failed, are handed back to the caller.
"""

import numpy as np

from libc.stdint cimport int32_t

from edgellm.session._ledger cimport LengthRow, ResidentRow
from edgellm.session._step_plan cimport StepPlan, plan_row_t

from edgellm.errors import InvariantError


def named_rows(StepPlan plan, list seats):
    """The rows that a validated plan names, in plan order."""
    cdef Py_ssize_t i
    cdef list rows = []
    for i in range(plan.size()):
        if not 0 <= plan.rows[i].slot < len(seats) or seats[plan.rows[i].slot] is None:
            raise InvariantError(f"a validated plan names slot {plan.rows[i].slot}, which is empty")
        rows.append(seats[plan.rows[i].slot])
    return rows


def moved_seat(list rows, StepPlan plan, list seats):
    """The first row that no longer sits in its slot or no longer is where the plan found it; None when all are."""
    cdef Py_ssize_t i
    cdef ResidentRow row
    if plan.size() != len(rows):
        raise InvariantError(f"{len(rows)} rows ran a plan of {plan.size()} entries")
    for i in range(len(rows)):
        row = rows[i]
        if not 0 <= row.slot < len(seats) or seats[row.slot] is not row:
            return row
        if plan.rows[i].past_length != row.committed or plan.rows[i].slot != row.slot:
            return row
    return None


def take_tokens(list rows, StepPlan plan, const int32_t[::1] token_ids):
    """Give each row its one token: ledger, generated ids and finish decision.

    Args:
        plan: decode rows only, one each; checked before.
        token_ids: (n,); -1 is a row that failed.
    Returns:
        (indices of rows whose ledger moved and whose token, or failure, is the caller's; (row, error) of rows whose
        sampling state raised).
    Raises:
        InvariantError: a row of the plan is no decode row, or the lengths differ.  Nothing was changed.
    """
    cdef Py_ssize_t i, count = len(rows)
    cdef ResidentRow row
    cdef list left = [], failed = []
    if plan.size() != count or token_ids.shape[0] != count:
        raise InvariantError(f"{count} rows ran with {token_ids.shape[0]} tokens over a plan of {plan.size()}")
    if plan.has_context:
        raise InvariantError("one token a row was reported for a step that runs a prompt")
    for i in range(count):
        row = rows[i]
        row.committed += 1
        row.state_length = max(row.state_length, row.committed)
        if token_ids[i] < 0 or row.needs_text_lane():
            left.append(i)
            continue
        try:
            row.take(token_ids[i])
        except Exception as error:
            failed.append((row, error))
    return left, failed


def token_column(list token_ids):
    """(n,) int32 of lists of one token each; None when some list has another length."""
    cdef Py_ssize_t i, count = len(token_ids)
    column = np.empty(count, dtype=np.int32)
    cdef int32_t[::1] out = column
    cdef list run
    for i in range(count):
        run = token_ids[i]
        if len(run) != 1:
            return None
        out[i] = run[0]
    return column


def sampling_states(list rows, list selected):
    """What the sampler remembers of each selected row.

    Raises:
        InvariantError: a row has no sampling state.
    """
    cdef Py_ssize_t index
    cdef ResidentRow row
    cdef list states = []
    for index in selected:
        if not 0 <= index < len(rows):
            raise InvariantError(f"row {index} is selected of {len(rows)}")
        row = rows[index]
        if row.sampling is None:
            raise InvariantError(f"{row.ref} has no sampling state")
        states.append(row.sampling)
    return states


def row_indices(list rows, *, bint ended_only=False):
    """Places in resident order, of all rows or of those that ended."""
    cdef ResidentRow row
    cdef list indices = []
    for row in rows:
        if row.terminal or not ended_only:
            indices.append(row.index)
    return indices


def advance_mirror(list lengths, StepPlan execution):
    """Move the engine's mirror over a step in which everybody decoded one token, or change nothing.

    Returns:
        False when `execution` is anything else, or disagrees with the mirror: look at it entry by entry.
    """
    cdef Py_ssize_t i, count = len(lengths)
    cdef LengthRow seat
    cdef plan_row_t *row
    if execution.size() != count:
        return False
    for i in range(count):
        seat = lengths[i]
        row = &execution.rows[i]
        if (
            row.context or row.query_length != 1 or row.past_length != seat.committed or seat.prompt_remaining
            or row.slot != seat.slot or row.epoch != seat.epoch or row.request_id != seat.request_id
        ):
            return False
    for i in range(count):
        (<LengthRow>lengths[i]).committed += 1
    return True
