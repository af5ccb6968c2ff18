"""Plan validation in C, for plans that break no rule.

`plan_check.py` holds the rules with their messages; a plan that misses any of them here is checked there again.
"""

from libc.stdint cimport int64_t, uint8_t
from libcpp.vector cimport vector

from edgellm.session._ledger cimport LengthRow
from edgellm.session._step_plan cimport StepPlan, plan_row_t

FULL_COHORT_DECODE = 0
WHOLE_PROMPT = 1
COMPACT = 2
LOOK_CLOSER = -1


def quick_shape(
    StepPlan plan,
    list seats,
    list order,
    int64_t max_batch_size,
    int64_t max_input_length,
    int64_t max_kv_capacity,
    bint compact,
):
    """The shape code of a valid plan; LOOK_CLOSER when a rule may be broken.  Modifies nothing.

    Args:
        seats: per slot, its `LengthRow` or None.
        order: the `LengthRow`s in resident order.
    """
    cdef Py_ssize_t count = plan.size()
    if not 0 < count <= max_batch_size:                                                        # V1
        return LOOK_CLOSER
    if count == len(order) and _is_full_cohort(plan, order, max_kv_capacity):
        return FULL_COHORT_DECODE
    if not _rows_are_valid(plan, seats, max_kv_capacity):
        return LOOK_CLOSER
    if _any_exclusive(order):                                                                  # V14
        return WHOLE_PROMPT if len(order) == 1 and _whole_prompt(plan, order[0], max_input_length) else LOOK_CLOSER
    if not compact:
        return WHOLE_PROMPT if _is_pending_prompt(plan, order, max_input_length) else LOOK_CLOSER
    return COMPACT if _fits_step(plan, max_input_length, max_batch_size * max_input_length) else LOOK_CLOSER


cdef bint _names(plan_row_t *row, LengthRow seat) noexcept:
    return row.request_id == seat.request_id and row.slot == seat.slot and row.epoch == seat.epoch


cdef bint _is_full_cohort(StepPlan plan, list order, int64_t capacity) except -1:              # V10
    cdef Py_ssize_t i
    cdef plan_row_t *row
    cdef LengthRow seat
    for i in range(plan.size()):
        row = &plan.rows[i]
        seat = order[i]
        if (
            row.context or row.query_length != 1 or not row.select
            or row.past_length != seat.committed or row.past_length >= capacity
            or seat.prompt_remaining or not _names(row, seat)
        ):
            return False
    return True


cdef bint _rows_are_valid(StepPlan plan, list seats, int64_t capacity) except -1:
    cdef vector[uint8_t] seen
    cdef Py_ssize_t i
    cdef plan_row_t *row
    seen.resize(len(seats), 0)
    for i in range(plan.size()):
        row = &plan.rows[i]
        if row.request_id == 0 or row.epoch == 0 or not 0 <= row.slot < len(seats):            # V2
            return False
        seat = seats[row.slot]
        if seat is None or not _names(row, seat) or seen[row.slot]:                            # V3, V4
            return False
        seen[row.slot] = 1
        if not _lengths_are_valid(row, seat, capacity):
            return False
    return True


cdef bint _lengths_are_valid(plan_row_t *row, LengthRow seat, int64_t capacity) except -1:
    cdef int64_t past = row.past_length
    if row.query_length <= 0 or past < 0 or past + row.query_length > min(capacity, <int64_t>0x7FFFFFFF):    # V5
        return False
    if past != seat.committed or row.context != (seat.prompt_remaining > 0):                   # V6, V7
        return False
    if not row.context:
        return row.query_length == 1 and row.select                                            # V8
    return (
        row.query_length <= seat.prompt_remaining
        and row.select == (row.query_length == seat.prompt_remaining)                          # V9
    )


cdef bint _any_exclusive(list order) except -1:
    cdef LengthRow seat
    for seat in order:
        if seat.exclusive:
            return True
    return False


cdef bint _whole_prompt(StepPlan plan, LengthRow seat, int64_t max_input_length) except -1:    # V11
    cdef plan_row_t *row = &plan.rows[0]
    if plan.size() != 1 or not _names(row, seat):
        return False
    return not row.context or (row.query_length == seat.prompt_remaining and row.query_length <= max_input_length)


cdef bint _is_pending_prompt(StepPlan plan, list order, int64_t max_input_length) except -1:   # V12, V15
    cdef LengthRow seat
    for seat in order:
        if seat.prompt_remaining:
            return _whole_prompt(plan, seat, max_input_length)
    return False


cdef bint _fits_step(StepPlan plan, int64_t max_input_length, int64_t max_tokens) noexcept:    # V13
    cdef int64_t total = 0
    cdef Py_ssize_t i
    for i in range(plan.size()):
        if plan.rows[i].context and plan.rows[i].query_length > max_input_length:
            return False
        total += plan.rows[i].query_length
    return total <= max_tokens
