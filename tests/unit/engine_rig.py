"""Engines over the scripted session: a brake that holds the actor in a step, and shorthand for requests."""

import threading
import time

import pytest

from edgellm.engine.engine import RequestEngine, ShutdownMode
from edgellm.request import LLMGenerationRequest
from edgellm.sampling.params import SamplingParams
from edgellm.testing.scripted_session import letters

WAIT = 20


class Brake:
    """A scripted token source that can hold the actor inside a step."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._released = threading.Event()
        self._released.set()
        self._trap = None
        self.trapped = False

    def __call__(self, prompt, index) -> int:
        if (len(prompt), index) == self._trap:
            self.hold()
            self._trap, self.trapped = None, True
        self.entered.set()
        if not self._released.wait(WAIT):
            raise TimeoutError("the test never released the brake")
        return letters(prompt, index)

    def hold(self) -> None:
        self.entered.clear()
        self._released.clear()

    def hold_at(self, prompt_length: int, index: int) -> None:
        """Hold when the sequence with a prompt of that length comes to its token `index`."""
        self._trap = (prompt_length, index)

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def brake():
    brake = Brake()
    yield brake
    brake.release()


@pytest.fixture
def start():
    """Start engines that the test cannot forget to stop; checks that nothing leaked."""
    started = []

    def make(runtime, config=None, **kwargs) -> RequestEngine:
        engine = RequestEngine(runtime, config, **kwargs)
        started.append((engine, runtime))
        return engine

    yield make
    for engine, runtime in started:
        engine.shutdown(ShutdownMode.CANCEL)
        metrics = engine.metrics()
        assert engine.pending() == 0
        assert metrics.completed + metrics.cancelled + metrics.failed == metrics.submitted
        assert getattr(runtime, "leased", set()) == set()


def ask(prompt="hello", max_tokens=4, **kwargs) -> LLMGenerationRequest:
    sampling = {name: kwargs.pop(name) for name in ("temperature", "stop") if name in kwargs}
    return LLMGenerationRequest(prompt=prompt, sampling=SamplingParams(max_tokens=max_tokens, **sampling), **kwargs)


def held(engine, brake, **kwargs):
    """A request that is resident and inside a step."""
    brake.hold()
    handle = engine.submit(ask("held", max_tokens=50, **kwargs))
    assert brake.entered.wait(WAIT)
    return handle


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def admitted(runtime) -> list[int]:
    return [entry[1] for entry in runtime.log if entry[0] == "admit"]


def first_residency(runtime) -> list[int]:
    """Request ids in the order of their first context step."""
    order = []
    for entry in runtime.log:
        if entry[0] == "execute":
            for descriptor in entry[1]:
                if descriptor.identity.request_id not in order:
                    order.append(descriptor.identity.request_id)
    return order
