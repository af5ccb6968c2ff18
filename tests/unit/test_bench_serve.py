"""`edgellm bench serve`: workloads, their numbers and files.  Counts and sums, never a time."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import io
import itertools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from toy_parts import VOCAB, toy_parts
from typer.testing import CliRunner

from edgellm import AsyncEngine, cli
from edgellm.bench_serve import report
from edgellm.bench_serve.driver import play, warm_up
from edgellm.bench_serve.measure import Outcome, Sample, Spread, percentile, summarise
from edgellm.bench_serve.workload import (
    Lengths,
    PlannedRequest,
    RecordedOptions,
    SyntheticOptions,
    recorded,
    synthetic,
)
from edgellm.engine.config import EngineConfig
from edgellm.errors import InvalidArgumentError

TRACE = Path(__file__).resolve().parents[2] / "bench" / "data" / "conversation_first2000.jsonl.gz"


def options(**changes: Any) -> SyntheticOptions:
    values: dict[str, Any] = {
        "requests": 40,
        "rate": None,
        "prompt_tokens": Lengths(20, 40),
        "output_tokens": Lengths(4, 4),
        "seed": 5,
    }
    return SyntheticOptions(**{**values, **changes})


# ---- workloads ------------------------------------------------------------------------------------------


def test_lengths_are_constant_uniform_or_lognormal() -> None:
    rng = Random(1)
    assert [Lengths.parse("-n", "7").draw(rng) for _ in range(3)] == [7, 7, 7]
    uniform = [Lengths.parse("-n", "3-5").draw(rng) for _ in range(200)]
    assert set(uniform) == {3, 4, 5}
    lognormal = sorted(Lengths.parse("-n", "lognormal:200:0.5").draw(rng) for _ in range(2001))
    assert 185 < lognormal[1000] < 215  # the median
    assert lognormal[0] < 80 < 600 < lognormal[-1]


TOO_LONG = ["1048577", "5-1048577", "lognormal:1048577:1", "9" * 5000]


@pytest.mark.parametrize("text", ["", "0", "5-3", "a", "1.5", "lognormal:5", "lognormal:0:1", "-3", "3-", *TOO_LONG])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"--prompt-tokens is .*; write 128 \(always\), 64-256"):
        Lengths.parse("--prompt-tokens", text)


@pytest.mark.parametrize("sigma", ["50", "1000", "9" * 400])
def test_a_lognormal_that_overflows_is_refused(sigma: str) -> None:
    lengths = Lengths.parse("-n", f"lognormal:200:{sigma}")
    with pytest.raises(
        InvalidArgumentError, match=r"lognormal:200:.* draws lengths above 1048576 tokens; lower the median"
    ):
        synthetic(options(prompt_tokens=lengths), 300)


def test_lengths_and_arrivals_are_the_same_for_any_vocabulary() -> None:
    chosen = options(rate=5.0, prompt_tokens=Lengths(20, 20, 0.7), shared_prefix_share=0.5, shared_prefix_tokens=9)
    small, large = synthetic(chosen, 2), synthetic(chosen, 30_000)
    assert [(r.arrival, len(r.prompt), r.output_tokens) for r in small] == [
        (r.arrival, len(r.prompt), r.output_tokens) for r in large
    ]


def test_a_seed_makes_the_same_workload_and_another_one_another() -> None:
    assert synthetic(options(), 300) == synthetic(options(), 300)
    assert synthetic(options(), 300) != synthetic(options(seed=6), 300)


def test_a_share_of_the_prompts_begins_alike() -> None:
    shared = options(shared_prefix_share=0.5, shared_prefix_tokens=16, requests=200)
    heads = [tuple(request.prompt[:16]) for request in synthetic(shared, 300)]
    common = max(set(heads), key=heads.count)
    assert 70 < heads.count(common) < 130
    assert len(set(heads)) == 200 - heads.count(common) + 1
    everyone = synthetic(dataclasses.replace(shared, shared_prefix_share=1.0, shared_prefixes=3), 300)
    assert len({tuple(request.prompt[:16]) for request in everyone}) == 3
    short = synthetic(dataclasses.replace(shared, shared_prefix_share=1.0, prompt_tokens=Lengths(10, 10)), 300)
    assert {len(request.prompt) for request in short} == {10}
    assert len({tuple(request.prompt[:9]) for request in short}) == 1
    assert len({tuple(request.prompt) for request in short}) > 1  # the last token is their own


def test_a_rate_spaces_arrivals_and_tokens_stay_inside_the_vocabulary() -> None:
    planned = synthetic(options(requests=2000, rate=50.0), 300)
    arrivals = [request.arrival for request in planned]
    assert arrivals == sorted(arrivals)
    assert 35 < arrivals[-1] < 45
    assert {request.arrival for request in synthetic(options(), 300)} == {0.0}
    tokens = {token for request in planned for token in request.prompt}
    assert (min(tokens), max(tokens)) == (3, 299)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": 0}, "--requests is 0"),
        ({"rate": 0.0}, r"--rate is 0\.0"),
        ({"rate": 1e-320}, "--rate is 1e-320: 40 requests would arrive over more than 30 days; raise it or lower"),
        ({"rate": 1e-6}, "--rate is 1e-06: 40 requests would arrive over more than 30 days"),
        ({"shared_prefix_share": 1.5}, r"--shared-prefix is 1\.5"),
        ({"shared_prefix_tokens": -1}, "--shared-prefix-tokens is -1"),
        ({"shared_prefix_tokens": 10**12}, "--shared-prefix-tokens is 1000000000000 .*from 0 to 1048576"),
        ({"shared_prefixes": 0}, "--shared-prefixes 0"),
    ],
)
def test_synthetic_options_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        options(**changes)


def write_recording(path: Path, *lines: object) -> Path:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_recording_keeps_lengths_times_and_shared_blocks(tmp_path: Path, name: str) -> None:
    path = write_recording(
        tmp_path / name,
        {"timestamp": 0, "input_length": 1000, "output_length": 30, "hash_ids": [7, 8]},
        {"timestamp": 500, "input_length": 1024, "output_length": 9, "hash_ids": [7, 9]},
        "",
        {"timestamp": 800, "input_length": 100, "output_length": 1},
        {"prompt": "hello", "output_length": 2},
        {"timestamp": 900, "input_length": 5, "output_length": 1},
    )
    chosen = RecordedOptions(path=path, limit=4, block_tokens=64, max_output_tokens=10, speed=2.0)
    first, second, third, text = recorded(chosen, 300)
    assert [request.arrival for request in (first, second, third, text)] == [0.0, 0.25, 0.4, 0.0]
    assert [request.output_tokens for request in (first, second, third, text)] == [10, 9, 1, 2]
    assert [len(request.prompt) for request in (first, second, third)] == [125, 128, 13]
    assert first.prompt[:64] == second.prompt[:64]
    assert first.prompt[64:] != second.prompt[64:125]
    assert text.prompt == "hello"
    assert recorded(chosen, 300)[2] == third


def test_blocks_beyond_a_prompts_length_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(
        "edgellm.bench_serve.workload._tokens", lambda rng, count, vocab_size: made.append(count) or [5] * count
    )
    line = {"input_length": 600, "output_length": 1, "hash_ids": list(range(10_000))}
    chosen = RecordedOptions(path=write_recording(tmp_path / "r.jsonl", line), limit=1, block_tokens=64)
    assert [len(request.prompt) for request in recorded(chosen, 300)] == [75]
    assert made == [64, 64, 0]


@pytest.mark.skipif(not TRACE.is_file(), reason="the recorded trace is not beside an installed package")
def test_the_bundled_trace_is_a_recording() -> None:
    planned = recorded(RecordedOptions(path=TRACE, limit=3, block_tokens=8), 300)
    assert [len(request.prompt) for request in planned] == [-(-length * 8 // 512) for length in (6758, 7322, 7236)]
    assert [request.output_tokens for request in planned] == [500, 490, 794]
    assert planned[0].prompt[:8] == planned[1].prompt[:8] == planned[2].prompt[:8]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: no JSON"),
        ("[1]", "line 1: a list; each line is one JSON object"),
        ({"input_length": 5}, "line 1: output_length is None; it must be a number of at least 1"),
        ({"output_length": 5}, "line 1: input_length is None"),
        ({"output_length": 5, "input_length": 0}, "line 1: input_length is 0"),
        ({"output_length": 5, "input_length": 5, "timestamp": -1}, "line 1: timestamp is -1"),
        ({"output_length": 5, "input_length": 5, "hash_ids": ["a"]}, "line 1: hash_ids is .*list of integers"),
        ({"output_length": 5, "prompt": ""}, "line 1: prompt is ''; it must be text"),
        (
            {"output_length": 5, "input_length": 10**400},
            r"line 1: input_length is 10+\.\.\.; it must be at most 1\.04858e\+06",
        ),
        ({"output_length": 2**30, "input_length": 5}, "line 1: output_length is 1073741824; it must be at most"),
        ('{"output_length": 5, "input_length": 5, "timestamp": 1e999}', "line 1: timestamp is inf; it must be at most"),
        ('{"output_length": 5, "input_length": 5, "timestamp": NaN}', "line 1: timestamp is nan"),
        (
            {"output_length": 5, "input_length": 5, "timestamp": 10**13},
            "timestamp is 10+, which --speed 1.0 plays after",
        ),
        ("", "has no requests"),
    ],
)
def test_a_malformed_recording_names_the_line(tmp_path: Path, line: object, message: str) -> None:
    path = write_recording(tmp_path / "r.jsonl", line)
    with pytest.raises(InvalidArgumentError, match=message):
        recorded(RecordedOptions(path=path, limit=5), 300)


def test_an_absent_or_damaged_recording_is_named(tmp_path: Path) -> None:
    damaged = tmp_path / "d.jsonl.gz"
    damaged.write_bytes(gzip.compress(b"{}" * 500)[:20])
    for path in (tmp_path / "absent.jsonl", damaged):
        with pytest.raises(InvalidArgumentError, match=f"cannot read the recording {path}"):
            recorded(RecordedOptions(path=path, limit=5), 300)


# ---- numbers --------------------------------------------------------------------------------------------


def test_percentiles_are_those_of_numpy() -> None:
    rng = Random(3)
    for count in (1, 2, 7, 100):
        values = sorted(rng.random() for _ in range(count))
        for share in (0.0, 0.5, 0.9, 0.99, 1.0):
            assert percentile(values, share) == pytest.approx(np.percentile(values, 100 * share), rel=1e-12)
    spread = Spread.of([0.004, 0.001, 0.003, 0.002, 0.010])
    assert (spread.count, spread.mean, spread.p50, spread.max) == (5, 4.0, 3.0, 10.0)
    assert (spread.p90, spread.p99) == (pytest.approx(7.6), pytest.approx(9.76))
    assert Spread.of([]) == Spread(0, 0.0, 0.0, 0.0, 0.0, 0.0)


def known_samples() -> list[Sample]:
    done = Outcome.COMPLETED
    return [
        Sample(1.0, 1.0, 3.0, [1.5, 2.0, 3.0], prompt_tokens=10, reused_tokens=4, queue_seconds=0.1, outcome=done),
        Sample(1.0, 1.25, 2.25, [2.25], prompt_tokens=30, reused_tokens=16, queue_seconds=0.3, outcome=done),
        Sample(2.0, 2.0, 2.0, outcome=Outcome.REFUSED, error="SubmitError: full"),
        Sample(2.0, 2.0, 5.0, [4.0, 4.5], outcome=Outcome.FAILED, error="RequestTimedOut: late"),
    ]


def test_a_known_sample_has_known_numbers() -> None:
    summary = summarise(known_samples())
    assert (summary.requests, summary.completed, summary.refused, summary.failed) == (4, 2, 1, 1)
    assert summary.wall_seconds == 4.0
    assert (summary.prompt_tokens, summary.reused_tokens, summary.reuse_share) == (40, 20, 0.5)
    assert (summary.generated_tokens, summary.output_tokens_per_second) == (6, 1.5)
    assert summary.requests_per_second == 0.5
    first, between = summary.time_to_first_token, summary.inter_token
    assert (first.count, first.mean, first.max) == (2, 750.0, 1000.0)
    assert (between.count, between.p50, between.max) == (2, 750.0, 1000.0)
    assert (summary.end_to_end.p50, summary.queue.max, summary.late.max) == (1500.0, 300.0, 250.0)


# ---- driving --------------------------------------------------------------------------------------------


def drive(workload: list[PlannedRequest], config: EngineConfig | None = None, **how: Any) -> list[Sample]:
    async def main() -> list[Sample]:
        async with AsyncEngine.from_parts(toy_parts(num_pages=512, config=config)) as engine:
            await warm_up(engine, 2, VOCAB)
            samples = await play(engine, workload, **how)
            assert engine.metrics().engine.completed == 2 + sum(s.outcome is Outcome.COMPLETED for s in samples)
            return samples

    return asyncio.run(main())


@pytest.mark.parametrize("how", [{"clients": 1}, {"clients": 3}, {}])
def test_every_request_is_played_and_counted(how: dict[str, Any]) -> None:
    workload = synthetic(options(rate=None if how else 400.0), VOCAB)
    ended: list[Sample] = []
    samples = drive(workload, on_done=ended.append, **how)
    assert sorted(map(id, ended)) == sorted(map(id, samples))
    assert [sample.prompt_tokens for sample in samples] == [len(request.prompt) for request in workload]
    assert [len(sample.token_times) for sample in samples] == [4] * 40
    for sample in samples:
        assert sample.outcome is Outcome.COMPLETED
        assert sample.due <= sample.sent <= sample.token_times[0] <= sample.token_times[-1] <= sample.finished
        assert sample.token_times == sorted(sample.token_times)
    summary = summarise(samples)
    assert (summary.completed, summary.generated_tokens) == (40, 160)
    assert summary.inter_token.count == 120
    assert summary.time_to_first_token.count == summary.end_to_end.count == summary.queue.count == 40


def test_reuse_is_counted_request_by_request() -> None:
    prompt = [20 + token for token in range(24)]
    samples = drive([PlannedRequest(0.0, prompt, 4), PlannedRequest(0.0, prompt, 4)], clients=1)
    assert [sample.reused_tokens for sample in samples] == [0, 23]
    assert summarise(samples).reuse_share == 23 / 48


def test_one_client_asks_one_after_the_other() -> None:
    samples = drive(synthetic(options(requests=5), VOCAB), clients=1)
    assert all(later.sent >= earlier.finished for earlier, later in itertools.pairwise(samples))


def test_refusals_are_told_from_failures_and_do_not_end_the_run() -> None:
    workload = [
        PlannedRequest(0.0, [5] * 10, 4),
        PlannedRequest(0.0, [5] * 400, 4),  # longer than a sequence may be
        PlannedRequest(0.0, [VOCAB + 7], 4),
        PlannedRequest(0.0, [6] * 10, 4),
    ]
    samples = drive(workload, clients=2)
    assert [sample.outcome.value for sample in samples] == ["completed", "refused", "refused", "completed"]
    assert "EDGELLM_INPUT_TOO_LONG" in samples[1].error
    assert samples[2].error.startswith("AdmissionError: ")
    full = drive([PlannedRequest(0.0, [5 + index], 40) for index in range(8)], EngineConfig(max_pending_requests=2))
    summary = summarise(full)
    assert summary.completed + summary.refused == 8
    assert summary.refused >= 1
    with pytest.raises(InvalidArgumentError, match="--clients is -1"):
        drive(workload, clients=-1)


# ---- what is left ---------------------------------------------------------------------------------------


def test_the_table_and_its_lines_show_the_numbers() -> None:
    summary = summarise(known_samples())
    out = io.StringIO()
    Console(file=out, width=100).print(report.table_of(summary, "a title"))
    lines = out.getvalue().splitlines()
    assert lines[0].rstrip() == "a title"
    row = next(line.split() for line in lines if "time to first token" in line)
    assert row[4:] == ["750.0", "950.0", "995.0", "1,000.0", "750.0"]
    assert report.lines_of(summary) == [
        "2 of 4 requests completed, 1 refused, 1 failed, in 4.00 s",
        "6 tokens generated: 1.5 tokens/s, 0.50 requests/s",
        "20 of 40 prompt tokens reused (50.0%)",
    ]


def test_the_json_repeats_the_run(tmp_path: Path) -> None:
    samples = known_samples()
    report.write_json(tmp_path / "r.json", report.as_plain(summarise(samples), samples, {"seed": 5}))
    plain = json.loads((tmp_path / "r.json").read_text())
    assert plain["settings"] == {"seed": 5}
    assert plain["summary"]["reuse_share"] == 0.5
    assert [entry["outcome"] for entry in plain["requests"]] == ["completed", "completed", "refused", "failed"]
    assert plain["requests"][0]["token_times"] == [1.5, 2.0, 3.0]
    assert {"edgellm", "python", "torch", "numpy"} <= plain["versions"].keys()
    assert plain["machine"]["cores"] >= 1


@pytest.mark.parametrize("samples", [known_samples(), known_samples()[2:], []], ids=["all", "none done", "empty"])
def test_the_plot_is_a_png_or_an_svg(tmp_path: Path, samples: list[Sample]) -> None:
    pytest.importorskip("matplotlib")
    report.write_plot(tmp_path / "p.png", samples, "title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    report.write_plot(tmp_path / "p.svg", samples, "title")
    assert ElementTree.parse(tmp_path / "p.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_files_that_cannot_be_written_are_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgumentError, match=r"--json is .*; name a file in a folder that exists"):
        report.check_targets(tmp_path / "no" / "r.json", None)
    with pytest.raises(InvalidArgumentError, match=r"--json is .*; name a file"):
        report.check_targets(tmp_path, None)
    with pytest.raises(InvalidArgumentError, match=r"--plot is .*p\.pdf'; its name must end in \.png or \.svg"):
        report.check_targets(None, tmp_path / "p.pdf")
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        InvalidArgumentError, match=r"matplotlib, which is not installed; pip install 'edgellm\[bench\]'"
    ):
        report.check_targets(None, tmp_path / "p.png")
    report.check_targets(tmp_path / "r.json", None)


# ---- the command ----------------------------------------------------------------------------------------


def test_the_command_runs_both_workloads_on_a_real_checkpoint(tiny_model_dir: Path, tmp_path: Path) -> None:
    recording = write_recording(
        tmp_path / "r.jsonl",
        {"timestamp": 0, "input_length": 512, "output_length": 3, "hash_ids": [1]},
        {"timestamp": 1, "input_length": 1024, "output_length": 2, "hash_ids": [1, 2]},
    )
    common = ["bench", "serve", "-m", str(tiny_model_dir), "--kv-budget", "2048", "--page-size", "8"]
    chosen = ["--requests", "6", "--clients", "2", "--prompt-tokens", "20-40", "--output-tokens", "3"]
    files = ["--json", str(tmp_path / "s.json"), "--plot", str(tmp_path / "s.png")]
    result = CliRunner().invoke(cli.app, [*common, *chosen, "--shared-prefix-tokens", "16", *files])
    assert result.exit_code == 0, result.output
    assert "6 of 6 requests completed, 0 refused, 0 failed" in result.output
    plain = json.loads((tmp_path / "s.json").read_text())
    assert (plain["summary"]["completed"], plain["summary"]["generated_tokens"]) == (6, 18)
    assert plain["settings"]["prompt_tokens"] == {"low": 20, "high": 40, "sigma": 0.0}
    assert plain["settings"]["engine"]["kv_budget"] == 2048
    assert (tmp_path / "s.png").stat().st_size > 1000
    result = CliRunner().invoke(cli.app, [*common, "--workload", str(recording), "--block-tokens", "16"])
    assert result.exit_code == 0, result.output
    assert "2 of 2 requests completed" in result.output
    assert "5 tokens generated" in result.output


def test_a_malformed_recording_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = write_recording(tmp_path / "r.jsonl", {"input_length": 5, "output_length": 3}, {"input_length": 5})
    started: list[AsyncEngine] = []
    monkeypatch.setattr(AsyncEngine, "__init__", lambda self, *rest, **named: started.append(self))
    result = CliRunner().invoke(cli.app, ["bench", "serve", "-m", "nowhere", "--workload", str(recording)])
    assert isinstance(result.exception, InvalidArgumentError)
    assert "r.jsonl, line 2: output_length is None" in str(result.exception)
    assert not started


def test_a_run_in_which_nothing_completes_says_so_and_fails(tiny_model_dir: Path) -> None:
    arguments = [
        "bench",
        "serve",
        "-m",
        str(tiny_model_dir),
        "--kv-budget",
        "2048",
        "--page-size",
        "8",
        "--warmup",
        "0",
    ]
    result = CliRunner().invoke(cli.app, [*arguments, "--requests", "2", "--prompt-tokens", "100000"])
    assert result.exit_code == 1
    assert "0 of 2 requests completed, 2 refused" in result.output
    assert "0.0" not in result.output.partition("0 of 2")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "2", "--clients", "3"], "--rate and --clients exclude each other"),
        (["--prompt-tokens", "many"], "--prompt-tokens is 'many'"),
        (["--plot", "p.pdf"], "--plot is 'p.pdf'"),
        (["--clients", "0"], "--clients is 0; it must be at least 1"),
        (["--warmup", "-1"], "--warmup is -1; it must be 0 or more"),
        (["--timeout", "0"], "--timeout is 0.0; it must be above 0 seconds"),
        (["--kv-budget", ""], "--kv-budget is empty"),
        (["--step-time-budget-ms", "-1", "-m", "nowhere"], "step_time_budget_ms is -1"),
        (["--rate", "1e-320", "-m", "nowhere"], "--rate is 1e-320: 32 requests would arrive"),
        (["--prompt-tokens", "lognormal:200:900", "-m", "nowhere"], "lognormal:200:900.0 draws lengths above"),
        (["--output-tokens", "lognormal:200:900", "-m", "nowhere"], "lognormal:200:900.0 draws lengths above"),
        (["--workload", "absent.jsonl", "-m", "nowhere"], "cannot read the recording absent.jsonl"),
    ],
)
def test_wrong_options_are_one_error_and_load_nothing(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", "serve", *arguments])
    assert isinstance(result.exception, InvalidArgumentError)
    assert message in str(result.exception)
