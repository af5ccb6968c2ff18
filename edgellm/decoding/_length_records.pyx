"""What became of each resident's proposals, and the search for the best lengths: the inner part of `adaptive`."""

from libc.stdint cimport int32_t
from libcpp.algorithm cimport sort
from libcpp.vector cimport vector

cdef double FORGET = 0.9  # weight of what was known, at each new observation
cdef double FORGET_OF_ALL = 0.98  # the same for what all sequences got
cdef double FIRST_ACCEPTANCE = 0.7
cdef double CERTAINTY = 4.0  # proposals that the first guess counts for
cdef int32_t FIRST_WAIT = 16, LONGEST_WAIT = 128  # rounds after which a sequence for which nothing pays is tried again

cdef int32_t ASKED_EVERY = 8  # rounds without proposals, after which it is looked again whether any would pay


cdef struct Record:
    # Proposals that were kept and that were tried, with weights that fade; rounds without any, and how many are due.
    double kept
    double tried
    int32_t idle
    int32_t wait


cdef struct Offer:
    # The place-th proposal of a sequence, and with which probability it is kept.
    double gain
    int32_t sequence
    int32_t place


cdef bint comes_before(const Offer &one, const Offer &other) noexcept nogil:
    """The best first; of equal ones that of the earlier sequence."""
    if one.gain != other.gain:
        return one.gain > other.gain
    if one.sequence != other.sequence:
        return one.sequence < other.sequence
    return one.place < other.place


cdef Record new_record(double acceptance) noexcept nogil:
    cdef Record made
    made.kept, made.tried = acceptance * CERTAINTY, CERTAINTY
    made.idle, made.wait = 0, FIRST_WAIT
    return made


cdef class LengthRecords:
    """By resident slot.  A sequence starts from what all sequences got lately."""

    cdef vector[Record] _records
    cdef vector[Offer] _offers
    cdef double _kept, _tried  # of all sequences

    def __cinit__(self):
        self._kept, self._tried = FIRST_ACCEPTANCE * CERTAINTY, CERTAINTY

    cdef int _reach(self, Py_ssize_t slot) except -1:
        if slot < 0:
            raise IndexError(f"slot {slot} is negative")
        while <Py_ssize_t>self._records.size() <= slot:
            self._records.push_back(new_record(self._kept / self._tried))
        return 0

    def seat(self, Py_ssize_t slot):
        """A new sequence.  How long the slot has been without proposals stays: short answers get their turn too."""
        self._reach(slot)
        cdef Record *record = &self._records[slot]
        record.kept, record.tried = CERTAINTY * self._kept / self._tried, CERTAINTY

    def acceptance(self, Py_ssize_t slot):
        """Expected share of the slot's proposals that are kept."""
        self._reach(slot)
        return self._records[slot].kept / self._records[slot].tried

    def observe(self, Py_ssize_t slot, int32_t proposed, int32_t kept):
        """`kept` of `proposed` tokens were accepted; those behind the first refused one say nothing of theirs."""
        if proposed <= 0:
            return
        self._reach(slot)
        cdef Record *record = &self._records[slot]
        cdef int32_t tried = min(kept + 1, proposed)
        record.kept = FORGET * record.kept + kept
        record.tried = FORGET * record.tried + tried
        self._kept = FORGET_OF_ALL * self._kept + kept
        self._tried = FORGET_OF_ALL * self._tried + tried
        record.idle = 0
        if kept:
            record.wait = FIRST_WAIT

    def limits(self, list slots, list most, double seconds, double per_row, double per_depth):
        """Proposals worth making for each slot, at most `most` of it; see `DraftLengths`.

        Args:
            seconds: of the step without any proposal.
            per_row: that each proposal adds.  per_depth: that each token of the longest chain adds.
        """
        cdef Py_ssize_t count = len(slots), i, ends = 0
        cdef int32_t depth, deepest = 0, longest = 0
        cdef vector[int32_t] places, allowed, chosen
        cdef double best = count / seconds if seconds else 0.0, rate = 0.0
        for i in range(count):
            self._reach(slots[i])
            places.push_back(slots[i])
            allowed.push_back(most[i])
            longest = max(longest, allowed[i])
        chosen.resize(count, 0)
        self._collect(places, allowed, seconds + longest * per_depth, per_row)
        for depth in range(1, longest + 1):
            i = self._spread(depth, count, seconds + depth * per_depth, per_row, &rate)
            if rate <= best and per_depth:
                break
            if rate > best:
                best, deepest, ends = rate, depth, i
        for i in range(ends):
            if self._offers[i].place <= deepest:
                chosen[self._offers[i].sequence] += 1
        return self._with_probes(places, allowed, chosen)

    def rest(self, list slots, list most):
        """Count a round without proposals for every slot, where none proposed before and none is to be looked at."""
        cdef Py_ssize_t i, slot
        cdef Record *record
        for i in range(len(slots)):
            slot = slots[i]
            self._reach(slot)
            record = &self._records[slot]
            if <int32_t>most[i] <= 0:
                continue
            if record.idle == 0 or record.idle + 1 >= record.wait or (record.idle + 1) % ASKED_EVERY == 0:
                return False
        for i in range(len(slots)):
            if <int32_t>most[i] > 0:
                self._records[<Py_ssize_t>slots[i]].idle += 1
        return True

    def stay_idle(self, list slots, list most):
        """Whether no slot is likely to propose in the next round: none did in this one, and no trial is due."""
        cdef Py_ssize_t i, slot
        cdef Record *record
        for i in range(len(slots)):
            slot = slots[i]
            self._reach(slot)
            record = &self._records[slot]
            if <int32_t>most[i] > 0 and (record.idle == 0 or record.idle + 1 >= record.wait):
                return False
        return True

    cdef int _collect(
        self, const vector[int32_t] &places, const vector[int32_t] &allowed, double seconds, double per_row
    ) except -1:
        """All proposals that can pay, the best one first.

        Args:
            seconds: of the step with the longest chain, without any proposal's row.
        """
        cdef Offer offer
        cdef double acceptance, least = <double>places.size() * per_row
        cdef Py_ssize_t i
        for i in range(<Py_ssize_t>places.size()):
            seconds += allowed[i] * per_row
        self._offers.clear()
        for i in range(<Py_ssize_t>places.size()):
            acceptance = self._records[places[i]].kept / self._records[places[i]].tried
            offer.gain, offer.sequence, offer.place = acceptance, <int32_t>i, 1
            # What pays in front of all others, or behind them, is better than that.
            while offer.place <= allowed[i] and offer.gain * seconds >= least:
                self._offers.push_back(offer)
                offer.gain, offer.place = offer.gain * acceptance, offer.place + 1
        sort(self._offers.begin(), self._offers.end(), comes_before)
        return 0

    cdef Py_ssize_t _spread(
        self, int32_t depth, Py_ssize_t count, double seconds, double per_row, double *rate
    ) noexcept nogil:
        """Which proposals of chains of at most `depth` tokens are made: those among the first so many, and the rate."""
        cdef double expected = <double>count
        cdef Py_ssize_t i
        for i in range(<Py_ssize_t>self._offers.size()):
            if self._offers[i].place > depth:
                continue
            if self._offers[i].gain * seconds < expected * per_row:
                rate[0] = expected / seconds if seconds else 0.0
                return i
            expected += self._offers[i].gain
            seconds += per_row
        rate[0] = expected / seconds if seconds else 0.0
        return self._offers.size()

    cdef list _with_probes(
        self, const vector[int32_t] &places, const vector[int32_t] &allowed, const vector[int32_t] &chosen
    ):
        """What a sequence writes changes: one for which nothing paid is tried again from time to time."""
        cdef Record *record
        cdef Py_ssize_t i
        cdef list lengths = []
        for i in range(<Py_ssize_t>places.size()):
            record = &self._records[places[i]]
            if chosen[i] or not allowed[i]:
                record.idle = 0
                lengths.append(chosen[i])
                continue
            record.idle += 1
            if record.idle < record.wait:
                lengths.append(0)
                continue
            record.idle, record.wait = 0, min(2 * record.wait, LONGEST_WAIT)
            lengths.append(1)
        return lengths
