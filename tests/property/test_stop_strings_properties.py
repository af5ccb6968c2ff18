"""However a text is cut into pieces, the matcher does what one search over the whole text does."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.tokenization.stop_strings import StopStringMatcher, trim_at_stop

# A tiny alphabet makes overlaps, restarts and near misses common.
TEXT = st.text(alphabet="ab\u00e9", max_size=6)
STOPS = st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=5), min_size=1, max_size=4)


def naive(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """Try every position, and at each the stop strings from the shortest."""
    for position in range(len(text)):
        for stop in sorted(stops, key=len):
            if text.startswith(stop, position):
                return text[: position + len(stop) * include_stop], stop
    return text, None


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(st.lists(TEXT, max_size=8), STOPS, st.booleans())
def test_pieces_give_the_same_text_and_match_as_one_search(pieces, stops, include_stop):
    matcher = StopStringMatcher(stops, include_stop=include_stop)
    emitted = "".join([matcher.push(piece) for piece in pieces]) + matcher.flush()
    assert (emitted, matcher.match) == naive("".join(pieces), stops, include_stop)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(TEXT, max_size=8), STOPS)
def test_at_most_the_longest_stop_less_one_is_held_and_every_step_is_a_prefix(pieces, stops):
    matcher = StopStringMatcher(stops)
    received = shown = ""
    for piece in pieces:
        received += piece
        shown += matcher.push(piece)
        assert naive(received, stops, False)[0].startswith(shown)
        if matcher.match is None:
            assert shown + matcher.held == received
            assert len(matcher.held) <= max(map(len, stops)) - 1


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(alphabet="ab\u00e9", max_size=20), STOPS, st.booleans())
def test_trimming_equals_the_naive_search(text, stops, include_stop):
    assert trim_at_stop(text, stops, include_stop=include_stop) == naive(text, stops, include_stop)
