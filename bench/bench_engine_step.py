"""Host time of one engine step over a null executor, against a plain-Python model of the same step.

    pytest bench/bench_engine_step.py                        # times; ratio in extra_info
    pytest bench/bench_engine_step.py --benchmark-disable    # smoke test

`test_decode_step` is the whole path: command queue, admission, planning, plan validation, session, detokeniser,
thread-safe streams, commit.  The model keeps the bare rules in one loop: what it leaves out (identities, validation,
two-pass commit, cancellation, recovery, threads) is what the ratio prices.  `test_plan` is planning alone.

Both make the same plans and the same text, which is checked first.  The peer's round is the `setup` of ours, so the
rounds alternate.  The ratio is our best round over the peer's best: a guard against regressions (`LIMIT`), not an aim.
"""

from __future__ import annotations

import statistics
import sys
from time import perf_counter_ns
from typing import Any

import pytest

from bench.peers.plain_engine import PlainEngine
from edgellm.engine.actor import EngineActor
from edgellm.engine.command_queue import EngineChannel
from edgellm.engine.config import EngineConfig
from edgellm.engine.metrics import EngineMetrics
from edgellm.engine.records import RequestRecord
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.session.types import SequenceWork, SessionOptions
from edgellm.streaming import StreamChannel
from edgellm.testing.scripted_session import Script, ScriptedRuntime

TOKEN_ID = 2 + ord("k")
PAGE_SIZE = 16
MAX_INPUT = 1024
ENDLESS = 1_000_000
STEPS = {1: 40, 32: 10, 256: 3}  # a round
ROUNDS = 40
LIMIT = {"step": 45.0, "plan": 25.0}


class Ours:
    """Engine and session, driven on this thread one boundary at a time."""

    def __init__(self, seats: int) -> None:
        self.runtime = ScriptedRuntime(
            script=Script(next_token=lambda prompt, index: TOKEN_ID),
            max_batch_size=seats,
            max_input_length=MAX_INPUT,
            max_kv_capacity=1 << 24,
            num_pages=1 << 22,
            page_size=PAGE_SIZE,
        )
        config = EngineConfig(command_queue_capacity=1024, max_pending_requests=1024)
        self.channel = EngineChannel(config, EngineMetrics())
        self.actor = EngineActor(
            channel=self.channel,
            config=config,
            open_session=lambda: self.runtime.open_session(SessionOptions(allow_compact_execution=True)),
            device_healthy=None,
            close_runtime=None,
        )
        self.actor._open()
        self.records: list[RequestRecord] = []

    def submit(self, prompt_length: int, max_tokens: int) -> None:
        stream = StreamChannel.create()
        request = LLMGenerationRequest(
            prompt_token_ids=[5] * prompt_length,
            sampling=SamplingParams(max_tokens=max_tokens),
            stream_channel=stream,
        )
        record = RequestRecord(
            request_id=self.channel.reserve(),
            request=request,
            channel=stream,
            note_cancel=self.channel.note_cancel,
        )
        self.channel.post(record)
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
        """Forget what only grows: the test double's log and unread chunks."""
        self.runtime.log.clear()
        for record in self.records:
            while record.channel.try_pop() is not None:
                pass


def make_peer(ours: Ours) -> PlainEngine:
    limits = ours.actor._limits
    return PlainEngine(
        seats=limits.max_batch_size,
        page=limits.page_size,
        max_num_tokens=limits.max_num_tokens,
        max_chunk_tokens=limits.max_chunk_tokens,
        max_step_tokens=limits.max_step_tokens,
        max_input=limits.max_input_length,
        piece={TOKEN_ID: "k"}.__getitem__,
    )


def check_equal(seats: int) -> None:
    """Random-looking arrivals and lengths: equal plans at every step, equal tokens, text and streams."""
    ours = Ours(seats)
    peer = make_peer(ours)
    peer_plans, submitted = [], 0
    for step in range(120):
        for _ in range(1 + step % 3 if submitted < 40 else 0):
            submitted += 1
            prompt_length, max_tokens = 1 + submitted * 137 % MAX_INPUT, 1 + submitted * 31 % 23
            ours.submit(prompt_length, max_tokens)
            peer.submit(submitted, prompt_length, max_tokens)
        ours.steps(1)
        peer_plans.append(peer.step(TOKEN_ID))
    assert ours.plans() == [plan for plan in peer_plans if plan]
    ended = [record for record in ours.records if record.outcome_published]
    assert {record.id for record in ended} == set(peer.done)
    assert ended
    for record in ended:
        sequence = peer.done[record.id]
        assert record.response is not None
        assert record.response.token_ids == sequence.generated
        assert record.response.text == sequence.text
        chunks = list(record.channel)
        assert [(tuple(c.token_ids), c.text, c.finished) for c in chunks] == list(sequence.stream)
    ours.actor._close_session()


@pytest.mark.parametrize("residents", [1, 32, 256])
def test_decode_step(benchmark: Any, residents: int) -> None:
    check_equal(residents)
    ours = Ours(residents)
    peer = make_peer(ours)
    for number in range(residents):
        ours.submit(16, ENDLESS)
        peer.submit(number + 1, 16, ENDLESS)
    ours.steps(2)
    for _ in range(2):
        peer.step(TOKEN_ID)
    assert len(peer.running) == ours.actor.resident() == residents
    count, peer_ns = STEPS[residents], []

    def peer_round() -> None:
        ours.rest()
        for sequence in peer.running:
            sequence.stream.clear()
        start = perf_counter_ns()
        for _ in range(count):
            peer.step(TOKEN_ID)
        peer_ns.append(perf_counter_ns() - start)

    benchmark.pedantic(ours.steps, args=(count,), setup=peer_round, rounds=ROUNDS, warmup_rounds=3)
    assert ours.actor.resident() == residents
    ours.actor._close_session()
    report(benchmark, peer_ns, count, residents, LIMIT["step"])


@pytest.mark.parametrize("residents", [1, 32, 256])
def test_plan(benchmark: Any, residents: int) -> None:
    ours = Ours(residents)
    peer = make_peer(ours)
    for number in range(residents):
        ours.submit(16, ENDLESS)
        peer.submit(number + 1, 16, ENDLESS)
    ours.steps(2)
    for _ in range(2):
        peer.step(TOKEN_ID)
    planner, lengths = ours.actor._planner, ours.actor._coordinator.lengths
    assert [(d.identity.request_id, d.query_length, d.past_length) for d in planner.plan(lengths)] == [
        (sequence.request_id, query, sequence.committed) for sequence, _, query in peer.plan()
    ]
    count, peer_ns = 10 * STEPS[residents], []

    def peer_round() -> None:
        start = perf_counter_ns()
        for _ in range(count):
            peer.plan()
        peer_ns.append(perf_counter_ns() - start)

    def our_round() -> None:
        for _ in range(count):
            planner.plan(lengths)

    benchmark.pedantic(our_round, setup=peer_round, rounds=ROUNDS, warmup_rounds=3)
    ours.actor._close_session()
    report(benchmark, peer_ns, count, residents, LIMIT["plan"])


def report(benchmark: Any, peer_ns: list[int], count: int, residents: int, limit: float) -> None:
    """Put ratio and sizes into the record; fail above `limit`."""
    if benchmark.stats is None:  # --benchmark-disable
        return
    ours_us = benchmark.stats.stats.min / count * 1e6
    peer_us = min(peer_ns) / count / 1e3
    benchmark.extra_info.update(
        ratio_to_plain=round(ours_us / peer_us, 2),
        median_ratio=round(benchmark.stats.stats.median * 1e9 / statistics.median(peer_ns), 2),
        step_us=round(ours_us, 1),
        per_resident_us=round(ours_us / residents, 2),
        plain_us=round(peer_us, 1),
        residents=residents,
        python=sys.version.split()[0],
    )
    assert ours_us / peer_us < limit
