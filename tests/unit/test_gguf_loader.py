"""GGUF files: names, rope rows, every supported type against a decoder written from the format, refusals."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from ragged import permuted_page_rows, ragged_batch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models.gguf_loader import GgufSource, hf_name, unpermute_rope_rows
from edgellm.models.loader import load_model
from edgellm.models.registry import Architecture
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.kv_cache import KVCache

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_model(family: str, **changes: Any) -> PreTrainedModel:
    config_class, model_class, own = FAMILIES[family]
    torch.manual_seed(5)
    model = model_class(config_class(**(SIZES | own | changes))).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter.uniform_(0.5, 1.5)
    return model


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleave_rope_rows(values: np.ndarray, num_heads: int) -> np.ndarray:
    """What converters do to Llama's Q and K: rows i and i + half become rows 2i and 2i + 1."""
    split = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    family: str,
    *,
    quantise: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    skip: tuple[str, ...] = (),
    extra: dict[str, Any] | None = None,
    raw: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """Write a model as converters do; `skip` leaves metadata keys out, `raw` replaces stored tensors."""
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    ints = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if family == "qwen3" else SIZES["hidden_size"] // 4,
    }
    floats = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 50000.0}
    for name, value in ints.items():
        if name not in skip:
            writer.add_uint32(f"{family}.{name}", value)
    for name, number in floats.items():
        if name not in skip:
            writer.add_float32(f"{family}.{name}", number)
    for name, item in (extra or {}).items():
        add = (
            writer.add_string
            if isinstance(item, str)
            else (writer.add_float32 if isinstance(item, float) else writer.add_uint32)
        )
        add(name, item)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 3)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            values = interleave_rope_rows(values, heads)
        stored = gguf_name(name)
        if raw and stored in raw:
            writer.add_tensor(stored, raw[stored][0], raw_dtype=raw[stored][1])
        elif values.ndim == 1:
            writer.add_tensor(stored, values)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(values, quantise), raw_dtype=quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def our_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    model = load_model(path)
    executor = CpuExecutor(model, KVCache.for_model(model.config, num_pages=16, page_size=4))
    batch = ragged_batch([(0, 0, tokens)], permuted_page_rows(1, 16, seed=1))
    return executor.forward(batch)[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_float_file_equals_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    """Llama's rows come back un-permuted, Qwen's as they are."""
    model = make_model(family, tie_word_embeddings=tied)
    tokens = [5, 9, 1, 60, 33, 8, 8, 2]
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    actual = our_logits(write_gguf(tmp_path / "m.gguf", model, family), tokens)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_metadata_becomes_the_config(tmp_path: Path) -> None:
    config = GgufSource(write_gguf(tmp_path / "m.gguf", make_model("qwen3"), "qwen3")).config
    assert (config.architecture, config.head_dim, config.num_kv_heads) == (Architecture.QWEN3, 24, 2)
    assert (config.qk_norm, config.qkv_bias, config.tied_embeddings) == (True, False, False)
    assert (config.vocab_size, config.max_positions, config.eos_token_ids) == (64, 128, (3,))
    assert config.rope.theta == 50000.0


def test_scaled_rope_and_stored_factors(tmp_path: Path) -> None:
    extra = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    rope = GgufSource(write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama", extra=extra)).config.rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 32)


def test_unpermute_is_the_inverse_of_the_converters_permutation() -> None:
    rows = np.arange(24, dtype=np.float32).reshape(12, 2)
    stored = interleave_rope_rows(rows, 2)
    assert stored[:6, 0].tolist() == [0, 6, 2, 8, 4, 10]
    assert np.array_equal(unpermute_rope_rows(stored, 2), rows)
    assert np.array_equal(unpermute_rope_rows(stored[:, 0], 2), rows[:, 0])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16", "F32"])
def test_quantised_files_hold_what_the_format_says(name: str, tmp_path: Path) -> None:
    """Weights are within the step of the type of what was stored, and exactly what the block formula gives."""
    quantise = gguf.GGMLQuantizationType[name]
    model = make_model("qwen2")
    path = write_gguf(tmp_path / "m.gguf", model, "qwen2", quantise=quantise)
    ours = load_model(path).weights.layers[1].down
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_down.weight")
    assert stored.tensor_type.name == name
    decoded = decode(stored.data.tobytes(), name).reshape(64, 96)
    torch.testing.assert_close(ours, torch.from_numpy(decoded), atol=0, rtol=1e-6)
    steps = {"Q4_0": 8, "Q4_1": 15, "Q8_0": 127, "F16": 2048, "BF16": 256, "F32": 1e9}[name]
    original = model.state_dict()["model.layers.1.mlp.down_proj.weight"]
    assert float((ours - original).abs().max()) <= float(original.abs().max()) * 2 / steps


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_k_quants_are_decoded_as_the_format_says(name: str, tmp_path: Path) -> None:
    """Random blocks (there is no writer for these): one super-block of 256 values a row."""
    model = make_model("llama", intermediate_size=256)
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    rng = np.random.default_rng(9)
    blocks = rng.integers(0, 256, (64, block_bytes), dtype=np.uint8)
    half = rng.uniform(0.001, 0.02, (64, 2)).astype(np.float16).view(np.uint8).reshape(64, 4)
    if name == "Q4_K":
        blocks[:, :4] = half
    else:
        blocks[:, -2:] = half[:, :2]
    raw = {"blk.0.ffn_down.weight": (blocks, gguf.GGMLQuantizationType[name])}
    path = write_gguf(tmp_path / "m.gguf", model, "llama", raw=raw)
    expected = torch.from_numpy(decode(blocks.tobytes(), name).reshape(64, 256))
    torch.testing.assert_close(load_model(path).weights.layers[0].down, expected, atol=1e-7, rtol=1e-6)


def decode(data: bytes, name: str) -> np.ndarray:
    """The block formulas of the GGUF types, value by value."""
    if name in ("F32", "F16"):
        return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[name]).astype(np.float32)
    if name == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    blocks = [data[start : start + size] for start in range(0, len(data), size)]
    decoder = {"Q4_0": decode_q4_0, "Q4_1": decode_q4_1, "Q8_0": decode_q8_0, "Q4_K": decode_q4_k, "Q6_K": decode_q6_k}
    return np.array([value for block in blocks for value in decoder[name](block)], np.float32)


def decode_q4_0(block: bytes) -> list[float]:
    (scale,) = struct.unpack_from("<e", block)
    return [scale * ((byte & 15) - 8) for byte in block[2:]] + [scale * ((byte >> 4) - 8) for byte in block[2:]]


def decode_q4_1(block: bytes) -> list[float]:
    scale, low = struct.unpack_from("<ee", block)
    return [scale * (byte & 15) + low for byte in block[4:]] + [scale * (byte >> 4) + low for byte in block[4:]]


def decode_q8_0(block: bytes) -> list[float]:
    (scale,) = struct.unpack_from("<e", block)
    return [scale * value for value in struct.unpack_from("<32b", block, 2)]


def decode_q4_k(block: bytes) -> list[float]:
    """8 groups of 32; 6-bit scales and minimums packed in 12 bytes."""
    scale, low = struct.unpack_from("<ee", block)
    packed, quants = block[4:16], block[16:]
    values = []
    for group in range(8):
        if group < 4:
            factor, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            factor = (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4)
            minimum = (packed[group + 4] >> 4) | (packed[group] >> 6 << 4)
        chunk = quants[group // 2 * 32 : group // 2 * 32 + 32]
        nibbles = [byte >> 4 if group % 2 else byte & 15 for byte in chunk]
        values += [scale * factor * nibble - low * minimum for nibble in nibbles]
    return values


def decode_q6_k(block: bytes) -> list[float]:
    """Low 4 bits, high 2 bits, sixteen 8-bit scales, one float16 scale."""
    low, high, scales = block[:128], block[128:192], struct.unpack_from("<16b", block, 192)
    (scale,) = struct.unpack_from("<e", block, 208)
    values = []
    for idx in range(256):
        part, rest = divmod(idx, 128)
        quarter, place = divmod(rest, 32)
        byte = low[64 * part + 32 * (quarter % 2) + place]
        bits = (byte >> 4 if quarter >= 2 else byte & 15) | ((high[32 * part + place] >> (2 * quarter) & 3) << 4)
        values.append(scale * scales[idx // 16] * (bits - 32))
    return values


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama", quantise=gguf.GGMLQuantizationType.Q5_0)
    with pytest.raises(UnsupportedModelError, match=r"has GGUF type Q5_0; supported: F32, F16, BF16, Q4_0, Q4_1, Q8_0"):
        load_model(path)


def test_unknown_type_number_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama")
    data = bytearray(path.read_bytes())
    name = b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8
    struct.pack_into("<I", data, at, 250)
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=r"GGUF type that is not known.*250.*supported: F32"):
        load_model(path)


@pytest.mark.parametrize("keep", [0.02, 0.5, 0.999])
def test_truncated_file_is_refused(keep: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(
        WeightFileError,
        match=r"m\.gguf is not a readable GGUF file \(damaged or truncated at \d+ bytes.*\); download it again$",
    ):
        load_model(path)


def test_a_damaged_header_is_told_in_our_own_words(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama")
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 4, 77)  # the format's version
    path.write_bytes(data)
    with pytest.raises(WeightFileError) as caught:
        load_model(path)
    message = str(caught.value)
    assert message.startswith(f"{path} is not a readable GGUF file (damaged or truncated at {len(data)} bytes")
    assert message.endswith("); download it again")
    assert "Sorry" not in message


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("<html>not found</html>")
    with pytest.raises(WeightFileError, match="is not a GGUF file"):
        load_model(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(WeightFileError, match="is not a GGUF file"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": ("rope.freq_base",)}, "has no rope: neither llama.rope.freq_base nor llama.rope.dimension_count"),
        ({"skip": ("block_count",)}, r"m.gguf: llama.block_count is missing; an integer from 1 to 1024 is needed"),
        ({"extra": {"llama.rope.scaling.type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"extra": {"llama.rope.scaling.yarn_beta_fast": 16.0}}, "yarn_beta_fast, which decides the numbers"),
        ({"extra": {"llama.rope.dimension_count": 8}}, "rotates 8 of 16 dimensions"),
        ({"extra": {"llama.expert_count": 8}}, "mixture of experts"),
    ],
)
def test_incomplete_or_unsupported_metadata(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama", **options)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(path)


def test_other_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="'gemma3' is not supported; supported: llama, qwen2, qwen3"):
        load_model(tmp_path / "m.gguf")


def test_foreign_tensor_is_refused() -> None:
    assert hf_name("blk.11.attn_q.bias") == "model.layers.11.self_attn.q_proj.bias"
    with pytest.raises(UnsupportedModelError, match=r"'blk.0.ssm_in.weight' belongs to no supported architecture"):
        hf_name("blk.0.ssm_in.weight")


def test_file_fingerprint_follows_content(tmp_path: Path) -> None:
    first = load_model(write_gguf(tmp_path / "a.gguf", make_model("qwen2"), "qwen2")).fingerprint
    again = load_model(write_gguf(tmp_path / "b.gguf", make_model("qwen2"), "qwen2")).fingerprint
    other = load_model(write_gguf(tmp_path / "c.gguf", make_model("qwen2", initializer_range=0.1), "qwen2")).fingerprint
    assert first == again != other
