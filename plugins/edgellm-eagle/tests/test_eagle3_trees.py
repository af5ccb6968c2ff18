"""Trees from an EAGLE-3 head: the text is that of plain decoding, whichever branch was right.

The head is random and helped: where the text of plain decoding is known, one of its candidates becomes the right token,
the likeliest at some places and a sibling at others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_eagle3_decoder import CONFIG, head_tensors
from tiny_model import write_tiny_llama
from tree_texts import ids, second_prompts, settings_of

import edgellm_eagle.plugin
from edgellm import LLM, SamplingParams, SchedulingOptions, SpeculativeOptions
from edgellm.decoding.base import DecoderCapabilities
from edgellm.decoding.chain import KeptRow
from edgellm.decoding.draft_model import entries_batch
from edgellm.decoding.draft_passes import DraftEntries
from edgellm.decoding.draft_tree import DraftTable
from edgellm.decoding.tree_draft import TreeShape
from edgellm.decoding.tree_passes import Candidates, HostTreePasses
from edgellm.errors import InvalidArgumentError, UnsupportedModelError
from edgellm.models.loader import load_model
from edgellm.outputs import RequestOutput
from edgellm.plugins import load_plugins
from edgellm.testing.recount import recount
from edgellm_eagle.checkpoint import read_head, save_head
from edgellm_eagle.decoder import Eagle3Decoder

PAGE, SEATS = 8, 5
PROMPTS = ["the quick brown fox " * 2, "a", "0123456789" * 7, "in or out, that is: in or out", "zz top zz top zz"]
SETTINGS = settings_of(29)
# (num_drafts, top_k, depth): rows that the small kernel takes, more of them, and two words of a mask.
SHAPES = [(7, 2, 4), (15, 3, 5), (40, 8, 6)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=6)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    save_head(folder, CONFIG, head_tensors())
    return folder


@pytest.fixture(scope="module")
def plain(target: Path) -> dict[str, list[RequestOutput]]:
    """What plain decoding says to each prompt, alone; and to the turn behind the greedy answers."""
    with open_llm(target) as llm:
        wanted = {kind: ask(llm, PROMPTS, params, 1, use_cache=False) for kind, params in SETTINGS.items()}
        second = second_prompts(wanted["greedy"])
        wanted["second"] = ask(llm, second, SETTINGS["greedy"], 1, use_cache=False)
    return wanted


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_plugins(extra=(("eagle", edgellm_eagle.plugin),), autoload=False, strict=True)
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: loaded)


def open_llm(model: Path, *, chunk: int = 0, speculative: SpeculativeOptions | None = None) -> LLM:
    scheduling = SchedulingOptions(max_prompt_step_tokens=chunk or 512, max_num_tokens=chunk + SEATS if chunk else 512)
    return LLM(
        model,
        device="cpu",
        kv_budget=4096,
        page_size=PAGE,
        max_batch_size=SEATS,
        scheduling=scheduling,
        speculative=speculative,
    )


def trees(head: Path, shape: tuple[int, int, int] = SHAPES[1], **options: Any) -> SpeculativeOptions:
    values = {**dict(zip(("num_drafts", "top_k", "depth"), shape, strict=True)), "adaptive": False, **options}
    return SpeculativeOptions(decoder="eagle", draft=head, **values)


def ask(
    llm: LLM, prompts: Sequence[Any], params: SamplingParams, batch: int, *, use_cache: bool = True
) -> list[RequestOutput]:
    if batch == 1:
        return [llm.generate(prompt, params, use_cache=use_cache)[0] for prompt in prompts]
    return llm.generate(list(prompts), params, use_cache=use_cache)


class HelpedRanks:
    """Stands in front of the draft and makes one candidate the right one, at four of five places.

    Args:
        always: at every place, and the draft is sure of it.
    Attributes:
        branches: accepted nodes that were no chain, of every sequence and round.
    """

    def __init__(self, llm: LLM, texts: Sequence[RequestOutput], *, always: bool = False) -> None:
        self._always = always
        self.runtime: Any = llm._frontend.open_runtime("HelpedRanks")
        self._decoder: Any = self.runtime.decoder
        self._texts = {tuple(one.prompt_token_ids): [*one.prompt_token_ids, *one.token_ids] for one in texts}
        self._by_slot: dict[int, list[int]] = {}
        self.branches: list[list[int]] = []
        self._seat, self._rank = self._decoder.seat, self._decoder.draft.rank
        self._commit = self.runtime.executor.commit_rows
        self._decoder.seat, self._decoder.draft.rank = self.seat, self.rank
        self.runtime.executor.commit_rows = self.commit_rows

    def seat(self, executor: Any, seat: Any) -> None:
        self._by_slot[seat.slot] = self._texts[tuple(seat.prompt.tolist())]
        self._seat(executor, seat)

    def commit_rows(self, slots: Sequence[int], past: Sequence[int], rows: Sequence[list[int]]) -> None:
        self.branches += rows
        self._commit(slots, past, rows)

    def rank(self, batch: Any, hidden: torch.Tensor, **options: Any) -> tuple[Candidates, torch.Tensor]:
        found, own = self._rank(batch, hidden, **options)
        token_ids, log_probs = found.token_ids.copy(), found.log_probs.copy()
        for number, row in enumerate(batch.logits_index.tolist()):
            text = self._by_slot[int(batch.state_index[batch.logits_to_seq[number]])]
            place = int(batch.positions[row]) + 2
            if (place % 5 or self._always) and place < len(text):
                rank = place % 3 % token_ids.shape[1]
                _put(token_ids[number], rank, text[place])
                if self._always:
                    log_probs[number] = -5.0
                    log_probs[number, rank] = -0.01
        return Candidates(token_ids, log_probs), own


def _put(candidates: np.ndarray, rank: int, token: int) -> None:
    """Candidate `rank` is this token, and no other is."""
    candidates[candidates == token] = candidates[rank]
    candidates[rank] = token


# ---- the draft ------------------------------------------------------------------------------------------


def way_to(table: DraftTable, entry: int) -> list[int]:
    """Tokens from behind the root to the entry."""
    return [] if entry == 0 else [*way_to(table, table.parents[entry]), table.token_ids[entry]]


def test_every_node_is_ranked_as_behind_its_way_alone(target: Path, head: Path) -> None:
    """Two sequences of other lengths and depths grow at once; each way is then run token by token in a third slot."""
    model = load_model(target)
    config, weights = read_head(head, model.config, model.weights.embedding)
    decoder = Eagle3Decoder(config, weights, target_layers=6, page_size=PAGE, shape=TreeShape(15, 3, 4))
    decoder.open_draft(24).fill_poison()
    pages = np.random.default_rng(3).permutation(24).astype(np.int32).reshape(3, 8)
    passes = HostTreePasses(lambda: decoder.draft, 3)
    generator = torch.Generator().manual_seed(1)
    lengths = [25, 7]
    for slot, length in enumerate(lengths):
        hidden = torch.randn((length, 3 * config.hidden_size), generator=generator)
        tokens = torch.randint(1, 257, (length,), generator=generator).tolist()
        passes.begin(slot, None)
        kept = KeptRow(slot, 0, np.zeros(length, np.int32), [], hidden)
        passes.write(DraftEntries([slot], [0], [length], tokens, pages), [kept])
    firsts = [passes._first(slot) for slot in range(2)]
    tables = passes.tables([0, 1], lengths, [4, 2], pages)

    assert [len(table.scores) for table in tables] == [1 + 3 + 3 * 9, 1 + 3 + 9]
    for slot, table in enumerate(tables):
        for entry in sorted(set(table.parents[4:])):
            pages[2] = pages[slot]  # writes what the tree wrote as scratch
            own, past = firsts[slot][1][None], lengths[slot]
            for place, token in enumerate(way_to(table, entry)):
                one = (np.array([number], np.int32) for number in (2, past + place, 1, token))
                found, own = decoder.draft.rank(entries_batch(*one, pages), own, projected=True, top_k=3)
            children = [child for child, parent in enumerate(table.parents) if parent == entry]
            assert [table.token_ids[child] for child in children] == found.token_ids[0].tolist()
            scores = [table.scores[child] - table.scores[entry] for child in children]
            np.testing.assert_allclose(scores, found.log_probs[0], atol=1e-5)


# ---- the text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [PAGE, 0], ids=["chunked", "one-shot"])
@pytest.mark.parametrize("use_cache", [True, False], ids=["reuse", "cold"])
@pytest.mark.parametrize("batch", [1, 5])
def test_trees_change_no_token(
    target: Path, head: Path, plain: dict[str, list[RequestOutput]], batch: int, use_cache: bool, chunk: int
) -> None:
    with open_llm(target, chunk=chunk, speculative=trees(head)) as llm:
        helped = HelpedRanks(llm, [*plain["greedy"], *plain["second"]])
        first = ask(llm, PROMPTS, SETTINGS["greedy"], batch, use_cache=use_cache)
        second = ask(llm, second_prompts(first), SETTINGS["greedy"], batch, use_cache=use_cache)
        recount(helped.runtime.coordinator)
    assert ids(first) == ids(plain["greedy"])
    assert ids(second) == ids(plain["second"])
    assert len(helped.branches) > 20
    assert max(map(len, helped.branches)) > 3
    reused = [output.reuse.reused_tokens for output in second]
    assert all(reused) if use_cache else not any(reused)


@pytest.mark.parametrize(
    ("kind", "shape"), [*((kind, SHAPES[1]) for kind in SETTINGS), ("greedy", SHAPES[0]), ("sampled", SHAPES[2])]
)
def test_every_setting_of_a_request_goes_with_trees(
    target: Path, head: Path, plain: dict[str, list[RequestOutput]], kind: str, shape: tuple[int, int, int]
) -> None:
    with open_llm(target, speculative=trees(head, shape)) as llm:
        helped = HelpedRanks(llm, plain[kind])
        together = ask(llm, PROMPTS, SETTINGS[kind], 5, use_cache=False)
    assert ids(together) == ids(plain[kind])
    assert [output.finish_reason for output in together] == [output.finish_reason for output in plain[kind]]
    assert helped.branches
    assert sum(output.accepted_draft_tokens for output in together) > 20


def test_requests_of_every_setting_share_a_batch(
    target: Path, head: Path, plain: dict[str, list[RequestOutput]]
) -> None:
    kinds = [*SETTINGS, "greedy"]
    wanted = [plain[kind][number] for number, kind in enumerate(kinds)]
    with open_llm(target, speculative=trees(head, adaptive=True)) as llm:
        HelpedRanks(llm, wanted)
        together = llm.generate(PROMPTS, [SETTINGS[kind] for kind in kinds], use_cache=False)
    assert ids(together) == ids(wanted)


def test_requests_that_end_leave_the_others_as_they_were(
    target: Path, head: Path, plain: dict[str, list[RequestOutput]]
) -> None:
    """Budgets that end inside runs, and newcomers that take the seats."""
    budgets = [3, 9, 17, 29, 4, 22, 1, 29]
    wanted = [plain["greedy"][number % 5] for number in range(len(budgets))]
    params = [SamplingParams(max_tokens=budget, temperature=0.0, ignore_eos=True) for budget in budgets]
    with open_llm(target, speculative=trees(head)) as llm:
        helped = HelpedRanks(llm, plain["greedy"])
        outputs = llm.generate([PROMPTS[number % 5] for number in range(len(budgets))], params)
        recount(helped.runtime.coordinator)
    assert ids(outputs) == [one.token_ids[:budget] for one, budget in zip(wanted, budgets, strict=True)]


def test_a_stop_token_inside_a_run_ends_it(target: Path, head: Path, plain: dict[str, list[RequestOutput]]) -> None:
    stops = [output.token_ids[10] for output in plain["greedy"]]
    params = [SamplingParams(max_tokens=29, temperature=0.0, stop_token_ids=[stop]) for stop in stops]
    with open_llm(target) as llm:
        wanted = [llm.generate(prompt, one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    with open_llm(target, speculative=trees(head)) as llm:
        helped = HelpedRanks(llm, plain["greedy"])
        outputs = llm.generate(PROMPTS, params)
        again = llm.generate(PROMPTS, params)
    assert ids(outputs) == ids(again) == ids(wanted)
    assert [output.text for output in outputs] == [output.text for output in wanted]
    assert any(len(output.token_ids) < 29 for output in outputs)
    assert helped.branches


def test_logprobs_are_those_of_the_branch_that_was_kept(
    target: Path, head: Path, plain: dict[str, list[RequestOutput]]
) -> None:
    with open_llm(target, speculative=trees(head)) as llm:
        HelpedRanks(llm, plain["penalised"])
        outputs = ask(llm, PROMPTS, SETTINGS["penalised"], 5)
    for output, expected in zip(outputs, plain["penalised"], strict=True):
        assert output.logprobs is not None
        assert expected.logprobs is not None
        got = [entry.logprob for entry in output.logprobs]
        assert got == pytest.approx([entry.logprob for entry in expected.logprobs], abs=1e-4)


def test_nothing_is_read_that_was_not_written(target: Path, head: Path, plain: dict[str, list[RequestOutput]]) -> None:
    with open_llm(target, speculative=trees(head)) as llm:
        helped = HelpedRanks(llm, plain["greedy"])
        helped.runtime.executor.kv_cache.fill_poison()
        helped.runtime.decoder._pages.fill_poison()
        assert ids(ask(llm, PROMPTS, SETTINGS["greedy"], 5)) == ids(plain["greedy"])


# ---- what it comes to -----------------------------------------------------------------------------------


def test_a_tree_that_holds_the_answer_is_believed_to_its_end(
    target: Path, head: Path, plain: dict[str, list[RequestOutput]]
) -> None:
    with open_llm(target, speculative=trees(head, (127, 2, 3))) as llm:
        HelpedRanks(llm, plain["greedy"], always=True)
        output = llm.generate(PROMPTS[0], SETTINGS["greedy"])[0]
    assert output.token_ids == plain["greedy"][0].token_ids
    assert output.accepted_draft_tokens == 21  # 29 tokens: the prompt's, and seven rounds of three and one more


def test_trees_that_do_not_pay_are_given_up(target: Path, head: Path) -> None:
    params = SamplingParams(max_tokens=160, temperature=0.0, ignore_eos=True)
    with open_llm(target, speculative=trees(head, adaptive=True)) as llm:
        output = llm.generate("abc", params)[0]
    with open_llm(target) as llm:
        assert output.token_ids == llm.generate("abc", params)[0].token_ids
    assert output.proposed_draft_tokens < 0.5 * 15 * 160


def test_sequences_run_to_the_end_of_their_room(
    target: Path, head: Path, plain: dict[str, list[RequestOutput]]
) -> None:
    """The last round still has places for a whole tree, in both pools."""
    params = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)
    with LLM(target, device="cpu", page_size=PAGE, max_batch_size=2, max_model_len=96) as llm:
        wanted = llm.generate(PROMPTS[:2], params)
    speculative = trees(head)
    with LLM(target, device="cpu", page_size=PAGE, max_batch_size=2, max_model_len=96, speculative=speculative) as llm:
        helped = HelpedRanks(llm, wanted)
        outputs = llm.generate(PROMPTS[:2], params)
        recount(helped.runtime.coordinator)
    for output, expected in zip(outputs, wanted, strict=True):
        assert output.finish_reason == "length"
        assert output.token_ids == expected.token_ids


def test_a_head_with_fewer_tokens_than_candidates(target: Path, tmp_path: Path) -> None:
    tensors = head_tensors()
    tensors["lm_head.weight"], tensors["d2t"] = tensors["lm_head.weight"][:3], tensors["d2t"][:3]
    save_head(tmp_path, {**CONFIG, "draft_vocab_size": 3}, tensors)
    with open_llm(target) as llm:
        wanted = llm.generate(PROMPTS, SETTINGS["greedy"])
    with open_llm(target, speculative=trees(tmp_path, SHAPES[2])) as llm:
        outputs = llm.generate(PROMPTS, SETTINGS["greedy"])
    assert ids(outputs) == ids(wanted)
    assert all(output.proposed_draft_tokens for output in outputs)


# ---- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 9}, "from 1 to 8"),
        ({"top_k": 2, "num_drafts": 128}, "from 1 to 127"),
        ({"num_drafts": 16}, "from 1 to 15"),
        ({"depth": 4}, "larger top_k"),
        ({"top_k": 2, "depth": 16}, "depth is 16"),
        ({"top_k": True}, "pass an integer"),
    ],
)
def test_shapes_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        SpeculativeOptions(decoder="eagle", **options)


def test_a_decoder_of_chains_is_not_asked_for_trees(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm_eagle.decoder.Eagle3Decoder.capabilities", lambda _: DecoderCapabilities())
    with pytest.raises(InvalidArgumentError, match="top_k is 3, and decoder 'eagle' proposes chains"):
        open_llm(target, speculative=trees(head))


def test_an_executor_that_verifies_chains_only(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("edgellm.runtime.executor_cpu.CpuExecutor.commit_rows")
    with pytest.raises(UnsupportedModelError, match="pass top_k=1"):
        open_llm(target, speculative=trees(head))
