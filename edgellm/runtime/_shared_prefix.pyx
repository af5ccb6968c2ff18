"""Which decode rows of a step lease the same leading pages: one pass over their page-table rows."""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcmp
from libcpp.vector cimport vector

from edgellm.errors import InvariantError

cdef Py_ssize_t STRIDE = 128, STEP = 8  # entries that are compared at once
cdef int32_t LEAST_ROWS = 4  # fewer leave most of a tile of the kernel empty

MIN_SHARED_ROWS = LEAST_ROWS


cdef struct Group:
    Py_ssize_t leader
    Py_ssize_t pages
    Py_ssize_t rows


cdef bint _pays(int64_t rows, int64_t tokens, int64_t least) noexcept nogil:
    return rows >= LEAST_ROWS and (rows - 1) * tokens >= least


def group_pays(int64_t rows, int64_t tokens, int64_t least_saved):
    """Whether `rows` rows that read a prefix of `tokens` tokens together save at least `least_saved` tokens."""
    return _pays(rows, tokens, least_saved)


cdef Py_ssize_t _common(const int32_t *a, const int32_t *b, Py_ssize_t most) noexcept nogil:
    """Leading entries in which two rows agree."""
    cdef Py_ssize_t at = 0
    while at + STRIDE <= most and memcmp(a + at, b + at, STRIDE * sizeof(int32_t)) == 0:
        at += STRIDE
    while at + STEP <= most and memcmp(a + at, b + at, STEP * sizeof(int32_t)) == 0:
        at += STEP
    while at < most and a[at] == b[at]:
        at += 1
    return at


cdef class _Finder:
    """Rows that are in no group yet, and what they have in common with one of them, the leader."""

    cdef Py_ssize_t rows, page_size
    cdef int64_t least  # tokens that a group has to save
    cdef vector[const int32_t *] pages
    cdef vector[Py_ssize_t] whole  # pages of a row that nobody writes in this step
    cdef vector[Py_ssize_t] group_of  # -1: none
    cdef vector[Py_ssize_t] mates  # rows that may share with the leader, itself included
    cdef vector[Py_ssize_t] common  # leading pages of each mate that are the leader's
    cdef vector[Py_ssize_t] sharing  # mates with that many, by pages

    cdef Py_ssize_t _least_pages(self, Py_ssize_t rows) noexcept nogil:
        """The fewest pages that pay for so many rows."""
        return max(1, (self.least + (rows - 1) * self.page_size - 1) // ((rows - 1) * self.page_size))

    cdef bint _find_mates(self, Py_ssize_t leader) noexcept nogil:
        """Only rows that agree with the leader in one page that every group of so many shares; whether any pays."""
        cdef Py_ssize_t row, at = 0, kept, i, before = -1
        cdef const int32_t *pages = self.pages[leader]
        self.mates.clear()
        for row in range(leader, self.rows):
            if self.group_of[row] < 0 and self.whole[row] and self.pages[row][0] == pages[0]:
                self.mates.push_back(row)
        while <Py_ssize_t>self.mates.size() >= LEAST_ROWS and <Py_ssize_t>self.mates.size() != before:
            before = self.mates.size()
            at = self._least_pages(before) - 1
            if at >= self.whole[leader]:
                return False
            kept = 0
            for i in range(before):
                row = self.mates[i]
                if at < self.whole[row] and self.pages[row][at] == pages[at]:
                    self.mates[kept] = row
                    kept += 1
            self.mates.resize(kept)
        return <Py_ssize_t>self.mates.size() >= LEAST_ROWS

    cdef Group _best(self, Py_ssize_t leader) noexcept nogil:
        """The mates and pages that save most; no pages where none pay."""
        cdef Group best
        cdef Py_ssize_t i, row, pages, rows = 0, saved, most = 0, whole = self.whole[leader]
        best.leader, best.pages, best.rows = leader, 0, 0
        if not whole or not self._find_mates(leader):
            return best
        self.sharing.assign(whole + 1, 0)
        self.common.resize(self.mates.size())
        for i in range(<Py_ssize_t>self.mates.size()):
            row = self.mates[i]
            self.common[i] = _common(self.pages[leader], self.pages[row], min(whole, self.whole[row]))
            self.sharing[self.common[i]] += 1
        for pages in range(whole, 0, -1):
            if not self.sharing[pages]:
                continue
            rows += self.sharing[pages]
            saved = (rows - 1) * pages
            if saved > most and _pays(rows, pages * self.page_size, self.least):
                most, best.pages, best.rows = saved, pages, rows
        return best

    cdef void find(self, vector[Group] &found) noexcept nogil:
        cdef Py_ssize_t leader, i
        cdef Group group
        self.group_of.assign(self.rows, -1)
        for leader in range(self.rows - LEAST_ROWS + 1):
            if self.group_of[leader] >= 0:
                continue
            group = self._best(leader)
            if not group.pages:
                continue
            for i in range(<Py_ssize_t>self.mates.size()):
                if self.common[i] >= group.pages:
                    self.group_of[self.mates[i]] = found.size()
            found.push_back(group)


cdef Py_ssize_t _size(const Group &group) noexcept nogil:
    return group.rows * group.pages


cdef void _drop_smallest(vector[Group] &found) noexcept nogil:
    """Of groups that are not dropped already."""
    cdef Py_ssize_t i, smallest = -1
    for i in range(<Py_ssize_t>found.size()):
        if found[i].rows and (smallest < 0 or _size(found[i]) < _size(found[smallest])):
            smallest = i
    found[smallest].rows = 0


def find_shared_prefixes(
    const int32_t[::1] past_len,
    const int32_t[::1] state_index,
    const int32_t[:, ::1] page_rows,
    Py_ssize_t first,
    Py_ssize_t page_size,
    int64_t least_saved,
    int32_t[::1] shared,
    int32_t[::1] members,
    int32_t[::1] group_start,
):
    """Groups of a sound batch's rows from `first` on, each of one token, that share the pages of a prefix and pay.

    Rows are taken in order: each gathers those that save most together with it, of what is left.

    Args:
        least_saved: tokens that a group saves at least, (rows - 1) times those of its prefix.
        shared: (>= rows,) to be filled: tokens of each row's prefix, 0 in no group.
        members: (>= rows,) to be filled: rows, counted from `first`, group by group.
        group_start: (most groups + 1,) to be filled: where each group's members begin; the largest are kept.
    Returns:
        How many groups there are.  Without any, `shared` and `group_start` are zeros.
    Raises:
        InvariantError: the tables have no room for the rows.
    """
    cdef Py_ssize_t rows = past_len.shape[0] - first, row, i, place = 0, count = 0
    cdef Py_ssize_t most = group_start.shape[0] - 1, _excess
    if rows < 0 or shared.shape[0] < rows or members.shape[0] < rows or most < 1 or page_size < 1:
        raise InvariantError(f"{rows} rows do not fit tables of {len(shared)}, {len(members)} and {len(group_start)}")
    cdef vector[Group] found
    cdef _Finder finder = _Finder.__new__(_Finder)
    finder.rows, finder.page_size, finder.least = rows, page_size, least_saved
    for row in range(first, first + rows):
        finder.pages.push_back(&page_rows[state_index[row], 0])
        finder.whole.push_back(past_len[row] // page_size)
    finder.find(found)
    for _excess in range(<Py_ssize_t>found.size() - most):
        _drop_smallest(found)
    for row in range(shared.shape[0]):
        shared[row] = 0
    group_start[0] = 0
    for i in range(<Py_ssize_t>found.size()):
        if not found[i].rows:
            continue
        for row in range(rows):
            if finder.group_of[row] == i:
                members[place] = <int32_t>row
                shared[row] = <int32_t>(found[i].pages * page_size)
                place += 1
        count += 1
        group_start[count] = <int32_t>place
    for i in range(count, most):
        group_start[i + 1] = <int32_t>place
    return count
