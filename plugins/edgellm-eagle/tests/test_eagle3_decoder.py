"""An EAGLE-3 head on a real model: the head equals a plain computation, and the text is that of plain decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import write_tiny_llama

import edgellm_eagle.plugin
from edgellm import LLM, SamplingParams, SpeculativeOptions
from edgellm.decoding.paged_draft import DraftRows
from edgellm.errors import InvalidArgumentError, UnsupportedModelError, WeightFileError
from edgellm.models.loader import LoadedModel, load_model
from edgellm.plugins import load_plugins
from edgellm_eagle.checkpoint import read_head, save_head
from edgellm_eagle.decoder import Eagle3Decoder, hidden_layers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, DRAFT_VOCAB = 64, 4, 2, 16, 80, 100
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 257,
    "draft_vocab_size": DRAFT_VOCAB,
}
PROMPTS = ["the quick brown fox", "a", "0123456789" * 7, "to be or not to be", "zz top zz top"]
SETTINGS = {
    "greedy": SamplingParams(max_tokens=33, temperature=0.0),
    "sampled": SamplingParams(max_tokens=33, temperature=0.9, top_k=20, seed=5),
    "penalised": SamplingParams(max_tokens=33, temperature=0.0, frequency_penalty=0.3),
}


def head_tensors(seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.15

    def norm() -> torch.Tensor:
        return torch.rand(HIDDEN, generator=generator) + 0.5

    chosen = torch.randperm(257, generator=generator)[:DRAFT_VOCAB].sort().values
    return {
        "fc.weight": new(HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": new(HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": new(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": new(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": new(HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": new(INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": new(INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": new(HIDDEN, INNER),
        "norm.weight": norm(),
        "lm_head.weight": new(DRAFT_VOCAB, HIDDEN),
        "d2t": chosen - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(257, dtype=torch.bool).index_fill_(0, chosen, True),
    }


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=6)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    save_head(folder, CONFIG, head_tensors())
    return folder


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_plugins(extra=(("eagle", edgellm_eagle.plugin),), autoload=False, strict=True)
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: loaded)


def speculating(target: Path, head: Path | None, **options: Any) -> LLM:
    speculative = SpeculativeOptions(decoder="eagle", draft=head, **options)
    return LLM(target, device="cpu", kv_budget=4096, page_size=16, speculative=speculative)


# ---- the head -------------------------------------------------------------------------------------------


def plain_head(model: LoadedModel, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """(T, draft vocabulary) logits of every entry, computed at once and without pages."""
    w = head_tensors()

    def norm(rows: torch.Tensor, name: str) -> torch.Tensor:
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5) * w[name]

    layer = "midlayer."
    h = hidden @ w["fc.weight"].T
    e = model.weights.embedding[torch.tensor(tokens)]
    x = torch.cat((norm(e, layer + "input_layernorm.weight"), norm(h, layer + "hidden_norm.weight")), dim=1)
    q, k, v = (x @ w[f"{layer}self_attn.{name}_proj.weight"].T for name in "qkv")
    q, k, v = (t.view(len(tokens), -1, HEAD_DIM).transpose(0, 1) for t in (q, k, v))
    angles = torch.arange(len(tokens))[:, None] / 10000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = (torch.cat((f(angles), f(angles)), dim=1) for f in (torch.cos, torch.sin))

    def rotate(t: torch.Tensor) -> torch.Tensor:
        first, second = t.chunk(2, dim=-1)
        return t * cos + torch.cat((-second, first), dim=-1) * sin

    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=0) for t in (k, v))
    attended = torch.nn.functional.scaled_dot_product_attention(rotate(q), rotate(k.contiguous()), v, is_causal=True)
    h = h + attended.transpose(0, 1).reshape(len(tokens), -1) @ w[f"{layer}self_attn.o_proj.weight"].T
    n = norm(h, layer + "post_attention_layernorm.weight")
    gate, up = (n @ w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    h = h + (torch.nn.functional.silu(gate) * up) @ w[f"{layer}mlp.down_proj.weight"].T
    return norm(h, "norm.weight") @ w["lm_head.weight"].T


@pytest.mark.parametrize("cuts", [(), (1,), (7, 16, 20)])
def test_the_head_equals_a_plain_computation_in_pieces_and_over_shuffled_pages(
    target: Path, head: Path, cuts: tuple[int, ...]
) -> None:
    model = load_model(target)
    config, weights = read_head(head, model.config, model.weights.embedding)
    decoder = Eagle3Decoder(config, weights, target_layers=6, page_size=8)
    decoder.open_draft(9)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 257, (25,), generator=generator).tolist()
    hidden = torch.randn((25, 3 * HIDDEN), generator=generator)
    wanted = weights.to_target[plain_head(model, hidden, tokens).argmax(dim=1)].tolist()
    pages = np.array([[-1] * 4, [7, 2, 5, 0]], np.int32)
    for start, end in zip((0, *cuts), (*cuts, 25), strict=True):
        got, _ = decoder.draft.forward(
            DraftRows(
                slots=np.array([1], np.int32),
                past=np.array([start], np.int32),
                counts=np.array([end - start], np.int32),
                token_ids=np.array(tokens[start:end], np.int32),
                hidden=hidden[start:end],
                projected=False,
                page_rows=pages,
            )
        )
        assert got == [wanted[end - 1]]


# ---- the decoder ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("adaptive", [True, False])
def test_the_text_is_that_of_plain_decoding(target: Path, head: Path, kind: str, adaptive: bool) -> None:
    params = SETTINGS[kind]
    with LLM(target, device="cpu", kv_budget=4096, page_size=16) as plain:
        wanted = plain.generate(PROMPTS, params)
    with speculating(target, head, adaptive=adaptive) as llm:
        together = llm.generate(PROMPTS, params)
        again = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
        longer = llm.generate([prompt + "!" for prompt in PROMPTS], params)
    with LLM(target, device="cpu", kv_budget=4096, page_size=16) as plain:
        wanted_longer = plain.generate([prompt + "!" for prompt in PROMPTS], params)
    for expected, outputs in ((wanted, together), (wanted, again), (wanted_longer, longer)):
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


def test_a_head_that_knows_the_answer_is_believed(target: Path, head: Path) -> None:
    tensors = head_tensors()
    draft_of = (tensors["d2t"] + torch.arange(DRAFT_VOCAB)).tolist()
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    tensors["norm.weight"] = torch.zeros(HIDDEN)
    params = SamplingParams(max_tokens=41, temperature=0.0, logit_bias={draft_of[0]: 100.0})
    folder = head.parent / "believed"
    save_head(folder, CONFIG, tensors)  # all logits equal: the first token of its vocabulary
    with speculating(target, folder, adaptive=False, num_drafts=3) as llm:
        output = llm.generate("abc", params)[0]
    assert output.token_ids == [draft_of[0]] * 41
    assert (output.proposed_draft_tokens, output.accepted_draft_tokens) == (30, 30)  # ten rounds of three and one more


# ---- what is refused ------------------------------------------------------------------------------------


def test_no_head(target: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="needs a head"):
        speculating(target, None)
    with pytest.raises(InvalidArgumentError, match="no folder"):
        speculating(target, Path("/nonexistent"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": torch.zeros(HIDDEN, HIDDEN)}, "fc.weight"),
        ({"d2t": torch.full((DRAFT_VOCAB,), 999)}, "d2t names the target token"),
        ({"midlayer.mlp.up_proj.weight": None}, "lacks the tensor"),
        ({"midlayer.hidden_norm.weight": None}, "no EAGLE-3 head"),
    ],
)
def test_heads_that_do_not_fit(tmp_path: Path, target: Path, change: dict[str, Any], message: str) -> None:
    tensors = {**head_tensors(), **change}
    save_head(tmp_path, CONFIG, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises((UnsupportedModelError, WeightFileError), match=message):
        speculating(target, tmp_path)


def test_a_damaged_file(tmp_path: Path, target: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(WeightFileError, match="cannot be read"):
        speculating(target, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightFileError, match="holds neither"):
        speculating(target, tmp_path)


def test_a_target_that_is_too_shallow() -> None:
    assert hidden_layers(32) == (2, 16, 29)
    with pytest.raises(UnsupportedModelError, match="at least 5"):
        hidden_layers(4)


def test_a_head_of_another_file_form_with_its_own_embedding_is_read_alike(
    tmp_path: Path, target: Path, head: Path
) -> None:
    model = load_model(target)
    embedding = torch.randn((257, HIDDEN))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": None}))
    torch.save({**head_tensors(), "embed_tokens.weight": embedding}, tmp_path / "pytorch_model.bin")
    config, weights = read_head(tmp_path, model.config, model.weights.embedding)
    same_config, same = read_head(head, model.config, model.weights.embedding)
    assert config == same_config  # the target's rope stands in
    assert torch.equal(weights.embedding, embedding)
    assert torch.equal(weights.qkv, same.qkv)
    assert torch.equal(weights.to_target, same.to_target)


def test_a_head_of_the_whole_vocabulary_needs_no_map(tmp_path: Path, target: Path) -> None:
    model = load_model(target)
    tensors = {name: tensor for name, tensor in head_tensors().items() if name != "d2t"}
    tensors["lm_head.weight"] = torch.zeros((257, HIDDEN))
    save_head(tmp_path, {**CONFIG, "draft_vocab_size": None}, tensors)
    _, weights = read_head(tmp_path, model.config, model.weights.embedding)
    assert weights.to_target.tolist() == list(range(257))


@pytest.mark.parametrize("size", [0, 300, 1.5, True])
def test_a_draft_vocabulary_that_cannot_be(tmp_path: Path, target: Path, size: object) -> None:
    save_head(tmp_path, {**CONFIG, "draft_vocab_size": size}, head_tensors())
    with pytest.raises(UnsupportedModelError, match="draft_vocab_size is"):
        speculating(target, tmp_path)


def test_a_head_of_another_width_must_bring_its_embedding(tmp_path: Path, target: Path) -> None:
    model = load_model(target)
    save_head(tmp_path, CONFIG, head_tensors())
    with pytest.raises(UnsupportedModelError, match="brings no embedding"):
        read_head(tmp_path, model.config, model.weights.embedding[:, :-2])
