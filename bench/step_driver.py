"""Engine and session over a null executor, driven one boundary at a time; also a program that times it.

    python bench/step_driver.py RESIDENTS {blocking,stream} {rules,pages}      prints microseconds a step

It uses only what earlier commits have too, so that the program can be run inside the tree of one:

    git archive COMMIT | tar -x -C /tmp/before && (cd /tmp/before && python setup.py -q build_ext --inplace)
    EDGELLM_BENCH_BEFORE=/tmp/before pytest bench/bench_engine_step.py -k before

`rules` plays the model and the page pool from a script: planning, validation, ledgers, commit.  `pages` is the real
rank session with its context cache, page table and lowering; only the decoder is replaced, by one that always
chooses the same token.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter_ns
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))

import numpy as np

from edgellm.decoding.base import DecodingStrategy, StepTokens
from edgellm.engine.actor import EngineActor
from edgellm.engine.command_queue import EngineChannel
from edgellm.engine.config import EngineConfig
from edgellm.engine.metrics import EngineMetrics
from edgellm.engine.records import RequestRecord
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session import frame
from edgellm.session.core import SessionCore
from edgellm.session.types import SequenceWork, SessionOptions
from edgellm.streaming import StreamChannel
from edgellm.testing.scripted_session import Script, ScriptedRuntime, ScriptedSession
from edgellm.testing.toy_runtime import ToyRuntime

TOKEN_ID = 2 + ord("k")
PAGE_SIZE = 16
MAX_INPUT = 1024
CAPACITY = {"rules": 1 << 24, "pages": 1 << 13}  # tokens a sequence may reach
STEPS = {1: 40, 32: 10, 256: 3}  # a round
ROUNDS = 40


class NullSession(ScriptedSession):
    """`ScriptedSession` without the cost of the test double: no log, and decode steps are not played row by row."""

    def execute(self, plan: Any) -> Any:
        return SessionCore.execute(self, plan)

    def _run(self, step: Any) -> Any:
        if any(resident.prompt_remaining for resident in step.rows[-1:]):
            return super()._run(step)
        if hasattr(frame, "OneTokenOutcomes"):
            return frame.OneTokenOutcomes(np.full(len(step.rows), TOKEN_ID, dtype=np.int32))
        return [frame.RowOutcome(1, (TOKEN_ID,)) for _ in step.rows]


class NullDecoder(DecodingStrategy):
    """Chooses `TOKEN_ID` everywhere and runs nothing."""

    name = "null"

    def run_step(self, executor: Any, batch: Any, sampler: Any, rows: Any) -> StepTokens:
        return StepTokens([[TOKEN_ID]] * len(rows), batch.query_len.tolist(), [None] * len(rows))


def scripted_runtime(seats: int) -> ScriptedRuntime:
    return ScriptedRuntime(
        script=Script(next_token=lambda prompt, index: TOKEN_ID),
        max_batch_size=seats,
        max_input_length=MAX_INPUT,
        max_kv_capacity=CAPACITY["rules"],
        num_pages=1 << 22,
        page_size=PAGE_SIZE,
    )


def paged_runtime(seats: int) -> ToyRuntime:
    capacity = CAPACITY["pages"]
    runtime = ToyRuntime(
        max_batch_size=seats,
        max_input_length=MAX_INPUT,
        max_kv_capacity=capacity,
        num_pages=seats * (64 if seats > 1 else capacity // PAGE_SIZE),
        page_size=PAGE_SIZE,
        reserve_growth=False,
    )
    runtime.decoder = NullDecoder()
    return runtime


class Driver:
    """Engine and session on this thread.

    Attributes:
        records: what was submitted.
    """

    def __init__(self, seats: int, runtime: Any, *, null: bool = True) -> None:
        self.runtime = runtime
        config = EngineConfig(command_queue_capacity=1024, max_pending_requests=1024)
        self.channel = EngineChannel(config, EngineMetrics())
        self.actor = EngineActor(
            channel=self.channel, config=config, open_session=self._open, device_healthy=None, close_runtime=None
        )
        # Before a submit was one operation, room was reserved first.
        self._next_id = getattr(self.channel, "next_id", None) or self.channel.reserve
        self._accept = getattr(self.channel, "accept", None) or self.channel.post
        self._null = null
        self.actor._open()
        self.records: list[RequestRecord] = []

    def _open(self) -> Any:
        session = self.runtime.open_session(SessionOptions(allow_compact_execution=True))
        if self._null and isinstance(session, ScriptedSession):
            session.__class__ = NullSession
        return session

    def submit(self, prompt_length: int, max_tokens: int, *, stream: bool, first_token: int = 5) -> None:
        # Before channels were made on demand, every request had one.
        on_demand = "note_stream" in RequestRecord.__init__.__annotations__
        channel = StreamChannel.create() if stream or not on_demand else None
        request = LLMGenerationRequest(
            prompt_token_ids=[first_token] + [5] * (prompt_length - 1),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            stream_channel=channel,
        )
        record = RequestRecord(
            request_id=self._next_id(), request=request, channel=channel, note_cancel=self.channel.note_cancel
        )
        self._accept(record)
        self.records.append(record)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.actor._drain()
            self.actor._boundary()

    def plans(self) -> list[list[tuple[int, bool, int, int]]]:
        return [
            [(d.identity.request_id, d.work is SequenceWork.CONTEXT, d.query_length, d.past_length) for d in entry[1]]
            for entry in self.runtime.log
            if entry[0] == "execute"
        ]

    def rest(self) -> None:
        """Forget what only grows: unread chunks."""
        for record in self.records:
            while record.channel is not None and record.channel.try_pop() is not None:
                pass

    def close(self) -> None:
        self.actor._close_session()


def decoding(residents: int, *, stream: bool, pages: bool) -> Driver:
    """A driver whose `residents` sequences all decode, for as long as anybody likes."""
    driver = Driver(residents, (paged_runtime if pages else scripted_runtime)(residents))
    most = CAPACITY["pages"] - 64 if pages else 1_000_000
    for number in range(residents):
        driver.submit(17, most, stream=stream, first_token=100 + number)  # no two share a block
    while (
        any(seat.lengths.prompt_remaining for seat in driver.actor._coordinator.seats()) or not driver.actor.resident()
    ):
        driver.steps(1)
    assert driver.actor.resident() == residents
    driver.steps(2)
    return driver


def main(residents: int, stream: bool, pages: bool) -> float:
    driver = decoding(residents, stream=stream, pages=pages)
    count, best = STEPS[residents], None
    for _ in range(ROUNDS):
        driver.rest()
        start = perf_counter_ns()
        driver.steps(count)
        took = (perf_counter_ns() - start) / count / 1e3
        best = took if best is None else min(best, took)
    assert driver.actor.resident() == residents
    driver.close()
    assert best is not None
    return best


if __name__ == "__main__":
    print(main(int(sys.argv[1]), sys.argv[2] == "stream", sys.argv[3] == "pages"))
