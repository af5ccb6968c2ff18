"""EAGLE trees beside the CUDA executor, kernels replaced by their references: the text of plain decoding.

The head is random and helped (`HelpedTrees`), so that branches of every length are kept.  What it proposes is also
compared with what the same head proposes on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helped_trees import HelpedTrees, note_tables
from reference_placement import ReferencePlacement, make_engine
from tiny_drafts import TinyPair, write_eagle_pair
from tree_texts import PROMPTS, ids, second_prompts, settings_of, texts

from edgellm import Engine, SamplingParams, SpeculativeOptions
from edgellm.models.device_attention import AttentionMode
from edgellm.runtime.placement import CpuPlacement
from edgellm.testing.recount import recount

pytestmark = pytest.mark.usefixtures("decoders_of_this_tree")

SETTINGS = settings_of(16)
GREEDY = SETTINGS["greedy"]


class OneShot(ReferencePlacement):
    """Prompts run as a whole, beside the trees of others: longer than a mask."""

    step_tokens = 512


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


@pytest.mark.parametrize("mode", [AttentionMode.EXACT, AttentionMode.SPLIT])
def test_tables_are_those_of_the_draft_on_the_cpu(
    pair: TinyPair, mode: AttentionMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both run in float32; they would differ where two scores are as good as tied."""
    monkeypatch.setattr("edgellm.decoding.draft_staging.attention_mode", lambda dtype, deterministic: mode)
    heard = []
    for placement in (type("OfMode", (ReferencePlacement,), {"mode": mode}), CpuPlacement):
        with make(pair, placement, (12, 3, 5)) as engine:
            tables = note_tables(engine._frontend.open_runtime("test").decoder)
            engine.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
            heard.append(tables)
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
            tables = note_tables(engine._frontend.open_runtime("test").decoder)
            outputs = engine.generate(PROMPTS[:2], GREEDY)
            heard.append((ids(outputs), {place: table.token_ids for place, table in tables.items()}))
    assert heard[0] == heard[1]
    assert {len(tokens) for tokens in heard[0][1].values()} == {1 + 2 + 4 + 8 + 8, 1 + 2 + 4 + 8, 1 + 2 + 4, 1 + 2}
