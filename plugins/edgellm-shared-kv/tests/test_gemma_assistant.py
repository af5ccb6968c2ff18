"""Tiny random Gemma4 assistants against transformers, and on the engine: float32, prompts of several windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged import permuted_page_rows, ragged_batch
from safetensors.torch import load_file, save_file
from tiny_model import write_byte_tokenizer, write_tiny_llama
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

import edgellm_shared_kv.plugin
from edgellm import LLM, SamplingParams, SpeculativeOptions
from edgellm.decoding.base import DecodingSeat
from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models.loader import LoadedModel, load_model
from edgellm.plugins import load_plugins
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.kv_cache import KVCache
from edgellm.sampling.sampler import Sampler, SamplingState
from edgellm_shared_kv.assistant import SharedKvAssistant
from edgellm_shared_kv.checkpoint import read_assistant
from edgellm_shared_kv.decoder import SharedKvMtpDecoder

VOCAB, WINDOW, NUM_DRAFTS = 257, 8, 5
ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
}
SHARED = {
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "sliding_window": WINDOW,
    "rope_parameters": ROPE,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
BASE: dict[str, Any] = SHARED | {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
BASES: dict[str, dict[str, Any]] = {
    "own": BASE,
    "shared": BASE | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    "key-is-value": BASE | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
}
TEXT: dict[str, Any] = SHARED | {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": VOCAB, "centroid_intermediate_top_k": 60}


def make_uneven(model: PreTrainedModel) -> None:
    """Norms and factors that differ from one, so that leaving one out shows."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("model.norm.weight"):
                parameter.uniform_(2.0, 4.0)
            elif key.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.uniform_(0.2, 0.6)
            elif "norm" in key:
                parameter.uniform_(0.5, 1.5)
            elif key.endswith("embed_tokens.weight"):
                parameter.normal_(0.0, 0.05)
        for key, buffer in model.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)
            elif key.endswith("token_ordering"):
                buffer.copy_(torch.randperm(VOCAB))


def make_base(folder: Path, name: str) -> PreTrainedModel:
    write_byte_tokenizer(folder)
    torch.manual_seed(11)
    model = Gemma4ForCausalLM(Gemma4TextConfig(**BASES[name])).eval()
    make_uneven(model)
    model.save_pretrained(folder)
    return model


def make_assistant(folder: Path, base: str, **outer: Any) -> Any:
    torch.manual_seed(12)
    same = {name: BASES[base].get(name) for name in ("attention_k_eq_v", "num_global_key_value_heads")}
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**TEXT | {k: v for k, v in same.items() if v}), backbone_hidden_size=48, **outer
    )
    model = Gemma4AssistantForCausalLM(config).eval()
    make_uneven(model)
    model.save_pretrained(folder)
    return model


class Pair:
    """A base, ours and transformers', with pages in which the prompt of slot 1 is written."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.theirs = make_base(folder, name)
        self.ours: LoadedModel = load_model(folder)
        self.kv_cache = KVCache.for_model(self.ours.config, num_pages=40, page_size=4)
        self.kv_cache.fill_poison()
        self.executor = CpuExecutor(self.ours, self.kv_cache)
        self.page_rows = permuted_page_rows(2, 20, seed=3)

    @torch.no_grad()
    def outputs(self, prompt: list[int]) -> Any:
        return self.theirs(
            input_ids=torch.tensor([prompt]),
            use_cache=False,
            output_hidden_states=True,
            return_shared_kv_states=True,
        )


@pytest.fixture(scope="module", params=BASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, str]:
    return Pair(tmp_path_factory.mktemp(request.param), request.param), request.param


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("base"), "own")


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(1, VOCAB - 1, length).tolist()


@pytest.mark.parametrize("length", [1, 7, WINDOW, WINDOW + 1, WINDOW + 2, 45])
@torch.no_grad()
def test_steps_equal_transformers(pair: tuple[Pair, str], tmp_path: Path, length: int) -> None:
    """Each step on the hidden row of the one before, over the same prefix and at the same position."""
    base, name = pair
    theirs = make_assistant(tmp_path, name)
    ours = SharedKvAssistant(*read_assistant(tmp_path, base.ours))
    prompt = prompt_of(length)
    outputs = base.outputs(prompt)
    base.executor.forward(ragged_batch([(1, 0, prompt)], base.page_rows))
    hidden, token = outputs.hidden_states[-1][0, -1:], 99
    prefix = ours.prefix(
        base.kv_cache,
        slots=np.array([1], np.int32),
        lengths=np.array([length], np.int32),
        page_rows=base.page_rows,
    )
    for _ in range(3):
        embedded = base.theirs.get_input_embeddings()(torch.tensor([[token]]))
        expected = theirs(
            inputs_embeds=torch.cat((embedded, hidden[None]), dim=-1),
            position_ids=torch.tensor([[length]]),
            shared_kv_states=outputs.shared_kv_states,
        )
        (chosen,), got = ours.forward([token], hidden, prefix)
        torch.testing.assert_close(got, expected.last_hidden_state[0], atol=1e-4, rtol=1e-4)
        assert chosen == int(expected.logits.argmax())
        token, hidden = chosen, expected.last_hidden_state[0]


@pytest.mark.parametrize("outer", [{}, CLUSTERS, CLUSTERS | {"num_centroids": 1, "centroid_intermediate_top_k": 1}])
@torch.no_grad()
def test_a_round_proposes_what_transformers_proposes(
    pair: tuple[Pair, str], tmp_path: Path, outer: dict[str, Any]
) -> None:
    base, name = pair
    theirs = make_assistant(tmp_path, name, **outer)
    prompt = prompt_of(31)
    decoder = SharedKvMtpDecoder(SharedKvAssistant(*read_assistant(tmp_path, base.ours)), NUM_DRAFTS, adaptive=False)
    token, chain = run_round(decoder, base, prompt)
    theirs.generation_config.num_assistant_tokens = NUM_DRAFTS
    generator = SinglePositionMultiTokenCandidateGenerator(
        theirs, base.theirs.get_input_embeddings(), GenerationConfig(max_length=200)
    )
    candidates, _ = generator.get_candidates(
        torch.tensor([[*prompt, token]]), {}, base.outputs(prompt), is_first_iteration=False, n_last_matches=0
    )
    assert chain == candidates[0, len(prompt) + 1 :].tolist()
    assert len(set(chain)) > 1


def run_round(decoder: SharedKvMtpDecoder, base: Pair, prompt: list[int]) -> tuple[int, list[int]]:
    """The first token, and what is proposed behind it."""
    decoder.attach(base.executor)
    decoder.seat(base.executor, DecodingSeat(1, 7, np.array(prompt, np.int32), 0))
    state = SamplingState(SamplingParams(temperature=0.0), prompt, VOCAB)
    tokens = decoder.run_step(base.executor, ragged_batch([(1, 0, prompt)], base.page_rows), Sampler(), [state])
    ((token,),) = tokens.token_ids
    batch = ragged_batch([(1, len(prompt), [token])], base.page_rows)
    (chain,) = decoder.propose(base.executor, batch, [0], [NUM_DRAFTS])
    return token, chain


# ---- the engine -----------------------------------------------------------------------------------------


SETTINGS = {
    "greedy": SamplingParams(max_tokens=33, temperature=0.0),
    "sampled": SamplingParams(max_tokens=33, temperature=0.9, top_k=20, seed=5),
    "penalised": SamplingParams(max_tokens=33, temperature=0.0, frequency_penalty=0.3),
}
PROMPTS = ["the quick brown fox", "a", "0123456789" * 7, "to be or not to be", "zz top zz top"]


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_plugins(extra=(("shared-kv", edgellm_shared_kv.plugin),), autoload=False, strict=True)
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: loaded)


def speculating(base: Path, assistant: Path, **options: Any) -> LLM:
    speculative = SpeculativeOptions(decoder="shared_kv_mtp", draft=assistant, adaptive=False, **options)
    return LLM(base, device="cpu", kv_budget=4096, page_size=16, speculative=speculative)


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_text_is_that_of_plain_decoding(pair: tuple[Pair, str], tmp_path: Path, kind: str) -> None:
    base, name = pair
    make_assistant(tmp_path, name)
    longer = [prompt + "!" for prompt in PROMPTS]
    with LLM(base.folder, device="cpu", kv_budget=4096, page_size=16) as plain:
        wanted, wanted_longer = plain.generate(PROMPTS, SETTINGS[kind]), plain.generate(longer, SETTINGS[kind])
    with speculating(base.folder, tmp_path) as llm:
        outputs = llm.generate(PROMPTS, SETTINGS[kind])
        outputs_longer = llm.generate(longer, SETTINGS[kind])
    assert [output.token_ids for output in outputs] == [output.token_ids for output in wanted]
    assert [output.token_ids for output in outputs_longer] == [output.token_ids for output in wanted_longer]
    assert sum(output.proposed_draft_tokens for output in outputs) > 100
    assert outputs_longer[2].reuse.reused_tokens == 70  # the whole of the shorter prompt


# ---- what is refused ------------------------------------------------------------------------------------


def change_config(folder: Path, *, text: dict[str, Any] | None = None, **outer: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(outer)
    config["text_config"].update(text or {})
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("outer", "text", "message"),
    [
        ({"architectures": ["Gemma4ForCausalLM"]}, {}, "Gemma4ForCausalLM is no shared-KV assistant"),
        ({"architectures": None}, {}, "no architecture is no shared-KV assistant"),
        ({"backbone_hidden_size": 64}, {}, "backbone_hidden_size is 64; the base's 48 is needed"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config"),
        ({"use_ordered_embeddings": True, "num_centroids": 2}, {}, "num_centroids is 2; a divisor"),
        ({"use_ordered_embeddings": True, "num_centroids": 1}, {}, "masked_embedding.token_ordering"),
        ({}, {"num_kv_shared_layers": 2}, "text_config.num_kv_shared_layers is 2"),
        ({}, {"vocab_size": 300}, "text_config.vocab_size is 300"),
        ({}, {"hidden_size_per_layer_input": 8}, "text_config.hidden_size_per_layer_input is 8"),
        ({}, {"enable_moe_block": True}, "text_config.enable_moe_block is True"),
        ({}, {"use_double_wide_mlp": True}, "text_config.use_double_wide_mlp is True"),
        (
            {},
            {"per_layer_config": None, "num_key_value_heads": 4},
            "4 kv heads of 16, the base's windowed layers have 2",
        ),
        ({}, {"hidden_activation": "relu"}, "hidden_activation"),
        ({}, {"intermediate_size": 60}, "mlp.gate_proj.weight"),
        ({}, {"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_configs_that_do_not_fit(
    own: Pair, tmp_path: Path, outer: dict[str, Any], text: dict[str, Any], message: str
) -> None:
    make_assistant(tmp_path, "own")
    change_config(tmp_path, text=text, **outer)
    with pytest.raises((UnsupportedModelError, WeightFileError), match=message) as caught:
        read_assistant(tmp_path, own.ours)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.layers.1.layer_scalar", None, "lacks the tensor 'model.layers.1.layer_scalar'"),
        ("post_projection.weight", torch.zeros(48, 48), "post_projection.weight"),
        ("model.layers.0.mlp.up_proj.weight", torch.zeros((56, 32), dtype=torch.int8), "stored as torch.int8"),
        (
            "model.layers.0.mlp.up_proj.weight",
            torch.zeros((56, 32)).to(torch.float8_e4m3fn),
            "stored as torch.float8_e4m3fn; use an assistant that is not quantised",
        ),
        (
            "model.layers.4.mlp.up_proj.weight",
            torch.zeros(56, 32),
            "which an assistant of this config",
        ),
        ("masked_embedding.token_ordering", torch.zeros(VOCAB, dtype=torch.int64), "does not name every token once"),
        ("masked_embedding.token_ordering", torch.zeros(VOCAB), "integers are needed"),
    ],
)
def test_tensors_that_do_not_fit(
    own: Pair, tmp_path: Path, name: str, change: torch.Tensor | None, message: str
) -> None:
    make_assistant(tmp_path, "own", **(CLUSTERS if "ordering" in name else {}))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(name, None)
    if change is not None:
        tensors[name] = change
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightFileError, match=message):
        read_assistant(tmp_path, own.ours)


def test_projections_of_keys_that_a_file_stores_are_left_unread(pair: tuple[Pair, str], tmp_path: Path) -> None:
    base, name = pair
    make_assistant(tmp_path, name)
    path = tmp_path / "model.safetensors"
    extra = {f"model.layers.0.self_attn.{part}_proj.weight": torch.zeros(32, 32) for part in "kv"}
    save_file(load_file(path) | extra, path, metadata={"format": "pt"})
    config, _ = read_assistant(tmp_path, base.ours)
    own = 3 if name == "shared" else 6
    assert [layer.donor for layer in config.layers] == [own - 2] * 3 + [own - 1]


def test_an_untied_head_is_read(own: Pair, tmp_path: Path) -> None:
    make_assistant(tmp_path, "own")
    change_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(WeightFileError, match=r"lm_head\.weight"):
        read_assistant(tmp_path, own.ours)
    path = tmp_path / "model.safetensors"
    head = torch.randn(VOCAB, 32)
    save_file(load_file(path) | {"lm_head.weight": head}, path, metadata={"format": "pt"})
    assert torch.equal(read_assistant(tmp_path, own.ours)[1].head.lm_head, head)


def test_a_base_of_another_family(tmp_path: Path) -> None:
    make_assistant(tmp_path / "assistant", "own")
    llama = load_model(write_tiny_llama(tmp_path / "llama"))
    with pytest.raises(UnsupportedModelError, match="reads the pages of a gemma4_text model; the model is llama"):
        read_assistant(tmp_path / "assistant", llama)
