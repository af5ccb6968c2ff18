"""What the tests of models with Mamba-2 mixers share: random weights, executors, and the reference without a cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ragged import GreedySequence, permuted_page_rows, run_greedy
from tiny_model import write_byte_tokenizer
from transformers import PreTrainedModel

from edgellm import LLM, RequestOutput, SamplingParams
from edgellm.errors import UnsupportedModelError
from edgellm.models.config import config_from_hf
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.kv_cache import KVCache
from edgellm.runtime.recurrent_state import RecurrentState

VOCAB_SIZE = 199
PAGE_SIZE = 4
PAGES_PER_SLOT = 24
NUM_SLOTS = 5
NUM_NEW = 32
TOLERANCE = 2e-4


def make_uneven(model: PreTrainedModel) -> None:
    """Every parameter that starts out constant becomes random, so that leaving one out shows."""
    ranges = {"dt_bias": (-3.0, 1.0), "A_log": (-1.0, 1.5), ".D": (0.2, 1.5), "conv1d.weight": (-0.6, 0.6)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for ending, (low, high) in ranges.items():
                if name.endswith(ending):
                    parameter.uniform_(low, high)
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.3)


def save_random(config_class: type, model_class: type, values: dict[str, Any], folder: Path, **save: Any) -> Any:
    """The transformers model, saved in `folder`."""
    torch.manual_seed(11)
    model = model_class(config_class(**values)).eval()
    make_uneven(model)
    model.save_pretrained(folder, **save)
    return model


def make_executor(model: Any) -> CpuExecutor:
    config = model.config
    cache = KVCache.for_model(config, num_pages=NUM_SLOTS * PAGES_PER_SLOT, page_size=PAGE_SIZE, dtype=model.dtype)
    cache.fill_poison()
    recurrent = RecurrentState(config.recurrent_pieces, NUM_SLOTS) if config.recurrent_pieces else None
    return CpuExecutor(model, cache, recurrent=recurrent)


def page_rows(seed: int) -> np.ndarray:
    return permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=seed)


def prompts(lengths: list[int], seed: int = 5) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


@torch.no_grad()
def check_greedy(reference: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Each of `tokens` is the reference's best after the prompt and the tokens before it; returns its logits.

    One pass over them all without a cache: what stands behind a token does not reach it.
    """
    rows = reference(torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :].float()
    assert tokens == rows.argmax(dim=1).tolist()
    return rows


@dataclass
class Pair:
    """The same weights twice: transformers' model, and ours from the file it saved."""

    reference: PreTrainedModel
    model: Any

    def check_greedy(self, chunks: list[int], lengths: list[int], *, seed: int) -> None:
        """Sequences of these lengths, prefilled in chunks of these sizes, run side by side and equal the reference."""
        sequences = [
            GreedySequence(slot=(3 * idx + seed) % NUM_SLOTS, prompt=prompt, chunk=chunk, num_new=NUM_NEW)
            for idx, (prompt, chunk) in enumerate(zip(prompts(lengths, seed), chunks, strict=True))
        ]
        run_greedy(make_executor(self.model), sequences, page_rows(seed))
        for sequence in sequences:
            assert len(sequence.tokens) == NUM_NEW
            logits = check_greedy(self.reference, sequence.prompt, sequence.tokens)
            torch.testing.assert_close(torch.stack(sequence.logits), logits, atol=TOLERANCE, rtol=TOLERANCE)
        assert max(len(set(sequence.tokens)) for sequence in sequences) > 4


def served_folder(config_class: type, model_class: type, values: dict[str, Any], folder: Path) -> Any:
    """A random model in `folder` with a tokenizer of one token a byte; returns transformers' model."""
    changes = {"vocab_size": write_byte_tokenizer(folder), "eos_token_id": 0, "bos_token_id": 0}
    return save_random(config_class, model_class, values | changes, folder)


def check_served(folder: Path, reference: PreTrainedModel) -> None:
    """Through the public API: several prompts at once, a prompt twice and a second turn, with exact tokens."""
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    texts = ["a state that cannot be cut back", "x", "the same prompt, and some more of it behind the first page"]
    with LLM(folder, device="cpu", page_size=PAGE_SIZE, max_batch_size=3, max_model_len=256) as llm:
        for output in llm.generate(texts, params):
            check_output(reference, output)
        _check_repeated(llm, reference, params)
        _check_turns(llm, reference, params)


def check_output(reference: PreTrainedModel, output: RequestOutput) -> None:
    assert len(output.token_ids) == NUM_NEW
    check_greedy(reference, output.prompt_token_ids, output.token_ids)


def _check_repeated(llm: LLM, reference: PreTrainedModel, params: SamplingParams) -> None:
    """The second run of a prompt finds no state to start from and leaves some; the third one starts there."""
    text = "a prompt that comes again and again, longer than a few pages"
    outputs = [llm.generate(text, params)[0] for _ in range(3)]
    for output in outputs:
        check_output(reference, output)
    assert outputs[2].reuse.reused_tokens >= len(outputs[2].prompt_token_ids) - PAGE_SIZE - 1


def _check_turns(llm: LLM, reference: PreTrainedModel, params: SamplingParams) -> None:
    """The same chat again starts behind the system prompt, its second turn behind the whole of the first prompt."""
    turns = [{"role": "system", "content": "be brief and exact"}, {"role": "user", "content": "what is a page?"}]
    first, again = llm.chat(turns, params)[0], llm.chat(turns, params)[0]
    turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and a slot?"}]
    second = llm.chat(turns, params)[0]
    assert again.reuse.reused_tokens >= len("system:be brief and exact")
    assert second.reuse.reused_tokens >= len(first.prompt_token_ids)
    for output in (first, again, second):
        check_output(reference, output)


def check_pressed(folder: Path, reference: PreTrainedModel) -> None:
    """Many prompts that share beginnings over few checkpoints and pages: what is evicted and resumed never shows."""
    rng = np.random.default_rng(9)
    bases = [rng.integers(1, 257, 60).tolist() for _ in range(3)]
    shared = [bases[int(rng.integers(3))][: int(rng.integers(1, 61))] for _ in range(24)]
    requests = [{"prompt_token_ids": [*begin, *rng.integers(1, 257, 6).tolist()]} for begin in shared]
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    with LLM(folder, device="cpu", page_size=PAGE_SIZE, max_batch_size=3, max_model_len=128, kv_budget=260) as llm:
        outputs = [*llm.generate(requests, params), *llm.generate(requests, params)]
        metrics = llm.cache_metrics()
    assert metrics.reclaimed_recurrent_snapshots > 0
    assert sum(output.reuse.reused_tokens for output in outputs) > 100
    for output in outputs:
        check_output(reference, output)


DAMAGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    3,
    10**400,
    0.5,
    float("nan"),
    float("-inf"),
    "x",
    "",
    [],
    [None, 1],
    {},
    {"a": 1},
)


def check_damaged_fields(raw: dict[str, Any]) -> None:
    """Whatever stands in a field, the config is read or refused by name."""
    refusals = []
    for name in raw:
        for value in DAMAGE:
            try:
                config_from_hf(raw | {name: value})
            except UnsupportedModelError as error:
                refusals.append(str(error))
    assert len(refusals) > len(raw)
    assert all("config.json" in text for text in refusals)
