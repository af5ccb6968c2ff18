"""Rounds in which nothing is proposed are plain decoding, the step behind them enqueued ahead; on the reference device.

Which rounds propose is scripted, and so is what is guessed of the next one: wrong guesses are among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from helped_drafts import HelpedDraft
from idle_rounds import AheadCounts, ScriptedLengths
from plain_assistant import write_plain_shared_kv_pair
from reference_placement import ReferencePlacement, make_engine
from tiny_drafts import PAIRS, TinyPair
from torch.utils._python_dispatch import TorchDispatchMode

import edgellm_eagle.plugin
import edgellm_hybrid.plugin
import edgellm_lookup.decoder
import edgellm_shared_kv.plugin
from edgellm import Engine, SamplingParams, SpeculativeOptions
from edgellm.decoding.adaptive import DraftLengths
from edgellm.models.device_attention import AttentionMode
from edgellm.plugins import load_plugins
from edgellm.runtime.device import CpuDevice
from edgellm.runtime.placement import CpuPlacement
from edgellm.testing.recount import recount

PLUGINS = (
    ("eagle", edgellm_eagle.plugin),
    ("hybrid", edgellm_hybrid.plugin),
    ("shared-kv", edgellm_shared_kv.plugin),
    ("lookup", edgellm_lookup.decoder),
)
DRAFTS = {name: PAIRS[name] for name in ("eagle", "mtp", "shared_kv")} | {"shared_kv_plain": write_plain_shared_kv_pair}
PROMPTS = ["the quick brown fox " * 3, "a", "0123456789" * 7, "in or out, that is: in or out", "zz top zz top zz"]
LENGTHS = [40, 7, 29, 1, 24]
GREEDY = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in LENGTHS]
SAMPLED = [
    SamplingParams(max_tokens=40, temperature=0.9, top_k=30, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(max_tokens=31, temperature=1.1, top_p=0.9, seed=4, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.7, min_p=0.02, presence_penalty=0.5, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
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


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> AheadCounts:
    return AheadCounts(monkeypatch)


def make(pair: TinyPair, placement: type[CpuPlacement] = ReferencePlacement, **options: Any) -> Engine:
    speculative = SpeculativeOptions(decoder=pair.decoder, draft=pair.draft, num_drafts=3)
    return make_engine(
        pair.model, placement, **({"kv_budget": 4096, "max_batch_size": 5, "speculative": speculative} | options)
    )


def script(engine: Engine, lengths: DraftLengths) -> Any:
    decoder: Any = engine._frontend.open_runtime("script").decoder
    decoder._lengths = lengths
    return decoder


def plain(pair: TinyPair, params: Sequence[SamplingParams]) -> list[Any]:
    with make(pair, speculative=None) as engine:
        return list(engine.generate(PROMPTS, list(params), use_cache=False))


def ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_idle_rounds_run_ahead_as_plain_decoding_does(pair: TinyPair, counts: AheadCounts, batch: int) -> None:
    with make(pair, speculative=None, max_batch_size=batch) as engine:
        wanted = engine.generate(PROMPTS, GREEDY, use_cache=False)
    plain_counts = (counts.ahead, counts.taken)
    counts.ahead = counts.taken = 0
    with make(pair, max_batch_size=batch) as engine:
        script(engine, ScriptedLengths(every=0))
        assert ids(engine.generate(PROMPTS, GREEDY, use_cache=False)) == ids(wanted)
        assert engine._runtime is not None
        assert recount(engine._runtime.coordinator).leased == 0
    assert counts.verified == 0
    if pair.decoder == "mtp":
        assert counts.ahead == plain_counts[0] == 0
    else:
        # Behind the last chunk of a prompt plain decoding runs ahead too; pages are there earlier here.
        assert plain_counts[0] - len(PROMPTS) <= counts.ahead <= sum(LENGTHS)
        assert counts.taken >= plain_counts[1] - len(PROMPTS) > 20
        assert batch > 1 or counts.taken == counts.ahead


@pytest.mark.parametrize("lies", [0, 3])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_plain_decodings_whatever_was_guessed(
    pair: TinyPair, counts: AheadCounts, params: list[SamplingParams], lies: int
) -> None:
    """Requests enter and leave meanwhile: two seats for five of them."""
    wanted = plain(pair, params)
    counts.ahead = counts.taken = 0
    with make(pair, max_batch_size=2) as engine:
        script(engine, ScriptedLengths(every=5, lies=lies))
        HelpedDraft(engine, [(output.prompt_token_ids, output.token_ids) for output in wanted])
        found = engine.generate(PROMPTS, params)
        assert ids(found) == ids(wanted)
        assert [output.logprobs is None for output in found] == [output.logprobs is None for output in wanted]
        assert sum(output.accepted_draft_tokens for output in found) > 0
        again = engine.generate(PROMPTS, params)
        assert ids(again) == ids(wanted)
        assert engine._runtime is not None
        assert recount(engine._runtime.coordinator).leased == 0
    assert counts.verified > 5
    if pair.decoder != "mtp":
        assert 0 < counts.taken <= counts.ahead
        assert not lies or counts.taken < counts.ahead


class Listening:
    """Remembers every chain that a decoder proposes, with the sequence and the place that it is for.

    Sequences are counted as they are seated, in the order of their requests; which slot is free by then is chance.
    """

    def __init__(self, decoder: Any) -> None:
        self.chains: dict[tuple[int, int], list[int]] = {}
        self._sequences: dict[int, int] = {}
        self._count = 0
        self._seat, self._propose = decoder.seat, decoder.propose
        decoder.seat, decoder.propose = self.seat, self.propose

    def seat(self, executor: Any, seat: Any) -> None:
        self._sequences[seat.slot] = self._count
        self._count += 1
        self._seat(executor, seat)

    def propose(self, executor: Any, batch: Any, rows: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        chains = self._propose(executor, batch, rows, limits)
        for row, chain in zip(rows, chains, strict=True):
            if chain:
                self.chains[self._sequences[int(batch.state_index[row])], int(batch.past_len[row])] = chain
        return chains


@pytest.mark.parametrize("mode", [AttentionMode.EXACT, AttentionMode.SPLIT])
def test_what_idle_rounds_leave_to_the_draft_is_what_it_has_on_the_cpu(pair: TinyPair, mode: AttentionMode) -> None:
    """Proposals read the hidden rows of the steps before, and those were computed ahead.

    Which rows share a step depends on when requests arrive, and so does the last bit of a sum: one near tie may fall
    otherwise.
    """
    on_device = type("OfMode", (ReferencePlacement,), {"mode": mode})
    heard = []
    for placement in (on_device, CpuPlacement):
        with make(pair, placement) as engine:
            listening = Listening(script(engine, ScriptedLengths(every=6)))
            engine.generate(PROMPTS, GREEDY, use_cache=False)
            heard.append(listening.chains)
    assert heard[0].keys() == heard[1].keys()
    assert sum(chain != heard[1][place] for place, chain in heard[0].items()) <= 1
    assert len(heard[0]) > 8


class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a decoder asks torch for in rounds of decode rows, forwards and sampling not included."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []
        self.calls = 0
        for name in ("pass_round", "propose", "hold_plain", "note_plain"):
            setattr(decoder, name, self._watching(getattr(decoder, name)))

    def _watching(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any) -> Any:
            self.calls += 1
            with self:
                return method(*given)

        return watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_idle_round_asks_the_device_for_nothing_beside_its_step(
    pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither copies of hidden rows nor uploads of their places: the step keeps them itself."""
    uploads: list[int] = []
    upload = CpuDevice.upload
    monkeypatch.setattr(CpuDevice, "upload", lambda device, host: uploads.append(host.size) or upload(device, host))
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)  # fewer than entries may wait
    counts = []
    for options in ({"speculative": None}, {}):
        with make(pair, **options) as engine:
            watched = None if options else Watched(script(engine, ScriptedLengths(every=0)))
            uploads.clear()
            engine.generate(PROMPTS, params, use_cache=False)
            counts.append(len(uploads))
    assert watched is not None
    assert watched.calls > 50
    assert watched.operations == []
    assert counts[1] <= counts[0]


def test_prompt_lookup_runs_ahead_while_it_is_idle(tmp_path: Any, counts: AheadCounts) -> None:
    pair = PAIRS["eagle"](tmp_path)
    wanted = plain(pair, GREEDY)
    counts.ahead = counts.taken = 0
    with make(pair, speculative="prompt_lookup", max_batch_size=2) as engine:
        script(engine, ScriptedLengths(every=4))
        assert ids(engine.generate(PROMPTS, GREEDY)) == ids(wanted)
    assert counts.taken > 10
