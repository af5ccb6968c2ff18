"""`EngineMetrics`: what an engine counts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from edgellm.metric_lines import metric_lines, milliseconds

BUCKETS_PER_OCTAVE = 4
NUM_BUCKETS = 32 * BUCKETS_PER_OCTAVE
"""Buckets of a latency: from a microsecond to over an hour, each a quarter of an octave wide."""


class StallReason(Enum):
    """Why the first waiting request waits although a seat may be free."""

    INCOMPATIBLE = "incompatible"
    EXCLUSIVE = "exclusive"
    FOUNDER_ONLY = "founder_only"
    NO_CAPACITY = "no_capacity"
    RESERVED = "reserved"
    OVERTAKEN = "overtaken"
    """Not the first one: others might have passed it, but it was overtaken `max_overtakes` times already."""


def bucket_of(micros: int) -> int:
    """The bucket of a latency in microseconds; latencies below 4 us have a bucket for each microsecond."""
    if micros < BUCKETS_PER_OCTAVE:
        return max(0, micros)
    octave = micros.bit_length() - 3
    return min(NUM_BUCKETS - 1, (octave << 2) + (micros >> octave))


def bucket_start(bucket: int) -> int:
    """The least latency of a bucket, in microseconds."""
    if bucket < 2 * BUCKETS_PER_OCTAVE:
        return bucket
    octave = (bucket >> 2) - 1
    return (BUCKETS_PER_OCTAVE + (bucket & 3)) << octave


@dataclass(slots=True)
class LatencyStat:
    """Histogram, total, maximum and count of one latency, in microseconds.

    The buckets are fixed and log-spaced, four an octave, so that recording costs a few operations whatever the
    count, and two histograms may be added bucket by bucket.

    Attributes:
        buckets: recorded latencies per bucket; `bucket_start(i)` is where bucket i begins.
    """

    total_us: int = 0
    max_us: int = 0
    count: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * NUM_BUCKETS, repr=False)

    def record(self, seconds: float, weight: int = 1) -> None:
        """Record one latency `weight` times."""
        micros = max(0, int(seconds * 1e6))
        self.total_us += micros * weight
        self.max_us = max(self.max_us, micros)
        self.count += weight
        self.buckets[bucket_of(micros)] += weight

    @property
    def mean_us(self) -> float:
        return self.total_us / self.count if self.count else 0.0

    def quantile_us(self, quantile: float) -> float:
        """Estimate of a quantile, in microseconds; 0.0 before the first record.

        Linear inside a bucket, never above the maximum: off by less than a bucket's width, a quarter of the value.

        Args:
            quantile: from 0 to 1.
        """
        if not self.count:
            return 0.0
        rank = min(1.0, max(0.0, quantile)) * self.count
        below = 0
        for bucket, count in enumerate(self.buckets):
            if count and below + count >= rank:
                start, end = bucket_start(bucket), bucket_start(bucket + 1)
                return min(float(self.max_us), start + (end - start) * (rank - below) / count)
            below += count
        return float(self.max_us)

    def __str__(self) -> str:
        if not self.count:
            return "none"
        places = [(name, self.quantile_us(quantile)) for name, quantile in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))]
        shown = [("mean", self.mean_us), *places, ("max", self.max_us)]
        return f"{self.count:,}; " + ", ".join(f"{name} {milliseconds(micros)}" for name, micros in shown)

    def copy(self) -> LatencyStat:
        return LatencyStat(self.total_us, self.max_us, self.count, list(self.buckets))


@dataclass(slots=True)
class EngineMetrics:
    """Counters over the engine's life.  Each field is accurate; several read together are no atomic cut.

    Attributes:
        submitted, refused: submits accepted, and refused by the engine's own limits; one that stands in line
            (`submit(wait=True)`) is accepted.
        completed, cancelled, failed: published outcomes; they sum to `submitted` once all are terminal.
        timed_out: those of `cancelled` whose `timeout_seconds` ended them.
        stalls: boundaries at which the first waiting request had to wait, by `StallReason`.
        admitted_mid_flight: admissions while others were resident.
        overtakes: times a waiting request was passed by a later one; prefix_overtakes of them because the later
            one shares a prefix with a resident.
        queue_latency: submit to seat.  time_to_first_token: submit to first token.
        inter_token: time between two tokens of one sequence: one record a decode row, see `EngineActor`.
        step_duration: `session.execute` alone.
        steps_context, steps_decode: steps by `StepResult.work`; steps_compact of them ran compact.
        prefill_tokens, decode_tokens: query tokens of the steps that ran.  Of those of prompts the ones that a request
            in flight had computed by then were not computed again: `rebound_tokens` of the cache's metrics.
        proposed_draft_tokens, accepted_draft_tokens: under speculative decoding, draft tokens that were verified, and
            those that are in the texts, of all requests that ended.
        budget_steps: steps that the step-time budget bounded; steps_over_budget of them took longer than it.
        budget_unreachable: those of `budget_steps` for which even one page of a prompt was expected to take longer.
        budget_predicted_us, budget_measured_us: what those steps were expected to take, and took, in all.
        paused_resident_steps: steps that residents missed by pausing.
        readmitted: prompts that moved to a new session after a refused compact step.
        replayed: requests that began again in a new session after theirs was lost.
        session_reopens: sessions that replaced a lost one.
        actor_wakeups: times the idle actor looked around.
    """

    submitted: int = 0
    refused: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    timed_out: int = 0
    stalls: dict[StallReason, int] = field(default_factory=lambda: dict.fromkeys(StallReason, 0))
    admitted: int = 0
    admitted_mid_flight: int = 0
    overtakes: int = 0
    prefix_overtakes: int = 0
    queue_latency: LatencyStat = field(default_factory=LatencyStat)
    time_to_first_token: LatencyStat = field(default_factory=LatencyStat)
    inter_token: LatencyStat = field(default_factory=LatencyStat)
    step_duration: LatencyStat = field(default_factory=LatencyStat)
    steps_context: int = 0
    steps_decode: int = 0
    steps_compact: int = 0
    graph_launched: int = 0
    chunks: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    proposed_draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    budget_steps: int = 0
    steps_over_budget: int = 0
    budget_unreachable: int = 0
    budget_predicted_us: int = 0
    budget_measured_us: int = 0
    prefix_published: int = 0
    paused_resident_steps: int = 0
    readmitted: int = 0
    replayed: int = 0
    session_reopens: int = 0
    actor_wakeups: int = 0

    def __str__(self) -> str:
        """One metric a line."""
        return metric_lines(self)

    def snapshot(self) -> EngineMetrics:
        """An independent copy."""
        values: dict[str, Any] = {}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            values[entry.name] = value.copy() if isinstance(value, (LatencyStat, dict)) else value
        return EngineMetrics(**values)
