"""Checkpoints behind answers of an MTP decoder: the draft catches up, whatever the answer's last run looked like.

The next turn begins where the answer ended, with the text, the proposals and the recurrent state of one that computed
everything again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from draft_state import DraftState
from helped_drafts import ScriptedDraft
from real_hybrid import RealHybrid, random_tokens, require_same_states
from tiny_model import write_tiny_qwen_hybrid

from edgellm.cache.types import ContextCacheCommitPolicy

pytestmark = pytest.mark.usefixtures("decoders_of_this_tree")

MESSAGE = [5, 6, 7]
SEED = 70
KEPT = 3  # right proposals of every round, so that runs end at 1 + 4 * n tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def twin(folder: Path) -> Iterator[RealHybrid]:
    """Decodes plainly, and computes everything."""
    with RealHybrid(folder, "plain") as made:
        yield made


@pytest.mark.parametrize("length", range(1, 6))
def test_the_next_turn_begins_where_the_answer_ended(folder: Path, twin: RealHybrid, length: int) -> None:
    """Answers end at every place of an accepted run, of which the session then keeps less than was accepted."""
    prompt = random_tokens(SEED, 21)
    text = twin.ask(prompt, 12, cold=True).token_ids
    assert len(set(text[:5])) == 5  # each token of the answer can end it
    again = [*prompt, *text[:length], *MESSAGE]
    wanted = twin.ask(again, 12, cold=True).token_ids
    with RealHybrid(folder, "mtp") as llm, RealHybrid(folder, "mtp") as cold:
        warm_state, cold_state = DraftState(llm.llm), DraftState(cold.llm)
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
    warm_state.require_same(cold_state, behind=len(again), at_least=3)


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
