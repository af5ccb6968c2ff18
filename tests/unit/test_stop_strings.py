"""Stop strings across pieces: where the text is cut, and what is held back until then."""

from __future__ import annotations

import pytest

from edgellm.tokenization.stop_strings import StopStringMatcher, find_first_stop, trim_at_stop


def run(stops, pieces, **keywords):
    """Emitted pieces, the flush last, and the match."""
    matcher = StopStringMatcher(stops, **keywords)
    emitted = [matcher.push(piece) for piece in pieces]
    return [*emitted, matcher.flush()], matcher.match


def test_without_stop_strings_everything_passes():
    assert run([], ["ab", "", "c"]) == (["ab", "", "c", ""], None)


def test_match_inside_one_piece():
    assert run(["STOP"], ["say STOP now"]) == (["say ", ""], "STOP")


def test_match_across_pieces_is_never_shown():
    assert run(["STOP"], ["say S", "T", "OP now"]) == (["say ", "", "", ""], "STOP")


def test_beginning_of_a_stop_is_held_and_released_when_it_does_not_come():
    assert run(["STOP"], ["say ST", "ART"]) == (["say ", "START", ""], None)
    assert run(["STOP"], ["say STO"]) == (["say ", "STO"], None)


def test_only_a_possible_beginning_is_held():
    matcher = StopStringMatcher(["###"])
    assert matcher.push("a long text without it") == "a long text without it"
    assert matcher.push("##") == ""
    assert matcher.held == "##"
    assert matcher.push("x") == "##x"


def test_restart_inside_a_failed_beginning():
    assert run(["aab"], ["aa", "ab"]) == (["", "a", ""], "aab")


def test_earliest_start_wins_not_the_first_in_the_list():
    assert run(["cd", "bc"], ["abcd"]) == (["a", ""], "bc")


def test_a_later_start_waits_while_an_earlier_one_may_complete():
    assert run(["abc", "b"], ["xab", "c"]) == (["x", "", ""], "abc")
    assert run(["abc", "b"], ["xab", "d"]) == (["x", "a", ""], "b")
    assert run(["abc", "b"], ["xab"]) == (["x", "a"], "b")
    assert run(["abc", "b"], ["xabc"]) == (["x", ""], "abc")


def test_shortest_of_several_that_start_together():
    assert run(["ab", "a", "abc"], ["xabc"]) == (["x", ""], "a")
    assert run(["ab", "a", "abc"], ["xa", "bc"]) == (["x", "", ""], "a")


def test_nothing_follows_a_match():
    matcher = StopStringMatcher(["."])
    assert matcher.push("one. two.") == "one"
    assert matcher.match == "."
    assert matcher.push(" three") == ""
    assert matcher.flush() == ""


def test_the_stop_string_is_shown_when_asked_for():
    assert run(["STOP"], ["say S", "TOP now"], include_stop=True) == (["say ", "STOP", ""], "STOP")
    assert run(["abc", "b"], ["xab"], include_stop=True) == (["x", "ab"], "b")


def test_flush_is_idempotent():
    matcher = StopStringMatcher(["STOP"])
    matcher.push("ST")
    assert [matcher.flush(), matcher.flush()] == ["ST", ""]


def test_characters_beyond_ascii():
    assert run(["\U0001f642\u3002"], ["hi \U0001f642", "\u3002", "x"]) == (["hi ", "", "", ""], "\U0001f642\u3002")


@pytest.mark.parametrize(
    ("text", "found"),
    [("abcd", (1, "bc")), ("xyz", None), ("", None), ("cd", (0, "cd")), ("bcd", (0, "bc"))],
)
def test_search_of_a_complete_text(text, found):
    assert find_first_stop(text, ["cd", "bc"]) == found


def test_trimming_a_complete_text():
    assert trim_at_stop("say STOP now", ["STOP"]) == ("say ", "STOP")
    assert trim_at_stop("say STOP now", ["STOP"], include_stop=True) == ("say STOP", "STOP")
    assert trim_at_stop("say", ["STOP"]) == ("say", None)
