"""What leaves the training: the target as a checkpoint folder, and students as parts of the plugins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_model import write_tiny_llama

import edgellm_eagle.plugin
import edgellm_hybrid.plugin
import edgellm_shared_kv.plugin
from edgellm import LLM, SamplingParams
from edgellm.models.loader import load_model
from edgellm.plugins import load_plugins
from training import ship
from training.target_checkpoint import write_checkpoint
from training.target_file import pack

SHIPPED = {
    "eagle": ("eagle", edgellm_eagle.plugin),
    "assistant": ("shared-kv", edgellm_shared_kv.plugin),
    "hybrid": ("hybrid", edgellm_hybrid.plugin),
}


@pytest.mark.parametrize("tied", [True, False])
def test_the_target_file_becomes_the_checkpoint_it_was(tmp_path: Path, tied: bool) -> None:
    model = write_tiny_llama(tmp_path / "model", tie_word_embeddings=tied, rope_theta=50_000.0)
    pack(model, tmp_path / "target.bin")
    folder = write_checkpoint(tmp_path / "target.bin", model, tmp_path / "folder")
    one, two = load_model(model).config, load_model(folder).config
    for name in ("vocab_size", "num_layers", "head_dim", "rope", "tied_embeddings", "eos_token_ids", "max_positions"):
        assert getattr(one, name) == getattr(two, name), name
    said = []
    for path in (model, folder):
        with LLM(path, device="cpu", dtype="float32", kv_budget=1024) as llm:
            params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
            said.append(llm.generate(["the quick brown fox"], params)[0].token_ids)
    assert said[0] == said[1]


def test_matrices_of_the_checkpoint_are_rounded_and_norms_are_not(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = write_tiny_llama(tmp_path / "model")
    pack(model, tmp_path / "target.bin")
    folder = write_checkpoint(tmp_path / "target.bin", model, tmp_path / "folder", torch.bfloat16)
    stored, wanted = load_file(folder / "model.safetensors"), load_file(model / "model.safetensors")
    assert stored.keys() == wanted.keys()
    for name, tensor in stored.items():
        assert tensor.dtype == (torch.float32 if tensor.ndim == 1 else torch.bfloat16), name
        assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name


@pytest.mark.parametrize("name", sorted(ship.PLACES))
def test_a_student_goes_where_its_plugin_looks(name: str) -> None:
    plugins = load_plugins(extra=[SHIPPED[name]], autoload=False, strict=True)
    (registered,) = plugins.shipped
    assert (ship.PLUGINS / ship.PLACES[name].folder).resolve() == registered.folder.resolve()
    assert f"python -m training ship {name}" in registered.remedy


@pytest.mark.parametrize("name", sorted(ship.PLACES))
def test_shipping_copies_the_files_of_the_export_alone(tmp_path: Path, name: str) -> None:
    export, place = tmp_path / "export", ship.PLACES[name]
    export.mkdir()
    with pytest.raises(FileNotFoundError, match=f"config.json does not exist; train {name} first"):
        ship.ship(name, export, tmp_path / "plugins")
    for file in (*place.files, "state.pt"):
        (export / file).write_text(file)
    copies = ship.ship(name, export, tmp_path / "plugins")
    assert sorted(path.name for path in (tmp_path / "plugins" / place.folder).iterdir()) == sorted(place.files)
    assert [path.read_text() for path in copies] == list(place.files)


def test_a_student_that_is_too_large_stays(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(16_000_000)
    with pytest.raises(ValueError, match=r"16\.0 MB, and 16 MB may go"):
        ship.ship("assistant", tmp_path, tmp_path / "plugins")
    assert not (tmp_path / "plugins").exists()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(15_999_998)
    assert len(ship.ship("assistant", tmp_path, tmp_path / "plugins")) == 2
