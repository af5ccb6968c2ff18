"""Wrong values in every field of a checkpoint: the error names the file, the field, the value and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import damaged_checkpoints as damaged
import pytest
from safetensors.torch import load_file, save_file
from tiny_model import write_byte_tokenizer

from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models.fields import Fields, naming, read_json_object
from edgellm.models.gguf_file import GgufArray, read_gguf_header
from edgellm.models.loader import load_model
from edgellm.models.safetensors_source import SafetensorsSource
from edgellm.tokenization.tokenizer import load_tokenizer

JUNK = [
    None, True, -1, 0, 1, 1.5, 10**18, 10**400, -(10**18), float("nan"), float("inf"), "", "x", [], [None], ["x"], {},
    {"a": 1}, [[]],
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damaged.write_safetensors(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("name", [*damaged.CONFIG, "head_dim", "attention_bias", "mlp_bias", "quantization_config"])
def test_any_value_in_any_field_of_the_config(folder: Path, name: str) -> None:
    for value in JUNK:
        (folder / "config.json").write_text(json.dumps(damaged.CONFIG | {name: value}))
        error = damaged.refusal(lambda: damaged.load_and_run(folder))
        assert error is None or str(folder) in str(error), f"{name} = {value!r}: {error}"


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_any_value_in_any_field_of_the_rope(folder: Path, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    more = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "type")
    for name in (*rope, *more, "original_max_position_embeddings", "partial_rotary_factor"):
        for value in JUNK:
            changed = damaged.CONFIG | {"rope_scaling": rope | {name: value}}
            (folder / "config.json").write_text(json.dumps(changed))
            error = damaged.refusal(lambda: damaged.load_and_run(folder))
            assert error is None or str(folder / "config.json") in str(error), f"{name} = {value!r}: {error}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": True}, "architectures is True; a list of names is needed"),
        ({"architectures": [None]}, "architectures is [None]; a list of names"),
        ({"model_type": []}, "model_type is []; text is needed"),
        ({"eos_token_id": {}}, "eos_token_id is {}; a token id from 0 to 10, or a list of them, is needed"),
        ({"eos_token_id": [None]}, "eos_token_id is [None]; a token id"),
        ({"eos_token_id": float("nan")}, "eos_token_id is nan; a token id"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'; a token id"),
        ({"eos_token_id": 11}, "eos_token_id is 11; a token id from 0 to 10"),
        ({"bos_token_id": "x"}, "bos_token_id is 'x'; an integer from 0 to 10"),
        ({"hidden_size": 10**18}, "hidden_size is 1000000000000000000; an integer from 1 to 131072"),
        ({"head_dim": 1024}, "head_dim is 1024; an integer from 1 to 512"),
        ({"head_dim": 3}, "head_dim is 3; rope needs an even head_dim"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"max_position_embeddings": 10**18}, "max_position_embeddings is 1000000000000000000; an integer from 1 to"),
        ({"tie_word_embeddings": "x"}, "tie_word_embeddings is 'x'; true or false is needed"),
        ({"quantization_config": [1]}, "quantization_config is [1]; an object is needed"),
        ({"rope_scaling": [1]}, "rope_scaling is [1]; an object is needed"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; a number above 0"),
        ({"rope_theta": float("inf")}, "rope field rope_theta is inf; a number above 1"),
    ],
)
def test_what_the_config_errors_say(folder: Path, changes: dict[str, Any], words: str) -> None:
    (folder / "config.json").write_text(json.dumps(damaged.CONFIG | changes))
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(folder)
    assert str(folder / "config.json") in str(caught.value)
    assert words in str(caught.value)


def test_an_old_config_states_no_padding_token_as_minus_one(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(damaged.CONFIG | {"pad_token_id": -1}))
    assert load_model(folder).config.pad_token_id is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 1}, "stores 'model.layers.1."),
        ({"num_hidden_layers": 3}, "lacks 12 of 39 tensors, the first is 'model.layers.2."),
        ({"vocab_size": 12}, "'model.embed_tokens.weight' is stored as [11, 8] but the config says [12, 8]"),
        ({"hidden_size": 1 << 17, "intermediate_size": 1 << 20, "head_dim": 2}, "but the config says [11, 131072]"),
    ],
)  # fmt: skip
def test_the_config_must_fit_the_tensors_before_memory_is_taken(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    (folder / "config.json").write_text(json.dumps(damaged.CONFIG | changes))
    with pytest.raises(WeightFileError) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)
    assert words in str(caught.value)


def test_stored_rope_frequencies_are_ignored(tmp_path: Path) -> None:
    folder = damaged.write_safetensors(tmp_path / "m")
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = stored["model.norm.weight"].clone()
    save_file(stored, folder / "model.safetensors")
    damaged.load_and_run(folder)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (None, "its entry is None, an object is needed"),
        ([], "its entry is [], an object is needed"),
        ({"dtype": "F32", "data_offsets": [0, 32]}, "shape is None, a list of sizes is needed"),
        ({"dtype": "F32", "data_offsets": [0, 32], "shape": "ab"}, "shape is 'ab', a list of sizes is needed"),
        ({"dtype": "F32", "data_offsets": [0, 32], "shape": [-8]}, "shape is [-8], a list of sizes is needed"),
        ({"dtype": "F32", "data_offsets": [0, 32], "shape": [8.0]}, "shape is [8.0], a list of sizes is needed"),
        ({"dtype": "F32", "data_offsets": [0, 32], "shape": [9]}, "shape [9] needs 36 bytes, data_offsets span 32"),
        ({"shape": [8], "data_offsets": [0, 32]}, "dtype is None, a name is needed"),
        ({"shape": [8], "data_offsets": [0, 32], "dtype": []}, "dtype is [], a name is needed"),
        ({"shape": [8], "dtype": "F32"}, "data_offsets is None, two ascending offsets are needed"),
        ({"shape": [8], "dtype": "F32", "data_offsets": [0, 32, 64]}, "data_offsets is [0, 32, 64], two ascending"),
        ({"shape": [8], "dtype": "F32", "data_offsets": ["0", "32"]}, "data_offsets is ['0', '32'], two ascending"),
        ({"shape": [8], "dtype": "F32", "data_offsets": [32, 0]}, "data_offsets is [32, 0], two ascending"),
        ({"shape": [8], "dtype": "F32", "data_offsets": [4, 36]}, "data_offsets begin at"),
    ],
)
def test_damaged_entries_of_the_safetensors_header(tmp_path: Path, entry: Any, words: str) -> None:
    path = damaged.write_safetensors(tmp_path / "m") / "model.safetensors"
    damaged.replace_header(path, damaged.header_of(path) | {"model.norm.weight": entry})
    with pytest.raises(WeightFileError) as caught:
        load_model(path.parent)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert str(caught.value).endswith("download it again")


def test_bytes_beyond_the_last_tensor_are_damage(tmp_path: Path) -> None:
    path = damaged.write_safetensors(tmp_path / "m") / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"left over")
    with pytest.raises(WeightFileError, match=r"is damaged: its tensors end at byte \d+ of \d+; download it again"):
        load_model(path.parent)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "weight_map is None"),
        ([], "weight_map is []"),
        ({"model.norm.weight": 5}, "weight_map places 'model.norm.weight' in 5"),
        ({"model.norm.weight": []}, "weight_map places 'model.norm.weight' in []"),
        ({"model.norm.weight": "../m/model.safetensors"}, "the name of a file beside it is needed"),
        ({"model.norm.weight": ".."}, "the name of a file beside it is needed"),
        ({"model.norm.weight": "other.safetensors"}, "1 are missing: other.safetensors"),
        ({"no.such.tensor": "model-00001-of-00002.safetensors"}, "says that tensor 'no.such.tensor' is in model-00001"),
    ],
)
def test_damaged_index(tmp_path: Path, change: Any, words: str) -> None:
    folder = tmp_path / "m"
    weight_map = damaged.write_sharded(folder)
    damaged.load_and_run(folder)
    changed = weight_map | change if isinstance(change, dict) else change
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": changed}))
    with pytest.raises(WeightFileError) as caught:
        load_model(folder)
    assert str(folder / "model.safetensors.index.json") in str(caught.value)
    assert words in str(caught.value)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    damaged.write_sharded(folder)
    stored = {name: tensor for name, tensor in damaged.tensors().items() if name == "model.norm.weight"}
    for file in sorted(folder.glob("*.safetensors")):
        save_file(load_file(file) | stored, file)
    with pytest.raises(WeightFileError, match=r"'model.norm.weight' is in .*00001.* and in .*00002"):
        SafetensorsSource(folder)


def test_deeply_nested_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(WeightFileError, match=r"config.json cannot be read as JSON \(it nests too deeply\)"):
        read_json_object(tmp_path / "config.json")


# --- GGUF ----------------------------------------------------------------------------------------------------


def test_the_gguf_header_is_read_as_written(tmp_path: Path) -> None:
    header = read_gguf_header(damaged.write_gguf(tmp_path / "m.gguf"))
    assert header.values["llama.block_count"] == 2
    assert header.values["tokenizer.ggml.tokens"] == GgufArray(11)
    assert header.tensors["blk.0.attn_k.weight"].shape == (4, 8)
    assert header.tensors["blk.0.attn_k.weight"].row_bytes == 32
    damaged.load_and_run(tmp_path / "m.gguf")


GGUF_JUNK = [True, -1, 0, 1, 2**31, 2**40, 1.5, float("nan"), "", "x", [1, 2], ["a"]]
GGUF_KEYS = [
    *(f"llama.{name}" for name in (*damaged.GGUF_INTS, *damaged.GGUF_FLOATS)),
    "llama.attention.key_length", "llama.rope.scaling.type", "llama.rope.scaling.attn_factor", "llama.expert_count",
    "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.padding_token_id",
]  # fmt: skip


@pytest.mark.parametrize("key", GGUF_KEYS)
def test_any_value_in_any_gguf_key(tmp_path: Path, key: str) -> None:
    for value in GGUF_JUNK:
        path = damaged.write_gguf(tmp_path / "m.gguf", replace={key: value})
        error = damaged.refusal(lambda path=path: damaged.load_and_run(path))
        assert error is None or str(path) in str(error), f"{key} = {value!r}: {error}"


@pytest.mark.parametrize(
    ("replace", "words"),
    [
        ({"llama.block_count": [2, 2]}, "llama.block_count is GgufArray(length=2); an integer from 1 to 1024"),
        ({"llama.attention.head_count": 2**40}, "llama.attention.head_count is 1099511627776; an integer"),
        ({"llama.attention.head_count": 3}, "not a multiple"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base is nan; a number above 1"),
        ({"llama.rope.scaling.factor": "x"}, "llama.rope field factor is 'x'; a number above 0"),
        ({"tokenizer.ggml.eos_token_id": 99}, "tokenizer.ggml.eos_token_id is 99; a token id from 0 to 10"),
        ({"tokenizer.ggml.tokens": ["t"] * 12}, "token_embd.weight has 11 rows and tokenizer.ggml.tokens 12 entries"),
        ({"general.alignment": 33}, "general.alignment is 33, a power of two from 8"),
        ({"llama.block_count": 1}, "stores 'model.layers.1."),
    ],
)
def test_what_the_gguf_errors_say(tmp_path: Path, replace: dict[str, Any], words: str) -> None:
    path = damaged.write_gguf(tmp_path / "m.gguf", replace=replace)
    with pytest.raises(damaged.REFUSALS) as caught:
        load_model(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_a_huge_array_length_ends_at_once(tmp_path: Path) -> None:
    """The length of an array of bytes, set to 2**60: nothing must count up to it."""
    path = damaged.write_gguf(tmp_path / "m.gguf", replace={"some.list": [1, 2, 3]})
    blob = bytearray(path.read_bytes())
    place = blob.index(b"some.list") + len(b"some.list") + 8
    assert blob[place : place + 8] == (3).to_bytes(8, "little")
    blob[place : place + 8] = (1 << 60).to_bytes(8, "little")
    path.write_bytes(blob)
    with pytest.raises(WeightFileError, match="goes on beyond the end of the file"):
        load_model(path)


# --- tokenizer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, -1, 1.5, 10**18, "x", {}, [None], [[]], ["x"], float("nan")])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_wrong_end_tokens_beside_the_tokenizer_are_named(tmp_path: Path, name: str, value: Any) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(WeightFileError) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / name) in str(caught.value)
    assert f"eos_token_id is {value!r}; a token id" in str(caught.value)


# --- the reader itself ---------------------------------------------------------------------------------------


def test_fields_give_values_in_range_and_defaults() -> None:
    fields = Fields("f.json", {"i": 5, "n": 2, "b": True, "t": "x", "o": {"k": 1}, "null": None, "none": -1})
    assert fields.integer("i", 5, 5) == 5
    assert fields.integer("null", 1, 2, default=7) == 7
    assert fields.optional_integer("absent", 1, 2) is None
    assert fields.number("n", above=1) == 2.0
    assert fields.optional_number("null", above=0) is None
    assert fields.flag("b", default=False) is True
    assert fields.text("t") == "x"
    assert fields.texts("absent") == []
    assert fields.token_ids("i", 6) == (5,)
    assert fields.optional_id("none", 6) is None
    assert fields.section("o").integer("k", 0, 1) == 1
    assert dict(fields.items()).keys() == {"i", "n", "b", "t", "o", "none"}


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        Fields("f.json", {"t": "x" * 10_000}).integer("t", 0, 1)
    assert len(str(caught.value)) < 200


def test_naming_adds_the_file_once() -> None:
    with pytest.raises(WeightFileError, match=r"^x.gguf: damaged$"), naming("x.gguf"):
        raise WeightFileError("damaged")
    with pytest.raises(WeightFileError, match=r"^file x.gguf: damaged$"), naming("x.gguf"):
        raise WeightFileError("file x.gguf: damaged")
