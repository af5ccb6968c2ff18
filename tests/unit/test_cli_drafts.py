"""Options of the command line that say what is proposed: they reach `SpeculativeOptions`, or are refused by name."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from typer.testing import CliRunner

from edgellm import SpeculativeOptions, cli
from edgellm.errors import InvalidArgumentError

TREES = ["--speculative", "eagle", "--draft", "head", "--num-drafts", "40", "--draft-top-k", "8", "--draft-depth", "6"]
WANTED = SpeculativeOptions(decoder="eagle", draft="head", num_drafts=40, top_k=8, depth=6)
COMMANDS = {"generate": ["generate", "hello"], "chat": ["chat"], "bench": ["bench", "serve"]}


class Stopped(Exception):
    """The model is about to be loaded."""


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The speculative options that commands open a model with."""
    found: list[Any] = []

    @contextlib.contextmanager
    def open_llm(choice: cli.ModelChoice) -> Any:
        found.append(choice.speculative)
        raise Stopped
        yield

    def run(options: Any, engine_options: dict[str, Any], *others: Any, **files: Any) -> Any:
        found.append(engine_options["speculative"])
        raise Stopped

    monkeypatch.setattr(cli, "open_llm", open_llm)
    monkeypatch.setattr("edgellm.bench_serve.command.run", run)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_trees_reach_the_decoder(command: str, asked_for: list[Any]) -> None:
    for options, wanted in (
        (TREES, WANTED),
        (TREES[:4], SpeculativeOptions(decoder="eagle", draft="head")),
        ([], None),
    ):
        result = CliRunner().invoke(cli.app, [*COMMANDS[command], *options])
        assert isinstance(result.exception, Stopped)
        assert asked_for.pop() == wanted


def test_sampling_has_a_top_k_of_its_own(asked_for: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[Any] = []
    monkeypatch.setattr(cli, "_sampling", lambda *values: sampled.append(values[3]))
    CliRunner().invoke(cli.app, ["generate", "hello", "--top-k", "20", *TREES])
    assert (asked_for, sampled) == ([WANTED], [20])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speculative", "eagle", "--draft-top-k", "9"], "--draft-top-k is 9; it must be from 1 to 8"),
        (["--speculative", "eagle", "--draft-top-k", "0"], "--draft-top-k is 0; it must be from 1 to 8"),
        (
            ["--speculative", "eagle", "--draft-depth", "4"],
            "--draft-depth is 4 and --draft-top-k 1, which proposes chains; pass --num-drafts for their length, or a "
            "larger --draft-top-k for trees",
        ),
        (["--speculative", "eagle", "--draft-top-k", "2", "--draft-depth", "16"], "--draft-depth is 16; it must be"),
        (["--speculative", "eagle", "--num-drafts", "16"], "--num-drafts is 16; it must be from 1 to 15"),
        (
            ["--speculative", "eagle", "--num-drafts", "128", "--draft-top-k", "2"],
            "--num-drafts is 128; it must be from 1 to 127",
        ),
        (["--draft-top-k", "3"], "--draft-top-k is 3 and --speculative is missing"),
        (["--draft-depth", "3"], "--draft-depth is 3 and --speculative is missing"),
        (["--num-drafts", "3"], "--num-drafts is 3 and --speculative is missing"),
        (["--draft", "head"], "--draft is 'head' and --speculative is missing"),
    ],
)
def test_wrong_options_are_named_and_load_nothing(
    command: str, options: list[str], message: str, asked_for: list[Any]
) -> None:
    result = CliRunner().invoke(cli.app, [*COMMANDS[command], *options])
    assert isinstance(result.exception, InvalidArgumentError)
    assert message in str(result.exception)
    assert asked_for == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_they_are(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(cli.app, [*COMMANDS[command][: 2 if command == "bench" else 1], "--help"])
    assert result.exit_code == 0
    for option in ("--draft-top-k", "--draft-depth", "--num-drafts"):
        assert option in result.output
