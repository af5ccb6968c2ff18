"""`ThroughputGuard`: whether rounds with proposals really are faster than rounds without, as measured from end to end.

Tokens by seconds of both kinds of rounds are kept for each power of two of residents apart: a bucket.  A round is
measured where its kind and residents are those of the round before; so the first one behind a change, which pays for
it (a step that ran ahead no more, or not yet), does not count, and neither does a stall.

A bucket is open until proposing turns out not to be faster by 3 %, the standard error of both speeds granted.  Then it
is closed, and opens when a trial, a few rounds in a row that propose, is faster by 3 %; where residents come and go in
it, so that too few of them are measured, the next trial is judged with it.  Idle rounds of an open bucket are measured
in samples: a few in a row behind the first rounds that propose, then ever more rarely, and before it is closed upon
what an old sample says.  Until both speeds are known nothing is closed.
"""

from libc.math cimport sqrt

cdef int32_t NUM_BUCKETS = 32  # 1, 2, 3 to 4, 5 to 8, ... residents
cdef int32_t SAMPLE_ROUNDS = 4, TRIAL_ROUNDS = 4  # in a row; the first is not measured
cdef int32_t FIRST_GAP = 3, SHORT_GAP = 32, LONGEST_GAP = 512  # measured rounds with proposals between two samples
cdef double FADE_OF_IDLE = 0.98, FADE_OF_PROPOSING = 0.95  # what a sequence writes changes sooner than the machine
cdef double STALL = 3.0  # times the mean: a round that took longer is not measured
cdef int32_t STALLS_IN_A_ROW = 4  # from which on they are the new pace
cdef double LEAST_KNOWN = 2.0  # rounds of both kinds before they are compared
cdef double LEAST_ERROR = 0.15  # of one round, as a share: a few equal ones prove nothing
cdef double MARGIN = 0.03
cdef double HOPELESS = 0.75  # of the speed of idle rounds: a trial that is slower ends early

cdef Pace NO_PACE = Pace(0, 0, 0, 0, 0, 0, 0)


cdef void scale(Pace *pace, double share) noexcept nogil:
    pace.rounds *= share
    pace.tokens *= share
    pace.seconds *= share
    pace.tokens_tokens *= share
    pace.tokens_seconds *= share
    pace.seconds_seconds *= share


cdef bint is_stall(Pace *pace, double seconds) noexcept nogil:
    """Whether a round took so long that it does not count; a pace that changed for good is forgotten."""
    if not pace.rounds:
        return False
    cdef double mean = pace.seconds / pace.rounds
    pace.stalls = pace.stalls + 1 if seconds > STALL * mean else 0
    if 0 < pace.stalls < STALLS_IN_A_ROW:
        return True
    if pace.stalls or STALL * seconds < mean:
        pace[0] = NO_PACE
    return False


cdef void add_round(Pace *pace, double fade, double tokens, double seconds) noexcept nogil:
    if is_stall(pace, seconds):
        return
    scale(pace, fade)
    pace.rounds += 1.0
    pace.tokens += tokens
    pace.seconds += seconds
    pace.tokens_tokens += tokens * tokens
    pace.tokens_seconds += tokens * seconds
    pace.seconds_seconds += seconds * seconds


cdef double speed_of(const Pace *pace) noexcept nogil:
    return pace.tokens / pace.seconds if pace.seconds else 0.0


cdef double variance_of(const Pace *pace) noexcept nogil:
    """Of the speed, as a share of it squared: that of a ratio of two means."""
    cdef double speed = speed_of(pace)
    cdef double squares = pace.tokens_tokens + speed * (speed * pace.seconds_seconds - 2.0 * pace.tokens_seconds)
    return max(squares, 0.0) / (pace.tokens * pace.tokens) + LEAST_ERROR * LEAST_ERROR / pace.rounds


cdef bint is_known(const Bucket *bucket) noexcept nogil:
    """Whether enough rounds of both kinds were measured."""
    cdef bint enough = min(bucket.idle.rounds, bucket.proposing.rounds) >= LEAST_KNOWN
    return enough and min(bucket.idle.tokens, bucket.proposing.tokens) > 0.0


cdef double gain_of(const Bucket *bucket) noexcept nogil:
    """Speed with proposals by the speed without."""
    return speed_of(&bucket.proposing) / speed_of(&bucket.idle)


cdef double error_of(const Bucket *bucket) noexcept nogil:
    """Standard error of the gain."""
    return gain_of(bucket) * sqrt(variance_of(&bucket.idle) + variance_of(&bucket.proposing))


cdef bint is_hopeless(const Bucket *bucket) noexcept nogil:
    """Whether a round of a trial was measured, and the trial is far slower than idle rounds."""
    return bucket.proposing.rounds > 0.0 and speed_of(&bucket.proposing) < HOPELESS * speed_of(&bucket.idle)


cdef int32_t gap_behind(const Bucket *bucket) noexcept nogil:
    """Rounds with proposals behind a sample, until the next one."""
    if not is_known(bucket) or gain_of(bucket) < 1.0 + MARGIN:
        return SHORT_GAP
    if gain_of(bucket) - 2.0 * error_of(bucket) > 1.0 + MARGIN:
        return LONGEST_GAP
    return min(max(2 * bucket.gap, SHORT_GAP), LONGEST_GAP)


cdef class ThroughputGuard:
    """Of one decoder.  A round is `enter`, then `note` where all its rows decode, then `observe`."""

    def __cinit__(self):
        self._buckets.resize(NUM_BUCKETS, Bucket(NO_PACE, NO_PACE, False, 0, FIRST_GAP))
        self._bucket = &self._buckets[0]
        self._kind = self._kind_before = UNMEASURED

    cdef bint enter(self, Py_ssize_t count) noexcept nogil:
        """A round of so many residents begins; may be said twice.  Whether they are another bucket's."""
        cdef int32_t place = 0
        self._kind = UNMEASURED  # a round that failed may have left another
        while place + 1 < NUM_BUCKETS and (<Py_ssize_t>1 << place) < count:
            place += 1
        cdef bint other = self._bucket != &self._buckets[place]
        if other:
            self._leave()
            self._bucket = &self._buckets[place]
        if count != self._count:
            self._count, self._changed = count, True
        cdef Bucket *bucket = self._bucket
        if not bucket.closed and bucket.since >= bucket.gap:
            scale(&bucket.idle, FADE_OF_IDLE**bucket.since)  # for the rounds in which none was seen
            bucket.since, self._sample_left = 0, SAMPLE_ROUNDS
        return other

    cdef void _leave(self) noexcept nogil:
        """The next round is another bucket's; a sample of this one ends as far as it came."""
        if self._sample_left:
            self._bucket.gap = gap_behind(self._bucket)
        self._sample_left = self._trial_left = 0

    cdef bint is_closed(self) noexcept nogil:
        return self._bucket.closed

    cdef bint is_sampling(self) noexcept nogil:
        return self._sample_left > 0

    cdef bint is_trying(self) noexcept nogil:
        return self._trial_left > 0

    cdef bint holds_back(self) noexcept nogil:
        """Whether nothing is to be proposed in this round, unless a trial begins."""
        return self._sample_left > 0 or (self._bucket.closed and not self._trial_left)

    cdef bint holds_back_next(self) noexcept nogil:
        """The same of the round behind this one, asked before this one is observed."""
        return self._sample_left > 1 or (self._bucket.closed and self._trial_left <= 1)

    cdef void begin_trial(self) noexcept nogil:
        """The first round of a trial of a closed bucket; it goes on with what one that could not be judged measured."""
        self._trial_left = TRIAL_ROUNDS

    cdef void note(self, bint proposes) noexcept nogil:
        """What becomes of this round, whose rows all decode.  A trial ends where nothing is worth proposing."""
        self._kind = PROPOSING if proposes else IDLE if self._count else UNMEASURED
        if not proposes and self._trial_left:
            self._trial_left, self._bucket.proposing = 0, NO_PACE

    cdef void observe(self, double tokens, double seconds) noexcept nogil:
        """This round brought so many tokens.

        Args:
            seconds: since the end of the round before; 0 where that is not known, or prompts were part of either.
        """
        cdef RoundKind kind = self._kind
        cdef bint measured = kind == self._kind_before and not self._changed and seconds > 0.0
        self._kind, self._kind_before, self._changed = UNMEASURED, kind, False
        if kind == UNMEASURED:
            return
        if measured:
            self._add(kind, tokens / self._count, seconds)
        if kind == PROPOSING and self._trial_left:
            self._go_on(nothing_kept=tokens <= self._count)
        if is_known(self._bucket):
            self._judge(kind)
        if kind == IDLE and self._sample_left:
            self._sample_left -= 1
            if not self._sample_left:
                self._bucket.gap = gap_behind(self._bucket)

    cdef void _go_on(self, bint nothing_kept) noexcept nogil:
        """A round of a trial, which ends early where its first round or its speed promises nothing."""
        if is_hopeless(self._bucket) or (nothing_kept and self._trial_left == TRIAL_ROUNDS):
            self._trial_left, self._bucket.proposing = 0, NO_PACE
        else:
            self._trial_left -= 1

    cdef void _add(self, RoundKind kind, double tokens, double seconds) noexcept nogil:
        cdef Bucket *bucket = self._bucket
        if kind == IDLE:
            add_round(&bucket.idle, FADE_OF_IDLE, tokens, seconds)
            bucket.since = 0
        else:
            add_round(&bucket.proposing, FADE_OF_PROPOSING, tokens, seconds)
            bucket.since += 1

    cdef void _judge(self, RoundKind kind) noexcept nogil:
        cdef Bucket *bucket = self._bucket
        if bucket.closed:
            if kind == PROPOSING and not self._trial_left:
                self._end_trial()
        elif gain_of(bucket) + error_of(bucket) < 1.0 + MARGIN:
            if bucket.since < SHORT_GAP:
                bucket.closed, bucket.proposing, self._sample_left = True, NO_PACE, 0
            else:
                bucket.gap = min(bucket.gap, bucket.since)  # idle rounds may have slowed down too since the sample

    cdef void _end_trial(self) noexcept nogil:
        cdef Bucket *bucket = self._bucket
        if gain_of(bucket) > 1.0 + MARGIN:
            bucket.closed, bucket.since, bucket.gap = False, 0, SHORT_GAP
        else:
            bucket.proposing = NO_PACE
