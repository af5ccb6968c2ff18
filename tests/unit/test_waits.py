"""Sleeping threads: who is woken when, and by an interrupt that the system gave to another thread."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest
from engine_rig import ask

from edgellm.engine.engine import RequestEngine, ShutdownMode
from edgellm.testing.scripted_session import Script, ScriptedRuntime, letters
from edgellm.waits import MAIN_THREAD_SLICE, Latch

pytestmark = pytest.mark.usefixtures("interrupts_arrive")
LONG = 10.0  # seconds that no test means to wait
SOON = 5 * MAIN_THREAD_SLICE


@contextmanager
def interrupt_of_another_thread(delay: float = 0.1) -> Iterator[None]:
    """SIGINT, delivered to a thread that is not the main one, while the main one runs the block."""
    release = threading.Event()
    bystander = threading.Thread(target=release.wait)
    bystander.start()
    assert bystander.ident is not None
    sender = threading.Timer(delay, signal.pthread_kill, (bystander.ident, signal.SIGINT))
    sender.start()
    try:
        yield
    finally:
        sender.join()
        release.set()
        bystander.join()


@pytest.mark.parametrize("timeout", [None, LONG])
def test_an_interrupt_that_another_thread_got_ends_a_wait_of_the_main_thread(timeout: float | None) -> None:
    latch = Latch()
    rescue = threading.Timer(LONG, latch.set)  # or the test of a wait without limit would never end
    rescue.start()
    start = time.monotonic()
    with interrupt_of_another_thread(), pytest.raises(KeyboardInterrupt):
        latch.wait(timeout)
    assert time.monotonic() - start < SOON
    rescue.cancel()
    latch.set()
    assert latch.wait(0.0)


def slow_letters(prompt: npt.NDArray[np.int32], index: int) -> int:
    time.sleep(0.05)
    return letters(prompt, index)


def test_an_interrupt_that_another_thread_got_ends_the_wait_for_an_answer() -> None:
    engine = RequestEngine(ScriptedRuntime(script=Script(next_token=slow_letters)))
    handle = engine.submit(ask(max_tokens=200))
    start = time.monotonic()
    with interrupt_of_another_thread(), pytest.raises(KeyboardInterrupt):
        handle.get(LONG)
    assert time.monotonic() - start < SOON
    engine.shutdown(ShutdownMode.CANCEL)


def test_a_wait_of_the_main_thread_ends_with_its_time_and_not_before() -> None:
    for timeout in (0.0, 0.05, MAIN_THREAD_SLICE + 0.1):
        start = time.monotonic()
        assert not Latch().wait(timeout)
        assert timeout <= time.monotonic() - start < timeout + MAIN_THREAD_SLICE


def test_a_long_wait_of_the_main_thread_is_woken_at_once() -> None:
    latch = Latch()
    late = MAIN_THREAD_SLICE + 0.1
    setter = threading.Timer(late, latch.set)
    start = time.monotonic()
    setter.start()
    assert latch.wait()
    assert time.monotonic() - start < late + 0.6 * MAIN_THREAD_SLICE
    setter.join()
