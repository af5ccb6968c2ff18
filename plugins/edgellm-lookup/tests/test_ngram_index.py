"""Where the end of a text stood before, and what came after it; against a search through the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgellm_lookup.ngram_index import NgramIndex


def of(*tokens: int) -> NgramIndex:
    index = NgramIndex()
    index.extend(tokens)
    return index


def test_what_followed_the_same_words_is_proposed() -> None:
    assert of(1, 2, 3, 4, 5, 9, 1, 2, 3).propose(3) == [4, 5, 9]


def test_the_longest_run_decides_and_then_the_latest() -> None:
    assert of(7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2).propose(1) == [50]
    assert of(7, 1, 2, 50, 7, 1, 2, 60, 7, 1, 2).propose(1) == [60]


def test_a_text_that_repeats_at_its_end_is_continued_with_itself() -> None:
    assert of(9, 1, 2, 1, 2).propose(5) == [1, 2, 1, 2, 1]
    assert of(4, 4, 4).propose(4) == [4, 4, 4, 4]


def test_unknown_and_short_texts_give_nothing() -> None:
    assert of().propose(4) == []
    assert of(1).propose(4) == []
    assert of(1, 2, 3, 4, 5).propose(4) == []
    assert of(1, 2, 1, 2).propose(0) == []


def by_search(tokens: list[int], most: int) -> list[int]:
    for length in (4, 3, 2):
        if length > len(tokens):
            continue
        places = [p for p in range(length, len(tokens)) if tokens[p - length : p] == tokens[-length:]]
        if places:
            found = list(tokens)
            while len(found) < places[-1] + most:
                found.append(found[len(found) - (len(tokens) - places[-1])])
            return found[places[-1] : places[-1] + most]
    return []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 9), st.data())
def test_proposals_are_those_of_a_search_through_the_text(tokens: list[int], most: int, data: st.DataObject) -> None:
    index = NgramIndex()
    cut = data.draw(st.integers(0, len(tokens)))
    index.extend(tokens[:cut])
    index.extend(tokens[cut:])
    assert len(index) == len(tokens)
    assert index.propose(most) == by_search(tokens, most)
