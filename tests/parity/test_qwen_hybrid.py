"""Tiny random Qwen3-Next and Qwen3.5 against transformers: logits and greedy tokens, float32, any chunking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged import GreedySequence, permuted_page_rows, ragged_batch, run_greedy
from safetensors.torch import load_file, save_file
from transformers import (
    DynamicCache,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from edgellm.models.loader import load_model
from edgellm.models.step import HiddenRequest
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.kv_cache import KVCache
from edgellm.runtime.recurrent_state import RecurrentState

PAGE_SIZE = 4
PAGES_PER_SLOT = 20
NUM_SLOTS = 6
NUM_NEW = 32
# Logits have a spread of about 1.4.  The norm of a delta net's heads enlarges the rounding of heads that nearly cancel,
# so a few rows are further off than all others.
TOLERANCE = 2e-3
MEAN_TOLERANCE = 3e-5

BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    # Wide weights make logits that differ, so that greedy tokens are not one repeated token.
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}

# name: (model class, changes of the config, keyword arguments of save_pretrained)
VARIANTS: dict[str, tuple[type[PreTrainedModel], dict[str, Any], dict[str, Any]]] = {
    "next-dense": (Qwen3NextForCausalLM, {"num_experts": 0}, {}),
    "next-moe": (Qwen3NextForCausalLM, EXPERTS | {"mlp_only_layers": [1]}, {}),
    "next-moe-step": (
        Qwen3NextForCausalLM,
        EXPERTS
        | {
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_parameters": YARN,
            "num_key_value_heads": 6,
            "linear_num_value_heads": 2,
        },
        {"max_shard_size": "20KB"},
    ),
    "3.5-dense": (Qwen3_5ForCausalLM, {}, {}),
    "3.5-tied": (
        Qwen3_5ForCausalLM,
        {"tie_word_embeddings": True, "attention_bias": True, "linear_conv_kernel_dim": 2},
        {},
    ),
    "3.5-conditional": (Qwen3_5ForConditionalGeneration, {}, {}),
    "3.5-moe": (Qwen3_5MoeForCausalLM, EXPERTS, {}),
    "3.5-moe-packed": (Qwen3_5MoeForConditionalGeneration, EXPERTS, {}),
}
MAIN = ["next-dense", "next-moe", "3.5-dense", "3.5-moe"]


def make_reference(name: str, folder: Path, **more: Any) -> PreTrainedModel:
    """A random model saved in `folder`; norms and biases are made uneven so that leaving one out shows.

    Args:
        more: further changes of the config.
    """
    model_class, changes, save_options = VARIANTS[name]
    torch.manual_seed(11)
    model = model_class(_config(model_class, BASE | changes | more)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif key.endswith("linear_attn.norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif "norm" in key:
                parameter.uniform_(-0.5, 0.5)  # zero-centred
    model.save_pretrained(folder, **save_options)
    if "packed" in name:
        pack_experts(folder / "model.safetensors")
    return model


def _config(model_class: type[PreTrainedModel], values: dict[str, Any]) -> Any:
    if model_class is Qwen3_5ForConditionalGeneration:
        return Qwen3_5Config(text_config=values, vision_config=VISION)
    if model_class is Qwen3_5MoeForConditionalGeneration:
        return Qwen3_5MoeConfig(text_config=values, vision_config=VISION)
    configs = {
        Qwen3NextForCausalLM: Qwen3NextConfig,
        Qwen3_5ForCausalLM: Qwen3_5TextConfig,
        Qwen3_5MoeForCausalLM: Qwen3_5MoeTextConfig,
    }
    return configs[model_class](**values)


def pack_experts(path: Path) -> None:
    """Store the experts of a layer as one tensor, as the published Qwen3.5 checkpoints do."""
    tensors = load_file(path)
    for prefix in {name.split(".experts.")[0] + ".experts." for name in tensors if ".experts." in name}:
        parts = {
            part: torch.stack([tensors.pop(f"{prefix}{expert}.{part}.weight") for expert in range(6)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{prefix}gate_up_proj"] = torch.cat((parts["gate_proj"], parts["up_proj"]), dim=1)
        tensors[f"{prefix}down_proj"] = parts["down_proj"]
    save_file(tensors, path)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@torch.no_grad()
def reference_greedy(reference: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy tokens and their logits.

    Token by token, so that transformers takes the recurrent form of the delta rule: the form in chunks, which it takes
    for prompts, differs from it by far more than float32 rounding on weights as wide as these.
    """
    tokens, logits = list(prompt), []
    cache = DynamicCache(config=reference.config)
    for place in range(len(prompt) + NUM_NEW - 1):
        output = reference(input_ids=torch.tensor([[tokens[place]]]), cache=cache, use_cache=True)
        if place >= len(prompt) - 1:
            logits.append(output.logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], logits


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    assert (ours - theirs).abs().mean() < MEAN_TOLERANCE


class Pair:
    """A transformers model and ours with the same weights; what the former answers is computed once."""

    def __init__(self, name: str, folder: Path) -> None:
        self.reference = make_reference(name, folder)
        self.model = load_model(folder)
        self._answers: dict[tuple[int, ...], tuple[list[int], list[torch.Tensor]]] = {}

    def greedy(self, prompt: list[int]) -> tuple[list[int], list[torch.Tensor]]:
        if tuple(prompt) not in self._answers:
            self._answers[tuple(prompt)] = reference_greedy(self.reference, prompt)
        return self._answers[tuple(prompt)]

    def check(self, sequence: GreedySequence) -> None:
        tokens, logits = self.greedy(sequence.prompt)
        close(torch.stack(sequence.logits), torch.stack(logits))
        assert sequence.tokens == tokens
        assert len(set(tokens)) > 1


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("model")
    pair = Pair(request.param, folder)
    if request.param == "next-moe-step":
        assert len(list(folder.glob("*.safetensors"))) > 3
    return pair


def make_executor(model: Any) -> CpuExecutor:
    kv_cache = KVCache.for_model(
        model.config, num_pages=NUM_SLOTS * PAGES_PER_SLOT, page_size=PAGE_SIZE, dtype=model.dtype
    )
    kv_cache.fill_poison()
    return CpuExecutor(model, kv_cache, recurrent=RecurrentState(model.config.recurrent_pieces, NUM_SLOTS))


def prompts(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, BASE["vocab_size"], length).tolist() for length in lengths]


@pytest.mark.parametrize("chunk", [1, 7, PAGE_SIZE, 1000])
def test_greedy_equals_transformers_for_every_chunk_size(pair: Pair, chunk: int) -> None:
    sequence = GreedySequence(slot=1, prompt=prompts([29])[0], chunk=chunk, num_new=NUM_NEW)
    run_greedy(make_executor(pair.model), [sequence], permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=1))
    pair.check(sequence)


def test_ragged_batch_of_five_equals_transformers(pair: Pair) -> None:
    """Different lengths and chunk sizes, so that from the second step on chunks and decode rows share a pass."""
    chunks = [1000, 7, 3, 13, 20]
    sequences = [
        GreedySequence(slot=slot, prompt=prompt, chunk=chunks[idx], num_new=NUM_NEW)
        for idx, (slot, prompt) in enumerate(zip([2, 0, 5, 1, 3], prompts([1, 19, 9, 14, 23]), strict=True))
    ]
    run_greedy(make_executor(pair.model), sequences, permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=2))
    for sequence in sequences:
        pair.check(sequence)


def test_all_logits_and_hidden_rows_equal_transformers(pair: Pair) -> None:
    prompt = prompts([19])[0]
    batch = ragged_batch([(0, 0, prompt)], permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=6))
    batch.logits_index = np.arange(len(prompt), dtype=np.int64)
    batch.logits_to_seq = np.zeros(len(prompt), np.int32)
    executor = make_executor(pair.model)
    executor.request_hidden(HiddenRequest(layers=(0, 3), normed=True))
    output = executor.forward_verify(batch)
    with torch.no_grad():
        expected = pair.reference(input_ids=torch.tensor([prompt]), use_cache=False, output_hidden_states=True)
    close(output.logits, expected.logits[0])
    hidden = torch.cat([expected.hidden_states[layer][0] for layer in (0, 3, 4)], dim=1)
    close(output.hidden, hidden)


@pytest.mark.parametrize("name", MAIN)
def test_verified_and_rewound_rows_are_those_of_plain_decoding(name: str, tmp_path: Path) -> None:
    """Bit for bit: proposals beside each other, half of them refused, beside another sequence."""
    make_reference(name, tmp_path)
    model = load_model(tmp_path)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=3)
    prompt, other = prompts([6, 7])
    plain = GreedySequence(slot=0, prompt=prompt, chunk=6, num_new=9)
    run_greedy(make_executor(model), [plain], page_rows)
    executor = make_executor(model)
    for slot, tokens in ((4, prompt), (1, other)):
        executor.forward(ragged_batch([(slot, 0, tokens)], page_rows))
    wrong = [(token + 1) % BASE["vocab_size"] for token in plain.tokens]
    rows, done = [], 0
    for step, proposals in enumerate((wrong[1:3], plain.tokens[2:4], [])):
        tokens = [plain.tokens[done], *proposals]
        batch = ragged_batch([(4, len(prompt) + done, tokens), (1, len(other) + step, [3])], page_rows)
        batch.logits_index = np.arange(len(tokens), dtype=np.int64)
        batch.logits_to_seq = np.zeros(len(tokens), np.int32)
        logits = executor.forward_verify(batch).logits
        kept = 1 if proposals == wrong[1:3] else len(tokens)
        rows.append(logits[:kept])
        if kept < len(tokens):
            executor.rewind([4], [kept])
        done += kept
    for ours, theirs in zip(torch.cat(rows), plain.logits[1:], strict=False):
        assert torch.equal(ours, theirs)
    assert done == 5


@pytest.mark.parametrize("name", MAIN)
def test_bfloat16_stays_close_to_float32(name: str, tmp_path: Path) -> None:
    """bfloat16 carries 8 bits: the logits of four layers stay within a few per cent of their spread."""
    make_reference(name, tmp_path)
    prompt = prompts([29])[0]
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=7)
    rows: dict[str, torch.Tensor] = {}
    for dtype in ("float32", "bfloat16"):
        executor = make_executor(load_model(tmp_path, dtype=dtype))
        executor.forward(ragged_batch([(0, 0, prompt[:20])], page_rows))
        executor.forward(ragged_batch([(0, 20, prompt[20:28])], page_rows))
        rows[dtype] = executor.forward(ragged_batch([(0, 28, prompt[28:])], page_rows))[0]
    assert rows["bfloat16"].dtype == torch.float32
    error = (rows["bfloat16"] - rows["float32"]).std() / rows["float32"].std()
    assert 0.0 < error < 0.1
