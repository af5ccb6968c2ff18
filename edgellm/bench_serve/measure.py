"""What was measured: one sample a request, and their summary."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Outcome(Enum):
    """REFUSED: never accepted (too long, too many pending).  FAILED: accepted, and ended without an answer."""

    COMPLETED = "completed"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(slots=True)
class Sample:
    """One request as its caller saw it.  Times are seconds from the start of the run.

    Attributes:
        due: when it was to be sent; sent: when it was.
        token_times: when each token arrived; tokens of one chunk arrive together.
        queue_seconds: from submission to a seat, as the engine says.
        error: why it was refused or failed.
    """

    due: float
    sent: float = 0.0
    finished: float = 0.0
    token_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    queue_seconds: float = 0.0
    outcome: Outcome = Outcome.FAILED
    error: str = ""

    @property
    def time_to_first_token(self) -> float:
        """Seconds; only where there is a token."""
        return self.token_times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens that follow each other."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of one quantity in milliseconds; all 0.0 without values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        if not seconds:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        ordered = sorted(1000.0 * value for value in seconds)
        p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest values, as NumPy's default.

    Args:
        ordered: ascending, not empty.
        share: 0 to 1.
    """
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a run.

    Attributes:
        wall_seconds: from the first request that was due to the end of the last.
        generated_tokens: of completed requests and of those that failed on the way.
        reused_tokens: prompt tokens of completed requests that were not computed again.
        time_to_first_token, inter_token, end_to_end, queue: milliseconds; of completed requests, inter_token over
            all gaps of all of them.
        late: how long after it was due a request was sent: the load generator's own delay.
    """

    requests: int
    completed: int
    refused: int
    failed: int
    wall_seconds: float
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    time_to_first_token: Spread
    inter_token: Spread
    end_to_end: Spread
    queue: Spread
    late: Spread

    @property
    def output_tokens_per_second(self) -> float:
        return self.generated_tokens / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def requests_per_second(self) -> float:
        return self.completed / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def reuse_share(self) -> float:
        """Reused prompt tokens over prompt tokens."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def summarise(samples: Sequence[Sample]) -> Summary:
    """The numbers of a run from its samples."""
    done = [sample for sample in samples if sample.outcome is Outcome.COMPLETED]
    counts = {outcome: sum(sample.outcome is outcome for sample in samples) for outcome in Outcome}
    start = min((sample.due for sample in samples), default=0.0)
    return Summary(
        requests=len(samples),
        completed=counts[Outcome.COMPLETED],
        refused=counts[Outcome.REFUSED],
        failed=counts[Outcome.FAILED],
        wall_seconds=max((sample.finished for sample in samples), default=start) - start,
        prompt_tokens=sum(sample.prompt_tokens for sample in done),
        reused_tokens=sum(sample.reused_tokens for sample in done),
        generated_tokens=sum(len(sample.token_times) for sample in samples),
        time_to_first_token=Spread.of([sample.time_to_first_token for sample in done if sample.token_times]),
        inter_token=Spread.of([gap for sample in done for gap in sample.gaps]),
        end_to_end=Spread.of([sample.finished - sample.sent for sample in done]),
        queue=Spread.of([sample.queue_seconds for sample in done]),
        late=Spread.of([sample.sent - sample.due for sample in samples]),
    )
