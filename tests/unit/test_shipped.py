"""Checkpoints that plugins bring: what may be registered, which model a draft is for, what is said without files."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any

import pytest

from edgellm.errors import InvalidArgumentError
from edgellm.fetch import DEFAULT_MODEL, PACKAGED_MODELS, resolve_model
from edgellm.hookspecs import hookimpl
from edgellm.models.config import config_from_hf
from edgellm.plugins import PluginStatus, load_plugins
from edgellm.shipped import DEFAULT_TARGET, CheckpointRegistrar, DraftTarget, drafts_for, models_of

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
}


def plugin(*registrations: tuple[tuple[Any, ...], dict[str, Any]]) -> types.ModuleType:
    """A plugin that registers checkpoints and nothing else."""
    made = types.ModuleType("brings_checkpoints")
    made.EDGELLM_API = ((1, 3), (1, 3))  # type: ignore[attr-defined]

    @hookimpl
    def edgellm_register_checkpoints(register: CheckpointRegistrar) -> None:
        for positional, named in registrations:
            register(*positional, **named)

    made.edgellm_register_checkpoints = edgellm_register_checkpoints  # type: ignore[attr-defined]
    return made


def test_plugins_bring_models_and_drafts(tmp_path: Path) -> None:
    brings = plugin(
        (("a-model", tmp_path / "m"), {}),
        (("a-draft", str(tmp_path / "d")), {"decoder": "eagle", "target": DEFAULT_TARGET, "remedy": "make one"}),
    )
    loaded = load_plugins(extra=[("one", brings)], autoload=False, strict=True)
    assert [(each.name, each.folder, each.plugin, each.distribution) for each in loaded.shipped] == [
        ("a-model", tmp_path / "m", "one", "local 0"),
        ("a-draft", tmp_path / "d", "one", "local 0"),
    ]
    assert list(models_of(loaded.shipped)) == ["a-model"]
    assert [each.name for each in drafts_for(loaded.shipped, config_from_hf(SMOLLM2))] == ["a-draft"]


def test_a_plugin_that_registers_a_taken_name_brings_nothing(tmp_path: Path) -> None:
    first, second = plugin((("same", tmp_path), {})), plugin((("other", tmp_path), {}), (("same", tmp_path), {}))
    loaded = load_plugins(extra=[("one", first), ("two", second)], autoload=False, strict=False)
    assert [each.name for each in loaded.shipped] == ["same"]
    report = loaded.reports[-1]
    assert report.status is PluginStatus.FAILED
    assert "checkpoint 'same' is already registered by 'one'; rename it" in report.reason


@pytest.mark.parametrize(
    ("name", "folder", "named", "words"),
    [
        ("", "f", {}, "must be a word"),
        ("a/b", "f", {}, "'a/b'; it must be a word that is no path"),
        (3, "f", {}, "must be a word"),
        ("a", 3, {}, "folder 3; it must be a path"),
        ("a", "f", {"decoder": "eagle"}, "a draft has both, a model neither"),
        ("a", "f", {"target": DEFAULT_TARGET}, "a draft has both, a model neither"),
    ],
)
def test_bad_registrations_are_refused(name: Any, folder: Any, named: dict[str, Any], words: str) -> None:
    registrar = CheckpointRegistrar("p")
    with pytest.raises(InvalidArgumentError, match=words):
        registrar(name, folder, **named)
    assert registrar.added == []


def test_a_target_is_told_by_sizes_vocabulary_and_rope() -> None:
    config = config_from_hf(SMOLLM2)
    assert DEFAULT_TARGET.matches(config)
    assert DraftTarget.of(config, DEFAULT_MODEL) == DEFAULT_TARGET
    assert DEFAULT_TARGET.matches(config_from_hf({**SMOLLM2, "max_position_embeddings": 2048, "dtype": "bfloat16"}))
    changes = {
        "architectures": ["Qwen2ForCausalLM"], "vocab_size": 49_153, "hidden_size": 1152, "num_hidden_layers": 29,
        "num_attention_heads": 18, "num_key_value_heads": 9, "head_dim": 32, "rope_theta": 10_000.0,
    }  # fmt: skip
    assert not [
        name for name, value in changes.items() if DEFAULT_TARGET.matches(config_from_hf({**SMOLLM2, name: value}))
    ]


@pytest.mark.model
def test_the_default_target_is_the_default_model(default_model: Path) -> None:
    from edgellm.models.loader import open_checkpoint

    assert DraftTarget.of(open_checkpoint(default_model)[0], DEFAULT_MODEL) == DEFAULT_TARGET


def test_a_model_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brings = plugin((("small", tmp_path / "small"), {"remedy": "train it"}))
    models = models_of(load_plugins(extra=[("one", brings)], autoload=False, strict=True).shipped)
    with pytest.raises(InvalidArgumentError, match=r"'small' of local 0 lacks its files .*; train it$"):
        resolve_model("small", shipped=models)
    (tmp_path / "small").mkdir()
    for file in ("config.json", "model.safetensors"):
        assert not models["small"].is_present
        (tmp_path / "small" / file).touch()
    assert resolve_model("small", shipped=models) == tmp_path / "small"
    with pytest.raises(InvalidArgumentError, match=rf"\({', '.join(PACKAGED_MODELS)}, small\)"):
        resolve_model("smal", shipped=models)
    monkeypatch.chdir(tmp_path)  # a path of that name goes first, as with every name
    assert resolve_model("small", shipped={"small": dataclasses.replace(models["small"], folder=Path("/x"))}) == Path(
        "small"
    )
