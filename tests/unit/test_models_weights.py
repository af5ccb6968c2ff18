"""Loading a Hugging Face directory: fused slices, progress, fingerprint, and every kind of broken file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgellm.errors import InvalidArgumentError, UnsupportedModelError, WeightFileError
from edgellm.models.loader import load_model

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
SHAPES = {
    "input_layernorm.weight": (8,),
    "self_attn.q_proj.weight": (8, 8),
    "self_attn.k_proj.weight": (4, 8),
    "self_attn.v_proj.weight": (4, 8),
    "self_attn.q_proj.bias": (8,),
    "self_attn.k_proj.bias": (4,),
    "self_attn.v_proj.bias": (4,),
    "self_attn.o_proj.weight": (8, 8),
    "post_attention_layernorm.weight": (8,),
    "mlp.gate_proj.weight": (6, 8),
    "mlp.up_proj.weight": (6, 8),
    "mlp.down_proj.weight": (8, 6),
}


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    shapes = {f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in SHAPES.items()}
    shapes |= {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,), "lm_head.weight": (11, 8)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def write_model(folder: Path, stored: dict[str, torch.Tensor], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(stored, folder / "model.safetensors")
    return folder


def write_sharded(folder: Path, stored: dict[str, torch.Tensor]) -> Path:
    """Even and odd tensors in two files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = sorted(stored)
    weight_map = {name: f"model-0000{idx % 2 + 1}-of-00002.safetensors" for idx, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: stored[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_stored_tensors_become_slices_of_the_fused_ones(tmp_path: Path) -> None:
    stored = tensors()
    weights = load_model(write_model(tmp_path / "m", stored)).weights
    layer, prefix = weights.layers[1], "model.layers.1."

    def join(part: str, names: list[str], kind: str) -> torch.Tensor:
        return torch.cat([stored[f"{prefix}{part}.{name}.{kind}"] for name in names])

    assert torch.equal(layer.qkv, join("self_attn", ["q_proj", "k_proj", "v_proj"], "weight"))
    assert layer.qkv_bias is not None
    assert torch.equal(layer.qkv_bias, join("self_attn", ["q_proj", "k_proj", "v_proj"], "bias"))
    assert torch.equal(layer.gate_up, join("mlp", ["gate_proj", "up_proj"], "weight"))
    assert torch.equal(layer.down, stored[prefix + "mlp.down_proj.weight"])
    assert torch.equal(layer.o, stored[prefix + "self_attn.o_proj.weight"])
    assert torch.equal(layer.mlp_norm, stored[prefix + "post_attention_layernorm.weight"])
    assert (layer.o_bias, layer.q_norm, layer.gate_up_bias) == (None, None, None)
    assert torch.equal(weights.embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(weights.lm_head, stored["lm_head.weight"])
    assert weights.num_bytes() == sum(tensor.nbytes for tensor in stored.values())
    assert not layer.qkv.requires_grad


def test_tied_embeddings_share_memory_and_ignore_a_stored_head(tmp_path: Path) -> None:
    weights = load_model(write_model(tmp_path / "m", tensors(), tie_word_embeddings=True)).weights
    assert weights.lm_head.data_ptr() == weights.embedding.data_ptr()


@pytest.mark.parametrize("stored_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_dtypes(tmp_path: Path, stored_dtype: torch.dtype, dtype: str, expected: torch.dtype) -> None:
    stored = tensors(stored_dtype)
    model = load_model(write_model(tmp_path / "m", stored), dtype=dtype)
    assert model.dtype == expected
    assert torch.equal(model.weights.layers[0].down, stored["model.layers.0.mlp.down_proj.weight"].to(expected))


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="dtype is 'int4'; supported: auto, float32, bfloat16"):
        load_model(write_model(tmp_path / "m", tensors()), dtype="int4")


def test_sharded_equals_single(tmp_path: Path) -> None:
    single = load_model(write_model(tmp_path / "single", tensors()))
    sharded = load_model(write_sharded(tmp_path / "sharded", tensors()))
    for ours, theirs in zip(single.weights.layers, sharded.weights.layers, strict=True):
        assert torch.equal(ours.qkv, theirs.qkv)
    assert single.fingerprint == sharded.fingerprint


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    stored = tensors()
    load_model(write_model(tmp_path / "m", stored), on_progress=lambda *call: calls.append(call))
    total = sum(tensor.nbytes for tensor in stored.values())
    assert len(calls) == len(stored)
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert calls[-1][:2] == (total, total)
    assert {name for _, _, name in calls} == set(stored)


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    original = load_model(write_model(tmp_path / "a", tensors())).fingerprint
    assert len(original) == 64
    assert load_model(write_model(tmp_path / "b", tensors())).fingerprint == original
    changed = tensors()
    changed["model.layers.1.mlp.down_proj.weight"][3, 2] += 1.0
    assert load_model(write_model(tmp_path / "c", changed)).fingerprint != original
    assert load_model(write_model(tmp_path / "d", tensors(), rope_theta=5e5)).fingerprint != original
    assert load_model(tmp_path / "a", dtype="bfloat16").fingerprint != original


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:40])


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def scribble(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 16) + b"not a JSON text.")


def text_page(folder: Path) -> None:
    (folder / "model.safetensors").write_text("<html>404 not found, sorry about that</html>")


def remove(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def without_tensor(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.1.self_attn.v_proj.weight"]
    save_file(stored, folder / "model.safetensors")


def with_wrong_shape(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    stored["model.norm.weight"] = torch.ones(9)
    save_file(stored, folder / "model.safetensors")


def with_unknown_bias(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.mlp.down_proj.bias"] = torch.ones(8)
    save_file(stored, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"model.safetensors is truncated: \d+ bytes, \d+ needed; download it again"),
        (cut_header, "is truncated: 40 bytes"),
        (empty, "is truncated: 0 bytes, 8 needed"),
        (scribble, "has a damaged header"),
        (text_page, "is not a safetensors file"),
        (remove, "holds neither model.safetensors nor model.safetensors.index.json"),
        (without_tensor, "lacks 1 of 27 tensors, the first is 'model.layers.1.self_attn.v_proj.weight'"),
        (with_wrong_shape, r"'model.norm.weight' is stored as \[9\] but the config says \[8\]"),
        (with_unknown_bias, "stores 'model.layers.0.mlp.down_proj.bias'.*does not mention"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = write_model(tmp_path / "m", tensors())
    damage(folder)
    with pytest.raises(WeightFileError, match=message):
        load_model(folder)


def test_index_that_names_a_missing_file(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m", tensors())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightFileError, match=r"names 2 files, 1 are missing: model-00002-of-00002.safetensors; down"):
        load_model(folder)


def test_damaged_index(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m", tensors())
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(WeightFileError, match=r"index.json is damaged"):
        load_model(folder)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    stored = tensors() | {"model.norm.weight": torch.ones(8, dtype=torch.int8)}
    with pytest.raises(UnsupportedModelError, match=r"'model.norm.weight' has dtype 'I8'; supported: F32, BF16, F16"):
        load_model(write_model(tmp_path / "m", stored))


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(WeightFileError, match="no model at"):
        load_model(tmp_path / "absent")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match=r"neither a directory nor a .gguf file"):
        load_model(tmp_path / "weights.bin")
