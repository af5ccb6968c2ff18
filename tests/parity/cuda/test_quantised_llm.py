"""Quantised checkpoints on a GPU: packed in memory, and the answers of the same numbers stored in 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantised_checkpoint import AWQ, COMPRESSED, FP8, GPTQ, Quantise, awq, fp8, gptq, write_quantised

from edgellm import LLM, SamplingParams
from edgellm.kernels.packed_weight import PackedWeight
from edgellm.models.loader import load_model

# Every sum of these widths is cut at whole units, so that packed and plain weights give the same bits.
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "initializer_range": 0.05,
}
CASES = {
    "awq": (AWQ | {"group_size": 128}, awq(128)),
    "gptq": (GPTQ | {"group_size": 128, "sym": True}, gptq(128, symmetric=True)),
    "fp8": (FP8 | {"weight_block_size": [128, 128]}, fp8((128, 128), "weight_scale_inv")),
    "compressed": (COMPRESSED, fp8(None, "weight_scale", by_row=True)),
}
PROMPTS = [
    {"prompt_token_ids": [1 + (index * 31 + place * 7) % 250 for place in range(length)]}
    for index, length in enumerate((5, 300, 18))
]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def answers(folder: Path, dtype: str, device: str = "cuda", *, deterministic: bool = True) -> list[list[int]]:
    options = {"device": device, "dtype": dtype, "kv_budget": 2048, "max_batch_size": 4}
    with LLM(folder, deterministic=deterministic, **options) as llm:
        return [list(output.token_ids) for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(CASES))
def test_packed_answers_are_those_of_the_plain_checkpoint(tmp_path: Path, name: str) -> None:
    """In deterministic mode, prompts longer than what the packed kernel takes included."""
    config: dict[str, object]
    quantise: Quantise
    config, quantise = CASES[name]
    folder = write_quantised(tmp_path, config, quantise, **SHAPE)
    model = load_model(folder / "quantised", dtype="float16", device="cuda")
    assert all(isinstance(layer.down, PackedWeight) for layer in model.weights.layers)
    ours, theirs = (answers(folder / kind, "float16") for kind in ("quantised", "plain"))
    assert ours == theirs
    assert len({tuple(answer) for answer in ours}) == len(PROMPTS)


@pytest.mark.gpu
def test_float32_is_expanded(tmp_path: Path) -> None:
    folder = write_quantised(tmp_path, *CASES["awq"], **SHAPE)
    ours, theirs = (load_model(folder / kind, dtype="float32", device="cuda") for kind in ("quantised", "plain"))
    assert torch.equal(ours.weights.layers[1].gate_up, theirs.weights.layers[1].gate_up)
