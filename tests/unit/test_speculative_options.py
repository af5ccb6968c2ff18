"""What `SpeculativeOptions` and its draft may be: refused where they are written, in the caller's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_tiny_llama

from edgellm import LLM, SpeculativeOptions
from edgellm.decoding.options import DecoderChoice
from edgellm.errors import InvalidArgumentError
from edgellm.models.config import ModelConfig, config_from_hf, read_config_json
from edgellm.shipped import draft_folder


class NoText:
    """A path that is bytes."""

    def __fspath__(self) -> bytes:
        return b"head"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def config(model: Path) -> ModelConfig:
    return config_from_hf(read_config_json(model))


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("", "draft is '', which would mean the current folder"),
        (3, "draft is a int; pass a path or None"),
        (b"head", "draft is a bytes"),
        (NoText(), "draft is a NoText"),
    ],
)
def test_drafts_that_are_no_path(draft: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        SpeculativeOptions(decoder="eagle", draft=draft)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("~nobodyxx/head", "draft '~nobodyxx/head' names no home that exists"),
        ("/nonexistent", "draft is '/nonexistent', which is no folder; pass that of a head"),
        ("a" * 300, "draft 'a*' cannot be looked at: .*; pass another folder"),
        ("a\0b", "which is no folder"),
    ],
)
def test_drafts_that_are_no_folder(config: ModelConfig, draft: str, message: str) -> None:
    options = SpeculativeOptions(decoder="eagle", draft=draft)
    choice = DecoderChoice(options=options, config=config, path=Path("model"))
    with pytest.raises(InvalidArgumentError, match=message):
        draft_folder(choice, "eagle", "a head")


def test_a_draft_below_the_home_folder(config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "head").mkdir()
    options = SpeculativeOptions(decoder="eagle", draft=Path("~/head"))
    assert draft_folder(DecoderChoice(options=options, config=config, path=Path("model")), "eagle", "a head") == (
        tmp_path / "head"
    )


def test_the_short_name_of_prompt_lookup_is_known_wherever_a_kind_is() -> None:
    assert SpeculativeOptions(decoder="lookup") == SpeculativeOptions(decoder="prompt_lookup")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft": "/nonexistent"}, "draft is '/nonexistent'; decoder 'vanilla' proposes nothing, leave it out"),
        ({"num_drafts": 3}, "num_drafts is 3; decoder 'vanilla' proposes nothing, leave it out"),
        ({"top_k": 4}, "top_k is 4"),
    ],
)
def test_plain_decoding_takes_no_options_of_proposals(model: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        LLM(model, device="cpu", speculative=SpeculativeOptions(decoder="vanilla", **fields))


def test_plain_decoding_may_be_named(model: Path) -> None:
    for speculative in ("vanilla", SpeculativeOptions(decoder="vanilla")):
        LLM(model, device="cpu", kv_budget=256, speculative=speculative).close()
