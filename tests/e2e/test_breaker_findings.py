"""What an attack on the cache proved: each test states the promise and fails where it is broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from plugin_policies import all_policies

from edgellm.builtin.base_endpoint import BaseEndpointPolicy
from edgellm.cache.quarantine import Quarantine
from edgellm.cache.types import ContextCacheSequenceAdvance, PublicationPoint, Retention
from edgellm.errors import CallerError
from edgellm.plugins import PolicyRegistration
from edgellm.session.types import ResidentRef
from edgellm.testing.recount import recount, require_baseline
from edgellm.testing.toy_driver import FLAVOURS, Status, ToyDriver
from edgellm.testing.toy_machine import Row

LONG = [0, 1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 1, 0]
Act = Callable[[Any, Any], Any]


class Reentrant(BaseEndpointPolicy):
    """The built-in policy; the first call of the hook named `where` does `act` first."""

    where = ""
    act: Act | None = None

    def _once(self, hook: str, request: Any) -> None:
        cls = type(self)
        if cls.where == hook and cls.act is not None:
            act, cls.act = cls.act, None
            act(self.coordinator, request)

    def on_prefill_chunk(self, request: Any, slot: int) -> None:
        self._once("chunk", request)
        super().on_prefill_chunk(request, slot)

    def on_decode_completed(self, request: Any, *step: Any) -> Any:
        self._once("decode", request)
        return super().on_decode_completed(request, *step)

    def on_terminalize(self, request: Any) -> Any:
        self._once("terminalize", request)
        return super().on_terminalize(request)


def reentrant_driver(hook: str) -> tuple[ToyDriver, type[Reentrant]]:
    policy = type("Policy", (Reentrant,), {"where": hook})
    registered = PolicyRegistration("test", policy, lambda profile, speculative: True, 0, "test")
    return ToyDriver(FLAVOURS["attention"], policies=[registered], max_kv_capacity=64, check=False), policy


def claim_the_whole_prompt(coordinator: Any, request: Any) -> None:
    for slot in range(request.num_sequences):
        if not request.sequence(slot).finalized:
            coordinator.advance_prefill(request, slot, request.sequence(slot).num_tokens)


def wrapped(change: Callable[[type], type]) -> list[PolicyRegistration]:
    """The installed policies, each of a class that `change` made of its own."""

    def wrap(registration: PolicyRegistration) -> PolicyRegistration:
        def build(coordinator: Any) -> Any:
            policy = registration.factory(coordinator)
            changed = change(type(policy))
            other = changed.__new__(changed)
            other.__dict__.update(policy.__dict__)
            return other

        return dataclasses.replace(registration, factory=build)

    return [wrap(registration) for registration in all_policies()]


@pytest.mark.parametrize("hook", ["on_prefill_chunk", "on_decode_completed"])
def test_a_policy_takes_no_checkpoint_of_another_request_whose_state_moved_on(hook: str) -> None:
    """Of another request's sequences the device may hold more than the ledger says: its checkpoint is another state."""
    armed: list[Any] = []

    def change(policy: type) -> type:
        def act(self: Any, request: Any, *rest: Any) -> Any:
            if armed:
                other = armed.pop()
                length = other.sequence(0).committed_state_length
                self.reserve_hybrid_capture(other, 0, length, PublicationPoint.PREFILL_CHUNK)
                self.capture_staged(other)
                self.publish_staged(other, 0)
            return getattr(policy, hook)(self, request, *rest)

        return type("CrossRequest", (policy,), {hook: act})

    driver = ToyDriver(
        FLAVOURS["hybrid"], policies=wrapped(change), max_kv_capacity=64, num_pages=80, check=False, look_again=False
    )
    beside = driver.beside(speculative=False)
    moving = beside.admit(LONG)
    beside.prefill_chunk(moving, 4)
    beside._prepare([])
    driver.machine.forward([Row(moving.slot, 4, tuple(LONG[4:8]))])  # enqueued: the device is at 8, the ledger at 4
    mine = driver.admit([1, 1, 0, 1, 1, 0])
    armed.append(beside.request)
    driver.prefill(mine)
    driver.step([mine])
    assert not armed
    follower = driver.admit([*LONG[:4], 0, 0, 0])
    driver.prefill(follower)
    driver.step([follower])  # its text is that of a run alone
    assert driver.coordinator.metrics().policy_failures == 1  # and who did it is told


@pytest.mark.parametrize("helper", ["mark_resolved", "synchronize"])
def test_a_policy_ends_no_step_of_another_request(helper: str) -> None:
    armed: list[Any] = []

    class Resolving(BaseEndpointPolicy):
        def on_prefill_chunk(self, request: Any, slot: int) -> None:
            if armed:
                getattr(self, helper)(armed.pop())
            super().on_prefill_chunk(request, slot)

    registered = PolicyRegistration("test", Resolving, lambda profile, speculative: True, 0, "test")
    driver = ToyDriver(FLAVOURS["attention"], policies=[registered], max_kv_capacity=64, check=False)
    beside = driver.beside(speculative=False)
    other = beside.admit([1, 1, 1, 1])
    beside.prefill(other)
    beside._prepare([other])
    mine = driver.admit(LONG)
    armed.append(beside.request)
    driver.prefill_chunk(mine, 4)
    assert not armed
    advance = ContextCacheSequenceAdvance([other.twin.next_token()], 5)
    assert driver.coordinator.complete_decode_step(beside.request, [advance]) is Status.OK


def nothing(coordinator: Any, request: Any) -> None:
    """What the other tests' hooks are compared with."""


@pytest.mark.parametrize("hook", ["chunk", "decode"])
def test_a_hook_that_calls_the_coordinator_publishes_nothing_that_is_not_written(hook: str) -> None:
    """A policy can publish too little, never more than is committed: the next prompt's text depends on it."""
    driver, policy = reentrant_driver(hook)
    first = driver.admit([1, 1, 1, 1])
    driver.prefill(first)
    victim = driver.admit(LONG)
    policy.act = staticmethod(claim_the_whole_prompt)
    if hook == "chunk":
        driver.prefill_chunk(victim, 2)
    else:
        driver.step([first])
    driver.cancel(victim)
    second = driver.admit([*LONG, 1])
    assert second.reuse.reused_tokens <= 2  # so many were ever computed
    driver.prefill(second)
    driver.step([second])  # compares the text with the twin's
    driver.close()


def finish(coordinator: Any, request: Any) -> None:
    coordinator.finish(request)


def abandon(coordinator: Any, request: Any) -> None:
    request.abandon()


def compact(coordinator: Any, request: Any) -> None:
    coordinator.begin_batch_compaction(request, [-1] * request.num_sequences, 0)
    coordinator.compact_batch(request)


def retract(coordinator: Any, request: Any) -> None:
    coordinator.retract_sequence_admission(request)


@pytest.mark.parametrize(
    ("hook", "act"),
    [
        ("chunk", nothing),
        ("terminalize", nothing),
        ("chunk", finish),
        ("decode", finish),
        ("terminalize", finish),
        ("chunk", abandon),
        ("decode", abandon),
        ("terminalize", compact),
        ("chunk", retract),
        ("decode", retract),
    ],
)
def test_a_hook_cannot_end_the_request_it_is_called_for(hook: str, act: Act) -> None:
    """A policy's fault is charged to it; the others' text goes on and the cache still admits."""
    driver, policy = reentrant_driver(hook)
    first = driver.admit([1, 1, 1, 1])
    driver.prefill(first)
    second = driver.admit(LONG)
    policy.act = staticmethod(act)
    driver.prefill_chunk(second, 2)
    driver.step([first])
    driver.cancel(second)
    driver.step([first])
    assert not driver.coordinator.poisoned
    driver.close()


def test_a_placement_that_admits_another_sequence_leaves_every_row_bound() -> None:
    """`plan_checkpoints` runs in the middle of an admission: what it admits must not be bound in its place."""
    armed: list[Callable[[], Any]] = []

    def change(policy: type) -> type:
        def plan_checkpoints(self: Any, context: Any) -> Any:
            if armed:
                armed.pop()()
            return policy.plan_checkpoints(self, context)  # type: ignore[attr-defined]

        return type("Placing", (policy,), {"plan_checkpoints": plan_checkpoints})

    driver = ToyDriver(FLAVOURS["hybrid"], policies=wrapped(change), max_kv_capacity=64, check=False)
    inner = driver.admission([1, 0, 1], ResidentRef(0, 77))  # the driver hands slots out from the top
    armed.append(lambda: driver.coordinator.admit_sequence(driver.request, inner, driver.headroom))
    driver.admit(LONG)
    assert not armed
    recount(driver.coordinator)
    driver.request.abandon()
    require_baseline(driver.coordinator)


@pytest.mark.parametrize("flavour", ["hybrid", "recurrent"])
def test_a_step_that_captured_and_then_came_to_nothing_leaves_nothing_staged(flavour: str) -> None:
    """Chunk ends were captured, the step is then completed with everybody holding: K6 must hold at rest."""
    driver = ToyDriver(FLAVOURS[flavour], policies=all_policies(), max_kv_capacity=64, check=False, look_again=False)
    sequences = [driver.admit([bit, *LONG], checkpoint_boundaries=[3, 5]) for bit in (0, 1)]
    driver._prepare([])
    driver.machine.forward([Row(one.slot, one.committed, one.prompt[:3]) for one in sequences])
    assert driver.coordinator.enqueue_prefill_captures(driver.request, [0, 1], [3, 3]) is Status.OK
    driver.coordinator.complete_decode_step(driver.request, [ContextCacheSequenceAdvance()] * 2)
    recount(driver.coordinator)
    driver.close()


@pytest.mark.parametrize("flavour", ["hybrid", "recurrent"])
def test_a_neighbours_departure_after_such_a_step_costs_nobody_publication(flavour: str) -> None:
    """The runtime held a step; no hook did anything wrong, so nothing is charged and the survivor publishes on."""
    driver = ToyDriver(FLAVOURS[flavour], policies=all_policies(), max_kv_capacity=64, check=False, look_again=False)
    leaver, survivor = (driver.admit([bit, *LONG], checkpoint_boundaries=[3, 5]) for bit in (0, 1))
    driver._prepare([])
    driver.machine.forward([Row(one.slot, one.committed, one.prompt[:3]) for one in (leaver, survivor)])
    assert driver.coordinator.enqueue_prefill_captures(driver.request, [0, 1], [3, 3]) is Status.OK
    driver.coordinator.complete_decode_step(driver.request, [ContextCacheSequenceAdvance()] * 2)
    driver.cancel(leaver)
    assert driver.coordinator.metrics().policy_failures == 0
    assert driver.request.impl.lengths.publishes[driver.index(survivor)]


@pytest.mark.parametrize("ttl", ["5", b"1", [], True])
def test_a_time_to_live_that_is_no_number_is_the_callers_error(ttl: Any) -> None:
    driver = ToyDriver(FLAVOURS["attention"])
    with pytest.raises(CallerError):
        driver.admit([1, 1], retention=Retention(ttl_seconds=ttl))


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_boundaries": ["1"]},
        {"checkpoint_boundaries": [1.5]},
        {"replay_tail_length": 0.5},
        {"replay_tail_length": "1"},
        {"reserve_pages": 1.5},
    ],
)
def test_an_admission_of_wrong_types_is_the_callers_error(options: dict[str, Any]) -> None:
    driver = ToyDriver(FLAVOURS["attention"])
    with pytest.raises(CallerError):
        driver.admit([1, 1], **options)


@pytest.mark.parametrize("answer", [np.False_, 0])
def test_a_wait_that_answers_false_in_another_type_is_a_failed_wait(answer: Any) -> None:
    """Pages that the device may still write must not go back."""
    assert Quarantine(lambda stream: answer).wait(None) is False  # type: ignore[arg-type]
