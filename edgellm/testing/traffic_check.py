"""What must hold after a run of `engine_traffic`, and its report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from edgellm.engine.records import TerminalStatus
from edgellm.errors import InvariantError
from edgellm.testing.recount import recount

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edgellm.engine.config import EngineConfig
    from edgellm.engine.metrics import EngineMetrics
    from edgellm.engine.records import RequestHandle, RequestRecord
    from edgellm.request import LLMGenerationResponse
    from edgellm.session.base import RuntimeSession
    from edgellm.testing.toy_runtime import ToyFlavourRuntime
    from edgellm.testing.traffic_errands import Errand

INJECTED = "injected"
"""In the message of every fault that the traffic brings about; nothing else may fail a request."""


@dataclass(slots=True)
class TrafficReport:
    """What a run did.

    Attributes:
        cancels: cancels that came in each state.
        outcomes: requests per `TerminalStatus`; timed_out of the cancelled ones by their deadline.
        options: what the run's engine was told beside its defaults.
        most_late_steps: most steps that ran a request after its cancel.
    """

    flavour: str
    options: str
    requests: int
    seconds: float
    steps: int
    sessions: int
    refusals: int
    failures: int
    cancels: Counter[str]
    callers: Counter[str]
    outcomes: Counter[str]
    timed_out: int
    readmitted: int
    replayed: int
    most_late_steps: int
    exact_texts: int

    def lines(self) -> list[str]:
        def counts(counter: Counter[str]) -> str:
            return ", ".join(f"{name} {count}" for name, count in counter.items())

        return [
            f"{self.flavour}: {self.requests} requests in {self.seconds:.1f} s, {self.steps} steps, {self.sessions} "
            f"sessions ({self.failures} failed steps, {self.refusals} refused compact steps)",
            f"  options: {self.options}",
            f"  outcomes: {counts(self.outcomes)} (timed out {self.timed_out}); readmitted {self.readmitted}, "
            f"replayed {self.replayed}",
            f"  cancels by state: {counts(self.cancels)}",
            f"  callers: {counts(self.callers)}",
            f"  texts equal to the solo run: {self.exact_texts}; steps after a cancel: at most {self.most_late_steps}",
        ]


def check_baseline(runtime: ToyFlavourRuntime, latest: RuntimeSession, *, seats: int) -> None:
    """Nothing was submitted since the last outcome; the actor is parked, so its session may be read.

    Raises:
        InvariantError: somebody still holds a page, a snapshot or a seat.
    """
    counted = recount(runtime.coordinator)
    if any(pool.leased for pool in counted.pools):
        raise InvariantError(f"nobody is left, and something is still leased: {counted}")
    session = cast("Any", latest)
    if session._state.value == "open" and (not session.idle() or session._slots.available() != seats):
        raise InvariantError(
            f"after the last outcome {session._slots.available()} of {seats} seats are free; residents: "
            f"{[str(resident.ref) for resident in session._order]}"
        )


def outcomes_of(
    errands: Iterable[Errand],
    metrics: EngineMetrics,
    runtime: ToyFlavourRuntime,
    config: EngineConfig,
    mistakes: list[str],
) -> Counter[str]:
    """Requests per `TerminalStatus`, after every one of them was checked.

    Args:
        mistakes: what was found on the way.
    Raises:
        InvariantError: there is a mistake, or the metrics do not sum.
    """
    outcomes: Counter[str] = Counter()
    for errand in errands:
        record = _record(errand)
        mistake = (
            _wrong_end(errand, record)
            or _wrong_status(errand, record)
            or _wrong_order(record, config)
            or _wrong_text(errand, record, runtime)
        )
        if mistake:
            mistakes.append(f"request {errand.number} ({errand.caller}, {errand.cancel_at}): {mistake}")
        outcomes[record.status.value if record.status is not None else "none"] += 1
    counted = {"completed": metrics.completed, "cancelled": metrics.cancelled, "execution_error": metrics.failed}
    if metrics.submitted != outcomes.total() or {k: v for k, v in counted.items() if v} != dict(outcomes):
        mistakes.append(f"metrics {counted} of {metrics.submitted} submitted, outcomes {dict(outcomes)}")
    if mistakes:
        raise InvariantError(f"{len(mistakes)} mistakes, among them: {mistakes[:5]}")
    return outcomes


# What is wrong with a request; empty where nothing is.


def _wrong_end(errand: Errand, record: RequestRecord) -> str:
    if errand.endings != 1 or record.status is None:
        return f"{errand.endings} outcomes, status {record.status}"
    if record.channel is not None and not record.channel.is_finished():
        return "its stream is open"
    if errand.steps_after_cancel > 1:
        return f"{errand.steps_after_cancel} steps named it after its cancel"
    return ""


def _wrong_status(errand: Errand, record: RequestRecord) -> str:
    if errand.hit and record.status is TerminalStatus.COMPLETED:
        return "it was cancelled and completed"
    if record.status is TerminalStatus.CANCELLED and not errand.may_be_cancelled:
        return "it was cancelled and nobody asked for that"
    if record.status is TerminalStatus.EXECUTION_ERROR and INJECTED not in record.error_message:
        return f"it failed by itself: {record.error_message}"
    return ""


def _wrong_order(record: RequestRecord, config: EngineConfig) -> str:
    if record.replays > config.max_replays:
        return f"it began again {record.replays} times, max_replays is {config.max_replays}"
    if record.overtaken > config.scheduling.max_overtakes:
        return f"it was passed {record.overtaken} times, max_overtakes is {config.scheduling.max_overtakes}"
    return ""


def _wrong_text(errand: Errand, record: RequestRecord, runtime: ToyFlavourRuntime) -> str:
    completed = record.status is TerminalStatus.COMPLETED
    solo = runtime.solo(errand.prompt, errand.request.sampling.max_tokens)
    known: LLMGenerationResponse | None = record.response if completed else record.partial
    if completed and (known is None or known.token_ids != solo):
        return f"its answer is {known and known.token_ids}, alone it is {solo}"
    if known is not None and (
        known.token_ids != solo[: len(known.token_ids)] or known.text != runtime.tokenizer.decode(known.token_ids)
    ):
        return f"it got {known.token_ids} ({known.text!r}), alone it is {solo}"
    if errand.streamed != solo[: len(errand.streamed)]:
        return f"its stream carried {errand.streamed}, alone it is {solo}"
    if errand.caller == "stream" and completed and errand.streamed != solo:
        return f"its stream carried only {errand.streamed} of {solo}"
    return ""


def _record(errand: Errand) -> RequestRecord:
    return cast("RequestHandle", errand.handle)._record
