"""Checks of single arguments: each refuses with a message that names the argument, its value and its range."""

from __future__ import annotations

import sys
import threading

from edgellm.errors import InvalidArgumentError
from edgellm.foreign import describe_value

INT32_MAX = 2**31 - 1


def check_int(name: str, value: object, *, low: int, high: int = INT32_MAX) -> None:
    """An integer from `low` to `high`; True and False are none.

    Raises:
        InvalidArgumentError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgumentError(f"{name} is {describe_value(value)}; it must be an integer from {low} to {high}")


def check_number(name: str, value: object, *, low: float, high: float, low_open: bool = False) -> None:
    """A finite number from `low` to `high`, or above `low`.

    Raises:
        InvalidArgumentError: it is not.
    """
    number = _finite(value)
    if number is None or not low <= number <= high or (low_open and number == low):
        bracket = "(" if low_open else "["
        raise InvalidArgumentError(
            f"{name} is {describe_value(value)}; it must be a finite number in {bracket}{low}, {high}]"
        )


def check_positive(name: str, value: object, *, wanted: str = "a finite number above 0") -> None:
    """A finite number above 0.

    Args:
        wanted: the same in the message.
    Raises:
        InvalidArgumentError: it is not.
    """
    number = _finite(value)
    if number is None or number <= 0:
        raise InvalidArgumentError(f"{name} is {describe_value(value)}; it must be {wanted}")


def check_flag(name: str, value: object) -> None:
    """True or False.

    Raises:
        InvalidArgumentError: it is neither.
    """
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} is {describe_value(value)}; it must be True or False")


def wait_seconds(name: str, value: object) -> float | None:
    """A time to wait as the locks of the interpreter take it; None, infinity and what exceeds them wait without limit.

    Raises:
        InvalidArgumentError: no number, not a number (NaN), or below 0.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise InvalidArgumentError(
            f"{name} is {describe_value(value)}; it must be a number of seconds, 0 or more, or None for no limit"
        )
    return None if value > threading.TIMEOUT_MAX else float(value)


def _finite(value: object) -> int | float | None:
    """`value` if it is a number that a float can hold, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) <= sys.float_info.max else None
