"""An assistant of the plain layout on a tiny Llama: it equals a plain computation, and the text is plain decoding's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged import permuted_page_rows, ragged_batch
from tiny_model import write_tiny_llama

import edgellm_shared_kv.plugin
from edgellm import LLM, SamplingParams, SpeculativeOptions
from edgellm.decoding.base import DecodingSeat
from edgellm.errors import (
    BrokenInvariantError,
    InvalidArgumentError,
    UnsupportedModelError,
    UnsupportedRequestError,
    WeightFileError,
)
from edgellm.models.loader import LoadedModel, load_model
from edgellm.models.registry import Architecture
from edgellm.models.step import HiddenRequest
from edgellm.plugins import load_plugins
from edgellm.request import LLMGenerationRequest
from edgellm.runtime.batch import RaggedBatch, VerifyForward
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.kv_cache import KVCache
from edgellm.sampling.sampler import Sampler, SamplingState
from edgellm_shared_kv.assistant import SharedKvAssistant
from edgellm_shared_kv.base_prefix import BasePrefix
from edgellm_shared_kv.checkpoint import read_assistant
from edgellm_shared_kv.decoder import SharedKvMtpDecoder
from edgellm_shared_kv.stored_tensors import save_assistant

BASE_HIDDEN, KV_HEADS, HEAD_DIM, VOCAB = 64, 2, 16, 257
HIDDEN, HEADS, INNER, DRAFT_VOCAB, DONORS = 40, 6, 56, 100, [2, 0, 2]
CONFIG: dict[str, Any] = {
    "architectures": ["SharedKvAssistantForCausalLM"],
    "backbone_hidden_size": BASE_HIDDEN,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "donor_layers": DONORS,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
}
PROMPTS = ["the quick brown fox", "a", "0123456789" * 7, "to be or not to be", "zz top zz top"]
SETTINGS = {
    "greedy": SamplingParams(max_tokens=33, temperature=0.0),
    "sampled": SamplingParams(max_tokens=33, temperature=0.9, top_k=20, seed=5),
    "penalised": SamplingParams(max_tokens=33, temperature=0.0, frequency_penalty=0.3),
}


def assistant_tensors(*, query_norm: bool = False, seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.15

    def norm(size: int = HIDDEN) -> torch.Tensor:
        return torch.rand(size, generator=generator) + 0.5

    chosen = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    tensors = {
        "pre_projection.weight": new(HIDDEN, 2 * BASE_HIDDEN),
        "post_projection.weight": new(BASE_HIDDEN, HIDDEN),
        "norm.weight": norm(),
        "lm_head.weight": new(DRAFT_VOCAB, HIDDEN),
        "d2t": chosen - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, chosen, True),
    }
    for idx in range(len(DONORS)):
        tensors |= {
            f"layers.{idx}.input_layernorm.weight": norm(),
            f"layers.{idx}.post_attention_layernorm.weight": norm(),
            f"layers.{idx}.self_attn.q_proj.weight": new(HEADS * HEAD_DIM, HIDDEN),
            f"layers.{idx}.self_attn.o_proj.weight": new(HIDDEN, HEADS * HEAD_DIM),
            f"layers.{idx}.mlp.gate_proj.weight": new(INNER, HIDDEN),
            f"layers.{idx}.mlp.up_proj.weight": new(INNER, HIDDEN),
            f"layers.{idx}.mlp.down_proj.weight": new(HIDDEN, INNER),
        }
        if query_norm:
            tensors[f"layers.{idx}.self_attn.q_norm.weight"] = norm(HEAD_DIM)
    return tensors


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("base"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def model(base: Path) -> LoadedModel:
    return load_model(base)


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assistant")
    save_assistant(folder, CONFIG, assistant_tensors())
    return folder


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_plugins(extra=(("shared-kv", edgellm_shared_kv.plugin),), autoload=False, strict=True)
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: loaded)


class Rig:
    """A base with pages in a shuffled order, and a decoder on it, driven step by step."""

    def __init__(self, model: LoadedModel, assistant: SharedKvAssistant, num_drafts: int = 4) -> None:
        self.kv_cache = KVCache.for_model(model.config, num_pages=3 * 12, page_size=8)
        self.kv_cache.fill_poison()
        self.executor = CpuExecutor(model, self.kv_cache)
        self.page_rows = permuted_page_rows(3, 12, seed=4)
        self.decoder = SharedKvMtpDecoder(assistant, num_drafts, adaptive=False)
        self.decoder.attach(self.executor)
        self.verified: list[RaggedBatch] = []
        forward = self.executor.forward_verify

        def forward_verify(batch: RaggedBatch) -> VerifyForward:
            self.verified.append(batch)
            return forward(batch)

        self.executor.forward_verify = forward_verify  # type: ignore[method-assign]

    def seat(self, slot: int, prompt: list[int]) -> None:
        self.decoder.seat(self.executor, DecodingSeat(slot, 100 + slot, np.array(prompt, np.int32), 0))

    def step(self, rows: list[tuple[int, int, list[int]]], most: list[int] | None = None) -> list[list[int]]:
        """Rows of (slot, past, tokens); returns what was chosen behind each."""
        batch = ragged_batch(rows, self.page_rows)
        batch.max_drafts = None if most is None else np.array(most, np.int32)
        states = [SamplingState(SamplingParams(temperature=0.0), [1] * past, VOCAB) for _, past, _ in rows]
        return self.decoder.run_step(self.executor, batch, Sampler(), states).token_ids

    def pool(self) -> list[bytes]:
        return [layer.numpy().tobytes() for layer in self.kv_cache.layers]


class Listening(SharedKvAssistant):
    """Remembers the hidden rows that each step was given."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.steps: list[tuple[list[int], torch.Tensor]] = []

    def forward(self, token_ids: Any, hidden: torch.Tensor, prefix: BasePrefix) -> tuple[list[int], torch.Tensor]:
        self.steps.append((list(token_ids), hidden))
        return super().forward(token_ids, hidden, prefix)


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(1, VOCAB, length).tolist()


# ---- the assistant --------------------------------------------------------------------------------------


def plain_step(
    w: dict[str, torch.Tensor], rig: Rig, slot: int, length: int, embedded: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(draft vocabulary,) logits and (base hidden,) row of one step over the first `length` tokens of a slot."""

    def norm(rows: torch.Tensor, name: str) -> torch.Tensor:
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5) * w[name]

    angles = length / 10000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = (torch.cat((f(angles), f(angles))) for f in (torch.cos, torch.sin))
    x = w["pre_projection.weight"] @ torch.cat((embedded, hidden))
    for idx, donor in enumerate(DONORS):
        layer = f"layers.{idx}."
        q = (w[f"{layer}self_attn.q_proj.weight"] @ norm(x, f"{layer}input_layernorm.weight")).view(HEADS, HEAD_DIM)
        if f"{layer}self_attn.q_norm.weight" in w:
            q = norm(q, f"{layer}self_attn.q_norm.weight")
        first, second = q.chunk(2, dim=-1)
        q = q * cos + torch.cat((-second, first), dim=-1) * sin
        key, value = rig.kv_cache.gather(donor, rig.page_rows[slot], length).repeat_interleave(HEADS // KV_HEADS, dim=1)
        scores = (key @ q[:, :, None])[:, :, 0] * HEAD_DIM**-0.5
        attended = (scores.softmax(dim=1)[:, None] @ value).reshape(-1)
        x = x + w[f"{layer}self_attn.o_proj.weight"] @ attended
        n = norm(x, f"{layer}post_attention_layernorm.weight")
        gate, up = (w[f"{layer}mlp.{name}_proj.weight"] @ n for name in ("gate", "up"))
        x = x + w[f"{layer}mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
    out = norm(x, "norm.weight")
    return w["lm_head.weight"] @ out, w["post_projection.weight"] @ out


@pytest.mark.parametrize("query_norm", [False, True])
def test_rows_of_several_sequences_equal_a_plain_computation(
    model: LoadedModel, tmp_path: Path, query_norm: bool
) -> None:
    tensors = assistant_tensors(query_norm=query_norm)
    save_assistant(tmp_path, CONFIG | {"query_norm": query_norm}, tensors)
    ours = SharedKvAssistant(*read_assistant(tmp_path, model))
    rig = Rig(model, ours)
    lengths = {2: 37, 0: 1, 1: 8}
    rig.executor.forward(ragged_batch([(slot, 0, prompt_of(size)) for slot, size in lengths.items()], rig.page_rows))
    prefix = ours.prefix(
        rig.kv_cache,
        slots=np.array(list(lengths), np.int32),
        lengths=np.array(list(lengths.values()), np.int32),
        page_rows=rig.page_rows,
    )
    to_base = tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    tokens, hidden = [5, 6, 7], torch.randn((3, BASE_HIDDEN), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        embedded = model.weights.embedding[torch.tensor(tokens)]
        wanted = [
            plain_step(tensors, rig, slot, size, embedded[row], hidden[row])
            for row, (slot, size) in enumerate(lengths.items())
        ]
        tokens, hidden = ours.forward(tokens, hidden, prefix)
        assert tokens == [int(to_base[logits.argmax()]) for logits, _ in wanted]
        torch.testing.assert_close(hidden, torch.stack([row for _, row in wanted]), atol=1e-5, rtol=1e-4)


def test_a_full_vocabulary_needs_no_map(model: LoadedModel, tmp_path: Path) -> None:
    tensors = assistant_tensors() | {"lm_head.weight": torch.randn(VOCAB, HIDDEN)}
    del tensors["d2t"], tensors["t2d"]
    save_assistant(tmp_path, {**CONFIG, "draft_vocab_size": None}, tensors)
    head = read_assistant(tmp_path, model)[1].head
    assert head.to_base.tolist() == list(range(VOCAB))


def test_bfloat16_weights_come_in_the_dtype_of_the_base(base: Path, assistant: Path) -> None:
    model = load_model(base, dtype="bfloat16")
    _, weights = read_assistant(assistant, model)
    assert (weights.pre_projection.dtype, weights.final_norm.dtype) == (torch.bfloat16, torch.float32)
    rig = Rig(model, SharedKvAssistant(*read_assistant(assistant, model)))
    rig.seat(1, prompt_of(9))
    ((token,),) = rig.step([(1, 0, prompt_of(9))])
    assert len(rig.step([(1, 9, [token])])[0]) >= 1
    assert rig.verified[-1].num_tokens == 5


# ---- the round ------------------------------------------------------------------------------------------


def test_a_round_verifies_the_seed_once_and_writes_nothing_itself(model: LoadedModel, assistant: Path) -> None:
    listening = Listening(*read_assistant(assistant, model))
    rig = Rig(model, listening)
    prompt = prompt_of(19)
    rig.seat(1, prompt)
    ((token,),) = rig.step([(1, 0, prompt)])
    pool, table = rig.pool(), rig.page_rows.copy()
    batch = ragged_batch([(1, 19, [token])], rig.page_rows)
    (chain,) = rig.decoder.propose(rig.executor, batch, [0], [4])
    assert rig.pool() == pool
    assert np.array_equal(rig.page_rows, table)
    assert [step[0] for step in listening.steps] == [[token], *([other] for other in chain[:3])]
    rig.step([(1, 19, [token])])
    verified = rig.verified[-1]
    assert verified.token_ids.tolist() == [token, *chain]
    assert verified.positions.tolist() == [19, 20, 21, 22, 23]
    assert verified.logits_index.tolist() == [0, 1, 2, 3, 4]


def test_each_round_starts_from_the_hidden_row_of_the_last_accepted_token(model: LoadedModel, assistant: Path) -> None:
    """Accepted are all, some or none of the proposals, by an assistant that is told what to propose."""

    class Told(Listening):
        plan: list[int]

        def forward(self, token_ids: Any, hidden: torch.Tensor, prefix: BasePrefix) -> tuple[list[int], torch.Tensor]:
            _, own = super().forward(token_ids, hidden, prefix)
            return [self.plan.pop(0)], own

    prompt = prompt_of(13)
    told = Told(*read_assistant(assistant, model))
    rig, text = Rig(model, told), list(prompt)
    rig.seat(1, prompt)
    plain = Rig(model, told)
    text += rig.step([(1, 0, prompt)])[0]
    for agreeing in (4, 2, 0, 3, 4):
        answer = greedy(plain, text, 4)
        told.plan = [token if place < agreeing else (token + 1) % VOCAB for place, token in enumerate(answer)]
        told.steps.clear()
        past = len(text) - 1
        chosen = rig.step([(1, past, text[-1:])])[0]
        assert len(chosen) == agreeing + 1
        torch.testing.assert_close(told.steps[0][1][0], hidden_of(plain, text[:past]), atol=1e-3, rtol=1e-3)
        text += chosen
    assert text[13:] == greedy(plain, prompt, len(text) - 13)


def greedy(rig: Rig, text: list[int], count: int) -> list[int]:
    """What plain decoding says behind a text, token by token in slot 2."""
    known = list(text)
    for _ in range(count):
        known.append(int(rig.executor.forward(ragged_batch([(2, 0, known)], rig.page_rows))[0].argmax()))
    return known[len(text) :]


def hidden_of(rig: Rig, text: list[int]) -> torch.Tensor:
    """(base hidden,) row of the last token of a text that is run anew."""
    rig.executor.request_hidden(HiddenRequest(normed=True))
    output = rig.executor.forward_verify(ragged_batch([(2, 0, text)], rig.page_rows))
    assert output.hidden is not None
    return output.hidden[-1]


def test_chains_are_as_long_as_the_rooms_and_the_same_as_alone(model: LoadedModel, assistant: Path) -> None:
    ours = SharedKvAssistant(*read_assistant(assistant, model))
    rig = Rig(model, ours, num_drafts=5)
    prompts = {0: prompt_of(5), 1: prompt_of(6), 2: prompt_of(7)}
    rooms = [1, 0, 4]
    for slot, prompt in prompts.items():
        rig.seat(slot, prompt)
    firsts = rig.step([(slot, 0, prompt) for slot, prompt in prompts.items()])
    rows = [(slot, len(prompt), first) for (slot, prompt), first in zip(prompts.items(), firsts, strict=True)]
    alone = [rig.decoder.propose(rig.executor, ragged_batch([row], rig.page_rows), [0], [4])[0] for row in rows]
    chosen = rig.step(rows, most=rooms)
    verified = rig.verified[-1]
    assert verified.query_len.tolist() == [room + 1 for room in rooms]
    wanted = [first + chain[:room] for first, chain, room in zip(firsts, alone, rooms, strict=True)]
    assert verified.token_ids.tolist() == [token for run in wanted for token in run]
    assert all(len(tokens) <= room + 1 for tokens, room in zip(chosen, rooms, strict=True))
    assert len({tuple(chain) for chain in alone}) == 3


def test_a_slot_without_a_hidden_row_is_a_defect(model: LoadedModel, assistant: Path) -> None:
    rig = Rig(model, SharedKvAssistant(*read_assistant(assistant, model)))
    rig.seat(1, prompt_of(4))
    with pytest.raises(BrokenInvariantError, match="slot 1 is to propose, and no token of it ran"):
        rig.decoder.propose(rig.executor, ragged_batch([(1, 4, [3])], rig.page_rows), [0], [2])
    rig.step([(1, 0, prompt_of(4))])
    rig.decoder.unseat([1])
    with pytest.raises(BrokenInvariantError, match="slot 1"):
        rig.decoder.propose(rig.executor, ragged_batch([(1, 4, [3])], rig.page_rows), [0], [2])


# ---- the engine -----------------------------------------------------------------------------------------


def speculating(base: Path, assistant: Path | None, **options: Any) -> LLM:
    speculative = SpeculativeOptions(decoder="shared_kv_mtp", draft=assistant, **options)
    return LLM(base, device="cpu", kv_budget=4096, page_size=16, speculative=speculative)


def token_ids(outputs: Any) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("adaptive", [True, False])
def test_the_text_is_that_of_plain_decoding(base: Path, assistant: Path, kind: str, adaptive: bool) -> None:
    params = SETTINGS[kind]
    with LLM(base, device="cpu", kv_budget=4096, page_size=16) as plain:
        wanted = plain.generate(PROMPTS, params)
        turns = [prompt + output.text + " and?" for prompt, output in zip(PROMPTS, wanted, strict=True)]
        wanted_turns = plain.generate(turns, params)
    with speculating(base, assistant, adaptive=adaptive) as llm:
        together = llm.generate(PROMPTS, params)
        again = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
        second = llm.generate(turns, params)
    assert token_ids(together) == token_ids(again) == token_ids(wanted)
    assert token_ids(second) == token_ids(wanted_turns)
    assert again[2].reuse.reused_tokens == 69  # all but the token whose logits are needed
    if not adaptive:
        assert sum(output.proposed_draft_tokens for output in together) > 100


def believed(folder: Path) -> tuple[Path, SamplingParams, int]:
    """An assistant that proposes one token always, and parameters under which the base says nothing else."""
    tensors = assistant_tensors()
    token = int(tensors["d2t"][0])
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])  # all equal: the first one
    save_assistant(folder, CONFIG, tensors)
    return folder, SamplingParams(max_tokens=41, temperature=0.0, logit_bias={token: 100.0}), token


def test_an_assistant_that_knows_the_answer_is_believed(base: Path, tmp_path: Path) -> None:
    folder, params, token = believed(tmp_path)
    with speculating(base, folder, adaptive=False, num_drafts=3) as llm:
        output = llm.generate("abc", params)[0]
    assert output.token_ids == [token] * 41
    assert (output.proposed_draft_tokens, output.accepted_draft_tokens) == (30, 30)  # ten rounds of three and one more


def test_a_budget_of_two_takes_two_of_what_is_accepted(base: Path, tmp_path: Path) -> None:
    """One token of the prompt's step, a round of six, and two that are left: a single proposal is worth making."""
    folder, params, token = believed(tmp_path)
    with speculating(base, folder, adaptive=False, num_drafts=5) as llm:
        output = llm.generate("abc", dataclasses.replace(params, max_tokens=9))[0]
        assert output.token_ids == [token] * 9
        assert (output.proposed_draft_tokens, output.accepted_draft_tokens) == (6, 6)
        output = llm.generate("abc", dataclasses.replace(params, max_tokens=3))[0]
        assert output.token_ids == [token] * 3
        assert (output.proposed_draft_tokens, output.accepted_draft_tokens) == (1, 1)


def test_an_end_inside_an_accepted_run_cuts_it(base: Path, tmp_path: Path) -> None:
    folder, params, token = believed(tmp_path)
    with LLM(base, device="cpu", kv_budget=4096, page_size=16) as plain:
        letter = plain.generate("abc", dataclasses.replace(params, max_tokens=1))[0].text
        stopping = dataclasses.replace(params, stop=[letter * 3])
        wanted = plain.generate("abc", stopping)[0]
    with speculating(base, folder, adaptive=False, num_drafts=5) as llm:
        output = llm.generate("abc", stopping)[0]
        after = llm.generate("abc", params)[0]
    assert output.token_ids == wanted.token_ids == [token] * 3
    assert (output.text, output.finish_reason) == (wanted.text, "stop")
    assert after.token_ids == [token] * 41


def test_a_request_without_speculation_is_refused_where_it_is_submitted(base: Path, assistant: Path) -> None:
    params = SamplingParams(max_tokens=5, temperature=0.0)
    with speculating(base, assistant) as llm:
        engine = llm._frontend.open_engine("test")
        with pytest.raises(UnsupportedRequestError, match=r"disable_spec_decode .* \(shared_kv_mtp\) only verifies"):
            engine.submit(LLMGenerationRequest(prompt="abc", sampling=params, disable_spec_decode=True))
        assert engine.pending() == 0
        assert len(engine.submit(LLMGenerationRequest(prompt="abc", sampling=params)).get().token_ids) == 5
    with LLM(base, device="cpu", kv_budget=256) as plain:
        request = LLMGenerationRequest(prompt="abc", sampling=params, disable_spec_decode=True)
        assert len(plain._frontend.open_engine("test").submit(request).get().token_ids) == 5


# ---- what is refused ------------------------------------------------------------------------------------


def test_no_assistant(base: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="needs an assistant"):
        speculating(base, None)
    with pytest.raises(InvalidArgumentError, match="no folder"):
        speculating(base, Path("/nonexistent"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is no shared-KV assistant; supported: Shared"),
        ({"backbone_hidden_size": 576}, "backbone_hidden_size is 576; the base's 64 is needed"),
        ({"vocab_size": 300}, "vocab_size is 300"),
        ({"draft_vocab_size": 258}, "draft_vocab_size is 258"),
        ({"draft_vocab_size": 99}, "lm_head.weight|d2t"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_attention_heads": 5}, "num_attention_heads is 5; a multiple of the base's 2 kv heads"),
        ({"donor_layers": None}, "donor_layers is missing; a list of 1 to 64 layers of the base, from 0 to 2"),
        ({"donor_layers": []}, "donor_layers is \\[\\]"),
        ({"donor_layers": [0, 3, 1]}, "donor_layers is \\[0, 3, 1\\]"),
        ({"donor_layers": [0, -1, 1]}, "donor_layers"),
        ({"donor_layers": [0, True, 1]}, "donor_layers"),
        ({"donor_layers": [0, 1]}, "layers.2.input_layernorm.weight.*does not have"),
        ({"donor_layers": [0, 1, 2, 2]}, "lacks the tensor 'layers.3.input_layernorm.weight'"),
        ({"query_norm": True}, "lacks the tensor 'layers.0.self_attn.q_norm.weight'"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"head_dim": 99}, "head_dim is 99; the base's 16 is needed"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4; the base's 2 is needed"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; 3, one for each of donor_layers, is needed"),
        ({"rope_theta": 3.0}, "rope_theta is 3.0; the base's rope \\(default, theta 10000\\)"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is .*; the base's rope"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_parameters is .*; the base's rope"),
        ({"attention_bias": True}, "attention_bias is True; false is needed"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window is True"),
    ],
)
def test_configs_that_do_not_fit(
    base: Path, assistant: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    save_assistant(tmp_path, CONFIG | change, assistant_tensors())
    with pytest.raises((UnsupportedModelError, WeightFileError), match=message) as caught:
        speculating(base, tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_configs_that_say_what_is_done_anyway(model: LoadedModel, assistant: Path, tmp_path: Path) -> None:
    stated = {
        "head_dim": HEAD_DIM,
        "num_key_value_heads": model.config.num_kv_heads,
        "num_hidden_layers": len(DONORS),
        "rope_theta": model.config.rope.theta,
        "rope_scaling": None,
        "attention_bias": False,
        "sliding_window": 4,
    }
    save_assistant(tmp_path, CONFIG | stated, assistant_tensors())
    assert read_assistant(tmp_path, model)[0] == read_assistant(assistant, model)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre_projection.weight": torch.zeros(HIDDEN, BASE_HIDDEN)}, "pre_projection.weight"),
        ({"d2t": torch.full((DRAFT_VOCAB,), 999)}, "d2t names the model's token 999 at place 0, the model has 257"),
        ({"d2t": torch.full((DRAFT_VOCAB,), -1)}, "d2t names the model's token -1 at place 0"),
        ({"lm_head.weight": torch.zeros((DRAFT_VOCAB, HIDDEN)).to(torch.float8_e4m3fn)}, "torch.float8_e4m3fn"),
        ({"post_projection.weight": torch.zeros((BASE_HIDDEN, HIDDEN), dtype=torch.complex64)}, "torch.complex64"),
        ({"d2t": torch.zeros(DRAFT_VOCAB)}, "integers are needed"),
        ({"layers.1.mlp.up_proj.weight": None}, "lacks the tensor"),
        ({"norm.weight": torch.zeros(HIDDEN, dtype=torch.int32)}, "stored as torch.int32"),
        ({"layers.0.self_attn.k_proj.weight": torch.zeros(32, HIDDEN)}, "k_proj.weight.*does not have"),
    ],
)
def test_tensors_that_do_not_fit(base: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tensors = {**assistant_tensors(), **change}
    save_assistant(tmp_path, CONFIG, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(WeightFileError, match=message) as caught:
        speculating(base, tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_damaged_folder(base: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightFileError, match=r"config\.json is missing"):
        speculating(base, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(WeightFileError, match=r"holds no model\.safetensors"):
        speculating(base, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(WeightFileError, match="cannot be read"):
        speculating(base, tmp_path)


def test_a_base_of_another_family(model: LoadedModel, assistant: Path) -> None:
    gemma = dataclasses.replace(model, config=dataclasses.replace(model.config, architecture=Architecture.GEMMA3))
    with pytest.raises(UnsupportedModelError, match="pages of a llama or qwen2 or qwen3 model; the model is gemma3"):
        read_assistant(assistant, gemma)
