"""The public API on a GPU over models of every family: the tokens of the CPU, cold, reused and many at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity.family_models import MODELS
from tiny_model import write_byte_tokenizer

import edgellm_hybrid.plugin
from edgellm import LLM, SamplingParams
from edgellm.plugins import load_plugins

pytestmark = pytest.mark.gpu

SERVED = ("gemma3", "gemma4-shared", "gemma4-experts", "granite-experts", "mamba2-one-group-tied", "qwen-next-moe")
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
LENGTHS = (3, 40, 70, 18, 101)
PROMPTS = [[1 + (index * 37 + place * 11) % 250 for place in range(length)] for index, length in enumerate(LENGTHS)]


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_plugins(extra=(("hybrid", edgellm_hybrid.plugin),), autoload=False, strict=True)
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: loaded)


def answers(folder: Path, device: str, dtype: str = "float32") -> tuple[list[list[list[int]]], int]:
    """Tokens of three rounds over the same prompts, and of how many prompt tokens the state was there."""
    sizes = {"page_size": 16, "kv_budget": 4096, "max_batch_size": 3, "max_model_len": 128}
    with LLM(folder, dtype=dtype, device=device, **sizes) as llm:
        rounds = [llm.generate(PROMPTS, GREEDY) for _ in range(3)]
    reused = sum(output.reuse.reused_tokens for output in rounds[2])
    return [[list(output.token_ids) for output in outputs] for outputs in rounds], reused


@pytest.mark.parametrize("name", SERVED)
def test_tokens_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    changes = {} if name.startswith("gemma") else {"eos_token_id": 0, "bos_token_id": 0}
    MODELS[name](tmp_path, vocab_size=write_byte_tokenizer(tmp_path), **changes)
    ours, reused = answers(tmp_path, "cuda")
    theirs, reused_there = answers(tmp_path, "cpu")
    assert ours == theirs
    assert ours[0] == ours[1] == ours[2]
    assert reused == reused_there > 0
    assert len({token for tokens in ours[0] for token in tokens}) > 8


@pytest.mark.parametrize("name", ["gemma4-shared", "granite-experts"])
def test_bfloat16_is_served(name: str, tmp_path: Path) -> None:
    changes = {} if name.startswith("gemma") else {"eos_token_id": 0, "bos_token_id": 0}
    MODELS[name](tmp_path, vocab_size=write_byte_tokenizer(tmp_path), **changes)
    rounds, reused = answers(tmp_path, "cuda", "bfloat16")
    assert all(len(tokens) == 20 for outputs in rounds for tokens in outputs)
    assert reused > 0
