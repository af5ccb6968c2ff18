"""AWQ, GPTQ and fp8 checkpoints: the numbers, the packed memory, the answers, and every variant that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_checkpoint import AWQ, COMPRESSED, FORMATS, FP8, GPTQ, awq, fp8, gptq, linear_prefixes, write_quantised
from reference_placement import ReferencePlacement, make_engine
from safetensors.torch import load_file, save_file

from edgellm import SamplingParams
from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.kernels.packed_weight import PackedKind, PackedWeight, workspace_elements
from edgellm.kernels.ref.quantised_linear import expand_weight
from edgellm.models.config import config_from_hf
from edgellm.models.loader import LoadedModel, fingerprint, load_model, open_checkpoint, stays_packed
from edgellm.models.packed_layers import describe_packed, why_expanded
from edgellm.models.pinned_upload import PinnedUpload
from edgellm.models.quantised_source import QuantisedSource
from edgellm.models.weights import load_weights, weight_bytes
from edgellm.runtime.cuda_memory import DeviceMemory
from edgellm.runtime.placement import CpuPlacement

CPU = torch.device("cpu")
PROMPTS = [[1 + (index * 31 + place * 7) % 250 for place in range(length)] for index, length in enumerate((5, 41, 18))]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=list(FORMATS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders "quantised" and "plain" with the same numbers."""
    return write_quantised(tmp_path_factory.mktemp("checkpoint"), *FORMATS[request.param])


class PackedPlacement(ReferencePlacement):
    """Packed weights under the reference operators."""

    def load_model(self, path: Path, on_progress: Any) -> LoadedModel:
        return load_packed(path, torch.float32)


def load_packed(path: Path, dtype: torch.dtype) -> LoadedModel:
    config, source = open_checkpoint(path)
    with torch.inference_mode():
        weights = load_weights(config, source, dtype=dtype, device=CPU, packed=True)
    return LoadedModel(config, weights, path, fingerprint(config, source, dtype))


def expand(weight: PackedWeight) -> torch.Tensor:
    matrix = torch.empty(weight.shape, dtype=weight.dtype)
    expand_weight(weight, matrix)
    return matrix


def test_a_quantised_weight_reads_as_its_numbers(checkpoint: Path) -> None:
    config, source = open_checkpoint(checkpoint / "quantised")
    plain = load_file(checkpoint / "plain" / "model.safetensors")
    assert config.quantisation is not None
    assert dict(source.specs()).keys() == plain.keys()
    for name, tensor in plain.items():
        assert source.specs()[name].shape == tuple(tensor.shape)
        assert torch.equal(source.read(name), tensor), name


def test_pieces_are_those_numbers_too(checkpoint: Path) -> None:
    _, source = open_checkpoint(checkpoint / "quantised")
    plain = load_file(checkpoint / "plain" / "model.safetensors")
    assert isinstance(source, QuantisedSource)
    upload = PinnedUpload(source, CPU, piece_bytes=4096)
    for name in ("model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"):
        target = torch.empty_like(plain[name])
        upload.fill(name, target)
        assert torch.equal(target, plain[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_expand_to_the_same(checkpoint: Path, dtype: torch.dtype) -> None:
    model, plain = load_packed(checkpoint / "quantised", dtype), load_model(checkpoint / "plain", dtype="float32")
    for ours, theirs in zip(model.weights.layers, plain.weights.layers, strict=True):
        assert torch.equal(ours.qkv_bias, theirs.qkv_bias.to(dtype))
        for name in ("qkv", "o", "gate_up", "down"):
            weight, expected = getattr(ours, name), getattr(theirs, name)
            assert isinstance(weight, PackedWeight)
            if dtype == torch.float32 or weight.kind is PackedKind.FP8:
                assert torch.equal(expand(weight), expected.to(dtype))
            else:  # scales are rounded first
                torch.testing.assert_close(expand(weight), expected.to(dtype), rtol=2**-7, atol=0)


def test_memory_is_counted_packed(checkpoint: Path) -> None:
    config, _ = open_checkpoint(checkpoint / "quantised")
    model = load_packed(checkpoint / "quantised", torch.bfloat16)
    assert model.weights.num_bytes() == weight_bytes(config, torch.bfloat16, packed=True)
    qkv = model.weights.layers[0].qkv
    dense = qkv.shape[0] * qkv.shape[1] * 2
    most = 0.3 if qkv.kind is PackedKind.INT4 else 0.57
    assert dense / 5 < qkv.nbytes < dense * most
    assert qkv.workspace.data_ptr() == model.weights.layers[1].down.workspace.data_ptr()


def test_the_same_answers_as_the_plain_checkpoint(checkpoint: Path) -> None:
    """On the CPU, and packed under the device's executor, in one piece and in several."""
    answers = []
    for folder, placement in (("plain", CpuPlacement), ("quantised", CpuPlacement), ("quantised", PackedPlacement)):
        engine = make_engine(checkpoint / folder, placement, kv_budget=384, max_batch_size=3)
        try:
            answers.append([output.token_ids for output in engine.generate(PROMPTS, GREEDY)])
        finally:
            engine.shutdown()
    assert answers[0] == answers[1] == answers[2]
    assert len({tuple(answer) for answer in answers[0]}) == len(PROMPTS)


def test_the_fingerprint_sees_every_part(tmp_path: Path) -> None:
    config, quantise = FORMATS["gptq"]
    folder = write_quantised(tmp_path, config, quantise) / "quantised"
    stored = load_file(folder / "model.safetensors")
    first = load_model(folder).fingerprint
    for part in ("qweight", "scales", "qzeros"):
        changed = dict(stored)
        changed[f"model.layers.1.mlp.up_proj.{part}"] = (
            stored[f"model.layers.1.mlp.up_proj.{part}"].flip(1).contiguous()
        )
        save_file(changed, folder / "model.safetensors")
        assert load_model(folder).fingerprint != first


def test_the_budget_says_how_weights_are_stored(checkpoint: Path) -> None:
    packed = load_packed(checkpoint / "quantised", torch.bfloat16)
    assert packed.config.quantisation is not None
    assert describe_packed(packed) == packed.config.quantisation.describe()
    assert describe_packed(load_model(checkpoint / "quantised")) == ""
    memory = DeviceMemory(
        device_name="card",
        weights_bytes=5 << 30,
        free_bytes=2 << 30,
        scratch_bytes=0,
        graph_bytes=0,
    )
    assert f"weights 5.0 GiB ({describe_packed(packed)}), scratch" in memory.describe(describe_packed(packed))


def test_what_stays_packed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, source = open_checkpoint(write_quantised(tmp_path, *FORMATS["awq"]) / "quantised")
    assert stays_packed(config, source, torch.float16)
    assert not caplog.messages
    assert not stays_packed(config, source, torch.float32)
    assert "expanded to float32: the kernels compute in 16 bits" in caplog.text


@pytest.mark.parametrize(
    ("quantised", "changes", "reason"),
    [
        (GPTQ | {"group_size": 32}, {}, "groups have 32 columns"),
        (GPTQ | {"group_size": 96}, {}, "groups have 96 columns"),
        (FP8 | {"weight_block_size": [40, 128]}, {}, "blocks have 40 rows"),
        (GPTQ, {"intermediate_size": 96}, "intermediate_size is 96; the kernels take multiples of 64"),
        (FP8, {"intermediate_size": 104}, "intermediate_size is 104; the kernels take multiples of 16"),
        (FP8, {"head_dim": 4}, r"num_key_value_heads \* head_dim is 8"),
        (FP8, {}, ""),
        (COMPRESSED, {}, ""),
        (None, {}, "not quantised"),
    ],
)
def test_why_weights_are_expanded(quantised: dict[str, Any] | None, changes: dict[str, Any], reason: str) -> None:
    config = config_from_hf(LLAMA | {"quantization_config": quantised} | changes)
    found = why_expanded(config, torch.bfloat16)
    assert bool(found) == bool(reason)
    if reason:
        import re

        assert re.search(reason, found)


def test_a_layer_that_was_left_out_expands_all(tmp_path: Path) -> None:
    folder = write_quantised(tmp_path, *FORMATS["awq"])
    plain, stored = (load_file(folder / name / "model.safetensors") for name in ("plain", "quantised"))
    prefix = "model.layers.1.self_attn.k_proj."
    for part in ("qweight", "qzeros", "scales"):
        del stored[prefix + part]
    stored[f"{prefix}weight"] = plain[f"{prefix}weight"]
    save_file(stored, folder / "quantised" / "model.safetensors")
    config, source = open_checkpoint(folder / "quantised")
    assert why_expanded(config, torch.bfloat16, source.specs()) == f"{prefix}weight is stored in F32"
    ours, theirs = load_model(folder / "quantised").weights, load_model(folder / "plain").weights
    assert torch.equal(ours.layers[1].qkv, theirs.layers[1].qkv)


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    ("quantised", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "method 'bitsandbytes'.*supported: awq, gptq, fp8.*GGUF file"),
        ({"bits": 4}, "method 'unknown'"),
        (GPTQ | {"bits": 3}, "bits 3 is not supported; supported: 4 bits.*unquantised checkpoint"),
        (GPTQ | {"bits": 8}, "bits 8 is not supported"),
        (GPTQ | {"bits": "4"}, "quantization_config.bits is '4'; an integer"),
        (GPTQ | {"desc_act": True}, "desc_act true .*supported: false"),
        (GPTQ | {"lm_head": True}, "lm_head true"),
        (GPTQ | {"dynamic": {"+:layers.1": {"bits": 8}}}, "dynamic .*the same for all layers"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'.*gptq, gptq_v2"),
        (GPTQ | {"group_size": 0}, "group_size 0"),
        (GPTQ | {"group_size": -2}, "group_size is -2; an integer from -1"),
        (AWQ | {"version": "gemv"}, "version 'gemv'.*gemm"),
        (AWQ | {"zero_point": False}, "zero_point false"),
        ({"quant_method": "awq", "w_bit": 3}, "w_bit 3"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2'.*e4m3"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size \[128\].*two sizes"),
        (FP8 | {"weight_block_size": [128, 0]}, "two sizes"),
        (COMPRESSED | {"format": "pack-quantized"}, "format 'pack-quantized'.*float-quantized"),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (COMPRESSED | {"config_groups": {}}, "one group"),
        (
            COMPRESSED | {"config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}},
            "weights int of 8 bits.*float of 8 bits",
        ),
        (
            COMPRESSED | {"config_groups": {"a": {"weights": {"num_bits": 8, "type": "float", "strategy": "group"}}}},
            "strategy 'group'",
        ),
    ],
)
def test_refused(quantised: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf(LLAMA | {"quantization_config": quantised})


def test_other_spellings() -> None:
    config = config_from_hf(LLAMA | {"quantization_config": {"quant_method": "awq", "w_bit": 4, "q_group_size": 64}})
    assert config.quantisation is not None
    assert config.quantisation.describe() == "int4, a scale for 64 columns (awq)"
    config = config_from_hf(LLAMA | {"quantization_config": FP8 | {"weight_block_size": [128, 128]}})
    assert config.quantisation is not None
    assert config.quantisation.describe() == "fp8, a scale for 128 x 128 (fp8)"


def damaged(folder: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """The quantised checkpoint of `folder` with tensors replaced, or (None) missing."""
    path = folder / "quantised" / "model.safetensors"
    stored: dict[str, torch.Tensor | None] = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, path)
    return folder / "quantised"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq", {"g_idx": torch.arange(64).flip(0).int() // 32}, "out of order"),
        ("gptq", {"qzeros": None}, "lacks 'model.layers.0.self_attn.q_proj.qzeros'"),
        ("gptq", {"scales": torch.zeros(2, 64).half()}, r"stored as \[2, 64\], \[1, 64\] is needed"),
        ("awq", {"qzeros": torch.zeros(1, 4).int()}, r"stored as \[1, 4\], \[1, 8\] is needed"),
        ("awq", {"qweight": torch.zeros(60, 8).int()}, "60 input columns, which groups of 64"),
        ("fp8 blocks", {"weight_scale_inv": None}, "lacks 'model.layers.0.self_attn.q_proj.weight_scale_inv'"),
        ("fp8 blocks", {"weight_scale_inv": torch.zeros(3, 1)}, r"stored as \[3, 1\], \[2, 1\] is needed"),
        ("compressed rows", {"weight_scale": torch.zeros(7)}, "one scale, or one for each of 64 rows"),
    ],
)
def test_damaged(tmp_path: Path, name: str, changes: dict[str, torch.Tensor | None], message: str) -> None:
    prefix = "model.layers.0.self_attn.q_proj."
    folder = damaged(write_quantised(tmp_path, *FORMATS[name]), {prefix + key: value for key, value in changes.items()})
    with pytest.raises((UnsupportedModelError, WeightFileError), match=message) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "part", "value", "message"),
    [
        ("gptq", "qweight", torch.zeros(8, 64).half(), "qweight' is stored in F16 and 2 dimensions; I32 and 2"),
        ("gptq", "qweight", torch.zeros(8, 64), "qweight' is stored in F32"),
        ("gptq", "qweight", torch.zeros(1, 8, 64).int(), "qweight' is stored in I32 and 3 dimensions"),
        ("awq", "qweight", torch.zeros(512).int(), "qweight' is stored in I32 and 1 dimensions"),
        ("awq", "qzeros", torch.zeros(1, 8).half(), "qzeros' is stored in F16"),
        ("awq", "scales", torch.ones(1, 64).int(), "scales' is stored in I32.*F32, BF16, F16 and 2"),
        ("gptq", "scales", torch.ones(1, 64).to(torch.float8_e4m3fn), "scales' is stored in F8_E4M3"),
        ("gptq", "g_idx", torch.zeros(64), "g_idx' is stored in F32"),
        ("gptq", "g_idx", torch.zeros(5).int(), r"g_idx' is stored as \[5\], \[64\] is needed"),
        ("gptq", "g_idx", torch.zeros(()).int(), "g_idx' is stored in I32 and 0 dimensions"),
        ("gptq", "weight", torch.zeros(64, 64), "q_proj.weight' is stored beside .*q_proj.qweight'"),
        ("gptq", "bias", torch.zeros(64).int(), "q_proj.bias' is stored in I32; .*F32, BF16, F16"),
        ("gptq", "bias", torch.zeros(64).to(torch.float8_e4m3fn), "q_proj.bias' is stored in F8_E4M3"),
        ("gptq", "weight", torch.zeros(64, 64).to(torch.float8_e4m3fn), "q_proj.weight' is stored beside"),
        (
            "fp8 matrix",
            "weight",
            torch.zeros(1, 64, 64).to(torch.float8_e4m3fn),
            "weight' is .* 3 dimensions",
        ),
        ("fp8 matrix", "weight_scale", torch.ones(()).int(), "weight_scale' is stored in I32"),
        ("fp8 matrix", "weight_scale", torch.ones(()).to(torch.float8_e4m3fn), "weight_scale' is stored in F8_E4M3"),
    ],
)
def test_tensors_of_another_kind(tmp_path: Path, name: str, part: str, value: torch.Tensor, message: str) -> None:
    """Words that are no words, floats that are no floats: refused, not reinterpreted."""
    folder = damaged(write_quantised(tmp_path, *FORMATS[name]), {f"model.layers.0.self_attn.q_proj.{part}": value})
    with pytest.raises((UnsupportedModelError, WeightFileError), match=message) as caught:
        open_checkpoint(folder)
    assert "download" in str(caught.value) or "check that config.json" in str(caught.value)


@pytest.mark.parametrize("name", ["gptq", "fp8 matrix"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_tensors_outside_linear_layers_are_floats(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    folder = damaged(write_quantised(tmp_path, *FORMATS[name]), {"model.norm.weight": torch.ones(64).to(dtype)})
    with pytest.raises((UnsupportedModelError, WeightFileError), match=r"'model.norm"):
        open_checkpoint(folder)


def test_a_matrix_scale_under_the_name_of_blocks(tmp_path: Path) -> None:
    """transformers keeps the name `weight_scale_inv` where weight_block_size is null."""
    folder = write_quantised(tmp_path, FP8 | {"weight_block_size": None}, fp8(None, "weight_scale_inv"))
    ours, theirs = load_model(folder / "quantised").weights, load_model(folder / "plain").weights
    assert torch.equal(ours.layers[1].qkv, theirs.layers[1].qkv)


def test_blocks_of_one_row(tmp_path: Path) -> None:
    config = FP8 | {"weight_block_size": [1, 64]}
    folder = write_quantised(tmp_path, config, fp8((1, 64), "weight_scale_inv"))
    ours, theirs = load_model(folder / "quantised").weights, load_model(folder / "plain").weights
    assert torch.equal(ours.layers[1].down, theirs.layers[1].down)
    stored, source = open_checkpoint(folder / "quantised")
    assert (
        why_expanded(stored, torch.bfloat16, source.specs()) == "blocks have 1 rows; the kernels take multiples of 16"
    )


def test_small_groups_work_where_they_are_expanded(tmp_path: Path) -> None:
    folder = write_quantised(tmp_path, AWQ | {"group_size": 16}, awq(16))
    ours, theirs = load_model(folder / "quantised").weights, load_model(folder / "plain").weights
    assert torch.equal(ours.layers[0].down, theirs.layers[0].down)


def test_wrapped_zeros(tmp_path: Path) -> None:
    """A zero of 0 is stored as 15 in format v1."""
    quantise = gptq(64)
    folder = write_quantised(tmp_path, GPTQ, lambda prefix, weight: quantise(prefix, weight.abs()))
    stored = load_file(folder / "quantised" / "model.safetensors")
    prefix = next(iter(linear_prefixes(load_file(folder / "plain" / "model.safetensors"))))
    assert (stored[f"{prefix}qzeros"] == -1).all()
    assert torch.equal(
        load_model(folder / "quantised").weights.layers[0].o, load_model(folder / "plain").weights.layers[0].o
    )


def test_the_workspace_holds_a_panel_at_least() -> None:
    assert workspace_elements([(32, 64), (64, 32)]) == 2048
    assert workspace_elements([(1 << 14, 1 << 14)]) == 16 << 20
    assert workspace_elements([(16, 1 << 21)]) == 16 << 21


def test_config_json_is_read_from_the_folder(tmp_path: Path) -> None:
    folder = write_quantised(tmp_path, *FORMATS["awq"]) / "quantised"
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["bits"] = 8
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match="bits 8") as caught:
        load_model(folder)
    assert str(folder / "config.json") in str(caught.value)
