"""The default model against transformers, and against itself with reuse on, off and after eviction.

`reference/smollm2_greedy.json` was made by `reference/make_reference.py`; a handful is made again here.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from near_tie import NEAR_TIE_NATS_16_BIT, compare

from edgellm import LLM, SamplingParams

REFERENCE = Path(__file__).with_name("reference") / "smollm2_greedy.json"
NUM_TOKENS = 32
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
LIVE_CASES = (0, 30, 37, 52, 58)
LIVE_TOKENS = 8

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def cases() -> list[dict]:
    return json.loads(REFERENCE.read_text())["cases"]


@pytest.fixture(scope="module")
def llm(default_model):
    with LLM(default_model, dtype="float32", kv_budget=32_768, max_batch_size=8) as model:
        yield model


def prompts_of(cases: list[dict]) -> list[dict]:
    return [{"prompt_token_ids": case["prompt_token_ids"]} for case in cases]


def report(cases: list[dict], outputs) -> tuple[list[str], int]:
    """Differences that rounding does not explain, and how many cases are identical."""
    wrong, identical = [], 0
    for case, output in zip(cases, outputs, strict=True):
        found = compare(output.token_ids, case["token_ids"], case["margins"])
        identical += found.identical
        if not found.acceptable:
            wrong.append(f"prompt {case['prompt']}: differs at token {found.equal}, margin {found.margin} nat")
    return wrong, identical


def test_greedy_tokens_equal_those_of_transformers(llm, cases):
    outputs = llm.generate(prompts_of(cases), GREEDY, use_cache=False)
    wrong, identical = report(cases, outputs)
    assert not wrong, wrong
    assert len(cases) >= 50
    assert identical >= 0.9 * len(cases)
    assert all(output.reuse.reused_tokens == 0 for output in outputs)


def test_bfloat16_parts_from_transformers_only_at_near_ties(default_model, cases):
    chosen = cases[::8]
    with LLM(default_model, dtype="bfloat16", kv_budget=16_384, max_batch_size=8) as rounded:
        outputs = rounded.generate(prompts_of(chosen), GREEDY)
    found = [
        compare(output.token_ids, case["token_ids"], case["margins"])
        for case, output in zip(chosen, outputs, strict=True)
    ]
    assert all(one.is_acceptable(NEAR_TIE_NATS_16_BIT) for one in found), [one.margin for one in found]
    assert sum(one.identical for one in found) >= 0.5 * len(chosen)


def test_reuse_on_gives_the_same_tokens_as_reuse_off(llm, cases):
    chosen = cases[::3]
    cold = llm.generate(prompts_of(chosen), GREEDY, use_cache=False)
    llm.generate(prompts_of(chosen), GREEDY)
    warm = llm.generate(prompts_of(chosen), GREEDY)
    for case, before, after in zip(chosen, cold, warm, strict=True):
        found = compare(after.token_ids, before.token_ids, case["margins"])
        assert found.acceptable, (case["prompt"], found)
        assert after.reuse.computed_tokens == 1


def test_after_eviction_the_tokens_are_still_the_same(default_model, cases):
    chosen = [case for case in cases if len(case["prompt_token_ids"]) > 150]
    with LLM(default_model, dtype="float32", kv_budget=768, max_batch_size=1) as small:
        for _ in range(2):
            outputs = small.generate(prompts_of(chosen), GREEDY)
            wrong, _ = report(chosen, outputs)
            assert not wrong, wrong
        assert small.cache_metrics().reclaimed_base_kv_pages > 0


def test_a_handful_of_references_made_again_by_transformers(default_model, cases):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = Path(default_model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            quantization_config=transformers.GgufConfig(dequantize=True),
            dtype=torch.float32,
        ).eval()
        model.generation_config.eos_token_id = None  # the references go on after the end token
        for case in (cases[i] for i in LIVE_CASES):
            ids = torch.tensor([case["prompt_token_ids"]])
            # Without a mask, generate() hides the end tokens inside the prompt: they double as padding.
            mask = torch.ones_like(ids)
            out = model.generate(ids, attention_mask=mask, max_new_tokens=LIVE_TOKENS, do_sample=False)
            tokens = out[0, ids.shape[1] :].tolist()
            found = compare(tokens, case["token_ids"][:LIVE_TOKENS], case["margins"])
            assert found.acceptable, (case["prompt"], found)
