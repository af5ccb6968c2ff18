"""Tiny random Gemma3 and Gemma4 text models against transformers: logits and greedy tokens, float32, any chunking.

Prompts are several windows long.  Through the executor first, then through the public API with and without reuse.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged import GreedySequence, permuted_page_rows, ragged_batch, run_greedy
from safetensors.torch import load_file, save_file
from tiny_model import write_byte_tokenizer
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    PreTrainedModel,
)

from edgellm import LLM, SamplingParams
from edgellm.models.loader import load_model
from edgellm.models.step import HiddenRequest
from edgellm.runtime.attention_cpu import AttentionStep
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.kv_cache import KVCache

PAGE_SIZE = 4
PAGES_PER_SLOT = 24
NUM_SLOTS = 5
NUM_NEW = 32
WINDOW = 8
TOLERANCE = 1e-4
VOCAB = 257  # a token for each byte, and the end token

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    # Wide weights make logits that differ, so that greedy tokens are not one repeated token.
    "initializer_range": 0.25,
    "sliding_window": WINDOW,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
GEMMA3 = BASE | {"query_pre_attn_scalar": 24}
GEMMA4 = BASE | {"global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
}
PROPORTIONAL = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.4, "factor": 2.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
}
SHARED = {"num_kv_shared_layers": 3, "use_double_wide_mlp": True}
KEY_IS_VALUE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = {"enable_moe_block": True, "num_experts": 7, "top_k_experts": 2, "moe_intermediate_size": 24}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "gemma3": GEMMA3,
    "gemma3-linear-capped": GEMMA3 | {"rope_parameters": LINEAR, "final_logit_softcapping": 3.0},
    "gemma3-untied-mha": GEMMA3 | {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "gemma3-older-fields": GEMMA3 | {"rope_parameters": LINEAR, "layer_types": None, "sliding_window_pattern": 3},
    "gemma3-towers": GEMMA3,
    "gemma4": GEMMA4,
    "gemma4-plain": GEMMA4 | {"hidden_size_per_layer_input": 0, "global_head_dim": 16},
    "gemma4-proportional-capped": GEMMA4 | {"rope_parameters": PROPORTIONAL, "final_logit_softcapping": 3.0},
    "gemma4-key-is-value": GEMMA4 | KEY_IS_VALUE,
    "gemma4-shared": GEMMA4 | SHARED,
    "gemma4-older-fields": GEMMA4 | SHARED | KEY_IS_VALUE,
    "gemma4-experts": GEMMA4 | EXPERTS | KEY_IS_VALUE | {"hidden_size_per_layer_input": 0},
    "gemma4-towers": GEMMA4 | KEY_IS_VALUE | {"tie_word_embeddings": False},
}


def build(name: str, **more: Any) -> PreTrainedModel:
    values = VARIANTS[name] | more
    if name == "gemma3-towers":
        vision = {"model_type": "siglip_vision_model", **TOWER}
        config = Gemma3Config(
            text_config=values, vision_config=vision, mm_tokens_per_image=4, image_token_index=VOCAB - 1
        )
        return Gemma3ForConditionalGeneration(config)
    if name == "gemma4-towers":
        text = Gemma4TextConfig(**values)
        config = Gemma4Config(text_config=text.to_dict(), tie_word_embeddings=False)
        return Gemma4ForConditionalGeneration(config)
    if name.startswith("gemma3"):
        return Gemma3ForCausalLM(Gemma3TextConfig(**values))
    return Gemma4ForCausalLM(Gemma4TextConfig(**values))


def make_reference(name: str, folder: Path, **more: Any) -> PreTrainedModel:
    """A random model saved in `folder`; norms and factors are made uneven so that leaving one out shows.

    Args:
        more: further changes of the config.
    """
    torch.manual_seed(11)
    model = build(name, **more).eval()
    low = -0.5 if name.startswith("gemma3") else 0.5  # Gemma3 stores norms less one
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("model.norm.weight"):
                parameter.uniform_(2.0, 4.0)
            elif name.startswith("gemma4") and key.endswith(("q_norm.weight", "k_norm.weight")):
                # Scores are not scaled: with larger norms, attention picks one key and magnifies rounding.
                parameter.uniform_(0.2, 0.6)
            elif ("norm" in key or key.endswith("scale")) and "tower" not in key:
                parameter.uniform_(low, low + 1.0)
            elif key.endswith("embed_tokens.weight"):
                # Tied embeddings of the others' width would make every token its own successor.
                parameter.normal_(0.0, 0.05)
        for key, buffer in model.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)
    model.save_pretrained(folder)
    if name.endswith("older-fields"):
        write_older_fields(folder, name)
    return model


def write_older_fields(folder: Path, name: str) -> None:
    """The same model as earlier files describe it; Gemma4's also stored projections that nothing reads."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if name.startswith("gemma3"):
        rope = config.pop("rope_parameters")
        del config["layer_types"], config["tie_word_embeddings"]
        config.pop("_sliding_window_pattern", None)
        config["sliding_window_pattern"] = 3
        config["rope_theta"] = rope["full_attention"]["rope_theta"]
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        config["rope_scaling"] = {"rope_type": "linear", "factor": rope["full_attention"]["factor"]}
    else:
        del config["per_layer_config"]
        config["global_head_dim"], config["num_global_key_value_heads"] = 32, 1
        weights = load_file(folder / "model.safetensors")
        for part, rows in (("k_proj", 32), ("v_proj", 32)):
            weights[f"model.layers.4.self_attn.{part}.weight"] = torch.randn(rows, 48)
        weights["model.layers.4.self_attn.k_norm.weight"] = torch.randn(16)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    path.write_text(json.dumps(config))


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """(transformers model, our loaded model, folder) with the same weights."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = make_reference(request.param, folder)
    return Greedy(reference), load_model(folder), folder


class Greedy:
    """A transformers model that runs the whole sequence for every token, each prompt once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._known: dict[tuple[int, ...], tuple[list[int], list[torch.Tensor]]] = {}

    @torch.no_grad()
    def all_logits(self, tokens: list[int]) -> torch.Tensor:
        return self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]

    def __call__(self, prompt: list[int]) -> tuple[list[int], list[torch.Tensor]]:
        """`NUM_NEW` tokens, and the logits of each."""
        if tuple(prompt) not in self._known:
            tokens, logits = list(prompt), []
            for _ in range(NUM_NEW):
                logits.append(self.all_logits(tokens)[-1])
                tokens.append(int(logits[-1].argmax()))
            self._known[tuple(prompt)] = tokens[len(prompt) :], logits
        return self._known[tuple(prompt)]


def make_executor(model: Any) -> CpuExecutor:
    kv_cache = KVCache.for_model(model.config, num_pages=NUM_SLOTS * PAGES_PER_SLOT, page_size=PAGE_SIZE)
    kv_cache.fill_poison()
    return CpuExecutor(model, kv_cache)


def prompts(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(1, VOCAB - 1, length).tolist() for length in lengths]


def check(sequence: GreedySequence, reference: Greedy) -> None:
    tokens, logits = reference(sequence.prompt)
    for step, (ours, theirs) in enumerate(zip(sequence.logits, logits, strict=True)):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE, msg=lambda m, s=step: f"step {s}: {m}")
    assert sequence.tokens == tokens


@pytest.mark.parametrize("chunk", [1, 7, PAGE_SIZE, 1000])
def test_greedy_equals_transformers_for_every_chunk_size(pair: tuple[Greedy, Any, Path], chunk: int) -> None:
    reference, model, _ = pair
    sequence = GreedySequence(slot=1, prompt=prompts([45])[0], chunk=chunk, num_new=NUM_NEW)
    run_greedy(make_executor(model), [sequence], permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=1))
    check(sequence, reference)
    assert len(set(sequence.tokens)) > 4


def test_five_ragged_sequences_equal_transformers(pair: tuple[Greedy, Any, Path]) -> None:
    """Chunks on both sides of what is attended token by token, beside decode rows."""
    reference, model, _ = pair
    chunks = [1000, 7, 3, 21, 17]
    sequences = [
        GreedySequence(slot=slot, prompt=prompt, chunk=chunks[idx], num_new=NUM_NEW)
        for idx, (slot, prompt) in enumerate(zip([2, 0, 3, 1, 4], prompts([1, 29, 17, 52, 40]), strict=True))
    ]
    run_greedy(make_executor(model), sequences, permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=2))
    for sequence in sequences:
        check(sequence, reference)


def test_shared_and_copied_pages_give_the_same_logits(pair: tuple[Greedy, Any, Path]) -> None:
    """Pages of all layer shapes go together; those of the sequence they came from are poisoned afterwards."""
    reference, model, _ = pair
    prompt = prompts([45])[0]
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=3)
    executor = make_executor(model)
    run_greedy(executor, [GreedySequence(slot=0, prompt=prompt, chunk=1000, num_new=1)], page_rows)
    page_rows[1, :5] = page_rows[0, :5]
    executor.copy_pages(page_rows[0, 5:11], page_rows[1, 5:11])
    executor.kv_cache.fill_poison(page_rows[0, 5:])
    sequence = GreedySequence(slot=1, prompt=prompt, chunk=1000, num_new=NUM_NEW, done=42)
    run_greedy(executor, [sequence], page_rows)
    check(sequence, reference)


def test_all_logits_and_hidden_rows_equal_transformers(pair: tuple[Greedy, Any, Path]) -> None:
    reference, model, _ = pair
    prompt = prompts([45])[0]
    batch = ragged_batch([(0, 0, prompt)], permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=6))
    batch.logits_index = np.arange(len(prompt), dtype=np.int64)
    batch.logits_to_seq = np.zeros(len(prompt), np.int32)
    executor = make_executor(model)
    executor.request_hidden(HiddenRequest(layers=(0, 4), normed=True))
    result = executor.forward_verify(batch)
    torch.testing.assert_close(result.logits, reference.all_logits(prompt), atol=TOLERANCE, rtol=TOLERANCE)
    with torch.no_grad():
        output = reference.model(input_ids=torch.tensor([prompt]), use_cache=False, output_hidden_states=True)
    rows = torch.cat([output.hidden_states[layer][0] for layer in (0, 4, 6)], dim=-1)
    torch.testing.assert_close(result.hidden, rows, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_row_does_not_depend_on_its_neighbours(pair: tuple[Greedy, Any, Path]) -> None:
    """Decode rows beyond the window, bit for bit: alone, and beside four others."""
    _, model, _ = pair
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=9)
    executor = make_executor(model)
    texts = prompts([45, 12, 33, 9, 60])
    for slot, text in enumerate(texts):
        executor.forward(ragged_batch([(slot, 0, text[:-1])], page_rows))
    rows = [(slot, len(text) - 1, text[-1:]) for slot, text in enumerate(texts)]
    together = executor.forward(ragged_batch(rows, page_rows))
    for slot, row in enumerate(rows):
        assert torch.equal(executor.forward(ragged_batch([row], page_rows))[0], together[slot])


def test_layers_that_own_no_kv_run_rows_with_logits_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that later tokens read comes from the last three layers, so a chunk without logits ends before them."""
    make_reference("gemma4-shared", tmp_path)
    calls: list[tuple[int, int]] = []
    attend = AttentionStep.attend

    def counted(step: AttentionStep, layer: int, qkv: torch.Tensor, out: torch.Tensor, chosen: Any = None) -> None:
        calls.append((layer, len(qkv)))
        attend(step, layer, qkv, out, chosen)

    monkeypatch.setattr(AttentionStep, "attend", counted)
    executor = make_executor(load_model(tmp_path))
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=8)
    batch = ragged_batch([(0, 0, prompts([20])[0])], page_rows)
    batch.logits_index, batch.logits_to_seq = np.zeros(0, np.int64), np.zeros(0, np.int32)
    assert executor.forward(batch).shape == (0, VOCAB)
    assert calls == [(0, 20), (1, 20), (2, 20)]
    calls.clear()
    assert executor.forward(ragged_batch([(0, 20, [5, 6, 7]), (1, 0, [8, 9])], page_rows)).shape == (2, VOCAB)
    assert calls == [(0, 5), (1, 5), (2, 5), (1, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize("name", ["gemma3", "gemma4-shared"])
def test_bfloat16_stays_close_to_float32(name: str, tmp_path: Path) -> None:
    """bfloat16 carries 8 bits: the logits of six layers stay within a tenth of their spread."""
    make_reference(name, tmp_path)
    prompt = prompts([45])[0]
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=7)
    rows: dict[str, torch.Tensor] = {}
    for dtype in ("float32", "bfloat16"):
        model = load_model(tmp_path, dtype=dtype)
        kv_cache = KVCache.for_model(model.config, num_pages=120, page_size=PAGE_SIZE, dtype=model.dtype)
        executor = CpuExecutor(model, kv_cache)
        executor.forward(ragged_batch([(0, 0, prompt[:30])], page_rows))
        executor.forward(ragged_batch([(0, 30, prompt[30:44])], page_rows))
        rows[dtype] = executor.forward(ragged_batch([(0, 44, prompt[44:])], page_rows))[0]
    assert rows["bfloat16"].dtype == torch.float32
    error = (rows["bfloat16"] - rows["float32"]).std() / rows["float32"].std()
    assert 0.0 < error < 0.1


GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)


def test_the_public_api_with_and_without_reuse_equals_transformers(pair: tuple[Greedy, Any, Path]) -> None:
    """Cold, known to the end, parting within a page and at one, and five at once."""
    reference, _, folder = pair
    write_byte_tokenizer(folder)
    text = prompts([45])[0]
    cases = {"known": text, "parts within a page": [*text[:22], 7, 9], "parts at a page": [*text[:24], 7, 9]}
    with LLM(folder, dtype="float32", device="cpu", kv_budget=960, page_size=PAGE_SIZE, max_batch_size=5) as llm:
        for prompt in cases.values():
            (output,) = llm.generate(prompt, GREEDY, use_cache=False)
            assert output.token_ids == reference(prompt)[0]
        llm.generate(text, GREEDY)
        reused = {}
        for name, prompt in cases.items():
            (output,) = llm.generate(prompt, GREEDY)
            assert output.token_ids == reference(prompt)[0]
            reused[name] = output.reuse.reused_tokens
        assert reused == {"known": 44, "parts within a page": 22, "parts at a page": 24}
        many = prompts([1, 29, 17, 52, 40])
        answers = [output.token_ids for output in llm.generate(many, GREEDY)]
        assert answers == [reference(prompt)[0] for prompt in many]
