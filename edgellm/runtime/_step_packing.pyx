"""A step's inputs packed for the device: one pass over the batch, without an object per token.

Sections lie one behind the other in `words`, each from a multiple of 16 bytes on; `step_inputs` says what they hold.
"""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcmp, memcpy
from libcpp.vector cimport vector

from edgellm.errors import InvariantError

cdef int32_t ALIGNMENT = 4  # int32 words of 16 bytes: kernels may read a section by wide loads
cdef int32_t NONE = -1


cdef int64_t _aligned(int64_t count) noexcept nogil:
    return (count + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


cdef int32_t _blocks(int64_t tokens, int32_t page_size) noexcept nogil:
    return <int32_t>((tokens + page_size - 1) // page_size)


def is_sound(
    const int32_t[::1] token_ids,
    const int32_t[::1] positions,
    const int32_t[::1] query_start,
    const int32_t[::1] query_len,
    const int32_t[::1] past_len,
    const int32_t[::1] state_index,
    const int32_t[:, ::1] page_rows,
    const int64_t[::1] logits_index,
    int32_t vocab_size,
    int32_t page_size,
    int32_t num_pages,
):
    """Whether a batch contradicts itself nowhere and every page that it reads or writes is in the pool."""
    cdef Py_ssize_t sequences = query_len.shape[0], tokens = token_ids.shape[0], start = 0, i, j
    cdef int32_t query, past, slot, num_blocks
    if not sequences or positions.shape[0] != tokens or query_start.shape[0] != sequences + 1:
        return False
    if past_len.shape[0] != sequences or state_index.shape[0] != sequences:
        return False
    for i in range(sequences):
        query, past, slot = query_len[i], past_len[i], state_index[i]
        if query < 1 or past < 0 or slot < 0 or slot >= page_rows.shape[0]:
            return False
        if query_start[i] != start or query > tokens - start:
            return False
        for j in range(query):
            if positions[start + j] != past + j:
                return False
        start += query
        num_blocks = _blocks(<int64_t>past + query, page_size)
        if num_blocks > page_rows.shape[1]:
            return False
        for j in range(num_blocks):
            if page_rows[slot, j] < 0 or page_rows[slot, j] >= num_pages:
                return False
    if start != tokens or query_start[sequences] != tokens:
        return False
    for i in range(tokens):
        if token_ids[i] < 0 or token_ids[i] >= vocab_size:
            return False
    for i in range(logits_index.shape[0]):
        if logits_index[i] < 0 or logits_index[i] >= tokens:
            return False
    return True


def count_single_tail(const int32_t[::1] query_len):
    """Rows of one token at the end of a batch."""
    cdef Py_ssize_t first = query_len.shape[0]
    while first > 0 and query_len[first - 1] == 1:
        first -= 1
    return query_len.shape[0] - first


def rows_are_current(
    const int32_t[::1] query_len,
    const int32_t[::1] past_len,
    const int32_t[::1] state_index,
    const int32_t[:, ::1] page_rows,
    const int32_t[:, ::1] shadow,
    int32_t page_size,
):
    """Whether `shadow` has every page-table entry that a sound batch reads."""
    cdef Py_ssize_t i
    cdef size_t num_bytes
    for i in range(query_len.shape[0]):
        num_bytes = _blocks(<int64_t>past_len[i] + query_len[i], page_size) * sizeof(int32_t)
        if memcmp(&page_rows[state_index[i], 0], &shadow[state_index[i], 0], num_bytes) != 0:
            return False
    return True


def pack_step(
    const int32_t[::1] token_ids,
    const int32_t[::1] positions,
    const int32_t[::1] query_len,
    const int32_t[::1] past_len,
    const int32_t[::1] state_index,
    const int64_t[::1] logits_index,
    int32_t[::1] words,
    Py_ssize_t exact_decode_rows,
    Py_ssize_t context_tokens,
    Py_ssize_t context_rows,
    Py_ssize_t decode_rows,
    Py_ssize_t logits,
):
    """Write a sound batch as a step of the padded sizes that the last four arguments say.

    Decode rows move behind the padding of the context rows.

    Args:
        exact_decode_rows: how many of the batch's last rows are decode rows.
    Raises:
        InvariantError: the batch does not fit the sizes, or the sizes not `words`.
    """
    cdef Py_ssize_t tokens = context_tokens + decode_rows, rows = context_rows + decode_rows
    cdef Py_ssize_t exact_rows = query_len.shape[0] - exact_decode_rows
    cdef Py_ssize_t exact_tokens = token_ids.shape[0] - exact_decode_rows
    cdef Py_ssize_t token_room = _aligned(tokens), row_room = _aligned(rows), i, j, start, moved
    if exact_rows > context_rows or exact_tokens > context_tokens or exact_decode_rows > decode_rows:
        raise InvariantError(f"{len(query_len)} rows of {len(token_ids)} tokens do not fit a step of {rows} rows")
    if logits_index.shape[0] > logits:
        raise InvariantError(f"{len(logits_index)} logits rows do not fit a step of {logits}")
    if words.shape[0] < 3 * token_room + 3 * row_room + _aligned(rows + 1) + _aligned(logits):
        raise InvariantError(f"a step of {tokens} tokens and {rows} rows does not fit {len(words)} words")
    cdef int32_t *ids = &words[0]
    cdef int32_t *places = ids + token_room
    cdef int32_t *sequence = places + token_room
    cdef int32_t *slots = sequence + token_room
    cdef int32_t *query_start = slots + row_room
    cdef int32_t *past = query_start + _aligned(rows + 1)
    cdef int32_t *lengths = past + row_room
    cdef int32_t *selected = lengths + row_room
    for i in range(tokens):
        ids[i] = places[i] = 0
        sequence[i] = NONE
    for i in range(rows):
        slots[i] = NONE
        past[i] = lengths[i] = 0
    start = 0
    for i in range(exact_rows):
        query_start[i] = <int32_t>start
        slots[i], past[i], lengths[i] = state_index[i], past_len[i], past_len[i] + query_len[i]
        for j in range(start, start + query_len[i]):
            ids[j], places[j], sequence[j] = token_ids[j], positions[j], <int32_t>i
        start += query_len[i]
    for i in range(exact_rows, context_rows + 1):
        query_start[i] = <int32_t>start
    for i in range(exact_decode_rows):
        j = exact_rows + i
        slots[context_rows + i], past[context_rows + i] = state_index[j], past_len[j]
        lengths[context_rows + i] = past_len[j] + 1
        ids[context_tokens + i] = token_ids[exact_tokens + i]
        places[context_tokens + i] = positions[exact_tokens + i]
        sequence[context_tokens + i] = <int32_t>(context_rows + i)
    for i in range(decode_rows):
        query_start[context_rows + 1 + i] = <int32_t>(context_tokens + 1 + i)
    moved = context_tokens - exact_tokens
    for i in range(logits_index.shape[0]):
        selected[i] = <int32_t>(logits_index[i] + (moved if logits_index[i] >= exact_tokens else 0))
    for i in range(logits_index.shape[0], logits):
        selected[i] = 0


def pack_changed_rows(
    const int32_t[::1] query_len,
    const int32_t[::1] past_len,
    const int32_t[::1] state_index,
    const int32_t[:, ::1] page_rows,
    int32_t[:, ::1] shadow,
    int32_t page_size,
    int32_t[::1] words,
    Py_ssize_t start,
    Py_ssize_t first,
):
    """Find page-table rows that a sound batch reads and `shadow` has not; pack as many as fit, and note them there.

    At `start` of `words`: their slots, then from the next multiple of 16 bytes on the rows, all as wide as the widest
    that the batch reads, -1 behind what each sequence reads.

    Args:
        shadow: what the device has, (num_slots, >= pages_per_slot), width a multiple of 4.
        first: sequence to begin with.
    Returns:
        (rows packed, their width, the sequence to go on with; the number of sequences at the end).
    Raises:
        InvariantError: not even one row fits.
    """
    cdef Py_ssize_t sequences = query_len.shape[0], i, j, k, slot, num_blocks, widest = 0
    cdef int64_t width, room, target
    cdef vector[Py_ssize_t] changed
    for i in range(sequences):
        widest = max(widest, <Py_ssize_t>_blocks(<int64_t>past_len[i] + query_len[i], page_size))
    width = _aligned(widest)
    room = (words.shape[0] - start - ALIGNMENT) // (width + 1)
    if room < 1 or width > shadow.shape[1]:
        raise InvariantError(f"a page row of {width} entries does not fit {len(words) - start} words")
    i = first
    while i < sequences and <int64_t>changed.size() < room:
        slot, num_blocks = state_index[i], _blocks(<int64_t>past_len[i] + query_len[i], page_size)
        if memcmp(&page_rows[slot, 0], &shadow[slot, 0], num_blocks * sizeof(int32_t)) != 0:
            changed.push_back(i)
        i += 1
    target = start + _aligned(changed.size())
    for k in range(<Py_ssize_t>changed.size()):
        j = changed[k]
        slot, num_blocks = state_index[j], _blocks(<int64_t>past_len[j] + query_len[j], page_size)
        words[start + k] = <int32_t>slot
        memcpy(&shadow[slot, 0], &page_rows[slot, 0], num_blocks * sizeof(int32_t))
        for j in range(num_blocks, width):
            shadow[slot, j] = NONE
        memcpy(&words[target], &shadow[slot, 0], width * sizeof(int32_t))
        target += width
    return changed.size(), width, i
