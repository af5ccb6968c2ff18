"""`edgellm demo --hybrid`: a chat with a hybrid checkpoint, plain and with its head; and what it says without one."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from decoder_plugins import use_decoder_plugins
from rich.console import Console
from tiny_model import write_tiny_llama, write_tiny_qwen_hybrid

import edgellm_hybrid.plugin
from edgellm import LLM, cli, demo_hybrid
from edgellm.plugins import PluginReport, PluginStatus, load_plugins


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    use_decoder_plugins(monkeypatch)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> tuple[io.StringIO, io.StringIO]:
    """Standard output and standard error of the command line."""
    texts = io.StringIO(), io.StringIO()
    for name, text in zip(("out", "err"), texts, strict=True):
        monkeypatch.setattr(cli, name, Console(file=text, width=200, soft_wrap=True, highlight=False))
    return texts


def run(*arguments: str) -> int:
    """The exit code of `edgellm demo`."""
    sys.argv = ["edgellm", "demo", *arguments]
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


@pytest.fixture(autouse=True)
def argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))


def test_the_chat_is_the_same_with_the_head(
    tmp_path: Path, shown: tuple[io.StringIO, io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    proposed: list[int] = []  # in every run; the table shows the fastest ones, where it may be nothing
    chat = LLM.chat

    def counted(*arguments: Any) -> Any:
        outputs = chat(*arguments)
        proposed.extend(output.proposed_draft_tokens for output in outputs)
        return outputs

    monkeypatch.setattr(LLM, "chat", counted)
    folder = write_tiny_qwen_hybrid(tmp_path, max_position_embeddings=1024)
    assert run("--hybrid", "--model", str(folder), "--max-tokens", "12", "--device", "cpu") == 0, shown[1].getvalue()
    lines = shown[0].getvalue().splitlines()
    assert "the texts are identical, token for token" in lines
    rows = [line.split() for line in lines if len(line.split()) == 11 and line.strip().endswith("x")]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    assert int(rows[0][2]) == int(rows[0][3]) == 0
    assert all(int(row[2]) > 100 and int(row[3]) > 100 for row in rows[1:])
    assert [int(row[4]) - int(row[6]) for row in rows] == [int(row[7]) for row in rows]  # steps
    assert sum(proposed) > 0


def hybrid_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """edgellm-hybrid, with its model in another folder."""
    monkeypatch.setattr(edgellm_hybrid.plugin, "FOLDER", folder)
    use_decoder_plugins(monkeypatch)


def test_without_a_checkpoint_it_says_how_to_get_one(
    tmp_path: Path, shown: tuple[io.StringIO, io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid_in(tmp_path, monkeypatch)
    assert run("--hybrid") == 1
    said = shown[1].getvalue()
    assert f"lacks its files (config.json and model.safetensors in {tmp_path})" in said
    assert "python -m training train hybrid" in said
    assert "or pass --model with" in said


def test_without_the_plugin_it_is_named(
    shown: tuple[io.StringIO, io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = load_plugins(autoload=False)
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: bare)
    assert run("--hybrid") == 1
    said = shown[1].getvalue()
    assert (
        "no plugin brings one; install package edgellm-hybrid (in the source tree of edgellm: pip install ./plugins/"
        in said
    )
    assert ", or pass --model with the folder of" in said


def test_the_plugin_that_is_switched_off_is_named(
    shown: tuple[io.StringIO, io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = load_plugins(autoload=False)
    bare.reports.append(PluginReport("hybrid", "edgellm-hybrid", "1", None, (), PluginStatus.SKIPPED))
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: bare)
    assert run("--hybrid") == 1
    assert "EDGELLM_PLUGINS leaves out its plugin 'hybrid'" in shown[1].getvalue()


def test_the_shipped_checkpoint_is_shown(
    tmp_path: Path, shown: tuple[io.StringIO, io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid_in(write_tiny_qwen_hybrid(tmp_path, max_position_embeddings=1024), monkeypatch)
    assert demo_hybrid.hybrid_model(None) == "edgellm-hybrid-7m"
    assert demo_hybrid.hybrid_model("mine") == "mine"
    assert run("--hybrid", "--max-tokens", "8", "--device", "cpu") == 0, shown[1].getvalue()
    assert "the texts are identical, token for token" in shown[0].getvalue()


@pytest.mark.parametrize("kind", ["no-head", "no-hybrid"])
def test_models_that_have_nothing_to_show(tmp_path: Path, shown: tuple[io.StringIO, io.StringIO], kind: str) -> None:
    write = write_tiny_llama if kind == "no-hybrid" else write_tiny_qwen_hybrid
    folder = write(tmp_path, **({} if kind == "no-hybrid" else {"mtp": False}))
    assert run("--hybrid", "--model", str(folder), "--device", "cpu") == 1
    reason = "attention-only" if kind == "no-hybrid" else "no multi-token prediction head"
    assert reason in shown[1].getvalue()


def test_two_demonstrations_at_once(shown: tuple[io.StringIO, io.StringIO]) -> None:
    assert run("--hybrid", "--speculative") == 1
    assert "pass one of them" in shown[1].getvalue()
