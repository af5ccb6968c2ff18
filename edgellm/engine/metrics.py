"""`EngineMetrics`: what an engine counts."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from enum import Enum


class StallReason(Enum):
    """Why the head of the backlog waits although a seat may be free."""

    INCOMPATIBLE = "incompatible"
    EXCLUSIVE = "exclusive"
    FOUNDER_ONLY = "founder_only"
    NO_CAPACITY = "no_capacity"
    RESERVED = "reserved"


@dataclass(slots=True)
class LatencyStat:
    """Total, maximum and count of one latency, in microseconds."""

    total_us: int = 0
    max_us: int = 0
    count: int = 0

    def record(self, seconds: float) -> None:
        micros = max(0, int(seconds * 1e6))
        self.total_us += micros
        self.max_us = max(self.max_us, micros)
        self.count += 1

    @property
    def mean_us(self) -> float:
        return self.total_us / self.count if self.count else 0.0


@dataclass(slots=True)
class EngineMetrics:
    """Counters over the engine's life.  Each field is accurate; several read together are no atomic cut.

    Attributes:
        submitted, refused: submits accepted, and refused by the engine's own limits.
        completed, cancelled, failed: published outcomes; they sum to `submitted` once all are terminal.
        stalls: boundaries at which the head of the backlog waited, by `StallReason`.
        admitted_mid_flight: admissions while others were resident.
        queue_latency: submit to seat.  time_to_first_token: submit to first token.
        steps_context, steps_decode: steps by `StepResult.work`; steps_compact of them ran compact.
        prefill_tokens, decode_tokens: query tokens executed.
        paused_resident_steps: steps that residents missed by pausing.
        readmitted, session_reopens: recovery.
        actor_wakeups: times the idle actor looked around.
    """

    submitted: int = 0
    refused: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    stalls: dict[StallReason, int] = field(default_factory=lambda: dict.fromkeys(StallReason, 0))
    admitted: int = 0
    admitted_mid_flight: int = 0
    queue_latency: LatencyStat = field(default_factory=LatencyStat)
    time_to_first_token: LatencyStat = field(default_factory=LatencyStat)
    steps_context: int = 0
    steps_decode: int = 0
    steps_compact: int = 0
    graph_launched: int = 0
    chunks: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefix_published: int = 0
    paused_resident_steps: int = 0
    readmitted: int = 0
    session_reopens: int = 0
    actor_wakeups: int = 0

    def snapshot(self) -> EngineMetrics:
        """An independent copy."""
        return copy.deepcopy(self)
