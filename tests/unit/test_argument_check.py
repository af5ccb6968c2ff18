"""Checks of single arguments: what passes, and the message of what does not."""

from __future__ import annotations

import math
import threading

import pytest

from edgellm.argument_check import check_flag, check_int, check_number, check_positive, wait_seconds
from edgellm.errors import InvalidArgumentError

NAN, INF = math.nan, math.inf


def test_integers_have_both_bounds_and_no_booleans() -> None:
    for good in (-1, 0, 5):
        check_int("n", good, low=-1, high=5)
    check_int("n", 2**31 - 1, low=0)
    for bad in (-2, 6, True, 1.0, "1", None, 10**400):
        with pytest.raises(InvalidArgumentError, match=r"^n is .*; it must be an integer from -1 to 5$"):
            check_int("n", bad, low=-1, high=5)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 10**400, -(10**400), "1", True, None, 1j])
def test_what_no_float_holds_is_no_number(bad: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^x is .*; it must be a finite number in \[0\.0, 1\.0\]$"):
        check_number("x", bad, low=0.0, high=1.0)
    with pytest.raises(InvalidArgumentError, match=r"^x is .*; it must be a finite number above 0$"):
        check_positive("x", bad)


def test_an_open_bound_is_outside() -> None:
    check_number("x", 0, low=0.0, high=1.0)
    check_number("x", 1, low=0.0, high=1.0, low_open=True)
    check_positive("x", 5e-324)
    with pytest.raises(InvalidArgumentError, match=r"^x is 0; it must be a finite number in \(0\.0, 1\.0\]$"):
        check_number("x", 0, low=0.0, high=1.0, low_open=True)
    with pytest.raises(InvalidArgumentError, match=r"^x is 0; it must be more$"):
        check_positive("x", 0, wanted="more")


def test_integers_without_a_text_are_refused_all_the_same() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^n is a int; it must be an integer from 0 to 2147483647$"):
        check_int("n", 10**5000, low=0)


def test_flags_are_true_or_false() -> None:
    check_flag("f", False)
    with pytest.raises(InvalidArgumentError, match=r"^f is 1; it must be True or False$"):
        check_flag("f", 1)


def test_a_wait_is_at_most_what_a_lock_takes() -> None:
    assert wait_seconds("t", None) is None
    assert wait_seconds("t", 0) == 0.0
    assert wait_seconds("t", 1.5) == 1.5
    assert wait_seconds("t", threading.TIMEOUT_MAX) == threading.TIMEOUT_MAX
    for endless in (INF, 1e308, 10**400):
        assert wait_seconds("t", endless) is None
    for bad in (-1, NAN, "1", True):
        with pytest.raises(InvalidArgumentError, match=r"^t is .*; it must be a number of seconds, 0 or more, or None"):
            wait_seconds("t", bad)
