"""Host time of one engine step over a null executor: whole, in parts, against a plain-Python model, against before.

    pytest bench/bench_engine_step.py                        # times; ratios and parts in extra_info
    pytest bench/bench_engine_step.py --benchmark-disable    # smoke test

`test_decode_step` is the whole path: command queue, admission, planning, plan validation, session, commit, and for
streamed requests detokeniser and thread-safe streams.  The model keeps the bare rules in one loop: what it leaves out
(identities, validation, two-pass commit, cancellation, recovery, threads) is what the ratio prices.

`test_decode_step_with_pages` is the same over the real rank session: lowering, page growth and cache publication
instead of a script.  `parts_us` says where its time goes; the aim for 256 residents is `PAGES_AIM_US`, on the machine
where that was measured: read it beside the ratios of the same run.

`test_before` compares with an earlier commit; `step_driver.py` says how.

The peer's round is the `setup` of ours, so the rounds alternate; ratios are of the best rounds.  `LIMIT` guards against
regressions: about twice what was measured.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import pytest

import edgellm.session.core as core
from bench import step_driver
from bench.peers.plain_engine import PlainEngine
from bench.step_driver import MAX_INPUT, ROUNDS, STEPS, TOKEN_ID, Driver, decoding, scripted_runtime

RESIDENTS = (1, 32, 256)
LIMIT = {
    "blocking": {1: 40.0, 32: 6.0, 256: 1.6},
    "stream": {1: 45.0, 32: 30.0, 256: 30.0},
    "plan": {1: 2.0, 32: 0.5, 256: 0.4},
}
PAGES_AIM_US = 140.0  # the plain floor's time for the pages alone, 256 residents


def make_peer(ours: Driver, *, stream: bool) -> PlainEngine:
    limits = ours.actor._limits
    return PlainEngine(
        seats=limits.max_batch_size,
        page=limits.page_size,
        max_num_tokens=limits.max_num_tokens,
        max_chunk_tokens=limits.max_chunk_tokens,
        max_step_tokens=limits.max_step_tokens,
        max_input=limits.max_input_length,
        piece={TOKEN_ID: "k"}.__getitem__ if stream else None,
    )


def check_equal(seats: int, *, stream: bool) -> None:
    """Random-looking arrivals and lengths: equal plans at every step, equal tokens, text and streams."""
    ours = Driver(seats, scripted_runtime(seats), null=False)
    peer = make_peer(ours, stream=stream)
    peer_plans, submitted = [], 0
    for step in range(120):
        for _ in range(1 + step % 3 if submitted < 40 else 0):
            submitted += 1
            prompt_length, max_tokens = 1 + submitted * 137 % MAX_INPUT, 1 + submitted * 31 % 23
            ours.submit(prompt_length, max_tokens, stream=stream)
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
        assert record.response.text == "k" * len(sequence.generated)
        if record.channel is not None:
            chunks = list(record.channel)
            assert [(tuple(c.token_ids), c.text, c.finished) for c in chunks] == list(sequence.stream)
    ours.close()


def decoding_peer(ours: Driver, residents: int, *, stream: bool) -> PlainEngine:
    peer = make_peer(ours, stream=stream)
    for number in range(residents):
        peer.submit(number + 1, 17, 1_000_000)
    while any(sequence.left for sequence in peer.running) or not peer.running:
        peer.step(TOKEN_ID)
    assert len(peer.running) == ours.actor.resident() == residents
    return peer


@pytest.mark.parametrize("mode", ["blocking", "stream"])
@pytest.mark.parametrize("residents", RESIDENTS)
def test_decode_step(benchmark: Any, residents: int, mode: str) -> None:
    stream = mode == "stream"
    check_equal(residents, stream=stream)
    ours = decoding(residents, stream=stream, pages=False)
    peer = decoding_peer(ours, residents, stream=stream)
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
    ours.close()
    report(benchmark, peer_ns, count, residents, LIMIT[mode][residents])


@pytest.mark.parametrize("residents", RESIDENTS)
def test_plan(benchmark: Any, residents: int) -> None:
    ours = decoding(residents, stream=False, pages=False)
    peer = decoding_peer(ours, residents, stream=False)
    planner, lengths = ours.actor._planner, ours.actor._coordinator.lengths
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
    ours.close()
    report(benchmark, peer_ns, count, residents, LIMIT["plan"][residents])


class Stopwatch:
    """Wraps calls of one step and keeps the best time of each; the wrapper's own cost is in every part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._inside = 0
        self._step: dict[str, int] = {}
        self.best_us: dict[str, float] = {}

    def watch(self, part: str, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start, inner_before = perf_counter_ns(), self._inside
            result = call(*args, **kwargs)
            took = perf_counter_ns() - start
            self._step[part] = self._step.get(part, 0) + took - (self._inside - inner_before)  # without parts inside
            self._inside = inner_before + took
            return result

        self._monkeypatch.setattr(owner, name, timed)

    def step(self, run: Any) -> None:
        self._inside = 0
        self._step = {}
        start = perf_counter_ns()
        run(1)
        self._step["rest"] = perf_counter_ns() - start - self._inside
        for part, took in self._step.items():
            self.best_us[part] = min(self.best_us.get(part, 1e9), took / 1e3)


def parts_of(ours: Driver, monkeypatch: pytest.MonkeyPatch, steps: int) -> dict[str, float]:
    actor, session = ours.actor, ours.runtime._session
    watch = Stopwatch(monkeypatch)
    watch.watch("plan", actor._planner, "plan")
    watch.watch("validate", core, "check_plan")
    watch.watch("lower", session._lowering, "lower")
    watch.watch("decoder", ours.runtime.decoder, "run_step")
    for name in ("poll_cancelled", "moved_seat", "take_tokens", "report"):
        watch.watch("ledger", core, name)
    watch.watch("ledger", actor._coordinator, "commit")
    watch.watch("pages", session._coordinator, "prepare_decode_step")
    watch.watch("publish", session._coordinator, "complete_decode_step")
    for _ in range(steps):
        watch.step(ours.steps)
    return {part: round(best, 1) for part, best in watch.best_us.items()}


@pytest.mark.parametrize("residents", RESIDENTS)
def test_decode_step_with_pages(benchmark: Any, monkeypatch: pytest.MonkeyPatch, residents: int) -> None:
    ours = decoding(residents, stream=False, pages=True)
    count = STEPS[residents]
    benchmark.pedantic(ours.steps, args=(count,), rounds=ROUNDS, warmup_rounds=3)
    step_us = None if benchmark.stats is None else benchmark.stats.stats.min / count * 1e6
    parts = parts_of(ours, monkeypatch, 5 if step_us is None else 100)
    assert set(parts) == {"plan", "validate", "lower", "decoder", "ledger", "pages", "publish", "rest"}
    assert ours.actor.resident() == residents
    ours.close()
    ours.runtime.close()
    if step_us is not None:
        benchmark.extra_info.update(step_us=round(step_us, 1), parts_us=parts, aim_us=PAGES_AIM_US, residents=residents)


@pytest.mark.skipif(not os.environ.get("EDGELLM_BENCH_BEFORE"), reason="EDGELLM_BENCH_BEFORE names no earlier tree")
@pytest.mark.parametrize("pages", [False, True], ids=["rules", "pages"])
@pytest.mark.parametrize("mode", ["blocking", "stream"])
@pytest.mark.parametrize("residents", RESIDENTS)
def test_before(benchmark: Any, residents: int, mode: str, pages: bool) -> None:
    """The same program in both trees, by turns."""
    arguments = [str(residents), mode, "pages" if pages else "rules"]

    def run(tree: str | Path) -> float:
        command = [sys.executable, step_driver.__file__, *arguments]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
        return float(done.stdout.split()[-1])

    here = Path(step_driver.__file__).parent.parent
    pairs = [(run(os.environ["EDGELLM_BENCH_BEFORE"]), run(here)) for _ in range(3)]
    before, now = (min(column) for column in zip(*pairs, strict=True))
    benchmark.pedantic(lambda: None)
    benchmark.extra_info.update(
        before_us=round(before, 1), now_us=round(now, 1), times_faster=round(before / now, 2), residents=residents
    )


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
