"""Calls of foreign code: nothing that it raises goes further, but for an interrupt of the process."""

from __future__ import annotations

import asyncio
import threading

import pytest

from edgellm.foreign import call_foreign, describe_error, describe_value

RAISED = [
    ValueError("x"),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    StopIteration(),
]


def raiser(error: BaseException):
    def function(*arguments: object) -> None:
        raise error

    return function


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_off_the_main_thread_whatever_is_raised_comes_back(error: BaseException) -> None:
    caught: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: caught.append(call_foreign(raiser(error), 1)))
    thread.start()
    thread.join(10)
    assert caught == [error]


def test_on_the_main_thread_an_interrupt_passes_and_nothing_else_does() -> None:
    with pytest.raises(KeyboardInterrupt):
        call_foreign(raiser(KeyboardInterrupt()))
    stopped = asyncio.CancelledError()
    assert call_foreign(raiser(stopped)) is stopped


def test_arguments_arrive_and_success_is_none() -> None:
    seen: list[int] = []
    assert call_foreign(seen.append, 3) is None
    assert seen == [3]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Trap(str):
    """A text that fails when it is written into another, or measured."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        raise RuntimeError("no text")

    def __len__(self) -> int:
        raise RuntimeError("no length")


class Deceptive(Exception):
    def __str__(self) -> str:
        return Trap("x")

    __repr__ = __str__


def test_a_description_is_plain_text_whatever_a_foreign_object_calls_its_text() -> None:
    assert describe_error(Deceptive()) == "Deceptive: x"
    assert describe_value(Deceptive()) == "x"
    assert type(describe_value(Deceptive())) is type(describe_error(Deceptive())) is str


def test_descriptions_never_fail() -> None:
    assert describe_error(ValueError("x")) == "ValueError: x"
    assert describe_error(Unspeakable()) == "Unspeakable"
    assert describe_value("a") == "'a'"
    assert describe_value("a" * 100, 4) == "'aaa..."
    assert describe_value(Unspeakable()) == "a Unspeakable"
    assert describe_value(10**5000) == "a int"
