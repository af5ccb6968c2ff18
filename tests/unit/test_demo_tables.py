"""The numbers that the demonstrations show: runs in turns, the best of them, and no ratio where nothing was reused."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from edgellm import RequestOutput, cli, demo
from edgellm.cache.types import ReuseReport, ReuseStopReason
from edgellm.demo_hybrid import hybrid_table
from edgellm.demo_pairs import Pair, ask_in_turns
from edgellm.demo_speculative import answer_table
from edgellm.fetch import DEFAULT_MODEL
from edgellm.outputs import RequestTimings
from edgellm.sampling.params import SamplingParams
from edgellm.terminal import piped_width


def output(
    rate: float, *, tokens: int = 10, kept: int = 0, reused: int = 0, first_ms: float = 100.0, last: int = 9
) -> RequestOutput:
    return RequestOutput(
        prompt_token_ids=[1, 2, 3],
        text="words",
        token_ids=[*range(tokens - 1), last],
        finish_reason="stop",
        logprobs=None,
        reuse=ReuseReport(3, reused, reused, ReuseStopReason.NO_RECORD, reused),
        timings=RequestTimings(0.0, first_ms, 1000.0, rate),
        proposed_draft_tokens=2 * kept,
        accepted_draft_tokens=kept,
    )


class Scripted:
    """A model whose runs take as long as they are told to."""

    def __init__(self, calls: list[str], name: str, outputs: list[RequestOutput]) -> None:
        self._calls, self._name, self._outputs = calls, name, list(outputs)

    def chat(self, messages: Any, params: SamplingParams) -> list[RequestOutput]:
        self._calls.append(self._name)
        return [self._outputs.pop(0)]


def rows_of(table: Any) -> list[list[str]]:
    text = io.StringIO()
    Console(file=text, width=200).print(table)
    return [line.split() for line in text.getvalue().splitlines() if re.match(r"\s+\d", line)]


def test_the_ways_take_turns_and_the_best_run_of_each_counts() -> None:
    calls: list[str] = []
    plain = Scripted(calls, "plain", [output(10.0, reused=0), output(4.0, reused=2), output(9.0, reused=2)])
    fast = Scripted(calls, "fast", [output(3.0, kept=2), output(15.0, kept=4), output(12.0, kept=5)])
    pair = ask_in_turns(plain, fast, [], SamplingParams(), Console(file=io.StringIO()), task="a")  # type: ignore[arg-type]
    assert calls == ["plain", "fast"] * 3
    assert pair.same
    assert rows_of(answer_table([pair], "mtp")) == [["1", "10", "8", "4", "6", "10.0", "15.0", "1.50x"]]
    assert rows_of(hybrid_table([pair])) == [["1", "3", "0", "0", "10", "8", "4", "6", "10.0", "15.0", "1.50x"]]


def test_a_table_fits_what_is_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    pair = Pair("a", (output(130.25, kept=100, reused=12_345),), (output(144.75, kept=100, reused=12_345),))
    text = io.StringIO()
    monkeypatch.setattr("sys.stdout", text)
    Console(file=text, width=piped_width(), soft_wrap=True).print(hybrid_table([pair]))
    assert "…" not in text.getvalue()
    monkeypatch.setenv("COLUMNS", "77")
    assert piped_width() == 77


def test_nothing_kept_is_as_many_steps_as_tokens() -> None:
    pair = Pair("a", (output(10.0),), (output(10.0),))
    assert (pair.steps, pair.cells()[3]) == (10, "10")


@pytest.mark.parametrize("where", [0, 1, 2])
def test_one_run_that_differs_is_noticed(where: int) -> None:
    runs = [output(1.0), output(1.0), output(1.0)]
    runs[where] = output(1.0, last=8)
    assert not Pair("a", (output(1.0),), tuple(runs)).same
    assert not Pair("a", tuple(runs), (output(1.0),)).same


def test_a_turn_that_reused_nothing_shows_no_ratio() -> None:
    first = demo.Turn("q", output(5.0, first_ms=100.0), output(5.0, first_ms=150.0))
    second = demo.Turn("q", output(5.0, first_ms=100.0), output(5.0, first_ms=20.0, reused=2))
    rows = rows_of(demo.turn_table([first, second]))
    assert [row[-3] for row in rows] == ["-", "5.0x"]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--hybrid"], "edgellm-hybrid-7m"),
        (["--hybrid", "--model", DEFAULT_MODEL], DEFAULT_MODEL),
        (["--hybrid", "--model", "mine"], "mine"),
        (["--speculative"], DEFAULT_MODEL),
        (["--speculative", "--model", "mine"], "mine"),
    ],
)
def test_the_model_that_is_named_is_shown(
    options: list[str], shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[str] = []

    def run(open_llm: Any, *others: Any, **named: Any) -> bool:
        with contextlib.suppress(StopIteration), open_llm(None):
            pass
        return True

    def open_llm(choice: cli.ModelChoice) -> Any:
        opened.append(choice.model)
        raise StopIteration

    monkeypatch.setattr(cli, "open_llm", open_llm)
    monkeypatch.setattr("edgellm.demo_hybrid.hybrid_model", lambda given: given or "edgellm-hybrid-7m")
    monkeypatch.setattr("edgellm.demo_hybrid.run_hybrid_demo", run)
    monkeypatch.setattr("edgellm.demo_speculative.run_speculative_demo", run)
    assert CliRunner().invoke(cli.app, ["demo", *options]).exit_code == 0
    assert opened == [shown]


def test_the_help_tells_of_three_demonstrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = " ".join(CliRunner().invoke(cli.app, ["demo", "--help"]).output.replace("│", " ").split())
    assert "Three demonstrations" in text
    assert f"default: {DEFAULT_MODEL}, with --hybrid edgellm-hybrid-7m" in text
