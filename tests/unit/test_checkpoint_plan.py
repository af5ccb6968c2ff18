"""Asking a policy where the checkpoints of a prompt go: what it is told, what is done with a slow or wrong answer."""

from __future__ import annotations

import time

import pytest
from coordinator_rig import VOCAB, Rig

from edgellm.builtin.base_endpoint import BaseEndpointPolicy
from edgellm.cache.policy import CheckpointContext
from edgellm.cache.types import CheckpointKind, ContextCacheConfig, ContextCacheLookupPolicy
from edgellm.plugins import PolicyRegistration
from edgellm.testing.toy_driver import FLAVOURS, ToyDriver
from edgellm_hybrid import HybridSnapshotPolicy


def prompt(length, seed=1):
    return [(seed * 31 + 7 * i * i + i) % 50 for i in range(length)]


class Placing(HybridSnapshotPolicy):
    """Remembers what it was asked; answers what `answer` says."""

    def __init__(self, coordinator):
        super().__init__(coordinator)
        type(self).asked = type(self).__dict__.get("asked", [])

    def answer(self, context):
        return []

    def plan_checkpoints(self, context):
        type(self).asked.append(context)
        return self.answer(context)


def driver_for(answer, *, deadline=None, interval=None, **options):
    policy = type("Policy", (Placing,), {"answer": answer})
    registration = PolicyRegistration("test", policy, lambda profile, speculative: True, 0, "test")
    config = ContextCacheConfig(policy_deadline_seconds=deadline, checkpoint_interval_tokens=interval)
    driver = ToyDriver(FLAVOURS["hybrid"], policies=[registration], config=config, **options)
    return driver, policy


def test_a_policy_is_told_what_the_cache_knows_of_the_prompt():
    driver, policy = driver_for(lambda self, context: [8] if context.num_tokens > 8 else [], interval=6)
    first = driver.admit(prompt(10), checkpoint_boundaries=[3, 7], replay_tail_length=2)
    driver.prefill(first)
    driver.finish(first)
    driver.admit([*prompt(10), 1, 2])
    assert policy.asked == [
        CheckpointContext(
            num_tokens=10,
            reuse_token_length=0,
            known_token_length=0,
            page_size=4,
            interval=6,
            template_boundaries=(3, 7),
            replay_tail_length=2,
        ),
        CheckpointContext(
            num_tokens=12,
            reuse_token_length=10,  # the end of a conversation is kept too
            known_token_length=10,
            page_size=4,
            interval=6,
            template_boundaries=(),
            replay_tail_length=0,
        ),
    ]


def test_answers_are_kept_ascending_and_once():
    driver, _ = driver_for(lambda self, context: [9, 4, 9, 1])
    sequence = driver.admit(prompt(9))
    assert driver.request.sequence(0).wanted_checkpoints == (1, 4, 9)
    assert sequence.boundaries == (1, 4, 9)


@pytest.mark.parametrize(
    ("length", "again", "branch"),
    [
        (10, 12, 8),  # two blocks of the first prompt are known
        (12, 12, 8),  # all three are, and one token must be computed: the branch is below it
        (12, 13, 12),  # three blocks, and a token behind them
    ],
)
def test_a_branch_point_is_the_known_whole_blocks_below_the_last_token(length, again, branch):
    driver, _ = driver_for(lambda self, context: [])
    first = driver.admit(prompt(length))
    driver.prefill(first)
    driver.admit(prompt(again))
    state = driver.request.sequence(1)
    assert state.branch_point == branch
    assert isinstance(state.branch_point, int)


def test_a_checkpoint_at_the_branch_point_is_a_branch():
    driver, _ = driver_for(lambda self, context: [8] if context.known_token_length >= 8 else [])
    driver.prefill(driver.admit(prompt(10)))
    driver.prefill(driver.admit([*prompt(9), 7, 7, 7]))
    records = driver.coordinator.manager.records
    (record,) = records.lru_to_mru()
    assert (records.exact_length(record), records.kind(record)) == (8, CheckpointKind.BRANCH)


def test_bypass_and_deployments_without_checkpoints_are_not_asked():
    driver, policy = driver_for(lambda self, context: [4])
    bypass = driver.admit(prompt(9), lookup=ContextCacheLookupPolicy.BYPASS)
    assert (policy.asked, bypass.boundaries) == ([], ())

    class Eager(BaseEndpointPolicy):
        def plan_checkpoints(self, context):
            raise AssertionError("attention models have no checkpoints")

    rig = Rig(policies=[PolicyRegistration("test", Eager, lambda profile, speculative: True, 0, "test")])
    handle = rig.container()
    rig.join(handle, [token % VOCAB for token in prompt(9)], 0)
    assert handle.sequence(0).wanted_checkpoints == ()
    assert rig.coordinator.metrics().policy_failures == 0


def test_a_slow_answer_is_charged_to_its_sequence():
    driver, _ = driver_for(lambda self, context: time.sleep(0.02) or [], deadline=0.01)
    driver.admit(prompt(9))
    assert driver.request.sequence(0).policy_overruns >= 1
    assert driver.coordinator.metrics().policy_deadline_overruns == driver.request.sequence(0).policy_overruns


@pytest.mark.parametrize("nonsense", [[0], [-1], [10], ["four"], None, 7])
def test_a_wrong_answer_places_nothing_and_is_charged(nonsense):
    driver, _ = driver_for(lambda self, context: nonsense if context.num_tokens == 9 else [4])
    for count in (1, 2):
        driver.admit(prompt(9, count))
        state = driver.request.sequence(count - 1)
        assert (state.wanted_checkpoints, state.branch_point) == ((), 0)
        assert driver.coordinator.metrics().policy_failures == count
    assert driver.request.impl.lengths.silenced[:2].tolist() == [True, True]
    driver.admit(prompt(8, 5))
    assert driver.request.sequence(2).wanted_checkpoints == (4,)
    assert not driver.request.impl.lengths.silenced[2]
