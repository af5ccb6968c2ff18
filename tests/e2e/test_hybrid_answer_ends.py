"""Checkpoints behind answers of an MTP decoder: the draft catches up, whatever the answer's last run looked like.

The next turn begins where the answer ended, with the text, the proposals and the recurrent state of one that computed
everything again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_plugins import use_decoder_plugins
from helped_drafts import ScriptedDraft
from real_hybrid import RealHybrid, random_tokens, require_same_states
from tiny_model import write_tiny_qwen_hybrid

from edgellm.cache.types import ContextCacheCommitPolicy

MESSAGE = [5, 6, 7]
SEED = 70
KEPT = 3  # right proposals of every round, so that runs end at 1 + 4 * n tokens


@pytest.fixture(scope="module", autouse=True)
def plugins_of_this_tree() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_decoder_plugins(patch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def twin(folder: Path) -> Iterator[RealHybrid]:
    """Decodes plainly, and computes everything."""
    with RealHybrid(folder, "plain") as made:
        yield made


class DraftState:
    """What the draft of an only resident has when it proposes: its K and V, and its chains before they are changed.

    Attributes:
        entries: by how many tokens stood in front, (2, kv_heads, tokens, head_dim) of its one layer.
    """

    def __init__(self, llm: RealHybrid) -> None:
        self.entries: dict[int, torch.Tensor] = {}
        self.chains: dict[int, list[int]] = {}
        self._decoder: Any = llm.runtime.decoder
        self._propose, self._decoder.propose = self._decoder.propose, self.propose

    def propose(self, executor: Any, batch: Any, rows: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        chains: list[list[int]] = self._propose(executor, batch, rows, limits)
        slot, past = int(batch.state_index[rows[0]]), int(batch.past_len[rows[0]])
        self.chains[past] = chains[0]
        self.entries[past] = self._decoder._pages.gather(0, batch.draft_page_rows[slot], past)
        return chains


@pytest.mark.parametrize("length", range(1, 6))
def test_the_next_turn_begins_where_the_answer_ended(folder: Path, twin: RealHybrid, length: int) -> None:
    """Answers end at every place of an accepted run, of which the session then keeps less than was accepted."""
    prompt = random_tokens(SEED, 21)
    text = twin.ask(prompt, 12, cold=True).token_ids
    assert len(set(text[:5])) == 5  # each token of the answer can end it
    again = [*prompt, *text[:length], *MESSAGE]
    wanted = twin.ask(again, 12, cold=True).token_ids
    with RealHybrid(folder, "mtp") as llm, RealHybrid(folder, "mtp") as cold:
        warm_state, cold_state = DraftState(llm), DraftState(cold)
        for one in (llm, cold):
            scripts = {tuple(prompt): (KEPT,), tuple(again): (KEPT,)}
            ScriptedDraft(one.llm, [(prompt, text), (again, wanted)], scripts)
        first = llm.ask(prompt, 12, stop_token_ids=[text[length - 1]])
        assert first.token_ids == text[:length]
        answers = [llm.ask(again, 12), cold.ask(again, 12, cold=True)]
        assert [one.recount_idle().leased for one in (llm, cold)] == [0, 0]
        require_same_states(llm, twin, at_least=3)
    assert [answer.token_ids for answer in answers] == [wanted, wanted]
    assert answers[0].reuse.reused_tokens == len(prompt) + length - 1
    places = [place for place in cold_state.entries if place >= len(again)]
    assert len(places) >= 3
    for place in places:
        torch.testing.assert_close(warm_state.entries[place], cold_state.entries[place], atol=1e-4, rtol=1e-4)
        assert warm_state.chains[place] == cold_state.chains[place]


def test_answers_are_kept_from_the_cache_where_the_caller_says_so(folder: Path) -> None:
    prompt = random_tokens(71, 21)
    policy = ContextCacheCommitPolicy.PREFILL_STATE_ONLY
    with RealHybrid(folder, "mtp") as llm:
        first = llm.ask(prompt, 9, commit_policy=policy)
        second = llm.ask([*prompt, *first.token_ids, *MESSAGE], 3)
    assert second.reuse.reused_tokens == len(prompt)


def test_a_cancelled_answer_leaves_no_checkpoint(folder: Path) -> None:
    prompt = random_tokens(72, 21)
    with RealHybrid(folder, "mtp") as llm:
        text = llm.ask(prompt, 30, cold=True).token_ids
        handle = llm.submit(prompt, 400)
        stream = handle.stream()
        for _ in range(4):
            next(iter(stream))
        handle.cancel()
        llm.recount_idle()
        second = llm.ask([*prompt, *text, *MESSAGE], 3)
    assert second.reuse.reused_tokens == len(prompt)
