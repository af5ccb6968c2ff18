"""Chats on a hybrid model: four clients at once, three turns each, and a turn computes little more than what is new."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from decoder_plugins import use_decoder_plugins
from tiny_model import write_tiny_qwen_hybrid

from edgellm import LLM, SamplingParams
from edgellm.outputs import RequestOutput
from edgellm.testing.recount import recount

CLIENTS, TURNS, PAGE = 4, 3, 8
LETTERS = dict.fromkeys(range(66, 92), 80.0)  # answers of letters come back from the template as they are
GREEDY = SamplingParams(max_tokens=21, temperature=0.0, ignore_eos=True, logit_bias=LETTERS)


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    use_decoder_plugins(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen_hybrid(tmp_path_factory.mktemp("hybrid"))


def open_llm(folder: Path, speculative: str | None) -> LLM:
    return LLM(folder, device="cpu", kv_budget=8192, page_size=PAGE, max_batch_size=CLIENTS, speculative=speculative)


class Client:
    """One conversation; `talk` holds it all, `outputs` the answers."""

    def __init__(self, number: int, together: threading.Barrier | None = None) -> None:
        self._together = together
        self.talk: list[dict[str, Any]] = [
            {"role": "user", "content": f"{number}: tell me about number {number}. " * 3}
        ]
        self.outputs: list[RequestOutput] = []

    def run(self, llm: LLM, *, use_cache: bool = True) -> Client:
        for turn in range(TURNS):
            if self._together is not None:
                self._together.wait(timeout=60)
            with llm.stream(self.talk, GREEDY, use_cache=use_cache) as stream:
                text = "".join(stream)
                self.outputs.append(stream.output)
            self.talk.append({"role": "assistant", "content": text})
            self.talk.append({"role": "user", "content": f"and then, {turn}?"})
        return self


@pytest.mark.parametrize("speculative", [None, "prompt_lookup", "mtp"])
def test_a_turn_computes_what_is_new_and_at_most_a_page(folder: Path, speculative: str | None) -> None:
    together = threading.Barrier(CLIENTS)
    with open_llm(folder, speculative) as llm, ThreadPoolExecutor(CLIENTS) as pool:
        clients = list(pool.map(lambda number: Client(number, together).run(llm), range(CLIENTS)))
        assert recount(llm._frontend.open_runtime("recount").coordinator).leased == 0
    with open_llm(folder, None) as llm:
        cold = [Client(number).run(llm, use_cache=False) for number in range(CLIENTS)]
    for client, twin in zip(clients, cold, strict=True):
        assert [output.token_ids for output in client.outputs] == [output.token_ids for output in twin.outputs]
        for before, after in zip(client.outputs, client.outputs[1:], strict=False):
            known = [*before.prompt_token_ids, *before.token_ids]
            assert after.prompt_token_ids[: len(known)] == known
            assert after.reuse.reused_tokens >= len(known) - PAGE, after.reuse
