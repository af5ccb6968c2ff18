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
from edgellm_eagle.checkpoint import HeadWeights, read_head, save_head
from edgellm_eagle.decoder import Eagle3Decoder
from edgellm_eagle.head_config import hidden_layers

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
    with pytest.raises(InvalidArgumentError, match="needs an EAGLE-3 head that was trained for this model"):
        speculating(target, None)
    with pytest.raises(InvalidArgumentError, match="no folder"):
        speculating(target, Path("/nonexistent"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": torch.zeros(HIDDEN, HIDDEN)}, "fc.weight"),
        ({"d2t": torch.full((DRAFT_VOCAB,), 999)}, "d2t names the model's token 999 at place 0, the model has 257"),
        ({"d2t": torch.arange(DRAFT_VOCAB) - 3}, "d2t names the model's token -3 at place 0"),
        ({"d2t": torch.full((DRAFT_VOCAB,), 2**63 - 1)}, "token 9223372036854775807 at place 0"),
        ({"d2t": torch.zeros(DRAFT_VOCAB) + 0.6}, "tensor 'd2t' is stored as torch.float32; integers are needed"),
        ({"d2t": torch.zeros(DRAFT_VOCAB, dtype=torch.bool)}, "tensor 'd2t' is stored as torch.bool"),
        ({"lm_head.weight": torch.zeros((DRAFT_VOCAB, HIDDEN), dtype=torch.int8)}, "'lm_head.weight' .* torch.int8"),
        ({"lm_head.weight": torch.zeros((DRAFT_VOCAB, HIDDEN)).to(torch.float8_e4m3fn)}, "torch.float8_e4m3fn"),
        ({"fc.weight": torch.zeros((HIDDEN, 3 * HIDDEN), dtype=torch.complex64)}, "torch.complex64"),
        ({"norm.weight": torch.zeros(HIDDEN, dtype=torch.int32)}, "'norm.weight' is stored as torch.int32"),
        (
            {"embed_tokens.weight": torch.zeros((257, HIDDEN), dtype=torch.uint8)},
            "'embed_tokens.weight' .*uint8",
        ),
        ({"midlayer.mlp.up_proj.weight": None}, "lacks the tensor"),
        ({"midlayer.hidden_norm.weight": None}, "no EAGLE-3 head"),
        ({"midlayer.self_attn.q_proj.bias": torch.zeros(HIDDEN)}, "stores 'midlayer.self_attn.q_proj.bias'"),
        ({"fc.bias": torch.zeros(HIDDEN)}, r"stores 'fc.bias' \(and 0 more"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(INNER, HIDDEN)}, "stores 'layers.1.mlp.up_proj.weight'"),
    ],
)
def test_heads_that_do_not_fit(tmp_path: Path, target: Path, change: dict[str, Any], message: str) -> None:
    tensors = {**head_tensors(), **change}
    save_head(tmp_path, CONFIG, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises((UnsupportedModelError, WeightFileError), match=message) as caught:
        speculating(target, tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias is True; false is needed"),
        ({"qkv_bias": True}, "qkv_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"norm_before_residual": True}, "norm_before_residual is True"),
        ({"norm_before_fc": True}, "norm_before_fc is True"),
        ({"sliding_window": 4, "use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types is \['sliding_attention'\]; .*'full_attention'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; 1 is needed"),
        ({"vocab_size": 99999}, "vocab_size is 99999; the model's 257 is needed"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state is False"),
        ({"eagle_config": {"norm_before_fc": True}}, "eagle_config.norm_before_fc is True"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
            r"eagle_config.eagle_aux_hidden_state_layer_ids is \[0, 1, 3\]; .*\[2, 3, 3\].*\[1, 2, 2\]",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}, r"eagle_aux_hidden_state_layer_ids is \[2, 3, 4\]"),
        ({"eagle_config": 3}, "eagle_config is 3"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_configs_that_ask_for_more(tmp_path: Path, target: Path, change: dict[str, Any], message: str) -> None:
    save_head(tmp_path, CONFIG | change, head_tensors())
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        speculating(target, tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": False, "mlp_bias": None, "sliding_window": 4, "use_sliding_window": False},
        {"vocab_size": None, "num_hidden_layers": None, "layer_types": ["full_attention"]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 3], "use_aux_hidden_state": True}},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}, "eagle_aux_hidden_state_layer_ids": None},
    ],
)
def test_configs_that_say_what_is_done(tmp_path: Path, target: Path, head: Path, change: dict[str, Any]) -> None:
    model = load_model(target)
    save_head(tmp_path, CONFIG | change, head_tensors() | {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert (
        read_head(tmp_path, model.config, model.weights.embedding)[0]
        == read_head(head, model.config, model.weights.embedding)[0]
    )


def test_a_damaged_file(tmp_path: Path, target: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(WeightFileError, match="cannot be read"):
        speculating(target, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightFileError, match=r"holds no model\.safetensors or pytorch_model\.bin"):
        speculating(target, tmp_path)


BAD_FILES = {
    "a list": ([1, 2], "holds a list; a dict of tensors by name is needed"),
    "a tensor": (torch.ones(3), "holds a Tensor"),
    "a key that is no text": ({1: torch.ones(2)}, "holds the key 1"),
    "a dict in the dict": ({"model": {"fc.weight": torch.ones(2)}}, "holds a dict under 'model'; a tensor is needed"),
    "a number": ({"fc.weight": 3}, "holds a int under 'fc.weight'"),
    "a sparse tensor": ({"fc.weight": torch.eye(HIDDEN).to_sparse()}, "tensor 'fc.weight' is torch.sparse_coo on cpu"),
    "a tensor without numbers": ({"fc.weight": torch.empty(3, device="meta")}, "'fc.weight' is torch.strided on meta"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_file_of_torch_that_holds_something_else(tmp_path: Path, target: Path, kind: str) -> None:
    held, message = BAD_FILES[kind]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save({**head_tensors(), **held} if isinstance(held, dict) else held, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightFileError, match=message) as caught:
        speculating(target, tmp_path)
    assert str(tmp_path) in str(caught.value)


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


def test_a_head_is_read_however_its_file_lays_the_numbers_out(tmp_path: Path, target: Path, head: Path) -> None:
    model = load_model(target)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensors = head_tensors()
    laid = {name: t.t().contiguous().t() if t.ndim == 2 else t.repeat_interleave(2)[::2] for name, t in tensors.items()}
    laid["o"] = laid.pop("midlayer.self_attn.o_proj.weight")
    negated = torch.complex(torch.zeros(HIDDEN, HIDDEN), -laid.pop("o")).conj().imag
    assert negated.is_neg()
    torch.save({**laid, "midlayer.self_attn.o_proj.weight": negated}, tmp_path / "pytorch_model.bin")
    _, weights = read_head(tmp_path, model.config, model.weights.embedding)
    _, wanted = read_head(head, model.config, model.weights.embedding)
    for name in HeadWeights.__slots__:
        tensor = getattr(weights, name)
        assert tensor.is_contiguous(), name
        assert torch.equal(tensor, getattr(wanted, name)), name
    with speculating(target, tmp_path) as llm, speculating(target, head) as same:
        params = SETTINGS["greedy"]
        assert llm.generate(PROMPTS, params)[0].token_ids == same.generate(PROMPTS, params)[0].token_ids


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
