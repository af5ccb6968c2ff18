"""Prompt lookup through the public API: the text of plain decoding, from fewer steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_model import write_tiny_llama

import edgellm_lookup.decoder
import edgellm_shared_kv.policy
from edgellm import LLM, SamplingParams, SpeculativeOptions
from edgellm.errors import InvalidArgumentError
from edgellm.plugins import load_plugins
from edgellm.request import LLMGenerationRequest
from edgellm_lookup import PromptLookupDecoder

EXTRA = (("lookup", edgellm_lookup.decoder), ("shared-kv", edgellm_shared_kv.policy))
PROMPTS = ["abcabcabcabc", "to be or not to be, that is to be or", "x", "one two three one two", "zzzzzzzzzzzzzzzzzzzz"]
SETTINGS = [
    SamplingParams(max_tokens=40, temperature=0.0),
    SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(max_tokens=40, temperature=0.0, repetition_penalty=1.2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("lookup"))


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_plugins(extra=EXTRA, autoload=False, strict=True)
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: loaded)


@pytest.fixture
def plain(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", kv_budget=4096) as llm:
        yield llm


def speculating(folder: Path, **options: object) -> LLM:
    return LLM(
        folder,
        device="cpu",
        kv_budget=4096,
        speculative=SpeculativeOptions(decoder="prompt_lookup", **options),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("params", SETTINGS, ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("adaptive", [True, False])
def test_the_text_is_that_of_plain_decoding(plain: LLM, folder: Path, params: SamplingParams, adaptive: bool) -> None:
    wanted = plain.generate(PROMPTS, params)
    with speculating(folder, adaptive=adaptive) as llm:
        together = llm.generate(PROMPTS, params)
        again = [llm.generate(prompt, params)[0] for prompt in PROMPTS]  # alone, and from the cache
    for one, two, three in zip(wanted, together, again, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids
        assert one.finish_reason == two.finish_reason


def test_a_text_that_repeats_comes_out_of_fewer_steps(folder: Path) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, logit_bias={66: 100.0})
    with speculating(folder, adaptive=False) as llm:
        output, other = llm.generate(["abc", "xyz"], params)
        metrics = llm.engine_metrics()
    assert output.token_ids == other.token_ids == [66] * 60
    assert output.proposed_draft_tokens == output.accepted_draft_tokens > 45
    assert metrics.proposed_draft_tokens == output.proposed_draft_tokens + other.proposed_draft_tokens
    assert metrics.accepted_draft_tokens == output.accepted_draft_tokens + other.accepted_draft_tokens


def test_a_request_may_decline(folder: Path) -> None:
    request = LLMGenerationRequest(
        sampling=SamplingParams(max_tokens=20, temperature=0.0, logit_bias={66: 100.0}),
        prompt_token_ids=np.array([66, 67, 68], np.int32),
        disable_spec_decode=True,
    )
    with speculating(folder, adaptive=False) as llm:
        output = llm._frontend.submit(request).get(timeout=60)
    assert (output.token_ids, output.proposed_draft_tokens) == ([66] * 20, 0)


def test_logprobs_come_with_every_token_of_a_run(folder: Path, plain: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=2)
    with speculating(folder, adaptive=False) as llm:
        got, wanted = llm.generate(PROMPTS[0], params)[0], plain.generate(PROMPTS[0], params)[0]
    assert got.token_ids == wanted.token_ids
    assert got.logprobs is not None
    assert wanted.logprobs is not None
    assert [one.token_id for one in got.logprobs] == [one.token_id for one in wanted.logprobs]
    assert [one.logprob for one in got.logprobs] == pytest.approx([one.logprob for one in wanted.logprobs], abs=1e-4)


def test_a_draft_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="prompt lookup needs none"):
        speculating(folder, draft="somewhere")


def test_nothing_of_a_request_stays_behind(folder: Path) -> None:
    with speculating(folder) as llm:
        llm.generate(PROMPTS, SETTINGS[0])
        decoder = llm._frontend.open_runtime("test").decoder
    assert isinstance(decoder, PromptLookupDecoder)
    assert not decoder._texts
    assert not decoder._requests
