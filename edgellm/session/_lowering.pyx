"""Lowering in C: the arrays of one ragged batch from a validated plan and its residents."""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from edgellm.session._ledger cimport ResidentRow
from edgellm.session._step_plan cimport StepPlan, plan_row_t

from edgellm.errors import InvariantError


def tokens_to_run(list rows, StepPlan plan):
    """Tokens of the batch: what the plan names, less what sharing covered meanwhile."""
    cdef int64_t total = 0
    cdef Py_ssize_t i
    if plan.size() != len(rows):
        raise InvariantError(f"{len(rows)} rows are lowered with a plan of {plan.size()} entries")
    for i in range(len(rows)):
        total += max(<int64_t>0, _query(rows[i], &plan.rows[i]))
    return total


def lower_rows(
    list rows,
    StepPlan plan,
    int32_t[::1] token_ids,
    int32_t[::1] positions,
    int32_t[::1] query_start,
    int32_t[::1] query_len,
    int32_t[::1] past_len,
    int32_t[::1] state_index,
    int64_t[::1] logits_index,
    int32_t[::1] logits_to_seq,
):
    """Fill the arrays; context rows first, plan order within each kind.

    Args:
        token_ids, positions: at least `tokens_to_run` long; the others hold one entry a row (`query_start` one more).
    Returns:
        (index in `rows` of each sequence of the batch, index in `rows` of each selected logits row, tokens).
    """
    cdef list plan_row = [], selected = []
    cdef Py_ssize_t i, j, row, count = len(rows)
    cdef int64_t start = 0, past, query
    cdef plan_row_t *entry
    cdef ResidentRow resident
    cdef bint context
    if plan.size() != count:
        raise InvariantError(f"{count} rows are lowered with a plan of {plan.size()} entries")
    if query_len.shape[0] < count:
        raise InvariantError(f"{count} rows do not fit a lowering of {query_len.shape[0]} sequences")
    for context in (True, False):
        for i in range(count):
            entry = &plan.rows[i]
            if entry.context != context:
                continue
            resident = rows[i]
            query = _query(resident, entry)
            if query <= 0:
                continue
            row = len(plan_row)
            if context:
                past = resident.state_length
                _copy_prompt(resident, past, query, &token_ids[start])
            else:
                past = resident.committed
                if not resident.generated:
                    raise InvariantError(f"{resident.ref} decodes and has no token to run")
                token_ids[start] = resident.generated[len(resident.generated) - 1]
            for j in range(query):
                positions[start + j] = <int32_t>(past + j)
            query_start[row] = <int32_t>start
            query_len[row] = <int32_t>query
            past_len[row] = <int32_t>past
            state_index[row] = resident.slot
            if entry.select:
                logits_index[len(selected)] = start + query - 1
                logits_to_seq[len(selected)] = <int32_t>row
                selected.append(i)
            plan_row.append(i)
            start += query
    query_start[len(plan_row)] = <int32_t>start
    return plan_row, selected, start


cdef int64_t _query(ResidentRow resident, plan_row_t *entry) except? -1:
    """Tokens that run; a chunk starts where the state ends, which sharing may have moved behind the plan."""
    if not entry.context:
        return 1
    return <int64_t>entry.past_length + entry.query_length - resident.state_length


cdef int _copy_prompt(ResidentRow resident, int64_t past, int64_t query, int32_t *out) except -1:
    cdef const int32_t[::1] prompt = resident.prompt
    if past < 0 or past + query > prompt.shape[0]:
        raise InvariantError(f"{resident.ref} runs [{past}, {past + query}) of a prompt of {prompt.shape[0]} tokens")
    memcpy(out, &prompt[past], query * sizeof(int32_t))
    return 0
