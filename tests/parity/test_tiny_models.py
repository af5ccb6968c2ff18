"""Tiny random Llama, Qwen2 and Qwen3 against transformers: logits and greedy tokens, float32, any chunking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged import GreedySequence, permuted_page_rows, ragged_batch, run_greedy
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from edgellm.models.loader import load_model
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.kv_cache import KVCache

PAGE_SIZE = 4
PAGES_PER_SLOT = 16
NUM_SLOTS = 4
NUM_NEW = 12
TOLERANCE = 1e-4

FAMILIES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
BASE = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Wide weights make logits that differ, so that greedy tokens are not one repeated token.
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN_ALL = YARN | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.3, "truncate": False}
YARN_MSCALE = YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}

# name: (family, changes of the config, keyword arguments of save_pretrained)
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": DEFAULT}, {}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}, {}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}, {}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}, {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama-head-dim": ("llama", {"head_dim": 20}, {}),
    "llama-mha": ("llama", {"num_key_value_heads": 6}, {}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}, {}),
    "llama-sharded": ("llama", {}, {"max_shard_size": "20KB"}),
    "qwen2": ("qwen2", {"rope_parameters": DEFAULT | {"rope_theta": 1000000.0}}, {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN_ALL, "tie_word_embeddings": True}, {}),
    "qwen3": ("qwen3", {"head_dim": 16}, {}),
    "qwen3-yarn": ("qwen3", {"head_dim": 32, "rope_parameters": YARN_MSCALE, "attention_bias": True}, {}),
    "qwen3-tied-sharded": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}, {"max_shard_size": "20KB"}),
}


def make_reference(name: str, folder: Path) -> PreTrainedModel:
    """A random model saved in `folder`; norms and biases are made uneven so that leaving one out shows."""
    family, changes, save_options = VARIANTS[name]
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(11)
    model = model_class(config_class(**(BASE | changes))).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in key:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, **save_options)
    return model


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Any]:
    """(transformers model, our loaded model) with the same weights."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = make_reference(request.param, folder)
    if "sharded" in request.param:
        assert len(list(folder.glob("*.safetensors"))) > 3
    return reference, load_model(folder)


def make_executor(model: Any) -> CpuExecutor:
    kv_cache = KVCache.for_model(model.config, num_pages=NUM_SLOTS * PAGES_PER_SLOT, page_size=PAGE_SIZE)
    kv_cache.fill_poison()
    return CpuExecutor(model, kv_cache)


def prompts(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, BASE["vocab_size"], length).tolist() for length in lengths]


@torch.no_grad()
def reference_greedy(reference: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy tokens and their logits without any cache: every step runs the whole sequence."""
    tokens, logits = list(prompt), []
    for _ in range(NUM_NEW):
        logits.append(reference(torch.tensor([tokens]), use_cache=False).logits[0, -1])
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], logits


def check(sequence: GreedySequence, reference: PreTrainedModel) -> None:
    tokens, logits = reference_greedy(reference, sequence.prompt)
    for step, (ours, theirs) in enumerate(zip(sequence.logits, logits, strict=True)):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE, msg=lambda m, s=step: f"step {s}: {m}")
    assert sequence.tokens == tokens
    assert len(set(tokens)) > 1


@pytest.mark.parametrize("chunk", [1, 7, PAGE_SIZE, 3 * PAGE_SIZE + 1, 1000])
def test_greedy_equals_transformers_for_every_chunk_size(pair: tuple[PreTrainedModel, Any], chunk: int) -> None:
    reference, model = pair
    sequence = GreedySequence(slot=1, prompt=prompts([29])[0], chunk=chunk, num_new=NUM_NEW)
    run_greedy(make_executor(model), [sequence], permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=1))
    check(sequence, reference)


def test_ragged_batch_of_chunks_and_decode_rows_equals_transformers(pair: tuple[PreTrainedModel, Any]) -> None:
    """Different lengths and chunk sizes, so that from the second step on chunks and decode rows share a pass."""
    reference, model = pair
    chunks = [1000, 7, 3, 13]
    sequences = [
        GreedySequence(slot=slot, prompt=prompt, chunk=chunks[idx], num_new=NUM_NEW)
        for idx, (slot, prompt) in enumerate(zip([2, 0, 3, 1], prompts([1, 29, 17, 40]), strict=True))
    ]
    run_greedy(make_executor(model), sequences, permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=2))
    for sequence in sequences:
        check(sequence, reference)


def test_shared_prefix_pages_give_the_same_logits(pair: tuple[PreTrainedModel, Any]) -> None:
    """A second sequence whose row starts with the first one's pages continues from their state."""
    reference, model = pair
    prompt = prompts([27])[0]
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=3)
    executor = make_executor(model)
    run_greedy(executor, [GreedySequence(slot=0, prompt=prompt, chunk=1000, num_new=1)], page_rows)
    page_rows[1, :5] = page_rows[0, :5]
    other = prompt[: 5 * PAGE_SIZE] + prompts([9])[0]
    sequence = GreedySequence(slot=1, prompt=other, chunk=1000, num_new=NUM_NEW, done=5 * PAGE_SIZE)
    run_greedy(executor, [sequence], page_rows)
    check(sequence, reference)


def test_copied_page_gives_the_same_logits(pair: tuple[PreTrainedModel, Any]) -> None:
    reference, model = pair
    prompt = prompts([22])[0]
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    executor = make_executor(model)
    run_greedy(executor, [GreedySequence(slot=0, prompt=prompt, chunk=1000, num_new=1)], page_rows)
    executor.copy_pages(page_rows[0, :6], page_rows[3, :6])
    executor.kv_cache.fill_poison(page_rows[0])
    sequence = GreedySequence(slot=3, prompt=prompt, chunk=1000, num_new=NUM_NEW, done=21)
    run_greedy(executor, [sequence], page_rows)
    check(sequence, reference)


def test_all_logits_of_a_chunk_equal_transformers(pair: tuple[PreTrainedModel, Any]) -> None:
    reference, model = pair
    prompt = prompts([19])[0]
    batch = ragged_batch([(0, 0, prompt)], permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=6))
    batch.logits_index = np.arange(len(prompt), dtype=np.int64)
    batch.logits_to_seq = np.zeros(len(prompt), np.int32)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt]), use_cache=False).logits[0]
    torch.testing.assert_close(make_executor(model).forward(batch), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_bfloat16_stays_close_to_float32(name: str, tmp_path: Path) -> None:
    """bfloat16 carries 8 bits: the logits of three layers stay within a few per cent of their spread."""
    make_reference(name, tmp_path)
    prompt = prompts([29])[0]
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=7)
    rows: dict[str, torch.Tensor] = {}
    for dtype in ("float32", "bfloat16"):
        model = load_model(tmp_path, dtype=dtype)
        kv_cache = KVCache.for_model(model.config, num_pages=64, page_size=PAGE_SIZE, dtype=model.dtype)
        executor = CpuExecutor(model, kv_cache)
        executor.forward(ragged_batch([(0, 0, prompt[:20])], page_rows))
        executor.forward(ragged_batch([(0, 20, prompt[20:28])], page_rows))
        rows[dtype] = executor.forward(ragged_batch([(0, 28, prompt[28:])], page_rows))[0]
    assert rows["bfloat16"].dtype == torch.float32
    error = (rows["bfloat16"] - rows["float32"]).std() / rows["float32"].std()
    assert 0.0 < error < 0.06


def test_bfloat16_pages_under_float32_weights(tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    model = load_model(tmp_path)
    prompt = prompts([29])[0]
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=8)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        kv_cache = KVCache.for_model(model.config, num_pages=64, page_size=PAGE_SIZE, dtype=dtype)
        executor = CpuExecutor(model, kv_cache)
        executor.forward(ragged_batch([(0, 0, prompt[:20])], page_rows))
        executor.forward(ragged_batch([(0, 20, prompt[20:28])], page_rows))
        rows.append(executor.forward(ragged_batch([(0, 28, prompt[28:])], page_rows))[0])
    error = (rows[1] - rows[0]).std() / rows[0].std()
    assert 0.0 < error < 0.03
