"""The multi-token prediction head against one built of transformers' own layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged import permuted_page_rows, ragged_batch
from safetensors.torch import load_file, save_file
from test_qwen_hybrid import BASE, EXPERTS, make_reference, prompts
from torch import nn
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextRMSNorm,
    Qwen3NextRotaryEmbedding,
)

from edgellm.decoding.draft_model import DraftStep, host_step
from edgellm.decoding.draft_ops import CpuDraftOps
from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models.loader import load_model
from edgellm.models.qwen_mtp import MtpHead, load_mtp
from edgellm.runtime.kv_cache import KVCache

PAGE_SIZE = 4


class ReferenceHead(nn.Module):
    """What the stored names say: two norms, a joining matrix, one attention layer, a norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        layer_types = config.layer_types
        config.layer_types = ["full_attention"]
        self.pre_fc_norm_embedding = Qwen3NextRMSNorm(config.hidden_size)
        self.pre_fc_norm_hidden = Qwen3NextRMSNorm(config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Qwen3NextDecoderLayer(config, 0)])
        self.norm = Qwen3NextRMSNorm(config.hidden_size)
        config.layer_types = layer_types
        self.rotary = Qwen3NextRotaryEmbedding(config)

    def forward(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        joined = self.fc(torch.cat((self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)), dim=-1))
        turned = self.rotary(joined[None], torch.arange(len(hidden))[None])
        mask = torch.full((1, 1, len(hidden), len(hidden)), float("-inf")).triu(1)
        return self.norm(self.layers[0](joined[None], position_embeddings=turned, attention_mask=mask))[0]


def make_head(reference: Any, folder: Path, *, packed: bool) -> ReferenceHead:
    """A random head, its tensors added to the checkpoint."""
    torch.manual_seed(21)
    head = ReferenceHead(reference.config).eval()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.uniform_(-0.5, 0.5) if "norm" in name else parameter.normal_(0.0, 0.2)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in head.state_dict().items():
        if ".experts." in name and not packed:
            parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[name.split(".")[-1]]
            for expert in range(EXPERTS["num_experts"]):
                for part, rows in zip(parts, tensor[expert].chunk(len(parts)), strict=True):
                    tensors[f"mtp.layers.0.mlp.experts.{expert}.{part}.weight"] = rows.clone()
        elif "rotary" not in name:
            tensors[f"mtp.{name}"] = tensor.contiguous()
    save_file(tensors, path)
    return head


@pytest.mark.parametrize(("name", "packed"), [("next-dense", False), ("next-moe", False), ("next-moe", True)])
@pytest.mark.parametrize("chunk", [1, 7, 40])
@torch.no_grad()
def test_head_equals_the_reference(name: str, packed: bool, chunk: int, tmp_path: Path) -> None:
    """Rows in chunks, then the head on its own rows, as a chain of drafts."""
    reference = make_reference(name, tmp_path)
    head = make_head(reference, tmp_path, packed=packed)
    model = load_model(tmp_path)
    tokens = torch.tensor(prompts([23])[0])
    hidden = torch.randn(23, BASE["hidden_size"])
    expected = head(reference.get_input_embeddings()(tokens), hidden)
    ours = MtpHead(model, load_mtp(model), CpuDraftOps())
    kv_cache = KVCache.for_model(ours.config, num_pages=20, page_size=PAGE_SIZE)
    assert kv_cache.num_layers == 1
    page_rows = permuted_page_rows(2, 10, seed=5)

    def step_of(past: int, count: int) -> DraftStep:
        batch = ragged_batch([(1, past, np.zeros(count, np.int32).tolist())], page_rows)
        return host_step(batch, ours.config, kv_cache, torch.float32)

    parts = []
    for start in range(0, 23, chunk):
        step = step_of(start, len(tokens[start : start + chunk]))
        parts.append(ours.rows(tokens[start : start + chunk], hidden[start : start + chunk], step))
    rows = torch.cat(parts)
    logits = ours.logits(rows)
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, reference.lm_head(expected), atol=1e-4, rtol=1e-4)

    chained = ours.logits(ours.rows(tokens[:1], rows[-1:], step_of(23, 1), torch.tensor([0])))
    all_hidden = torch.cat((hidden, expected[-1:]))
    wanted = head(reference.get_input_embeddings()(torch.cat((tokens, tokens[:1]))), all_hidden)
    torch.testing.assert_close(chained, reference.lm_head(wanted[-1:]), atol=1e-4, rtol=1e-4)


def test_a_missing_tensor_of_the_head_is_named(tmp_path: Path) -> None:
    make_head(make_reference("next-moe", tmp_path), tmp_path, packed=False)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["mtp.layers.0.mlp.experts.2.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightFileError, match=r"'mtp\.layers\.0\.mlp\.experts\.2\.up_proj\.weight'; download it again"):
        load_mtp(load_model(tmp_path))


def test_model_without_a_head_is_refused(tmp_path: Path) -> None:
    make_reference("next-dense", tmp_path)
    with pytest.raises(UnsupportedModelError, match="0 multi-token prediction layers"):
        load_mtp(load_model(tmp_path))
