"""`LLM` on a GPU: the same tokens as on the CPU, reuse that changes nothing, options, refusals, the default model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from parity.near_tie import NEAR_TIE_NATS, NEAR_TIE_NATS_16_BIT, compare
from tiny_model import write_tiny_llama

from edgellm import LLM, SamplingParams
from edgellm.errors import InvalidArgumentError
from edgellm.fetch import DEFAULT_MODEL, PACKAGED_MODELS, is_present

pytestmark = pytest.mark.gpu

REFERENCE = Path(__file__).parents[1] / "reference" / "smollm2_greedy.json"
KV_TOKENS = 4096


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path) -> Iterator[LLM]:
    with LLM(tiny_model_dir, device="cuda", dtype="float32", kv_budget=KV_TOKENS, page_size=16) as model:
        yield model


@pytest.fixture(scope="module")
def half_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that the tensor-core kernels serve."""
    return write_tiny_llama(tmp_path_factory.mktemp("half"), head_dim=64, hidden_size=128)


def prompts_of(count: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [1 + (index * 37 + place * 11) % 250 for place in range(5 + 9 * index)]}
            for index in range(count)]  # fmt: skip


def test_tokens_equal_those_of_the_cpu(llm: LLM, tiny_model_dir: Path) -> None:
    prompts = prompts_of(12)
    ours = [output.token_ids for output in llm.generate(prompts, greedy(24))]
    with LLM(tiny_model_dir, device="cpu", dtype="float32", kv_budget=KV_TOKENS, page_size=16) as cpu:
        theirs = [output.token_ids for output in cpu.generate(prompts, greedy(24))]
    assert ours == theirs


def test_sampled_tokens_equal_those_of_the_cpu(llm: LLM, tiny_model_dir: Path) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, top_k=40, seed=7, ignore_eos=True, logprobs=2)
    prompts = prompts_of(6)
    ours = llm.generate(prompts, params)
    with LLM(tiny_model_dir, device="cpu", dtype="float32", kv_budget=KV_TOKENS, page_size=16) as cpu:
        theirs = cpu.generate(prompts, params)
    assert [output.token_ids for output in ours] == [output.token_ids for output in theirs]


def test_reuse_changes_nothing_and_is_reported(llm: LLM) -> None:
    (prompt,) = prompts_of(20)[-1:]
    cold = llm.generate([prompt], greedy(20), use_cache=False)[0]
    first, second = llm.generate([prompt], greedy(20))[0], llm.generate([prompt], greedy(20))[0]
    assert cold.token_ids == first.token_ids == second.token_ids
    assert second.reuse.reused_tokens >= 16
    assert cold.reuse.reused_tokens == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_deterministic_answers_do_not_depend_on_company(half_model_dir: Path, dtype: str) -> None:
    prompts = prompts_of(10)
    with LLM(
        half_model_dir, device="cuda", dtype=dtype, kv_budget=KV_TOKENS, page_size=16, deterministic=True
    ) as model:
        together = [output.token_ids for output in model.generate(prompts, greedy(24))]
        alone = [model.generate([prompt], greedy(24), use_cache=False)[0].token_ids for prompt in prompts]
        again = [output.token_ids for output in model.generate(prompts, greedy(24))]
    assert together == alone == again


def test_fp8_pages_and_automatic_budget(half_model_dir: Path) -> None:
    with LLM(half_model_dir, device="cuda", dtype="bfloat16", kv_dtype="fp8", kv_budget=0.01) as model:
        budget = model.memory_budget
        assert budget.bytes_per_page == 2 * 2 * 2 * 32 * (64 + 4)
        assert "free after the weights" in budget.describe()
        assert len(model.generate(["hello"], greedy(8))[0].token_ids) == 8


def test_the_device_is_chosen_and_shown(tiny_model_dir: Path) -> None:
    with LLM(tiny_model_dir, kv_budget=KV_TOKENS) as model:
        assert torch.cuda.get_device_name() in model.memory_budget.describe()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda:99"}, "cuda:99.*CUDA devices?, numbered from 0"),
        ({"page_size": 8}, "page_size is 8; on a CUDA device it is one of 16, 32, 64, 128"),
        ({"kv_dtype": "fp8", "dtype": "float32"}, "kv_dtype is 'fp8' and the model computes in float32"),
        ({"kv_budget": "9TB"}, "kv_budget '9TB' needs"),
    ],
)
def test_refusals_name_what_to_change(tiny_model_dir: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        LLM(tiny_model_dir, **({"device": "cuda", "dtype": "float32"} | options))  # type: ignore[arg-type]


@pytest.mark.model
@pytest.mark.parametrize(
    ("dtype", "nats", "identical"), [("float32", NEAR_TIE_NATS, 0.9), ("bfloat16", NEAR_TIE_NATS_16_BIT, 0.5)]
)
def test_the_default_models_tokens_equal_those_of_transformers(dtype: str, nats: float, identical: float) -> None:
    """Where tokens differ, the two best were as good as tied; with reuse and without."""
    default_model = PACKAGED_MODELS[DEFAULT_MODEL]
    if not is_present(default_model):
        pytest.skip("needs the default model on this machine: edgellm doctor --fetch")
    cases = json.loads(REFERENCE.read_text())["cases"]
    prompts = [{"prompt_token_ids": case["prompt_token_ids"]} for case in cases]
    with LLM(default_model.path, device="cuda", dtype=dtype, kv_budget=65_536, max_batch_size=16) as model:
        for use_cache in (False, True, True):
            outputs = model.generate(prompts, greedy(32), use_cache=use_cache)
            found = [
                compare(output.token_ids, case["token_ids"], case["margins"])
                for case, output in zip(cases, outputs, strict=True)
            ]
            assert all(one.is_acceptable(nats) for one in found), [one.margin for one in found]
            assert sum(one.identical for one in found) >= identical * len(cases)
