"""Idle rounds on a GPU: steps run ahead with their hidden rows; the text is plain decoding's, whatever was guessed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from helped_drafts import HelpedDraft
from idle_rounds import AheadCounts, ScriptedLengths
from plain_assistant import write_plain_shared_kv_pair
from tiny_drafts import PAIRS, TinyPair

import edgellm_eagle.plugin
import edgellm_hybrid.plugin
import edgellm_shared_kv.plugin
from edgellm import LLM, SamplingParams, SpeculativeOptions
from edgellm.plugins import load_plugins
from edgellm.runtime.device_cuda import CudaDevice

pytestmark = pytest.mark.gpu

PLUGINS = (("eagle", edgellm_eagle.plugin), ("hybrid", edgellm_hybrid.plugin), ("shared-kv", edgellm_shared_kv.plugin))
DRAFTS = {name: PAIRS[name] for name in ("eagle", "mtp")} | {"shared_kv_plain": write_plain_shared_kv_pair}
PROMPTS = ["the quick brown fox " * 3, "a", "0123456789" * 7, "in or out, that is: in or out", "zz top zz top zz"]
LENGTHS = [40, 7, 29, 1, 24]
GREEDY = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in LENGTHS]
SAMPLED = [
    SamplingParams(max_tokens=count, temperature=0.9, top_k=30, seed=count, ignore_eos=True) for count in LENGTHS
]


@pytest.fixture(scope="module", autouse=True)
def plugins_of_this_tree() -> Iterator[None]:
    loaded = load_plugins(extra=PLUGINS, autoload=False, strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgellm.plugins.load_plugins", lambda: loaded)
        yield


@pytest.fixture(scope="module", params=DRAFTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return DRAFTS[request.param](tmp_path_factory.mktemp(request.param))


def load(pair: TinyPair, *, speculates: bool = True, **options: Any) -> LLM:
    speculative = SpeculativeOptions(decoder=pair.decoder, draft=pair.draft, num_drafts=3)
    chosen = {"device": "cuda", "dtype": "float32", "kv_budget": 4096, "page_size": 16, "max_batch_size": 5} | options
    return LLM(pair.model, speculative=speculative if speculates else None, **chosen)


def ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_plain_decodings(
    pair: TinyPair, monkeypatch: pytest.MonkeyPatch, params: list[SamplingParams], batch: int
) -> None:
    with load(pair, speculates=False) as llm:
        wanted = llm.generate(PROMPTS, params, use_cache=False)
    counts = AheadCounts(monkeypatch)
    with load(pair, max_batch_size=batch) as llm:
        decoder: Any = llm._frontend.open_runtime("idle").decoder
        HelpedDraft(llm, [(output.prompt_token_ids, output.token_ids) for output in wanted])
        for every, lies in ((0, 0), (5, 0), (6, 3)):
            decoder._lengths = ScriptedLengths(every, lies)
            assert ids(llm.generate(PROMPTS, params, use_cache=False)) == ids(wanted)
    assert counts.verified > 0
    if pair.decoder != "mtp":
        assert 20 < counts.taken < counts.ahead


def test_what_is_fetched_is_what_lay_there_in_stream_order() -> None:
    device = CudaDevice("cuda")
    numbers = torch.arange(6, dtype=torch.int32, device=device.torch_device).view(2, 3)
    first = device.fetch(numbers)
    numbers += 10
    second = device.fetch(numbers)
    numbers.zero_()
    assert first().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second().tolist() == [[10, 11, 12], [13, 14, 15]]
