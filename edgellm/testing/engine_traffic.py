"""Thousands of requests through a real engine over the toy model, cancelled in every state, under injected faults.

    python -m edgellm.testing.engine_traffic --requests 10000 --seed 1 [--flavour attention | --flavour all]

Client threads submit, stream, wait, go away and time out; steps fail and compact steps are refused, under options that
the seed chooses.  Afterwards every request must have reached exactly one outcome, every text must be that of the
request alone, nothing may have failed or been cancelled that nobody failed or cancelled, the metrics must sum, and
pools, seats and streams must be back at their baseline before anything else is submitted.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, cast

from edgellm.engine.config import EngineConfig, SchedulingOptions
from edgellm.engine.engine import RequestEngine
from edgellm.errors import (
    CompactRefusedError,
    InvariantError,
    RequestCancelled,
    RequestFailed,
    StepDeviceError,
    SubmitError,
)
from edgellm.session.types import AdmissionStatus, SequenceWork, SessionOptions
from edgellm.testing.recount import require_baseline
from edgellm.testing.toy_driver import FLAVOURS
from edgellm.testing.toy_runtime import ToyFlavourRuntime, toy_runtime
from edgellm.testing.traffic_check import INJECTED, TrafficReport, check_baseline, outcomes_of
from edgellm.testing.traffic_errands import BEHAVIOUR, CALLERS, PATIENCE_SECONDS, STATES, Errand, ErrandMaker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.engine.records import RequestHandle
    from edgellm.plugins import Plugins
    from edgellm.request import LLMGenerationRequest
    from edgellm.session.base import RuntimeSession
    from edgellm.session.types import AdmissionResult, ScheduledSequenceDescriptor, StepResult

__all__ = ["CALLERS", "STATES", "EngineTraffic", "Errand", "TrafficReport", "main", "run_traffic", "traffic_config"]

SEATS = 8
CLIENTS = 6
OUTSTANDING = 12  # requests of one client at a time
STEPS_BETWEEN_FAULTS = 100


def traffic_config(rng: random.Random, *, mixed: bool) -> EngineConfig:
    """Random options: they decide who runs when and who begins again, and never what anybody gets.

    Args:
        mixed: whether sessions can run steps of any subset; a pause and a time budget need that.
    """
    scheduling = SchedulingOptions(
        scheduling_policy="priority",  # type: ignore[arg-type]
        preemption="pause" if mixed else "none",  # type: ignore[arg-type]
        max_pause_steps=3 if mixed else 0,
        priority_reserved_slots=1,
        max_overtakes=rng.choice((0, 2, 16)),
        prefix_aware=rng.random() < 0.7,
        step_time_budget_ms=rng.choice((None, 0.5, 5.0, 50.0)) if mixed else None,
    )
    return EngineConfig(
        step_token_budget=8,
        max_pending_requests=CLIENTS * OUTSTANDING,
        max_reopen_attempts=3,
        max_replays=rng.choice((0, 1, 3)),
        scheduling=scheduling,
    )


def describe_options(config: EngineConfig) -> str:
    """What `traffic_config` chose."""
    options = config.scheduling
    return (
        f"step_time_budget_ms {options.step_time_budget_ms}, max_overtakes {options.max_overtakes}, "
        f"prefix_aware {options.prefix_aware}, max_replays {config.max_replays}"
    )


class WatchedSession:
    """The real session; cancels errands in the state they chose, and injects faults."""

    def __init__(self, session: RuntimeSession, traffic: EngineTraffic) -> None:
        self._session = session
        self._traffic = traffic

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def admit(self, request: LLMGenerationRequest, request_id: Any, cancel_token: Any = None) -> AdmissionResult:
        result = self._session.admit(request, request_id, cancel_token)
        if result.status is AdmissionStatus.ADMITTED:
            self._traffic.note_admitted(request, request_id, result)
        return result

    def execute(self, plan: Sequence[ScheduledSequenceDescriptor]) -> StepResult:
        self._traffic.before_step(plan, compact=self._session.capabilities().compact)
        result = self._session.execute(plan)
        self._traffic.after_step(result)
        return result


class EngineTraffic:
    """One run: an engine over a toy runtime, and its clients."""

    def __init__(self, *, requests: int, seed: int, flavour: str = "attention", plugins: Plugins | None = None) -> None:
        self._flavour = flavour
        self.runtime: ToyFlavourRuntime = toy_runtime(
            flavour, max_batch_size=SEATS, max_input_length=64, num_pages=112, plugins=plugins
        )
        maker = ErrandMaker(random.Random(f"{seed} {flavour}"))
        self.errands = {number: maker.make(number) for number in range(1, requests + 1)}
        self._waiting = deque(self.errands.values())
        self._seated: dict[int, tuple[Errand, int]] = {}  # request id: errand, where its prompt started
        self._inside: list[int] = []  # request ids to be cancelled by the next forward
        self._sessions: list[RuntimeSession] = []
        self._faults: Counter[str] = Counter()
        self._refused = False
        self._until_fault = STEPS_BETWEEN_FAULTS
        self._mistakes: list[str] = []
        self._forward = self.runtime.executor.forward_verify
        self.runtime.executor.forward_verify = self._forward_and_cancel  # type: ignore[method-assign]
        self.config = traffic_config(random.Random(f"{seed} {flavour} options"), mixed=self._can_mix())
        self.engine = RequestEngine(self._open_session, self.config)

    # ---- the traffic ----------------------------------------------------------------------------------

    def _can_mix(self) -> bool:
        return self.runtime.resolve_compact(SessionOptions(allow_compact_execution=True))[0]

    def run(self) -> TrafficReport:
        """Serve every errand, then check everything; the engine and the runtime are closed.

        Raises:
            InvariantError: something was lost, leaked, late or wrong.
        """
        started = time.perf_counter()
        clients = [threading.Thread(target=self._client, name=f"client-{number}") for number in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        self._wait_for_outcomes()
        check_baseline(self.runtime, self._sessions[-1], seats=SEATS)
        self.engine.shutdown()
        seconds = time.perf_counter() - started
        require_baseline(self.runtime.coordinator)
        self.runtime.close()
        metrics = self.engine.metrics()
        outcomes = outcomes_of(self.errands.values(), metrics, self.runtime, self.config, self._mistakes)
        return self._report(seconds, outcomes)

    def _client(self) -> None:
        mine: deque[Errand] = deque()
        try:
            while True:
                try:
                    errand = self._waiting.popleft()
                except IndexError:
                    break
                self._submit(errand)
                mine.append(errand)
                if len(mine) >= OUTSTANDING:
                    self._collect(mine.popleft())
            for errand in mine:
                self._collect(errand)
        except BaseException as error:
            self._mistakes.append(f"a client ended with {type(error).__name__}: {error}")
            raise

    def _submit(self, errand: Errand) -> None:
        while errand.handle is None:
            try:
                errand.handle = self.engine.submit(errand.request)
            except SubmitError:
                time.sleep(0.001)
        handle = errand.handle

        def ended() -> None:
            errand.endings += 1

        handle.add_done_callback(ended)
        if errand.cancel_at == "queued" and not handle._record.seated_at:
            handle.cancel()
            errand.hit = not handle._record.seated_at
        if errand.caller.startswith("stream"):
            handle.stream()

    def _collect(self, errand: Errand) -> None:
        """Take the answer, or behave as a caller that goes away."""
        try:
            BEHAVIOUR[errand.caller](cast("RequestHandle", errand.handle), errand)
        except (RequestCancelled, RequestFailed):
            pass
        except TimeoutError:
            self._mistakes.append(f"request {errand.number} has no outcome after {PATIENCE_SECONDS} s")

    def _wait_for_outcomes(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.engine.pending() or self.engine.resident() or self.engine.queued():
            if time.monotonic() > deadline:
                raise InvariantError(
                    f"{self.engine.pending()} requests have no outcome, {self.engine.resident()} hold a seat, "
                    f"{self.engine.queued()} wait; the clients have left"
                )
            time.sleep(0.002)

    # ---- the session's side (actor thread) ------------------------------------------------------------

    def _open_session(self) -> RuntimeSession:
        session = self.runtime.open_session(SessionOptions(allow_compact_execution=True))
        self._sessions.append(session)
        self._seated.clear()
        self._inside.clear()
        return cast("RuntimeSession", WatchedSession(session, self))

    def note_admitted(self, request: LLMGenerationRequest, request_id: int, admission: AdmissionResult) -> None:
        errand = self.errands[cast("int", request.sampling.seed)]
        self._seated[request_id] = (errand, admission.prefill_start)
        self._cancel_in("admitted", errand, request_id)

    def before_step(self, plan: Sequence[ScheduledSequenceDescriptor], *, compact: bool) -> None:
        works = {entry.work for entry in plan}
        for entry in plan:
            request_id = entry.identity.request_id
            errand, start = self._seated[request_id]
            state = self._state(entry, errand, start, mixed=len(works) > 1)
            if errand.hit:
                errand.steps_after_cancel += 1
            elif errand.cancel_at == "inside a step" and not self._inside:
                self._inside.append(request_id)
            elif state is not None and state == errand.cancel_at:
                self._cancel_in(state, errand, request_id)
        self._inject(compact=compact and len(works) > 1)

    @staticmethod
    def _state(entry: ScheduledSequenceDescriptor, errand: Errand, start: int, *, mixed: bool) -> str | None:
        if entry.work is SequenceWork.DECODE:
            errand.decode_rows -= 1
            return "decoding" if errand.decode_rows < 0 else None
        if mixed and errand.cancel_at == "mixed step":
            return "mixed step"
        return "later chunk" if entry.past_length > start else "first chunk"

    def _cancel_in(self, state: str, errand: Errand, request_id: int) -> None:
        if errand.cancel_at == state and not errand.hit:
            errand.hit = True
            self.engine.cancel(cast("Any", request_id))

    def _forward_and_cancel(self, batch: Any) -> Any:
        """The forward of a step, in the middle of which somebody cancels.

        Not every step has one: chunks that sharing covered entirely run nothing, so whoever waits to be cancelled
        inside waits for the next.
        """
        while self._inside:
            request_id = self._inside.pop()
            self._cancel_in("inside a step", self._seated[request_id][0], request_id)
        return self._forward(batch)

    def _inject(self, *, compact: bool) -> None:
        """Every so often: refuse a compact step; after that, fail one, with which compact execution comes back."""
        self._until_fault -= 1
        if self._until_fault > 0:
            return
        if self._refused or not self._can_mix():
            self._refused = False
            self.runtime.refuse_compact("")
            self._fail_next("failed", StepDeviceError(f"{INJECTED} device failure"))
        elif compact:
            self._refused = True
            self._fail_next("refused", CompactRefusedError(f"{INJECTED} refusal of a mixed batch"))

    def _fail_next(self, kind: str, error: Exception) -> None:
        self.runtime.executor.fail_next(error)
        self._faults[kind] += 1
        self._until_fault = STEPS_BETWEEN_FAULTS

    def after_step(self, result: StepResult) -> None:
        finished = {ref for ref, _ in result.finished}
        for identity in result.participants:
            errand, _ = self._seated[identity.request_id]
            if identity.resident in finished:
                self._cancel_in("last token", errand, identity.request_id)

    def _report(self, seconds: float, outcomes: Counter[str]) -> TrafficReport:
        metrics = self.engine.metrics()
        errands = self.errands.values()
        return TrafficReport(
            flavour=self._flavour,
            options=describe_options(self.config),
            requests=len(self.errands),
            seconds=seconds,
            steps=metrics.steps_context + metrics.steps_decode,
            sessions=len(self._sessions),
            refusals=self._faults["refused"],
            failures=self._faults["failed"],
            cancels=Counter({state: sum(e.hit and e.cancel_at == state for e in errands) for state in STATES}),
            callers=Counter({caller: sum(e.caller == caller for e in errands) for caller in CALLERS}),
            outcomes=outcomes,
            timed_out=metrics.timed_out,
            readmitted=metrics.readmitted,
            replayed=metrics.replayed,
            most_late_steps=max(e.steps_after_cancel for e in errands),
            exact_texts=outcomes["completed"],
        )


def run_traffic(
    *, requests: int, seed: int, flavour: str = "attention", plugins: Plugins | None = None
) -> TrafficReport:
    """Run `requests` requests; see the module.

    Raises:
        InvariantError: something was lost, leaked, late or wrong, or a state was never hit (from 2000 requests on).
    """
    report = EngineTraffic(requests=requests, seed=seed, flavour=flavour, plugins=plugins).run()
    missed = [state for state in STATES if not report.cancels[state]]
    if missed and requests >= 2000:
        raise InvariantError(f"nobody was cancelled in these states: {missed}")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m edgellm.testing.engine_traffic", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flavour", default="attention", choices=[*FLAVOURS, "all"])
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)  # injected failures are logged as errors
    for flavour in FLAVOURS if options.flavour == "all" else [options.flavour]:
        report = run_traffic(requests=options.requests, seed=options.seed, flavour=flavour)
        sys.stdout.write("\n".join(report.lines()) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
