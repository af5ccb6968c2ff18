"""Draft models on a GPU: the text of plain decoding at any draft quality, proposals as on the CPU, passes as graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from device_waits import refuse_waits
from helped_drafts import HelpedDraft
from plain_assistant import write_plain_shared_kv_pair
from tiny_drafts import PAIRS, TinyPair

import edgellm_eagle.plugin
import edgellm_hybrid.plugin
import edgellm_shared_kv.plugin
from edgellm import LLM, SamplingParams, SpeculativeOptions
from edgellm.plugins import load_plugins

pytestmark = pytest.mark.gpu

PLUGINS = (("eagle", edgellm_eagle.plugin), ("hybrid", edgellm_hybrid.plugin), ("shared-kv", edgellm_shared_kv.plugin))
DRAFTS = {name: PAIRS[name] for name in ("eagle", "mtp", "shared_kv")} | {"shared_kv_plain": write_plain_shared_kv_pair}
PROMPTS = ["the quick brown fox " * 3, "a", "0123456789" * 7, "in or out, that is: in or out", "zz top zz top zz"]
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def plugins_of_this_tree() -> Iterator[None]:
    loaded = load_plugins(extra=PLUGINS, autoload=False, strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgellm.plugins.load_plugins", lambda: loaded)
        yield


@pytest.fixture(scope="module", params=DRAFTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return DRAFTS[request.param](tmp_path_factory.mktemp(request.param))


def load(pair: TinyPair, *, speculates: bool = True, adaptive: bool = False, **options: Any) -> LLM:
    speculative = SpeculativeOptions(decoder=pair.decoder, draft=pair.draft, adaptive=adaptive, num_drafts=3)
    chosen = {"device": "cuda", "dtype": "float32", "kv_budget": 4096, "page_size": 16, "max_batch_size": 5} | options
    return LLM(pair.model, speculative=speculative if speculates else None, **chosen)


def ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What plain decoding says to the prompts, and to the turn behind each answer."""

    first: list[Any]
    second: list[Any] = field(default_factory=list)

    @property
    def second_prompts(self) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": [*output.prompt_token_ids, *output.token_ids, 7, 8, 9]} for output in self.first]


@pytest.fixture(scope="module")
def wanted(pair: TinyPair) -> Wanted:
    with load(pair, speculates=False) as llm:
        found = Wanted(llm.generate(PROMPTS, GREEDY, use_cache=False))
        found.second.extend(llm.generate(found.second_prompts, GREEDY, use_cache=False))
    return found


@pytest.fixture(scope="module")
def llm(pair: TinyPair) -> Iterator[LLM]:
    """Five seats, three proposals a round."""
    with load(pair) as made:
        yield made


@contextmanager
def decoder_of(llm: LLM) -> Iterator[Any]:
    """The decoder, whose methods are its own again afterwards."""
    decoder: Any = llm._frontend.open_runtime("decoder_of").decoder
    try:
        yield decoder
    finally:
        for name in ("seat", "propose"):
            vars(decoder).pop(name, None)


def require_plain_text(llm: LLM, wanted: Wanted) -> None:
    """Helped drafts: every length of an accepted run occurs."""
    with decoder_of(llm):
        HelpedDraft(llm, [(output.prompt_token_ids, output.token_ids) for output in [*wanted.first, *wanted.second]])
        first = llm.generate(PROMPTS, GREEDY, use_cache=False)
        again = llm.generate(PROMPTS, GREEDY)
        second = llm.generate(wanted.second_prompts, GREEDY)
    assert ids(first) == ids(again) == ids(wanted.first)
    assert ids(second) == ids(wanted.second)
    accepted = sum(output.accepted_draft_tokens for output in first)
    assert 0 < accepted < sum(output.proposed_draft_tokens for output in first)
    assert sum(output.reuse.reused_tokens for output in second) > 100


def test_the_text_of_five_sequences_is_that_of_plain_decoding(llm: LLM, wanted: Wanted) -> None:
    require_plain_text(llm, wanted)
    with decoder_of(llm) as decoder:
        passes = decoder._passes if hasattr(decoder, "_passes") else decoder._rounds
        graphs = passes._staging._runner
    assert (len(graphs) > 0, graphs.refusal) == (True, "")


def test_the_text_of_one_sequence_is_that_of_plain_decoding(pair: TinyPair, wanted: Wanted) -> None:
    with load(pair, max_batch_size=1) as alone:
        require_plain_text(alone, wanted)


def test_adaptive_lengths_and_few_seats(pair: TinyPair, wanted: Wanted) -> None:
    with load(pair, max_batch_size=2, adaptive=True) as few:
        assert ids(few.generate(PROMPTS, GREEDY)) == ids(wanted.first)


Chains = dict[tuple[bytes, int], list[int]]


def chains_of(llm: LLM) -> Chains:
    """Every chain that is proposed, by the prompt and the place that it is for."""
    found: Chains = {}
    prompts: dict[int, bytes] = {}
    with decoder_of(llm) as decoder:
        seat, propose = decoder.seat, decoder.propose

        def noting(executor: Any, made: Any) -> None:
            prompts[made.slot] = made.prompt.tobytes()
            seat(executor, made)

        def listening(executor: Any, batch: Any, rows: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
            chains: list[list[int]] = propose(executor, batch, rows, limits)
            for row, chain in zip(rows, chains, strict=True):
                found[prompts[int(batch.state_index[row])], int(batch.past_len[row])] = chain
            return chains

        decoder.seat, decoder.propose = noting, listening
        llm.generate(PROMPTS, GREEDY, use_cache=False)
    return found


def test_proposals_are_those_of_the_draft_on_the_cpu(pair: TinyPair, llm: LLM) -> None:
    """But where two tokens are as good as tied."""
    ours = chains_of(llm)
    with load(pair, device="cpu") as host:
        theirs = chains_of(host)
    assert ours.keys() == theirs.keys()
    assert sum(theirs[place] == chain for place, chain in ours.items()) >= 0.97 * len(ours) > 20


def test_a_round_waits_for_nothing_before_it_is_verified(llm: LLM) -> None:
    """From the start of a round until its verification is enqueued."""
    llm.generate(PROMPTS[:2], GREEDY, use_cache=False)  # everything is compiled and captured
    late: list[bool] = []
    with decoder_of(llm) as decoder:
        executor: Any = llm._frontend.open_runtime("waits").executor
        propose, verify = decoder.propose, executor.forward_verify

        def proposed(*given: Any) -> Any:
            refuse_waits(True)
            return propose(*given)

        def verified(batch: Any) -> Any:
            late.append(batch.late_tokens is not None)
            try:
                return verify(batch)
            finally:
                refuse_waits(False)

        decoder.propose, executor.forward_verify = proposed, verified
        try:
            outputs = llm.generate(PROMPTS[:2], GREEDY, use_cache=False)
        finally:
            refuse_waits(False)
            del executor.forward_verify
    assert late.count(True) > 10
    assert sum(output.proposed_draft_tokens for output in outputs) >= late.count(True)


SIZES_16_BIT = {
    "eagle": {"hidden_size": 256},
    "mtp": {"head_dim": 64, "hidden_size": 128},
    "shared_kv_plain": {"head_dim": 64, "hidden_size": 128},
}


@pytest.mark.parametrize("name", SIZES_16_BIT)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_rows_on_the_tensor_cores(name: str, dtype: str, tmp_path: Path) -> None:
    """In deterministic mode a verified token has the logits of plain decoding, to the bit."""
    pair = DRAFTS[name](tmp_path, **SIZES_16_BIT[name])
    with load(pair, speculates=False, dtype=dtype, deterministic=True) as plain:
        wanted = plain.generate(PROMPTS, GREEDY)
    with load(pair, dtype=dtype, deterministic=True) as llm:
        HelpedDraft(llm, [(output.prompt_token_ids, output.token_ids) for output in wanted])
        found = llm.generate(PROMPTS, GREEDY)
    assert ids(found) == ids(wanted)
    assert sum(output.accepted_draft_tokens for output in found) > 0
