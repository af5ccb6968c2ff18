"""Fixtures of the engine's tests; see `engine_rig`."""

import signal
from collections.abc import Iterator

import pytest
from engine_rig import brake, start

__all__ = ["brake", "interrupts_arrive", "start"]


@pytest.fixture
def interrupts_arrive() -> Iterator[None]:
    """A job that a shell started in the background ignores SIGINT, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
