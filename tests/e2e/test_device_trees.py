"""EAGLE trees beside the CUDA executor, kernels replaced by their references: the text of plain decoding.

The head is random and helped (`HelpedTrees`), so that branches of every length are kept.  What it proposes is also
compared with what the same head proposes on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helped_trees import HelpedTrees
from reference_placement import ReferencePlacement, make_engine
from tiny_drafts import TinyPair, write_eagle_pair

import edgellm_eagle.plugin
from edgellm import Engine, SamplingParams, SpeculativeOptions, StructuredOutput
from edgellm.models.device_attention import AttentionMode
from edgellm.plugins import load_plugins
from edgellm.runtime.placement import CpuPlacement
from edgellm.testing.recount import recount

PROMPTS = ["the quick brown fox " * 3, "a", "0123456789" * 7, "in or out, that is: in or out", "zz top zz top zz"]
SETTINGS = {
    "greedy": SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=16, temperature=0.9, top_k=20, seed=5, ignore_eos=True),
    "penalised": SamplingParams(max_tokens=16, temperature=0.7, frequency_penalty=0.3, seed=1, logprobs=2),
    "guided": SamplingParams(
        max_tokens=16, temperature=1.0, seed=2, structured=StructuredOutput(regex="([a-f]{2,5} [0-9]+,){1,9}")
    ),
}
GREEDY = SETTINGS["greedy"]


class OneShot(ReferencePlacement):
    """Prompts run as a whole, beside the trees of others: longer than a mask."""

    step_tokens = 512


@pytest.fixture(scope="module", autouse=True)
def plugins_of_this_tree() -> Iterator[None]:
    loaded = load_plugins(extra=(("eagle", edgellm_eagle.plugin),), autoload=False, strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgellm.plugins.load_plugins", lambda: loaded)
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_eagle_pair(tmp_path_factory.mktemp("eagle"))


@pytest.fixture(scope="module")
def plain(pair: TinyPair) -> dict[str, list[Any]]:
    """What plain decoding of the same executor says to each prompt, and to the turn behind the greedy answers."""
    with make(pair, speculative=None) as engine:
        wanted = {kind: engine.generate(PROMPTS, params, use_cache=False) for kind, params in SETTINGS.items()}
        wanted["second"] = engine.generate(second_prompts(wanted["greedy"]), GREEDY, use_cache=False)
    return wanted


def make(
    pair: TinyPair,
    placement: type[CpuPlacement] = ReferencePlacement,
    shape: tuple[int, int, int] = (14, 2, 4),
    *,
    adaptive: bool = False,
    **options: Any,
) -> Engine:
    sizes = dict(zip(("num_drafts", "top_k", "depth"), shape, strict=True))
    speculative = SpeculativeOptions(decoder="eagle", draft=pair.draft, adaptive=adaptive, **sizes)
    chosen = {"kv_budget": 4096, "max_batch_size": 5, "speculative": speculative} | options
    return make_engine(pair.model, placement, **chosen)


def second_prompts(first: Sequence[Any]) -> list[list[int]]:
    return [[*output.prompt_token_ids, *output.token_ids, 7, 8, 9] for output in first]


def texts(*outputs: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    return [(output.prompt_token_ids, output.token_ids) for some in outputs for output in some]


def ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


# ---- the text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "placement", "reuse"),
    [(5, ReferencePlacement, True), (1, ReferencePlacement, True), (5, OneShot, False)],
    ids=["five, chunked, reuse", "one, chunked, reuse", "five, one-shot, cold"],
)
def test_the_text_is_that_of_plain_decoding(
    pair: TinyPair, plain: dict[str, list[Any]], batch: int, placement: type[CpuPlacement], reuse: bool
) -> None:
    with make(pair, placement, max_batch_size=batch) as engine:
        helped = HelpedTrees(engine, texts(plain["greedy"], plain["second"]))
        helped.runtime.decoder._pages.fill_poison()
        first = engine.generate(PROMPTS, GREEDY, use_cache=reuse)
        assert ids(first) == ids(plain["greedy"])
        second = engine.generate(second_prompts(first), GREEDY, use_cache=reuse)
        assert ids(second) == ids(plain["second"])
        assert recount(helped.runtime.coordinator).leased == 0
    assert len(helped.branches) > 12
    assert max(map(len, helped.branches)) > 3
    reused = [output.reuse.reused_tokens for output in second]
    assert all(reused) if reuse else not any(reused)


def test_requests_of_every_setting_share_a_batch(pair: TinyPair, plain: dict[str, list[Any]]) -> None:
    kinds = [*SETTINGS, "greedy"]
    wanted = [plain[kind][number] for number, kind in enumerate(kinds)]
    placement = type("OfMode", (ReferencePlacement,), {"mode": AttentionMode.SPLIT})
    with make(pair, placement, (40, 8, 4), adaptive=True) as engine:
        helped = HelpedTrees(engine, texts(wanted))
        together = engine.generate(PROMPTS, [SETTINGS[kind] for kind in kinds], use_cache=False)
    assert ids(together) == ids(wanted)
    assert [output.finish_reason for output in together] == [output.finish_reason for output in wanted]
    assert sum(output.accepted_draft_tokens for output in together) > 10
    assert helped.branches
    for output, expected in zip(together, wanted, strict=True):
        if expected.logprobs is not None:
            found = [entry.logprob for entry in output.logprobs]
            assert found == pytest.approx([entry.logprob for entry in expected.logprobs], abs=1e-4)


def test_sequences_run_to_the_end_of_their_room(pair: TinyPair) -> None:
    """The last round still has places for a whole tree, in both pools."""
    params = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)
    options: dict[str, Any] = {"max_batch_size": 2, "max_model_len": 80}
    with make(pair, speculative=None, **options) as engine:
        wanted = engine.generate(PROMPTS[:2], params)
    with make(pair, **options) as engine:
        helped = HelpedTrees(engine, texts(wanted))
        outputs = engine.generate(PROMPTS[:2], params)
        assert recount(helped.runtime.coordinator).leased == 0
    for output, expected in zip(outputs, wanted, strict=True):
        assert output.finish_reason == "length"
        assert output.token_ids == expected.token_ids


def test_trees_that_do_not_pay_are_given_up(pair: TinyPair, plain: dict[str, list[Any]]) -> None:
    """Slots change hands meanwhile; a tree of fewer levels is another pass."""
    with make(pair, adaptive=True, max_batch_size=2) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
    assert ids(outputs) == ids(plain["greedy"])


# ---- what is proposed -------------------------------------------------------------------------------------------


class Listening:
    """Remembers the tables that a decoder's passes make, by slot and place."""

    def __init__(self, engine: Engine) -> None:
        runtime: Any = engine._frontend.open_runtime("Listening")
        self.tables: dict[tuple[int, int], Any] = {}
        self.downloads: list[int] = []
        self._make, self._download = runtime.decoder._trees.tables, runtime.executor.device.download
        runtime.decoder._trees.tables = self._listening

    def _listening(self, slots: Sequence[int], past: Sequence[int], limits: Sequence[int], pages: Any) -> Any:
        tables = self._make(slots, past, limits, pages)
        for slot, length, table in zip(slots, past, tables, strict=True):
            self.tables[slot, length] = table
        return tables


@pytest.mark.parametrize("mode", [AttentionMode.EXACT, AttentionMode.SPLIT])
def test_tables_are_those_of_the_draft_on_the_cpu(
    pair: TinyPair, mode: AttentionMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both run in float32; they would differ where two scores are as good as tied."""
    monkeypatch.setattr("edgellm.decoding.draft_staging.attention_mode", lambda dtype, deterministic: mode)
    heard = []
    for placement in (type("OfMode", (ReferencePlacement,), {"mode": mode}), CpuPlacement):
        with make(pair, placement, (12, 3, 5)) as engine:
            listening = Listening(engine)
            engine.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
            heard.append(listening.tables)
    assert heard[0].keys() == heard[1].keys()
    assert len(heard[0]) > 20
    for place, ours in heard[0].items():
        theirs = heard[1][place]
        assert (ours.token_ids, ours.parents) == (theirs.token_ids, theirs.parents)
        np.testing.assert_allclose(ours.scores, theirs.scores, atol=1e-4)
        assert ours.best(12).mask(1).tolist() == theirs.best(12).mask(1).tolist()


def test_a_round_reads_the_device_once(pair: TinyPair, plain: dict[str, list[Any]]) -> None:
    with make(pair) as engine:
        runtime: Any = engine._frontend.open_runtime("counting")
        device, downloads, rounds = runtime.executor.device, [], []
        tables, download = runtime.decoder._trees.tables, device.download
        device.download = lambda tensor: downloads.append(tuple(tensor.shape)) or download(tensor)

        def counted(*arguments: Any) -> Any:
            before = len(downloads)
            made = tables(*arguments)
            rounds.append(len(downloads) - before)
            return made

        runtime.decoder._trees.tables = counted
        assert ids(engine.generate(PROMPTS[:2], GREEDY)) == ids(plain["greedy"][:2])
    assert len(rounds) > 10
    assert set(rounds) == {1}


def test_a_head_with_fewer_tokens_than_candidates(pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens: levels of two, four, eight and eight candidates."""
    from edgellm_eagle import decoder

    read = decoder.read_head

    def narrow(*arguments: Any) -> Any:
        config, weights = read(*arguments)
        return config, replace(weights, lm_head=weights.lm_head[:2], to_target=weights.to_target[:2])

    monkeypatch.setattr(decoder, "read_head", narrow)
    heard = []
    for placement in (ReferencePlacement, CpuPlacement):
        with make(pair, placement, (40, 4, 4)) as engine:
            listening = Listening(engine)
            outputs = engine.generate(PROMPTS[:2], GREEDY)
            heard.append((ids(outputs), {place: table.token_ids for place, table in listening.tables.items()}))
    assert heard[0] == heard[1]
    assert {len(tokens) for tokens in heard[0][1].values()} == {1 + 2 + 4 + 8 + 8, 1 + 2 + 4 + 8, 1 + 2 + 4, 1 + 2}
