"""Thousands of requests through a real engine over the toy model, cancelled in every state, under injected faults.

    python -m edgellm.testing.engine_traffic --requests 10000 --seed 1 [--flavour attention | --flavour all]

Client threads submit, stream, wait, go away and time out; steps fail and compact steps are refused.  Afterwards every
request must have reached exactly one outcome, every text must be that of the request alone, the metrics must sum, and
pools, seats and streams must be back at their baseline before anything else is submitted.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from edgellm.engine.config import EngineConfig, SchedulingOptions
from edgellm.engine.engine import RequestEngine
from edgellm.engine.records import TerminalStatus
from edgellm.errors import (
    CompactRefusedError,
    InvariantError,
    RequestCancelled,
    RequestFailed,
    RequestTimedOut,
    StepDeviceError,
    SubmitError,
)
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.types import AdmissionStatus, SequenceWork, SessionOptions
from edgellm.testing.recount import recount, require_baseline
from edgellm.testing.toy_driver import FLAVOURS
from edgellm.testing.toy_runtime import ToyFlavourRuntime, toy_runtime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.engine.records import RequestHandle
    from edgellm.plugins import Plugins
    from edgellm.session.base import RuntimeSession
    from edgellm.session.types import AdmissionResult, ScheduledSequenceDescriptor, StepResult

STATES = ("queued", "admitted", "first chunk", "later chunk", "mixed step", "decoding", "inside a step", "last token")
CALLERS = ("stream", "stream, closed early", "get", "get, given up", "task", "task, cancelled", "nobody waits")
SEATS = 8
CLIENTS = 6
OUTSTANDING = 12  # requests of one client at a time
STEPS_BETWEEN_FAULTS = 120
PATIENCE_SECONDS = 60.0
LONGEST_ANSWER = 12


@dataclass(slots=True)
class Errand:
    """One request and how its caller behaves.

    Attributes:
        number: from 1; also the request's seed, by which the session's side finds the errand again.
        cancel_at: state in which it is cancelled; None never.
        decode_rows: decode rows that it runs before a cancel "decoding".
        hit: whether the cancel came in that state.
        endings: outcomes announced.
        streamed: tokens its caller read.
        steps_after_cancel: steps that named it after its cancel; more than one would be late.
    """

    number: int
    request: LLMGenerationRequest
    cancel_at: str | None
    caller: str
    decode_rows: int
    handle: RequestHandle | None = None
    hit: bool = False
    endings: int = 0
    streamed: list[int] = field(default_factory=list)
    steps_after_cancel: int = 0

    @property
    def prompt(self) -> list[int]:
        return list(cast("list[int]", self.request.prompt_token_ids))


@dataclass(slots=True)
class TrafficReport:
    """What a run did.

    Attributes:
        cancels: cancels that came in each state.
        outcomes: requests per `TerminalStatus`; timed_out of the cancelled ones by their deadline.
        most_late_steps: most steps that ran a request after its cancel.
    """

    flavour: str
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
            f"  outcomes: {counts(self.outcomes)} (timed out {self.timed_out}); readmitted {self.readmitted}, "
            f"replayed {self.replayed}",
            f"  cancels by state: {counts(self.cancels)}",
            f"  callers: {counts(self.callers)}",
            f"  texts equal to the solo run: {self.exact_texts}; steps after a cancel: at most {self.most_late_steps}",
        ]


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
    """One run: an engine over a toy runtime, its clients, and what must hold afterwards."""

    def __init__(self, *, requests: int, seed: int, flavour: str = "attention", plugins: Plugins | None = None) -> None:
        self._rng = random.Random(f"{seed} {flavour}")
        self._flavour = flavour
        self.runtime: ToyFlavourRuntime = toy_runtime(
            flavour, max_batch_size=SEATS, max_input_length=64, num_pages=112, plugins=plugins
        )
        self._stems = [self._tokens(24) for _ in range(10)]
        self.errands = {number: self._errand(number) for number in range(1, requests + 1)}
        self._waiting = deque(self.errands.values())
        self._seated: dict[int, tuple[Errand, int]] = {}  # request id: errand, where its prompt started
        self._inside: list[int] = []
        self._sessions: list[RuntimeSession] = []
        self._faults: Counter[str] = Counter()
        self._refused = False
        self._steps = 0
        self._mistakes: list[str] = []
        self._forward = self.runtime.executor.forward_verify
        self.runtime.executor.forward_verify = self._forward_and_cancel  # type: ignore[method-assign]
        scheduling = SchedulingOptions(
            scheduling_policy="priority",  # type: ignore[arg-type]
            preemption="pause" if self._can_mix() else "none",  # type: ignore[arg-type]
            max_pause_steps=3 if self._can_mix() else 0,
            priority_reserved_slots=1,
        )
        self.engine = RequestEngine(
            self._open_session,
            EngineConfig(
                step_token_budget=8,
                max_pending_requests=CLIENTS * OUTSTANDING,
                max_reopen_attempts=3,
                scheduling=scheduling,
            ),
        )

    # ---- the traffic ----------------------------------------------------------------------------------

    def _can_mix(self) -> bool:
        return self.runtime.resolve_compact(SessionOptions(allow_compact_execution=True))[0]

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(3, 500), k=count)

    def _errand(self, number: int) -> Errand:
        rng = self._rng
        cancel_at = rng.choice(STATES) if rng.random() < 0.5 else None
        chunked = cancel_at in ("later chunk", "mixed step")
        stem = rng.choice(self._stems)[: 24 if chunked else rng.randint(1, 24)]
        max_tokens = rng.randint(4 if cancel_at == "decoding" else 1, LONGEST_ANSWER)
        request = LLMGenerationRequest(
            prompt_token_ids=[*stem, *self._tokens(rng.randint(8, 20) if chunked else rng.randint(0, 20))],
            sampling=SamplingParams(
                temperature=0.0,
                ignore_eos=True,
                max_tokens=max_tokens,
                seed=number,
                logprobs=2 if rng.random() < 0.2 else None,
            ),
            priority=rng.choice((-1, 0, 0, 0, 1)),
            timeout_seconds=rng.uniform(0.001, 0.05) if rng.random() < 0.04 else None,
        )
        caller = rng.choices(CALLERS, weights=(5, 1, 5, 1, 3, 1, 1))[0]
        return Errand(number, request, cancel_at, caller, decode_rows=rng.randint(0, 2))

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
        self._check_baseline()
        self.engine.shutdown()
        seconds = time.perf_counter() - started
        require_baseline(self.runtime.coordinator)
        self.runtime.close()
        return self._report(seconds, self._check_errands())

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
            _BEHAVIOUR[errand.caller](cast("RequestHandle", errand.handle), errand)
        except (RequestCancelled, RequestFailed):
            pass
        except TimeoutError:
            self._mistakes.append(f"request {errand.number} has no outcome after {PATIENCE_SECONDS} s")

    # ---- the session's side (actor thread) ------------------------------------------------------------

    def _open_session(self) -> RuntimeSession:
        session = self.runtime.open_session(SessionOptions(allow_compact_execution=True))
        self._sessions.append(session)
        self._seated.clear()
        return cast("RuntimeSession", WatchedSession(session, self))

    def note_admitted(self, request: LLMGenerationRequest, request_id: int, admission: AdmissionResult) -> None:
        errand = self.errands[cast("int", request.sampling.seed)]
        self._seated[request_id] = (errand, admission.prefill_start)
        self._cancel_in("admitted", errand, request_id)

    def before_step(self, plan: Sequence[ScheduledSequenceDescriptor], *, compact: bool) -> None:
        self._steps += 1
        works = {entry.work for entry in plan}
        for entry in plan:
            request_id = entry.identity.request_id
            errand, start = self._seated[request_id]
            state = self._state(entry, errand, start, mixed=len(works) > 1)
            if errand.hit:
                errand.steps_after_cancel += 1
            elif errand.cancel_at == "inside a step" and not self._inside:
                errand.hit = True
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
        """The forward of a step, in the middle of which somebody cancels."""
        while self._inside:
            self.engine.cancel(cast("Any", self._inside.pop()))
        return self._forward(batch)

    def _inject(self, *, compact: bool) -> None:
        """Every so often: refuse a compact step; after that, fail one, with which compact execution comes back."""
        if self._steps % STEPS_BETWEEN_FAULTS < STEPS_BETWEEN_FAULTS - 20:
            return
        if self._refused or not self._can_mix():
            self._refused = False
            self.runtime.refuse_compact("")
            self.runtime.executor.fail_next(StepDeviceError("injected device failure"))
            self._faults["failed"] += 1
            self._steps += 20
        elif compact:
            self._refused = True
            self.runtime.executor.fail_next(CompactRefusedError("injected refusal of a mixed batch"))
            self._faults["refused"] += 1
            self._steps += 20

    def after_step(self, result: StepResult) -> None:
        finished = {ref for ref, _ in result.finished}
        for identity in result.participants:
            errand, _ = self._seated[identity.request_id]
            if identity.resident in finished:
                self._cancel_in("last token", errand, identity.request_id)

    # ---- what must hold -------------------------------------------------------------------------------

    def _wait_for_outcomes(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.engine.pending() or self.engine.resident() or self.engine.queued():
            if time.monotonic() > deadline:
                raise InvariantError(
                    f"{self.engine.pending()} requests have no outcome, {self.engine.resident()} hold a seat, "
                    f"{self.engine.queued()} wait; the clients have left"
                )
            time.sleep(0.002)

    def _check_baseline(self) -> None:
        """Nothing was submitted since the last outcome; the actor is parked, so its session may be read."""
        counted = recount(self.runtime.coordinator)
        if any(pool.leased for pool in counted.pools):
            raise InvariantError(f"nobody is left, and something is still leased: {counted}")
        session = cast("Any", self._sessions[-1])
        if session._state.value == "open" and (not session.idle() or session._slots.available() != SEATS):
            raise InvariantError(
                f"after the last outcome {session._slots.available()} of {SEATS} seats are free; residents: "
                f"{[str(resident.ref) for resident in session._order]}"
            )

    def _check_errands(self) -> Counter[str]:
        outcomes: Counter[str] = Counter()
        for errand in self.errands.values():
            record = cast("RequestHandle", errand.handle)._record
            mistake = self._mistake_of(errand)
            if mistake:
                self._mistakes.append(f"request {errand.number} ({errand.caller}, {errand.cancel_at}): {mistake}")
            outcomes[record.status.value if record.status is not None else "none"] += 1
        metrics = self.engine.metrics()
        counted = {"completed": metrics.completed, "cancelled": metrics.cancelled, "execution_error": metrics.failed}
        if metrics.submitted != len(self.errands) or {k: v for k, v in counted.items() if v} != dict(outcomes):
            self._mistakes.append(f"metrics {counted} of {metrics.submitted} submitted, outcomes {dict(outcomes)}")
        if self._mistakes:
            raise InvariantError(f"{len(self._mistakes)} mistakes, among them: {self._mistakes[:5]}")
        return outcomes

    def _mistake_of(self, errand: Errand) -> str:
        record = cast("RequestHandle", errand.handle)._record
        if errand.endings != 1 or record.status is None:
            return f"{errand.endings} outcomes, status {record.status}"
        if record.channel is not None and not record.channel.is_finished():
            return "its stream is open"
        if errand.steps_after_cancel > 1:
            return f"{errand.steps_after_cancel} steps named it after its cancel"
        solo = self.runtime.solo(errand.prompt, errand.request.sampling.max_tokens)
        known = record.response if record.status is TerminalStatus.COMPLETED else record.partial
        if record.status is TerminalStatus.COMPLETED and (known is None or known.token_ids != solo):
            return f"its answer is {known and known.token_ids}, alone it is {solo}"
        if known is not None and (
            known.token_ids != solo[: len(known.token_ids)]
            or known.text != self.runtime.tokenizer.decode(known.token_ids)
        ):
            return f"it got {known.token_ids} ({known.text!r}), alone it is {solo}"
        if errand.streamed != solo[: len(errand.streamed)]:
            return f"its stream carried {errand.streamed}, alone it is {solo}"
        if errand.caller == "stream" and record.status is TerminalStatus.COMPLETED and errand.streamed != solo:
            return f"its stream carried only {errand.streamed} of {solo}"
        if errand.hit and record.status is TerminalStatus.COMPLETED:
            return "it was cancelled and completed"
        return ""

    def _report(self, seconds: float, outcomes: Counter[str]) -> TrafficReport:
        metrics = self.engine.metrics()
        errands = self.errands.values()
        return TrafficReport(
            flavour=self._flavour,
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


# ---- callers ------------------------------------------------------------------------------------------


def _read_stream(handle: RequestHandle, errand: Errand) -> None:
    for chunk in handle.stream():
        errand.streamed += chunk.token_ids
    handle.get(PATIENCE_SECONDS)


def _close_stream(handle: RequestHandle, errand: Errand) -> None:
    for chunk in handle.stream():
        errand.streamed += chunk.token_ids
        break
    handle.cancel()


def _get(handle: RequestHandle, errand: Errand) -> None:
    handle.get(PATIENCE_SECONDS)


def _give_up(handle: RequestHandle, errand: Errand) -> None:
    try:
        handle.get(0.0005)
    except RequestTimedOut:
        raise
    except TimeoutError:
        handle.cancel()


def _await(handle: RequestHandle, errand: Errand) -> None:
    asyncio.run(asyncio.wait_for(handle.get_async(), PATIENCE_SECONDS))


def _cancel_task(handle: RequestHandle, errand: Errand) -> None:
    async def leave() -> None:
        task = asyncio.ensure_future(handle.get_async())
        await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())


def _drop(handle: RequestHandle, errand: Errand) -> None:
    """Nobody waits; the request runs to its end."""


_BEHAVIOUR = dict(zip(CALLERS, (_read_stream, _close_stream, _get, _give_up, _await, _cancel_task, _drop), strict=True))


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
