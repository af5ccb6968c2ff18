"""Drafts on a GPU: what they take beside their pages was counted, and answers of an MTP head are reused."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from tiny_drafts import PAIRS, TinyPair
from tiny_model import write_tiny_qwen_hybrid

from edgellm import LLM, SamplingParams, SpeculativeOptions
from edgellm.decoding.device_drafts import DevicePasses
from edgellm.errors import InvalidArgumentError
from edgellm.runtime import placement_cuda
from edgellm.runtime.cuda_memory import measure
from edgellm.testing.recount import recount
from edgellm_shared_kv.device_rounds import DeviceRounds

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("decoders_of_this_tree")]

MIB = 1 << 20
SEGMENTS = 64 * MIB  # torch takes memory in pieces of 2 and 20 MiB, for graphs apart
GREEDY = SamplingParams(max_tokens=21, temperature=0.0, ignore_eos=True)
WIDE: dict[str, Any] = {
    "head_dim": 64,
    "hidden_size": 128,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


@pytest.mark.parametrize("name", ["mtp", "eagle", "shared_kv"])
@pytest.mark.parametrize("slots", [4, 32])
def test_drafts_take_no_more_than_was_counted(
    name: str, slots: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair: TinyPair = PAIRS[name](tmp_path_factory.mktemp(name))
    counted: list[int] = []
    taken: list[int] = []

    def noting(*arguments: Any) -> Any:
        memory = measure(*arguments)
        counted.append(memory.draft_bytes)
        return memory

    monkeypatch.setattr(placement_cuda, "measure", noting)
    for made in (DevicePasses, DeviceRounds):
        watch_memory(monkeypatch, made, taken)
    speculative = SpeculativeOptions(decoder=pair.decoder, draft=pair.draft, num_drafts=3)
    with LLM(
        pair.model, device="cuda", dtype="float32", kv_budget=4096, max_batch_size=slots, speculative=speculative
    ) as llm:
        assert "drafts beside their pages" in llm.memory_budget.describe()
        assert len(llm.generate(["a" * 40] * 3, GREEDY)) == 3
    assert len(counted) == len(taken) == 1
    line = f"{name}, {slots} slots: counted {counted[0] / MIB:.1f} MiB, taken {taken[0] / MIB:.1f} MiB"
    sys.stdout.write(line + "\n")
    assert taken[0] <= counted[0] + SEGMENTS


def watch_memory(monkeypatch: pytest.MonkeyPatch, made: type[Any], taken: list[int]) -> None:
    """Note what torch takes of the device while a `made` is built."""
    build = made.__init__

    def building(self: Any, *arguments: Any, **options: Any) -> None:
        before = torch.cuda.memory_reserved()
        build(self, *arguments, **options)
        torch.cuda.synchronize()
        taken.append(torch.cuda.memory_reserved() - before)

    monkeypatch.setattr(made, "__init__", building)


@pytest.mark.parametrize("wide", [False, True])
def test_the_next_turn_reuses_the_answer_of_an_mtp_head(wide: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Four conversations at once: the text of a cold plain run, and at most a page is computed again."""
    folder = write_tiny_qwen_hybrid(tmp_path_factory.mktemp("hybrid"), **(WIDE if wide else {}))
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "kv_budget": 8192, "page_size": 16}
    prompts = [
        {"prompt_token_ids": [1 + (number * 37 + place * 11) % 250 for place in range(40)]} for number in range(4)
    ]
    speculative = SpeculativeOptions(decoder="mtp", num_drafts=3, adaptive=False)
    with LLM(folder, max_batch_size=4, speculative=speculative, **options) as llm:
        first = llm.generate(prompts, GREEDY)
        again = [{"prompt_token_ids": [*one.prompt_token_ids, *one.token_ids, 5, 6, 7]} for one in first]
        second = llm.generate(again, GREEDY)
        assert recount(llm._frontend.open_runtime("recount").coordinator).leased == 0
    with LLM(folder, max_batch_size=4, **options) as plain:
        wanted = [plain.generate(turn, GREEDY, use_cache=False) for turn in (prompts, again)]
    for ours, theirs in zip((first, second), wanted, strict=True):
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
    for before, after in zip(first, second, strict=True):
        known = len(before.prompt_token_ids) + len(before.token_ids)
        assert after.reuse.reused_tokens >= known - 16, after.reuse


def test_wrong_pages_are_refused_before_the_device_hears_of_them(tiny_model_dir: Any) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "kv_budget": 1024, "page_size": 16}
    with LLM(tiny_model_dir, **options) as llm:
        executor: Any = llm._frontend.open_runtime("copies").executor
        wanted = llm.generate("abc", GREEDY)[0].token_ids
        limit = executor.kv_cache.num_pages
        for sources, targets in (([0], [limit]), ([-1], [0]), ([0, 1], [2]), ([0, 1], [2, 2])):
            with pytest.raises(InvalidArgumentError):
                executor.copy_pages(np.array(sources, np.int32), np.array(targets, np.int32))
        torch.cuda.synchronize()
        assert llm.generate("abc", GREEDY)[0].token_ids == wanted
