"""The command line, with a scripted LLM where text is generated; nothing is fetched or loaded."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from edgellm import __version__, cli, doctor
from edgellm.cache.types import ReuseReport, ReuseStopReason
from edgellm.errors import EdgeLLMError, InputTooLongError, InvalidArgumentError
from edgellm.outputs import RequestOutput, RequestTimings
from edgellm.sampling.params import SamplingParams

PARAMS = SamplingParams(max_tokens=3, temperature=0.0)


def make_output(text: str = "an answer", *, prompt_tokens: int = 40, reused: int = 32) -> RequestOutput:
    return RequestOutput(
        prompt_token_ids=[1] * prompt_tokens,
        text=text,
        token_ids=[5, 6, 7],
        finish_reason="stop",
        logprobs=None,
        reuse=ReuseReport(prompt_tokens, reused, reused, ReuseStopReason.NO_RECORD, reused),
        timings=RequestTimings(queue_ms=1.0, time_to_first_token_ms=250.0, total_ms=450.0, tokens_per_second=10.0),
    )


class ScriptedStream:
    """Plays pieces; an exception among them is raised there."""

    def __init__(self, pieces: list[Any]) -> None:
        self._pieces = pieces
        self.output = make_output("".join(piece for piece in pieces if isinstance(piece, str)))

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def __enter__(self) -> ScriptedStream:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@dataclass
class ScriptedLLM:
    """Answers each turn with the next script; remembers what it was asked."""

    script: list[list[Any]]
    asked: list[list[dict[str, Any]]] = field(default_factory=list)
    use_cache: list[bool] = field(default_factory=list)

    def stream(self, messages: list[dict[str, Any]], params: SamplingParams, *, use_cache: bool) -> ScriptedStream:
        assert params is PARAMS
        self.asked.append(list(messages))
        self.use_cache.append(use_cache)
        pieces = self.script[len(self.asked) - 1]
        if isinstance(pieces[0], EdgeLLMError):
            raise pieces[0]
        return ScriptedStream(pieces)


@pytest.fixture
def consoles(monkeypatch: pytest.MonkeyPatch) -> tuple[io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(cli, "out", Console(file=out, soft_wrap=True, highlight=False, markup=False))
    monkeypatch.setattr(cli, "err", Console(file=err, highlight=False, width=200))
    return out, err


def talk(monkeypatch: pytest.MonkeyPatch, llm: ScriptedLLM, typed: str, **options: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    cli.chat_loop(llm, PARAMS, **{"system": None, "use_cache": True, **options})  # type: ignore[arg-type]


def test_chat_carries_the_conversation_and_shows_reuse(
    monkeypatch: pytest.MonkeyPatch, consoles: tuple[io.StringIO, io.StringIO]
) -> None:
    llm = ScriptedLLM([["Hel", "lo"], ["Bye [bold]"]])
    talk(monkeypatch, llm, "hi\n\nagain\n/quit\nnever\n", system="be brief")
    system = {"role": "system", "content": "be brief"}
    first = {"role": "user", "content": "hi"}
    assert llm.asked == [
        [system, first],
        [system, first, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "again"}],
    ]
    assert consoles[0].getvalue() == "Hello\nBye [bold]\n"
    line = "[reused 32 of 40 prompt tokens (no_record), first token 0.25 s, 3 tokens, 10.0 tokens/s, stop]"
    assert consoles[1].getvalue().count(line) == 2


def test_reset_forgets_all_but_the_system_message(
    monkeypatch: pytest.MonkeyPatch, consoles: tuple[io.StringIO, io.StringIO]
) -> None:
    llm = ScriptedLLM([["a"], ["b"]])
    talk(monkeypatch, llm, "one\n/reset\ntwo\n", system="s", use_cache=False)
    assert llm.asked[1] == [{"role": "system", "content": "s"}, {"role": "user", "content": "two"}]
    assert llm.use_cache == [False, False]
    assert "new conversation" in consoles[1].getvalue()


def test_a_refused_turn_leaves_the_conversation_as_it_was(
    monkeypatch: pytest.MonkeyPatch, consoles: tuple[io.StringIO, io.StringIO]
) -> None:
    llm = ScriptedLLM([["a"], [InputTooLongError("the prompt has 99 tokens")], ["c"]])
    talk(monkeypatch, llm, "one\ntoo long\nthree\n")
    assert [message["content"] for message in llm.asked[2]] == ["one", "a", "three"]
    assert "the prompt has 99 tokens  (/reset starts a new conversation)" in consoles[1].getvalue()


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(
    monkeypatch: pytest.MonkeyPatch, consoles: tuple[io.StringIO, io.StringIO]
) -> None:
    llm = ScriptedLLM([["par", KeyboardInterrupt()], ["b"]])
    talk(monkeypatch, llm, "one\ntwo\n")
    assert [message["content"] for message in llm.asked[1]] == ["two"]
    assert consoles[0].getvalue() == "par\nb\n"


def test_an_unknown_slash_command_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, consoles: tuple[io.StringIO, io.StringIO]
) -> None:
    llm = ScriptedLLM([])
    talk(monkeypatch, llm, "/exit\n")
    assert llm.asked == []
    assert "/exit is not a command; there are /reset and /quit" in consoles[1].getvalue()


@pytest.mark.parametrize(
    ("text", "value"),
    [(None, None), ("4096", 4096), ("4_096", 4096), ("0.25", 0.25), ("2GiB", "2GiB"), ("-5", -5), ("half", "half")],
)
def test_kv_budget_text(text: str | None, value: object) -> None:
    parsed = cli.parse_kv_budget(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_an_empty_kv_budget_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="--kv-budget is empty"):
        cli.parse_kv_budget(" ")


def test_version_and_help() -> None:
    runner = CliRunner()
    assert runner.invoke(cli.app, ["--version"]).output.strip() == f"edgellm {__version__}"
    text = runner.invoke(cli.app, ["--help"]).output
    assert all(command in text for command in ("generate", "chat", "demo", "doctor", "plugins"))


def test_plugins_lists_the_built_in_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(cli.app, ["plugins"])
    assert result.exit_code == 0
    for word in ("base-endpoint", "vanilla", "builtin", "edgellm_register_decoders", "1.0-1.0"):
        assert word in result.output


def test_an_error_of_edgellm_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, consoles: tuple[io.StringIO, io.StringIO]
) -> None:
    monkeypatch.setattr("sys.argv", ["edgellm", "generate", "--max-tokens", "0", "hi"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert consoles[1].getvalue().strip() == "error: max_tokens is 0; it must be from 1 to 2147483647"


def test_doctor_reports_and_never_fetches(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "empty"))
    checks = {check.name: check for check in doctor.run_checks()}
    assert checks["extensions"].status is doctor.Status.OK, checks["extensions"].detail
    assert checks["dependencies"].status is doctor.Status.OK
    assert "torch" in checks["dependencies"].detail
    assert checks["devices"].detail.startswith("cpu (")
    assert checks["default model"].status is doctor.Status.NOTE
    assert checks["self-test"].status is doctor.Status.NOTE
    assert not (tmp_path / "empty").exists()


def test_doctor_turns_an_exception_into_a_failed_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXTENSIONS", ("edgellm._core.no_such_module",))
    checks = {check.name: check for check in doctor.run_checks()}
    assert checks["extensions"].status is doctor.Status.FAILED
    assert "No module named 'edgellm._core.no_such_module'" in checks["extensions"].detail
    assert len(checks) == 9
