"""What became of each resident's proposals, and the search for the best lengths: the inner part of `adaptive`.

`LengthRecords` decides in three layers: lengths that the model of costs chooses, trials of sequences for which nothing
pays, and above both `ThroughputGuard`, which knows whether rounds with proposals really are faster.
"""

from libc.stdint cimport int32_t
from libcpp.algorithm cimport sort
from libcpp.vector cimport vector

from edgellm.decoding._throughput_guard cimport ThroughputGuard

cdef double FORGET = 0.9  # weight of what was known, at each new observation
cdef double FORGET_OF_ALL = 0.98  # the same for what all sequences got
cdef double FIRST_ACCEPTANCE = 0.7
cdef double CERTAINTY = 4.0  # proposals that the first guess counts for

cdef int32_t ASKED_EVERY = 8  # rounds without proposals, after which it is looked again whether any would pay

cdef int32_t FIRST_WAIT = 16, LONGEST_WAIT = 512  # rounds after which a sequence for which nothing pays is tried again
cdef int32_t LONGEST_TRIED = 8  # tokens to which a trial that goes well doubles its proposals, from 1
cdef double TRIAL_SHARE = 0.01  # of rounds, in which trials may propose while nothing pays
cdef double MOST_TRIALS = 2.0  # rounds of them that are saved up, and there at first


cdef struct Record:
    # Proposals that were kept and that were tried, with weights that fade; rounds without any (counted as far as the
    # longest wait), and after how many a trial is due; tokens that a trial proposes in the next round, 0 without one.
    double kept
    double tried
    int32_t idle
    int32_t wait
    int32_t trial


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
    made.idle, made.wait, made.trial = 0, FIRST_WAIT, 0
    return made


cdef class LengthRecords:
    """By resident slot.  A sequence starts from what all sequences got lately."""

    cdef vector[Record] _records
    cdef vector[Offer] _offers
    cdef double _kept, _tried  # of all sequences
    cdef ThroughputGuard _guard
    cdef double _credit  # rounds that trials may propose in while nothing pays
    cdef int32_t _rested  # rounds since it was looked at what pays

    def __cinit__(self):
        self._kept, self._tried = FIRST_ACCEPTANCE * CERTAINTY, CERTAINTY
        self._guard = ThroughputGuard()
        self._credit = MOST_TRIALS

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
        record.trial = 0

    def acceptance(self, Py_ssize_t slot):
        """Expected share of the slot's proposals that are kept."""
        self._reach(slot)
        return self._records[slot].kept / self._records[slot].tried

    def observe(self, Py_ssize_t slot, int32_t proposed, int32_t kept):
        """`kept` of `proposed` tokens were accepted; those behind the first refused one say nothing of theirs."""
        self._reach(slot)
        cdef Record *record = &self._records[slot]
        record.trial = 2 * record.trial if 0 < proposed == kept and record.trial < LONGEST_TRIED else 0
        if proposed <= 0:
            return
        cdef int32_t tried = min(kept + 1, proposed)
        record.kept = FORGET * record.kept + kept
        record.tried = FORGET * record.tried + tried
        self._kept = FORGET_OF_ALL * self._kept + kept
        self._tried = FORGET_OF_ALL * self._tried + tried
        record.idle = 0

    def observe_round(self, int32_t tokens, double seconds):
        """The round that `limits`, `rest` or `start` was asked for last gave so many tokens; see `DraftLengths`."""
        self._guard.observe(tokens, seconds)

    def start(self, list slots, bint alone):
        """A round that proposes as much as it may, since nothing is known of costs; `alone` as in `limits`."""
        self._enter(len(slots))
        if alone:
            self._guard.note(True)

    def limits(self, list slots, list most, double seconds, double per_row, double per_depth, bint alone=True):
        """Proposals worth making for each slot, at most `most` of it; see `DraftLengths`.

        Args:
            alone: whether no prompt shares the step.  One with a prompt is part of no trial and of no sample.
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
        self._enter(count)
        if alone and self._guard.holds_back() and not self._due(slots, most):
            self._pass(slots, most)
            return [0] * count
        if not alone and self._guard.is_closed():
            return [0] * count
        self._rested = 0
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
        return self._with_trials(places, allowed, chosen, alone, alone and self._is_ripe(slots, most))

    def rest(self, list slots, list most):
        """Count a round without proposals for every slot, where the guard wants one or none proposed before."""
        self._enter(len(slots))
        if self._due(slots, most):
            return False
        if not self._guard.holds_back() and (self._rested + 1 >= ASKED_EVERY or self._goes_on(slots, most)):
            return False
        self._pass(slots, most)
        return True

    def stay_idle(self, list slots, list most):
        """Whether no slot is likely to propose in the next round: none did in this one, and no trial is due."""
        if self._due(slots, most):
            return False
        return self._guard.holds_back_next() or not self._goes_on(slots, most)

    cdef void _enter(self, Py_ssize_t count) noexcept nogil:
        if self._guard.enter(count):
            self._rested = ASKED_EVERY  # what pays may be another thing with so many

    cdef int _pass(self, list slots, list most) except -1:
        """A round without proposals, and without a look at what would pay."""
        cdef Record *record
        cdef Py_ssize_t i, slot
        for i in range(len(slots)):
            slot = slots[i]
            self._reach(slot)
            record = &self._records[slot]
            # Behind a sample a sequence goes on as before.
            if <int32_t>most[i] > 0 and (record.idle or not self._guard.is_sampling()):
                record.idle = min(record.idle + 1, LONGEST_WAIT)
        self._rested = min(self._rested + 1, ASKED_EVERY)
        self._guard.note(False)
        self._earn()
        return 0

    cdef bint _goes_on(self, list slots, list most) except -1:
        """Whether a slot proposed in the latest round that was no sample, or may be in a trial."""
        cdef Py_ssize_t i, slot
        if self._guard.is_trying():
            return True
        for i in range(len(slots)):
            slot = slots[i]
            self._reach(slot)
            if <int32_t>most[i] > 0 and self._records[slot].idle == 0:
                return True
        return False

    cdef bint _due(self, list slots, list most) except -1:
        """Whether a trial begins in the next round, though nothing pays."""
        return not self._guard.is_sampling() and self._has_credit() and self._is_ripe(slots, most)

    cdef bint _is_ripe(self, list slots, list most) except -1:
        """Whether a slot has waited long enough for a trial in the next round."""
        cdef Record *record
        cdef Py_ssize_t i, slot
        for i in range(len(slots)):
            slot = slots[i]
            self._reach(slot)
            record = &self._records[slot]
            if <int32_t>most[i] > 0 and record.idle + 1 >= record.wait:
                return True
        return False

    cdef bint _has_credit(self) noexcept nogil:
        return self._credit + TRIAL_SHARE >= 1.0

    cdef void _earn(self) noexcept nogil:
        self._credit = min(self._credit + TRIAL_SHARE, MOST_TRIALS)

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

    cdef list _with_trials(
        self,
        const vector[int32_t] &places,
        const vector[int32_t] &allowed,
        const vector[int32_t] &chosen,
        bint alone,
        bint ripe,
    ):
        """What a sequence writes changes: those for which nothing paid are tried again from time to time, together.

        Beside proposals that pay a trial costs no more than its rows; alone it has to have credit.
        """
        cdef bint closed = self._guard.is_closed(), pays = False, proposes = False, begins
        cdef int32_t length
        cdef Py_ssize_t i
        cdef list lengths = []
        for i in range(<Py_ssize_t>places.size()):
            pays = pays or chosen[i] > 0
        begins = ripe and not self._guard.is_trying() and (self._has_credit() or (pays and not closed))
        if begins and closed:
            self._guard.begin_trial()
        for i in range(<Py_ssize_t>places.size()):
            length = self._length(&self._records[places[i]], allowed[i], chosen[i], begins)
            proposes = proposes or length > 0
            lengths.append(length)
        if proposes and (closed or not pays):
            self._credit -= 1.0
        if alone:
            self._guard.note(proposes)
            self._earn()
        return lengths

    cdef int32_t _length(self, Record *record, int32_t allowed, int32_t chosen, bint begins) noexcept nogil:
        cdef bint closed = self._guard.is_closed()
        if begins and allowed and (closed or not (chosen or record.trial)):
            record.wait, record.trial = min(2 * record.wait, LONGEST_WAIT), 1
            # It may have changed since: the past counts as a first guess does.
            record.kept *= min(1.0, CERTAINTY / record.tried)
            record.tried = min(record.tried, CERTAINTY)
        elif chosen and not closed:
            record.wait = FIRST_WAIT
        cdef int32_t length = max(chosen, min(record.trial, allowed))
        record.idle = 0 if length or not allowed else min(record.idle + 1, LONGEST_WAIT)
        return length
