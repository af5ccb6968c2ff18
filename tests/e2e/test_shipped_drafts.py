"""Drafts and models of plugins in use: found without being named, and what is said where none fits."""

from __future__ import annotations

import io
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_plugins import PLUGINS
from rich.console import Console
from tiny_model import write_tiny_llama, write_tiny_qwen_hybrid
from typer.testing import CliRunner

import edgellm_hybrid.plugin
from edgellm import LLM, SamplingParams, SpeculativeOptions, cli, demo_speculative
from edgellm.errors import InvalidArgumentError
from edgellm.hookspecs import hookimpl
from edgellm.models.loader import open_checkpoint
from edgellm.plugins import load_plugins
from edgellm.shipped import CheckpointRegistrar, DraftTarget
from training import courses
from training.assistant import Assistant
from training.eagle import EagleHead
from training.llama import Llama
from training.target_file import pack, read_target

REMEDY = "train one yourself"
KINDS = {"eagle": EagleHead, "shared_kv_mtp": partial(Assistant, hidden=48, inner=64)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return write_tiny_llama(folder, num_hidden_layers=6, tie_word_embeddings=True, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def drafts(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each kind, of random weights."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("drafts")
    pack(target, folder / "target.bin")
    model = Llama(*read_target(folder / "target.bin"), device="cpu", dtype=torch.float32)
    for kind, make in KINDS.items():
        courses.save(make(model, torch.arange(100)), folder / kind)  # type: ignore[operator]
    return folder


def ship(monkeypatch: pytest.MonkeyPatch, target: Path, drafts: Path) -> None:
    """Plugins of this tree, and one that brings drafts for the target."""
    shape = DraftTarget.of(open_checkpoint(target)[0], "tiny")
    brings = types.ModuleType("brings_drafts")
    brings.EDGELLM_API = ((1, 3), (1, 3))  # type: ignore[attr-defined]

    @hookimpl
    def edgellm_register_checkpoints(register: CheckpointRegistrar) -> None:
        for kind in KINDS:
            register(f"tiny-{kind}", drafts / kind, decoder=kind, target=shape, remedy=REMEDY)

    brings.edgellm_register_checkpoints = edgellm_register_checkpoints  # type: ignore[attr-defined]
    loaded = load_plugins(extra=[*PLUGINS, ("drafts", brings)], autoload=False, strict=True)
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda strict=None: loaded)


def say(model: str | Path, speculative: SpeculativeOptions | str | None = None) -> Any:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with LLM(model, device="cpu", dtype="float32", kv_budget=2048, speculative=speculative) as llm:
        return llm.generate(["to be or not to be"], params)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_is_found_for_its_target(
    monkeypatch: pytest.MonkeyPatch, target: Path, drafts: Path, kind: str
) -> None:
    ship(monkeypatch, target, drafts)
    found = say(target, kind)
    named = say(target, SpeculativeOptions(decoder=kind, draft=drafts / kind))
    assert found.token_ids == named.token_ids == say(target).token_ids
    assert found.proposed_draft_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_another_model_is_told_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, target: Path, drafts: Path, tmp_path: Path, kind: str
) -> None:
    ship(monkeypatch, target, drafts)
    other = write_tiny_llama(tmp_path, num_hidden_layers=7, tie_word_embeddings=True)
    with pytest.raises(InvalidArgumentError) as caught:
        say(other, kind)
    said = str(caught.value)
    assert f"decoder '{kind}' needs an" in said
    assert "this model is llama, 7 layers of width 64, 257 tokens" in said
    assert "smollm2-135m-instruct (llama, 30 layers of width 576" in said
    assert "tiny (llama, 6 layers of width 64, 257 tokens" in said


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_without_its_files_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, target: Path, tmp_path: Path, kind: str
) -> None:
    ship(monkeypatch, target, tmp_path)
    with pytest.raises(InvalidArgumentError, match=rf"'tiny-{kind}' of local 0 lacks its files .*: {REMEDY}"):
        say(target, kind)


def test_a_draft_that_is_named_goes_first(monkeypatch: pytest.MonkeyPatch, target: Path, drafts: Path) -> None:
    ship(monkeypatch, target, drafts)
    with pytest.raises(InvalidArgumentError, match="'/no/where', which is no folder; pass that of an EAGLE-3 head"):
        say(target, SpeculativeOptions(decoder="eagle", draft="/no/where"))


def test_the_hybrid_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(edgellm_hybrid.plugin, "FOLDER", tmp_path)
    loaded = load_plugins(extra=PLUGINS, autoload=False, strict=True)
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: loaded)
    with pytest.raises(InvalidArgumentError, match="python -m training train hybrid"):
        say("edgellm-hybrid-7m")
    write_tiny_qwen_hybrid(tmp_path)
    plain, fast = say("edgellm-hybrid-7m"), say("edgellm-hybrid-7m", "mtp")
    assert plain.token_ids == fast.token_ids == say(tmp_path).token_ids
    assert fast.proposed_draft_tokens > 0


def test_the_command_line_lists_them(
    monkeypatch: pytest.MonkeyPatch, target: Path, drafts: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(edgellm_hybrid.plugin, "FOLDER", tmp_path)
    ship(monkeypatch, target, drafts)
    text = io.StringIO()
    monkeypatch.setattr(cli, "out", Console(file=text, width=300, soft_wrap=True))
    assert CliRunner().invoke(cli.app, ["plugins"]).exit_code == 0
    lines = text.getvalue().splitlines()
    assert "tiny-eagle: a draft for tiny, decoder eagle, present" in lines
    assert f"edgellm-hybrid-7m: a model, no files; {edgellm_hybrid.plugin.REMEDY}" in lines


# ---- the demonstration ----------------------------------------------------------------------------------


@pytest.mark.parametrize("present", [True, False])
def test_the_demonstration_shows_what_there_is(
    monkeypatch: pytest.MonkeyPatch, target: Path, drafts: Path, tmp_path: Path, present: bool
) -> None:
    ship(monkeypatch, target, drafts if present else tmp_path)
    monkeypatch.setattr(demo_speculative, "load_document", lambda: "The lamp is lit at dusk. The horn sounds twice.")
    opened: list[str | None] = []
    proposed: list[int] = []  # by the drafts

    @contextmanager
    def open_llm(decoder: str | None) -> Iterator[LLM]:
        opened.append(decoder)
        with LLM(target, device="cpu", dtype="float32", kv_budget=4096, speculative=decoder) as llm:
            chat = llm.chat

            def counted(*arguments: Any) -> Any:
                outputs = chat(*arguments)
                if decoder in KINDS:
                    proposed.extend(output.proposed_draft_tokens for output in outputs)
                return outputs

            monkeypatch.setattr(llm, "chat", counted)
            yield llm

    text = io.StringIO()
    same = demo_speculative.run_speculative_demo(
        open_llm,
        Console(file=text, width=200, soft_wrap=True),
        max_tokens=10,
        find_drafts=partial(demo_speculative.shipped_drafts, str(target)),
    )
    said = text.getvalue()
    assert same
    assert "the texts are identical, token for token" in said
    assert opened == ["prompt_lookup", None, *(KINDS if present else ())]
    for kind in KINDS:
        assert (f"plain and {kind}" in said) == present
        assert (f"not shown: 'tiny-{kind}' of local 0 lacks its files" in said) != present
    rows = [line.split() for line in said.splitlines() if line.strip().endswith("x") and len(line.split()) == 8]
    assert [row[0] for row in rows] == ["1", "2", "3"] * (3 if present else 1)
    assert (sum(proposed) > 0) == present
