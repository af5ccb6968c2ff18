"""The multi-token prediction head of a hybrid: the text of plain decoding, reuse included, at any draft quality."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import write_tiny_llama, write_tiny_qwen_hybrid

import edgellm_hybrid.plugin
from edgellm import LLM, SamplingParams, SpeculativeOptions
from edgellm.errors import InvalidArgumentError, UnsupportedModelError, WeightFileError
from edgellm.plugins import load_plugins

PROMPTS = ["the quick brown fox", "a", "0123456789" * 7, "to be or not to be", "zz top zz top"]
SETTINGS = {
    "greedy": SamplingParams(max_tokens=24, temperature=0.0),
    "sampled": SamplingParams(max_tokens=24, temperature=0.9, top_k=20, seed=5),
    "penalised": SamplingParams(max_tokens=24, temperature=0.0, frequency_penalty=0.3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_plugins(extra=(("hybrid", edgellm_hybrid.plugin),), autoload=False, strict=True)
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: loaded)


def load(folder: Path, **speculative: Any) -> LLM:
    options = SpeculativeOptions(decoder="mtp", **speculative) if speculative else None
    return LLM(folder, device="cpu", kv_budget=2048, page_size=8, max_batch_size=5, speculative=options)


def ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("drafts", [1, 3])
def test_the_text_is_that_of_plain_decoding(folder: Path, kind: str, drafts: int) -> None:
    params = SETTINGS[kind]
    with load(folder) as plain:
        wanted = ids(plain.generate(PROMPTS, params))
    with load(folder, num_drafts=drafts, adaptive=False) as llm:
        assert ids(llm.generate(PROMPTS, params)) == wanted
        assert [llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS] == wanted


class Perfect:
    """Proposes what the model will say: every draft is kept, so state is never rolled back, only moved on."""

    def __init__(self, draft: Any, texts: dict[int, list[int]]) -> None:
        self.draft = draft
        self.texts = texts

    def forward(self, rows: Any) -> tuple[list[int], torch.Tensor]:
        _, hidden = self.draft.forward(rows)
        ends = (rows.past + rows.counts).tolist()
        text = self.texts[0]
        return [text[end + 1] if end + 1 < len(text) else 1 for end in ends], hidden


def test_a_draft_that_is_always_right_changes_nothing_but_the_steps(folder: Path) -> None:
    params = SETTINGS["greedy"]
    with load(folder) as plain:
        expected = plain.generate(PROMPTS[0], params)[0]
    with load(folder, num_drafts=3, adaptive=False) as llm:
        decoder = llm._frontend.open_runtime("test").decoder
        decoder._draft = Perfect(decoder._draft, {0: [*expected.prompt_token_ids, *expected.token_ids]})
        output = llm.generate(PROMPTS[0], params)[0]
    assert output.token_ids == expected.token_ids
    assert output.accepted_draft_tokens >= 17


@pytest.mark.parametrize("speculative", [{}, {"num_drafts": 3}], ids=["plain", "mtp"])
def test_the_second_turn_reuses_all_but_the_new_message(folder: Path, speculative: dict[str, Any]) -> None:
    """Four conversations at once; what is computed again is at most a page and the new message."""
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    talks = [[{"role": "user", "content": f"{number}: " + "tell me more about it " * 3}] for number in range(4)]
    with load(folder, **speculative) as llm:
        first = llm.chat(talks, params)
        for talk, output in zip(talks, first, strict=True):
            talk.append({"role": "assistant", "content": output.text})
            talk.append({"role": "user", "content": "and then?"})
        second = llm.chat(talks, params)
    with load(folder) as cold:
        assert ids(cold.chat(talks, params)) == ids(second)
    for one, two in zip(first, second, strict=True):
        old = len(one.prompt_token_ids)
        assert two.reuse.reused_tokens >= old - len("assistant:") - 8 - 1, two.reuse


def test_a_draft_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="the model's own head"):
        load(folder, draft="somewhere")


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no multi-token prediction head"):
        load(write_tiny_qwen_hybrid(tmp_path, mtp=False), num_drafts=2)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("mtp.lm_head.weight", torch.zeros(257, 48), "stores 'mtp.lm_head.weight' .* does not have"),
        ("mtp.fc.bias", torch.zeros(48), "stores 'mtp.fc.bias'"),
        ("mtp.fc.weight", torch.zeros(48, 40), r"'mtp.fc.weight' is stored as \[48, 40\]"),
        ("mtp.fc.weight", None, "lacks .* 'mtp.fc.weight'"),
    ],
)
def test_heads_that_do_not_fit(
    folder: Path, tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    tensors = {stored: each for stored, each in load_file(path).items() if stored != name}
    save_file(tensors if tensor is None else tensors | {name: tensor}, path, metadata={"format": "pt"})
    with pytest.raises(WeightFileError, match=message) as caught:
        load(tmp_path, num_drafts=2)
    assert str(tmp_path) in str(caught.value)
    load(tmp_path).close()  # plain decoding has no use for it


def test_a_rope_table_beside_the_head_is_left_unread(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    table = {"mtp.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(load_file(path) | table, path, metadata={"format": "pt"})
    load(tmp_path, num_drafts=2).close()


def test_an_attention_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="attention-only"):
        load(write_tiny_llama(tmp_path), num_drafts=2)
