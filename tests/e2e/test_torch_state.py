"""What the calling thread told torch before it made an `LLM`, and while it generates, changes no answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from reference_placement import ReferencePlacement
from tiny_model import write_tiny_llama, write_tiny_qwen_hybrid

import edgellm_hybrid.plugin
import edgellm_lookup.decoder
import edgellm_shared_kv.plugin
from edgellm import LLM, SamplingParams
from edgellm.plugins import load_plugins
from edgellm.runtime.placement import CpuPlacement

EXTRA = (
    ("hybrid", edgellm_hybrid.plugin),
    ("lookup", edgellm_lookup.decoder),
    ("shared-kv", edgellm_shared_kv.plugin),
)
PROMPTS = ["aab aab aab aab", "the tiny model"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=3, top_p=0.9, max_tokens=10, ignore_eos=True, logprobs=2)
STATES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
}
WRITERS = {"llama": write_tiny_llama, "hybrid": write_tiny_qwen_hybrid}


@pytest.fixture(scope="module", autouse=True)
def plugins_of_this_tree() -> Iterator[None]:
    loaded = load_plugins(extra=EXTRA, autoload=False, strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgellm.plugins.load_plugins", lambda: loaded)
        yield


@pytest.fixture(scope="module", params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[None, "prompt_lookup"])
def speculative(request: pytest.FixtureRequest) -> str | None:
    return request.param


@pytest.fixture(scope="module", params=[CpuPlacement, ReferencePlacement])
def placement(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgellm.runtime.placement.place", lambda device, options: request.param(options))
        yield


def make(folder: Path, speculative: str | None) -> LLM:
    return LLM(folder, kv_budget=512, page_size=8, max_batch_size=2, speculative=speculative)


def answers(llm: LLM) -> list[list[int]]:
    return [one.token_ids for params in (GREEDY, DRAWN) for one in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def expected(folder: Path, speculative: str | None, placement: None) -> list[list[int]]:
    with make(folder, speculative) as llm:
        return answers(llm)


@pytest.mark.parametrize("state", STATES)
def test_answers_do_not_depend_on_the_state_of_the_callers_torch(
    folder: Path, speculative: str | None, expected: list[list[int]], state: str
) -> None:
    with STATES[state]():
        llm = make(folder, speculative)
        assert answers(llm) == expected
        assert answers(llm) == expected  # over cached context
    with llm:
        assert answers(llm) == expected
    with make(folder, speculative) as llm, STATES[state]():
        assert answers(llm) == expected
