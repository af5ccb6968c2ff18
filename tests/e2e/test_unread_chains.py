"""Proposals that the host reads together with what the target chose: one wait a round, plain decoding's text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helped_drafts import HelpedDraft
from plain_assistant import write_plain_shared_kv_pair
from reference_placement import ReferencePlacement, make_engine
from tiny_drafts import PAIRS, TinyPair

import edgellm_eagle.plugin
import edgellm_hybrid.plugin
import edgellm_shared_kv.plugin
from edgellm import Engine, SamplingParams, SpeculativeOptions
from edgellm.decoding.unread_chains import UnreadChain, UnreadChains, late_tokens
from edgellm.plugins import load_plugins
from edgellm.runtime.device import CpuDevice
from edgellm.runtime.executor_cuda import CudaExecutor

PLUGINS = (("eagle", edgellm_eagle.plugin), ("hybrid", edgellm_hybrid.plugin), ("shared-kv", edgellm_shared_kv.plugin))
DRAFTS = {name: PAIRS[name] for name in ("eagle", "mtp", "shared_kv")} | {"shared_kv_plain": write_plain_shared_kv_pair}
PROMPTS = ["the quick brown fox " * 3, "a", "0123456789" * 7, "in or out, that is: in or out", "zz top zz top zz"]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.9, top_k=30, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=19, temperature=0.0, repetition_penalty=1.3, logprobs=1, ignore_eos=True),
    SamplingParams(max_tokens=11, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.0, min_tokens=8, ignore_eos=True),
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


class LateDevice:
    """Copies to the host are there when they are waited for; waits are counted, and so are steps.

    Attributes:
        early: waits for proposals in front of the step that verifies them.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.early = self.waits = self.rounds = 0
        self._open: list[int] = []
        verify = CudaExecutor.forward_verify

        def fetch(device: CpuDevice, tensor: torch.Tensor) -> Callable[[], np.ndarray[Any, Any]]:
            copied, steps = tensor.numpy().copy(), self.rounds

            def wait() -> np.ndarray[Any, Any]:
                self.waits += 1
                self.early += self.rounds == steps
                return copied

            return wait

        def counted(executor: CudaExecutor, batch: Any) -> Any:
            self.rounds += 1
            return verify(executor, batch)

        patch.setattr(CpuDevice, "fetch", fetch)
        patch.setattr(CudaExecutor, "forward_verify", counted)


class LateHelpedDraft(HelpedDraft):
    """Hands its chains over as a device would: unread, in columns of their own order, padding behind them."""

    def propose(self, executor: Any, batch: Any, rows: Sequence[int], limits: Sequence[int]) -> list[Any]:
        chains = super().propose(executor, batch, rows, limits)
        order = sorted((number for number, chain in enumerate(chains) if chain), key=lambda n: -len(chains[n]))
        if not order:
            return chains
        depth = len(chains[order[0]])
        table = np.full((depth, len(order) + 2), 77, np.int32)
        for column, number in enumerate(order):
            table[: len(chains[number]), column] = chains[number]
        lengths = [len(chains[number]) for number in order]
        made = UnreadChains(executor.device, torch.from_numpy(table), lengths).chains()
        for column, number in enumerate(order):
            chains[number] = made[column]
        return chains


def make(pair: TinyPair, **options: Any) -> Engine:
    speculative = SpeculativeOptions(decoder=pair.decoder, draft=pair.draft, adaptive=False, num_drafts=3)
    chosen = {"kv_budget": 4096, "max_batch_size": 5, "speculative": speculative} | options
    return make_engine(pair.model, ReferencePlacement, **chosen)


def ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_proposals_are_not_waited_for_before_they_are_verified(pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateDevice(monkeypatch)
    with make(pair) as engine:
        engine.generate(PROMPTS, PARAMS)
    assert late.waits > 20
    assert late.early == 0


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_text_is_that_of_plain_decoding(pair: TinyPair, batch: int) -> None:
    with make(pair, speculative=None) as engine:
        wanted = engine.generate(PROMPTS, PARAMS, use_cache=False)
    with make(pair, max_batch_size=batch) as engine:
        LateHelpedDraft(engine, [(output.prompt_token_ids, output.token_ids) for output in wanted])
        for _ in range(2):
            found = engine.generate(PROMPTS, PARAMS)
            assert ids(found) == ids(wanted)
            accepted = sum(output.accepted_draft_tokens for output in found)
            assert 20 < accepted < sum(output.proposed_draft_tokens for output in found)


def chains_of(*chains: Sequence[int]) -> list[UnreadChain]:
    depth = max(map(len, chains))
    table = torch.tensor([[(*chain, *[0] * depth)[place] for chain in chains] for place in range(depth)]).int()
    return UnreadChains(CpuDevice(), table, [len(chain) for chain in chains]).chains()


def test_a_chain_reads_as_a_list_does() -> None:
    first, second = chains_of([3, 4, 5], [6])
    assert (len(first), len(second), bool(first)) == (3, 1, True)
    assert not first.source.is_read
    assert late_tokens([[], first, second]) is not None
    assert (list(first), first[-1], first[1:], second[0]) == ([3, 4, 5], 5, [4, 5], 6)
    assert first == [3, 4, 5]
    assert second == [6]
    assert first != second
    assert second != [6, 4]
    assert late_tokens([[], first, second]) is None
    with pytest.raises(IndexError):
        second[1]


def test_chains_of_two_rounds_are_read_at_once() -> None:
    first, second = chains_of([3, 4])[0], chains_of([5])[0]
    assert late_tokens([first, second]) is None
    assert first.source.is_read
    assert second.source.is_read
