"""The toy model: text follows from the paged state exactly, and stale state is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgellm._core.page_ledger import ResourcePools
from edgellm.cache.types import ResourceDemand
from edgellm.errors import InvalidArgumentError, StepDeviceError
from edgellm.runtime.batch import RaggedBatch
from edgellm.testing.toy import CANARY, PoisonReadError, ToyExecutor, mix_token, next_token, toy_generate, toy_states

VOCAB = 97


def batch_of(rows, *, work):
    """One step: `work` is a list of (slot, past, tokens); every sequence's last token gets logits."""
    lengths = np.array([len(tokens) for _, _, tokens in work], np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return RaggedBatch(
        token_ids=np.concatenate([np.asarray(tokens, np.int32) for _, _, tokens in work]),
        positions=np.concatenate([np.arange(past, past + len(tokens), dtype=np.int32) for _, past, tokens in work]),
        query_start=starts,
        query_len=lengths,
        past_len=np.array([past for _, past, _ in work], np.int32),
        state_index=np.array([slot for slot, _, _ in work], np.int32),
        page_rows=np.asarray(rows, np.int32),
        logits_index=(starts[1:] - 1).astype(np.int64),
        logits_to_seq=np.arange(len(work), dtype=np.int32),
    )


def chosen(logits):
    assert logits.dtype == torch.float32
    assert ((logits == logits.max()).sum(-1) == 1).all()
    return logits.argmax(-1).tolist()


def test_known_values_do_not_drift():
    assert mix_token(5, 0, 1) == 14440560401912357969
    assert toy_generate([1, 2, 3], 6, VOCAB) == [27, 5, 17, 27, 9, 56]
    assert next_token(toy_states([1, 2, 3, 4]), 2**31 - 1) == 573638554


@pytest.mark.parametrize("page_size", [2, 4])
@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_paged_run_equals_the_plain_twin_for_every_chunking(page_size, chunk):
    prompt = [11, 3, 5, 8, 13, 21, 34]
    executor = ToyExecutor(vocab_size=VOCAB, num_pages=12, page_size=page_size)
    rows = [[9, 2, 7, 0, 5, 3, 1, -1]]
    past, token = 0, None
    while past < len(prompt):
        piece = prompt[past : past + chunk]
        logits = executor.forward(batch_of(rows, work=[(0, past, piece)]))
        past += len(piece)
        token = chosen(logits)[0]
    generated = [token]
    for _ in range(5):
        token = chosen(executor.forward(batch_of(rows, work=[(0, past, [token])])))[0]
        generated.append(token)
        past += 1
    assert generated == toy_generate(prompt, 6, VOCAB)
    assert executor.tokens_computed == len(prompt) + 5


def test_ragged_batch_equals_solo_runs():
    executor = ToyExecutor(vocab_size=VOCAB, num_pages=8, page_size=2)
    rows = [[0, 1, -1], [2, 3, 4], [5, -1, -1]]
    first = executor.forward(batch_of(rows, work=[(1, 0, [4, 5, 6]), (0, 0, [7]), (2, 0, [8, 9])]))
    assert chosen(first) == [toy_generate(p, 1, VOCAB)[0] for p in ([4, 5, 6], [7], [8, 9])]
    second = executor.forward(batch_of(rows, work=[(0, 1, [1, 2]), (1, 3, [3])]))
    assert chosen(second) == [toy_generate(p, 1, VOCAB)[0] for p in ([7, 1, 2], [4, 5, 6, 3])]


def test_every_earlier_token_and_place_matters():
    base = toy_states([1, 2, 3, 4, 5, 6])
    for place in range(6):
        changed = [1, 2, 3, 4, 5, 6]
        changed[place] += 1
        assert not np.array_equal(toy_states(changed)[place:], base[place:])
        assert np.array_equal(toy_states(changed)[:place], base[:place])
    swapped = base.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert next_token(swapped, 2**31) != next_token(base, 2**31)


def test_a_wrong_page_changes_the_text():
    tokens = []
    for row in ([0, 1, 2, 3], [0, 4, 2, 3]):
        executor = ToyExecutor(vocab_size=2**31 - 1, num_pages=6, page_size=2)
        executor.forward(batch_of([[0, 1, 2, 3]], work=[(0, 0, [1, 2, 3, 4, 5])]))
        executor.cache.pages[4] = 12345  # some other sequence's state
        tokens.append(chosen_index(executor, row))
    assert tokens[0] == next_token(toy_states([1, 2, 3, 4, 5, 6]), 2**31 - 1)
    assert tokens[0] != tokens[1]


def chosen_index(executor, row):
    """The next token by the state behind `row`, after one more token, without a dense logits row."""
    state = executor.state_of(row, 5)
    parent = int(state[-1])
    return next_token(np.append(state, np.uint64(mix_token(6, 5, parent))), executor.vocab_size)


def test_reading_a_freed_page_raises():
    pools = ResourcePools(ResourceDemand(base_kv_pages=4))
    pages = pools.base.allocate(2)
    executor = ToyExecutor(vocab_size=VOCAB, num_pages=4, page_size=2, pools=pools)
    executor.forward(batch_of([[*pages, -1]], work=[(0, 0, [1, 2])]))
    pools.base.release_active_ref(pages[0])
    with pytest.raises(PoisonReadError, match=f"position 0 of 2 lies in page {pages[0]}"):
        executor.forward(batch_of([[*pages, -1]], work=[(0, 2, [3])]))


def test_a_fresh_page_behind_the_past_is_poisoned_even_when_it_holds_old_state():
    executor = ToyExecutor(vocab_size=VOCAB, num_pages=4, page_size=2)
    executor.forward(batch_of([[0, 1, -1]], work=[(0, 0, [1, 2, 3, 4])]))
    # The same pages now serve another sequence that claims one token of state it never wrote.
    executor.forward(batch_of([[1, 0, -1]], work=[(0, 0, [9])]))
    with pytest.raises(PoisonReadError, match="position 1 of 2 lies in page 1, place 1"):
        executor.forward(batch_of([[1, 0, -1]], work=[(0, 2, [5])]))
    assert executor.cache.pages[1, 1] == CANARY


def test_stale_places_in_the_page_that_holds_the_past_are_poisoned():
    executor = ToyExecutor(vocab_size=VOCAB, num_pages=4, page_size=4)
    executor.forward(batch_of([[0, -1]], work=[(0, 0, [1, 2, 3, 4])]))
    executor.forward(batch_of([[0, -1]], work=[(0, 1, [9])]))
    with pytest.raises(PoisonReadError, match="position 2 of 3 lies in page 0, place 2"):
        executor.forward(batch_of([[0, -1]], work=[(0, 3, [5])]))


def test_writing_into_a_page_that_others_share_is_noticed_by_them():
    executor = ToyExecutor(vocab_size=VOCAB, num_pages=4, page_size=2)
    executor.forward(batch_of([[0, 1, -1]], work=[(0, 0, [1, 2, 3])]))
    with pytest.raises(PoisonReadError):
        executor.forward(batch_of([[0, 1, -1], [0, 2, -1]], work=[(1, 0, [7]), (0, 3, [4])]))


def test_missing_page_and_bad_token_are_refused():
    executor = ToyExecutor(vocab_size=VOCAB, num_pages=4, page_size=2)
    with pytest.raises(InvalidArgumentError, match="position 2 has no page"):
        executor.forward(batch_of([[0, -1]], work=[(0, 0, [1, 2, 3])]))
    with pytest.raises(InvalidArgumentError, match="the vocabulary has 97"):
        executor.forward(batch_of([[0, -1]], work=[(0, 0, [97])]))


def test_injected_failure_raises_once_and_writes_nothing():
    executor = ToyExecutor(vocab_size=VOCAB, num_pages=4, page_size=2)
    executor.fail_next()
    with pytest.raises(StepDeviceError, match="injected"):
        executor.forward(batch_of([[0, -1]], work=[(0, 0, [1])]))
    assert (executor.cache.pages == CANARY).all()
    executor.forward(batch_of([[0, -1]], work=[(0, 0, [1])]))
    assert executor.num_forwards == 1


def test_copy_pages_copies_whole_pages():
    executor = ToyExecutor(vocab_size=VOCAB, num_pages=4, page_size=2)
    executor.forward(batch_of([[0, 1]], work=[(0, 0, [1, 2, 3])]))
    executor.copy_pages(np.array([0, 1], np.int32), np.array([3, 2], np.int32))
    assert np.array_equal(executor.state_of([3, 2], 3), toy_states([1, 2, 3]))
