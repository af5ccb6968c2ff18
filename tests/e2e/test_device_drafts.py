"""Draft models beside the CUDA executor, kernels replaced by their references: the text of plain decoding, bit for bit.

Drafts are random and helped (`HelpedDraft`), so that every length of an accepted run occurs.  What they propose is also
compared with what the same draft proposes on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from helped_drafts import HelpedDraft
from plain_assistant import write_plain_shared_kv_pair
from reference_placement import ReferencePlacement, make_engine
from tiny_drafts import PAIRS, TinyPair

import edgellm_eagle.plugin
import edgellm_hybrid.plugin
import edgellm_shared_kv.plugin
from edgellm import Engine, SamplingParams, SpeculativeOptions
from edgellm.models.device_attention import AttentionMode
from edgellm.plugins import load_plugins
from edgellm.runtime.placement import CpuPlacement
from edgellm.testing.recount import recount

PLUGINS = (("eagle", edgellm_eagle.plugin), ("hybrid", edgellm_hybrid.plugin), ("shared-kv", edgellm_shared_kv.plugin))
DRAFTS = {name: PAIRS[name] for name in ("eagle", "mtp", "shared_kv")} | {"shared_kv_plain": write_plain_shared_kv_pair}
PROMPTS = ["the quick brown fox " * 3, "a", "0123456789" * 7, "in or out, that is: in or out", "zz top zz top zz"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def plugins_of_this_tree() -> Iterator[None]:
    loaded = load_plugins(extra=PLUGINS, autoload=False, strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgellm.plugins.load_plugins", lambda: loaded)
        yield


@pytest.fixture(scope="module", params=DRAFTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return DRAFTS[request.param](tmp_path_factory.mktemp(request.param))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What plain decoding of the same executor says to the prompts, and to the turn behind each answer."""

    first: list[Any]
    second: list[Any]

    @property
    def second_prompts(self) -> list[list[int]]:
        return [[*output.prompt_token_ids, *output.token_ids, 7, 8, 9] for output in self.first]


@pytest.fixture(scope="module")
def wanted(pair: TinyPair) -> Wanted:
    with make(pair, speculative=None) as engine:
        found = Wanted(engine.generate(PROMPTS, GREEDY, use_cache=False), [])
        found.second.extend(engine.generate(found.second_prompts, GREEDY, use_cache=False))
    return found


def make(pair: TinyPair, placement: type[CpuPlacement] = ReferencePlacement, **options: Any) -> Engine:
    speculative = SpeculativeOptions(decoder=pair.decoder, draft=pair.draft, adaptive=False, num_drafts=3)
    chosen = {"kv_budget": 4096, "max_batch_size": 5, "speculative": speculative} | options
    return make_engine(pair.model, placement, **chosen)


def in_mode(mode: AttentionMode) -> type[ReferencePlacement]:
    return type("OfMode", (ReferencePlacement,), {"mode": mode})


def ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("batch", [1, 5])
def test_the_text_is_that_of_plain_decoding(pair: TinyPair, wanted: Wanted, batch: int) -> None:
    with make(pair, max_batch_size=batch) as engine:
        outputs = [*wanted.first, *wanted.second]
        HelpedDraft(engine, [(output.prompt_token_ids, output.token_ids) for output in outputs])
        first = engine.generate(PROMPTS, GREEDY)
        assert ids(first) == ids(wanted.first)
        accepted = sum(output.accepted_draft_tokens for output in first)
        assert 0 < accepted < sum(output.proposed_draft_tokens for output in first)
        second = engine.generate(wanted.second_prompts, GREEDY)
        assert ids(second) == ids(wanted.second)
        assert sum(output.reuse.reused_tokens for output in second) > 100
        assert engine._runtime is not None
        assert recount(engine._runtime.coordinator).leased == 0


class Listening:
    """Remembers every chain that a decoder proposes, with the sequence and the place that it is for."""

    def __init__(self, engine: Engine) -> None:
        decoder: Any = engine._frontend.open_runtime("Listening").decoder
        self.chains: dict[tuple[int, int], list[int]] = {}
        self._propose = decoder.propose
        decoder.propose = self.propose

    def propose(self, executor: Any, batch: Any, rows: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        chains = self._propose(executor, batch, rows, limits)
        for row, chain in zip(rows, chains, strict=True):
            self.chains[int(batch.state_index[row]), int(batch.past_len[row])] = chain
        return chains


@pytest.mark.parametrize("mode", [AttentionMode.EXACT, AttentionMode.SPLIT])
def test_proposals_are_those_of_the_draft_on_the_cpu(
    pair: TinyPair, mode: AttentionMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both run in float32; they would differ where two tokens are as good as tied."""
    monkeypatch.setattr("edgellm.decoding.draft_staging.attention_mode", lambda dtype, deterministic: mode)
    heard = []
    for placement in (in_mode(mode), CpuPlacement):
        with make(pair, placement) as engine:
            listening = Listening(engine)
            engine.generate(PROMPTS, GREEDY)
            heard.append(listening.chains)
    assert heard[0] == heard[1]
    assert sum(map(len, heard[0].values())) > 100


def test_adaptive_lengths_and_few_seats(pair: TinyPair, wanted: Wanted) -> None:
    """Sequences that propose nothing for a while leave their entries for later; slots change hands."""
    speculative = SpeculativeOptions(decoder=pair.decoder, draft=pair.draft)
    with make(pair, max_batch_size=2, speculative=speculative) as engine:
        assert ids(engine.generate(PROMPTS, GREEDY)) == ids(wanted.first)
