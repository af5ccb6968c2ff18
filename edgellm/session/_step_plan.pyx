"""Plans and deltas as packed C entries that read like lists.

Most steps are planned, checked, run and committed without anybody looking at a single descriptor, so descriptors,
identities and deltas become Python objects when somebody looks, and not before.
"""

cimport cython
from libc.stdint cimport INT32_MAX, INT32_MIN, int32_t, int64_t

from collections.abc import Sequence

from edgellm.session._ledger cimport LengthRow, ResidentRow

from edgellm.errors import ContractViolation
from edgellm.session.types import (
    ResidentRef,
    ScheduledSequenceDescriptor,
    SequenceIdentity,
    SequenceWork,
    TokenDelta,
)

cdef object CONTEXT = SequenceWork.CONTEXT
cdef object DECODE = SequenceWork.DECODE


cdef int32_t _int32(int64_t value, str name, object whose) except? -1:
    if not INT32_MIN <= value <= INT32_MAX:
        raise ContractViolation(f"{name} is {value} for {whose}; a plan holds 32-bit lengths and slots")
    return <int32_t>value


cdef class LazySequence:
    """An immutable sequence whose items are built when somebody looks; equal to a list of the same items."""

    cdef list build(self):
        raise NotImplementedError

    cdef Py_ssize_t size(self) noexcept:
        return 0

    cdef list items(self):
        if self._items is None:
            self._items = self.build()
        return self._items

    def __len__(self):
        return self.size()

    def __getitem__(self, index):
        return self.items()[index]

    def __iter__(self):
        return iter(self.items())

    def __reversed__(self):
        return reversed(self.items())

    def __contains__(self, item):
        return item in self.items()

    def index(self, item, *bounds):
        return self.items().index(item, *bounds)

    def count(self, item):
        return self.items().count(item)

    def __eq__(self, other):
        if isinstance(other, LazySequence):
            return self.items() == (<LazySequence>other).items()
        if isinstance(other, list):
            return self.items() == other
        return NotImplemented

    __hash__ = None

    def __repr__(self):
        return repr(self.items())


@cython.final
cdef class StepPlan(LazySequence):
    """A plan: what `session.execute` takes, and what a step that ran as planned gives back as `execution`.

    Pointer-free like the descriptors it stands for; it can be pickled and sent to other ranks.
    """

    def __init__(self, descriptors=()):
        """Raises: ContractViolation: an integer does not fit (ids and epochs: unsigned 64-bit, else signed 32-bit)."""
        cdef plan_row_t entry
        items = list(descriptors)
        self.rows.reserve(len(items))
        for descriptor in items:
            identity = descriptor.identity
            try:
                entry.request_id = identity.request_id
                entry.epoch = identity.resident.epoch
                entry.slot = identity.resident.slot
                entry.query_length = descriptor.query_length
                entry.past_length = descriptor.past_length
            except OverflowError as error:
                raise ContractViolation(
                    f"{descriptor} does not fit a plan: request id and epoch are unsigned 64-bit, the slot and both "
                    f"lengths are signed 32-bit integers"
                ) from error
            if descriptor.work is not CONTEXT and descriptor.work is not DECODE:
                raise ContractViolation(f"{descriptor} has work {descriptor.work!r}; it must be a SequenceWork")
            entry.context = descriptor.work is CONTEXT
            entry.select = bool(descriptor.select_last_token_logits)
            self.rows.push_back(entry)
        self._items = items

    @staticmethod
    def of(list seats, list lengths):
        """The plan in which `seats[i]` runs `lengths[i]` tokens of its prompt, or its one decode token.

        Args:
            seats: `LengthRow`s; the work of each follows from what is left of its prompt.
            lengths: at least 1 each; 1 for a decode row.
        """
        cdef StepPlan plan = StepPlan.__new__(StepPlan)
        cdef LengthRow seat
        cdef Py_ssize_t i
        if len(seats) != len(lengths):
            raise ContractViolation(f"{len(seats)} residents are planned with {len(lengths)} lengths; give one each")
        plan.rows.resize(len(seats))
        for i in range(len(seats)):
            seat = seats[i]
            _fill(&plan.rows[i], seat, lengths[i])
        return plan

    @staticmethod
    def full_cohort(list seats):
        """One decode row for everybody, in resident order; None when a prompt is incomplete."""
        cdef StepPlan plan = StepPlan.__new__(StepPlan)
        cdef LengthRow seat
        cdef Py_ssize_t i
        plan.rows.resize(len(seats))
        for i in range(len(seats)):
            seat = seats[i]
            if seat.prompt_remaining:
                return None
            _fill(&plan.rows[i], seat, 1)
        return plan

    @property
    def num_tokens(self):
        """Sum of the query lengths."""
        cdef int64_t total = 0
        cdef size_t i
        for i in range(self.rows.size()):
            total += self.rows[i].query_length
        return total

    @property
    def has_context(self):
        """Whether somebody runs a part of its prompt."""
        cdef size_t i
        for i in range(self.rows.size()):
            if self.rows[i].context:
                return True
        return False

    @property
    def identities(self):
        """The identities named, as a lazy sequence."""
        cdef PlanIdentities view = PlanIdentities.__new__(PlanIdentities)
        view._plan = self
        return view

    def take(self, list indices):
        """The plan of these entries alone."""
        cdef StepPlan plan = StepPlan.__new__(StepPlan)
        cdef Py_ssize_t index
        plan.rows.reserve(len(indices))
        for index in indices:
            if not 0 <= index < self.size():
                raise IndexError(f"the plan has {self.size()} entries, not an entry {index}")
            plan.rows.push_back(self.rows[index])
        return plan

    cdef Py_ssize_t size(self) noexcept:
        return <Py_ssize_t>self.rows.size()

    cdef list build(self):
        return [self.describe(i) for i in range(self.size())]

    cdef object describe(self, Py_ssize_t index):
        cdef plan_row_t *row = &self.rows[index]
        return ScheduledSequenceDescriptor(
            self.identity_of(index),
            CONTEXT if row.context else DECODE,
            row.query_length,
            row.past_length,
            bool(row.select),
        )

    cdef object identity_of(self, Py_ssize_t index):
        cdef plan_row_t *row = &self.rows[index]
        return SequenceIdentity(row.request_id, ResidentRef(row.slot, row.epoch))

    def __getitem__(self, index):
        cdef Py_ssize_t place
        if self._items is not None or isinstance(index, slice):
            return self.items()[index]
        place = index
        if place < 0:
            place += self.size()
        if not 0 <= place < self.size():
            raise IndexError(f"the plan has {self.size()} entries, not an entry {index}")
        return self.describe(place)

    def __eq__(self, other):
        if type(other) is StepPlan:
            return _same_rows(&self.rows, &(<StepPlan>other).rows)
        return LazySequence.__eq__(self, other)

    __hash__ = None

    def __reduce__(self):
        return StepPlan, (self.items(),)


cdef int _fill(plan_row_t *entry, LengthRow seat, int64_t length) except -1:
    entry.request_id = seat.request_id
    entry.epoch = seat.epoch
    entry.slot = seat.slot
    entry.query_length = _int32(length, "query_length", seat.identity)
    entry.past_length = _int32(seat.committed, "past_length", seat.identity)
    entry.context = seat.prompt_remaining > 0
    entry.select = not entry.context or length == seat.prompt_remaining
    return 0


cdef bint _same_rows(vector[plan_row_t] *left, vector[plan_row_t] *right) noexcept:
    cdef size_t i
    cdef plan_row_t *a
    cdef plan_row_t *b
    if left.size() != right.size():
        return False
    for i in range(left.size()):
        a = &left[0][i]
        b = &right[0][i]
        if (
            a.request_id != b.request_id or a.epoch != b.epoch or a.slot != b.slot
            or a.query_length != b.query_length or a.past_length != b.past_length
            or a.context != b.context or a.select != b.select
        ):
            return False
    return True


@cython.final
cdef class PlanIdentities(LazySequence):
    """The identities that a plan names, in plan order."""

    def __init__(self):
        raise TypeError("identities belong to a plan; take StepPlan.identities")

    cdef Py_ssize_t size(self) noexcept:
        return self._plan.size()

    cdef list build(self):
        if self._plan._items is not None:
            return [descriptor.identity for descriptor in self._plan._items]
        return [self._plan.identity_of(i) for i in range(self._plan.size())]

    def __reduce__(self):
        return list, (self.items(),)


@cython.final
cdef class StepDeltas(LazySequence):
    """`(ref, TokenDelta)` of the residents that a step gave something and left alive."""

    cdef Py_ssize_t size(self) noexcept:
        return <Py_ssize_t>self.rows.size()

    cdef list build(self):
        cdef list deltas = []
        cdef size_t i, j, start = 0
        cdef delta_row_t *row
        for i in range(self.rows.size()):
            row = &self.rows[i]
            tokens = [self.tokens[j] for j in range(start, start + row.count)]
            deltas.append((ResidentRef(row.slot, row.epoch), TokenDelta(tokens)))
            start += row.count
        return deltas

    def __reduce__(self):
        return list, (self.items(),)


Sequence.register(LazySequence)


def report(list rows):
    """(deltas of the rows that go on, rows that ended), both in order; moves the watermark of the former."""
    cdef StepDeltas deltas = StepDeltas.__new__(StepDeltas)
    cdef list ended = []
    cdef ResidentRow row
    cdef delta_row_t entry
    cdef Py_ssize_t i, count
    deltas.rows.reserve(len(rows))
    deltas.tokens.reserve(len(rows))
    for row in rows:
        if row.terminal:
            ended.append(row)
            continue
        count = len(row.generated)
        if count <= row.reported:
            continue
        entry.epoch, entry.slot, entry.count = row.epoch, row.slot, <int32_t>(count - row.reported)
        for i in range(row.reported, count):
            deltas.tokens.push_back(<int64_t>row.generated[i])
        deltas.rows.push_back(entry)
        row.reported = count
    return deltas, ended
