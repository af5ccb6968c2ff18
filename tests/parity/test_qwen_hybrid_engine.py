"""Qwen hybrids through `LLM`: real files, real session, recurrent state in resident slots and checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from test_qwen_hybrid import MAIN, NUM_NEW, make_reference, reference_greedy
from tiny_model import write_byte_tokenizer

import edgellm_hybrid.policy
from edgellm import LLM, SamplingParams, plugins

GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=MAIN)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(transformers model, folder with the same weights and a tokenizer)."""
    folder = tmp_path_factory.mktemp("model")
    reference = make_reference(request.param, folder, vocab_size=write_byte_tokenizer(folder))
    return reference, folder


@pytest.fixture(autouse=True)
def hybrid_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy that knows when to keep recurrent state."""
    load = functools.partial(plugins.load_plugins, extra=[("hybrid", edgellm_hybrid.policy)], autoload=False)
    monkeypatch.setattr(plugins, "load_plugins", load)


def random_prompts(lengths: list[int]) -> list[list[int]]:
    torch.manual_seed(9)
    return [torch.randint(1, 257, (length,)).tolist() for length in lengths]


def test_five_requests_at_once_give_the_tokens_of_transformers(checkpoint: tuple[Any, Path]) -> None:
    """More requests than slots, then the same again over what the first round left in the cache."""
    reference, folder = checkpoint
    prompts = random_prompts([3, 30, 17, 41, 24])
    expected = [reference_greedy(reference, prompt)[0] for prompt in prompts]
    with LLM(folder, device="cpu", page_size=4, max_batch_size=3, max_model_len=128) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY)
            assert [output.token_ids for output in outputs] == expected


def test_a_continued_conversation_gives_the_tokens_of_transformers(checkpoint: tuple[Any, Path]) -> None:
    reference, folder = checkpoint
    (prompt, more) = random_prompts([33, 8])
    with LLM(folder, device="cpu", page_size=4, max_batch_size=2, max_model_len=128) as llm:
        (first,) = llm.generate(prompt, GREEDY)
        assert first.token_ids == reference_greedy(reference, prompt)[0]
        longer = [*prompt, *first.token_ids, *more]
        (second,) = llm.generate(longer, GREEDY)
        assert second.token_ids == reference_greedy(reference, longer)[0]
        assert second.reuse.reused_tokens > 0
