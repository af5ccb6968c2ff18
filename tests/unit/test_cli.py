"""The command line, with a scripted LLM where text is generated; nothing is fetched or loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from edgellm import LLM, __version__, cli, doctor, envs, plugins
from edgellm.cache.types import ReuseReport, ReuseStopReason
from edgellm.errors import EdgeLLMError, InputTooLongError, InvalidArgumentError
from edgellm.kernels.cpu._ops import isa_name
from edgellm.outputs import RequestOutput, RequestTimings
from edgellm.sampling.params import SamplingParams
from edgellm.terminal import NAME_WIDTH, fetch_progress, fixed_width, load_progress, waiting

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
    [(None, None), ("4096", 4096), ("4_096", 4096), ("0.25", 0.25), ("2GiB", "2GiB"), ("-5", -5), ("half", "half"),
     (".5", 0.5), ("1.0", 1.0), ("1e3", "1e3"), ("nan", "nan"), ("1.5 GiB", "1.5 GiB")],
)  # fmt: skip
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
    assert all(command in text for command in ("generate", "chat", "demo", "bench", "doctor", "plugins"))
    serve = runner.invoke(cli.app, ["bench", "serve", "--help"], env={"COLUMNS": "200"}).output
    assert all(option in serve for option in ("--workload", "--rate", "--clients", "--json", "--plot"))


def test_plugins_lists_the_built_in_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(cli.app, ["plugins"])
    assert result.exit_code == 0
    for word in ("base-endpoint", "vanilla", "builtin", "decoders", "policies", "1.1-1.3"):
        assert word in result.output
    assert "policies, the first that serves a request (priority): base-endpoint (0)" in result.output


def test_plugins_fit_80_columns_without_breaking_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(cli.app, ["plugins"])
    lines = [line.split() for line in result.output.splitlines()]
    version = plugins._own_version()
    assert ["base-endpoint", "edgellm", version, "1.1-1.3", "policies", "builtin"] in lines
    assert ["vanilla", "edgellm", version, "1.1-1.3", "decoders", "builtin"] in lines
    assert all(len(line) == 6 for line in lines if line and line[-1] in ("builtin", "loaded"))
    assert max(len(line) for line in result.output.splitlines()) <= 80


def test_a_failed_plugin_tells_its_reason_below_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("EDGELLM_PLUGINS", "absent")
    result = CliRunner().invoke(cli.app, ["plugins"])
    assert result.exit_code == 1
    names = r"[^()]*"  # of those that are installed where the test runs
    reason = rf"absent: EDGELLM_PLUGINS names it, and no plugin of that name is installed \(installed: {names}\)"
    assert re.search(rf"^{reason}; install it, or mend the list$", result.output, re.MULTILINE)


class PlainTokenizer:
    has_chat_template = False


class ModelWithoutTemplate:
    tokenizer = PlainTokenizer()


@pytest.mark.parametrize(
    ("arguments", "remedy"), [(["chat"], "edgellm generate --raw"), (["generate", "hi"], "pass --raw"), (["demo"], "")]
)
def test_a_model_without_a_chat_template_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
    consoles: tuple[io.StringIO, io.StringIO],
    arguments: list[str],
    remedy: str,
) -> None:
    monkeypatch.setattr(cli, "open_llm", lambda choice: contextlib.nullcontext(ModelWithoutTemplate()))
    monkeypatch.setattr("sys.argv", ["edgellm", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert consoles[0].getvalue() == ""
    assert consoles[1].getvalue().startswith("error: this model has no chat template")
    assert remedy in consoles[1].getvalue()


def test_options_reach_the_model_and_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(cli, "open_llm", lambda choice: contextlib.nullcontext(seen.append(choice)))
    monkeypatch.setattr(cli, "require_chat_template", lambda llm, remedy: None)
    monkeypatch.setattr(cli, "chat_loop", lambda llm, params, **options: seen.append(params))
    monkeypatch.setattr("edgellm.demo.run_demo", lambda llm, console, *, max_tokens: True)
    runner = CliRunner()
    assert runner.invoke(cli.app, ["chat", "--stop", "END", "--stop", "###"]).exit_code == 0
    assert runner.invoke(cli.app, ["demo"]).exit_code == 0
    assert runner.invoke(cli.app, ["demo", "--kv-budget", "4096"]).exit_code == 0
    assert seen[1].stop_strings == ("END", "###")
    assert [choice.kv_budget for choice in seen[2:]] == ["8192", "4096"]


def test_progress_is_one_plain_line_where_nobody_watches(consoles: tuple[io.StringIO, io.StringIO]) -> None:
    console = cli.err
    with (
        fetch_progress(console, "a-model") as on_fetch,
        load_progress(console) as on_load,
        waiting(console, "importing torch"),
    ):
        for done in (0, 50, 92_871_040):
            on_fetch(done, 92_871_040)
        for name in ("a", "b"):
            on_load(1, 3 << 20, name)
    assert consoles[1].getvalue() == "fetching a-model (93 MB)\nloading weights (3.0 MiB)\n"


def test_nothing_is_written_when_nothing_is_fetched_or_loaded(consoles: tuple[io.StringIO, io.StringIO]) -> None:
    with fetch_progress(cli.err, "a-model"), load_progress(cli.err), waiting(cli.err, "importing torch"):
        pass
    assert consoles[1].getvalue() == ""


@pytest.mark.parametrize("name", ["a", "model.layers.12.post_attention_layernorm.weight"])
def test_the_loading_bar_keeps_its_width(name: str) -> None:
    assert len(fixed_width(name)) == NAME_WIDTH
    assert fixed_width(name).rstrip().endswith(name[-20:])


def test_json_times_have_three_decimals() -> None:
    timings = RequestTimings(queue_ms=1.23456, time_to_first_token_ms=2.0, total_ms=3.00049, tokens_per_second=9.87654)
    plain = cli._as_plain(dataclasses.replace(make_output(), timings=timings))
    assert plain["timings"] == {
        "queue_ms": 1.235,
        "time_to_first_token_ms": 2.0,
        "total_ms": 3.0,
        "tokens_per_second": 9.877,
    }


def test_one_token_is_singular() -> None:
    output = dataclasses.replace(make_output(prompt_tokens=1, reused=0), token_ids=[5])
    assert "reused 0 of 1 prompt token (" in cli.describe_turn(output)
    assert ", 1 token, " in cli.describe_turn(output)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )


def test_the_command_line_shows_log_lines_when_a_level_is_set() -> None:
    code = (
        "import sys; sys.argv = ['edgellm', '--version']\n"
        "from edgellm import cli, log\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "log.get_logger('edgellm.x').info('hello %d', 5)\n"
    )
    assert run_python(code, EDGELLM_LOG_LEVEL="info").stderr.rstrip().endswith("INFO edgellm.x: hello 5")
    assert run_python(code, EDGELLM_LOG_LEVEL="").stderr == ""


def test_a_nonsense_log_level_is_warned_about_once_and_names_the_levels() -> None:
    code = "from edgellm import log; log.get_logger('a').info('x'); log.get_logger('b').warning('y')"
    assert run_python(code, EDGELLM_LOG_LEVEL="loud").stderr.splitlines() == [
        "EDGELLM_LOG_LEVEL is 'LOUD'; it must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL; WARNING is used",
        "y",
    ]


def test_a_nonsense_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_CPU_ISA", "avx2")
    with pytest.raises(InvalidArgumentError, match=r"EDGELLM_CPU_ISA is 'avx2'; set it to 0 \(portable\), 1 \(AVX2\)"):
        envs.cpu_isa_limit()
    with pytest.raises(InvalidArgumentError, match="EDGELLM_CPU_ISA"):
        LLM("no/such/model")


def test_doctor_shows_the_instruction_set_in_use(tmp_path: Any) -> None:
    code = "from edgellm import doctor; print(doctor._devices().detail)"
    assert "kernels: portable, limited by EDGELLM_CPU_ISA=0" in run_python(code, EDGELLM_CPU_ISA="0").stdout
    unlimited = run_python(code, EDGELLM_CPU_ISA="").stdout
    assert f"kernels: {isa_name()})" in unlimited


def test_doctor_prints_a_path_on_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    home = tmp_path / ("long" * 20)
    monkeypatch.setenv("EDGELLM_HOME", str(home))
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert f"default model: {home}" in result.output.splitlines()


def test_an_error_of_edgellm_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, consoles: tuple[io.StringIO, io.StringIO]
) -> None:
    monkeypatch.setattr("sys.argv", ["edgellm", "generate", "--max-tokens", "0", "hi"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert consoles[1].getvalue().strip() == "error: max_tokens is 0; it must be an integer from 1 to 2147483647"


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
    assert len(checks) == 11
