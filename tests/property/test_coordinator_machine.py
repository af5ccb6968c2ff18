"""The coordinator under any interleaving of requests: every text equals its solo twin, every pool is recounted.

One machine for each flavour, over the real manager and the real policies of the plugins, with toy state.  Behaviour
173, and 124 to 156 where they concern live sequences: joins, chunks, holds, compaction, failed drains, recovery.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plugin_policies import all_policies

from edgellm.cache.types import ContextCacheCommitPolicy, ContextCacheConfig, ContextCacheLookupPolicy, Retention
from edgellm.cache.types import RetentionPriority as Priority
from edgellm.testing.random_traffic import TrafficDriver, media_of
from edgellm.testing.toy_driver import DECODE, FLAVOURS
from edgellm.testing.toy_sequence import ToySequence

TOKENS = st.integers(0, 1)
CAPACITY = 48


class CoordinatorMachine(RuleBasedStateMachine):
    name: ClassVar[str] = "attention"
    driver: TrafficDriver

    @initialize(
        page_size=st.sampled_from([2, 4]),
        max_batch=st.integers(1, 3),
        spare_pages=st.integers(0, 6),
        slots=st.integers(1, 4),
        interval=st.sampled_from([None, 4, 8]),
        max_records=st.sampled_from([None, None, 1]),
        look_again=st.booleans(),
    )
    def build(
        self,
        page_size: int,
        max_batch: int,
        spare_pages: int,
        slots: int,
        interval: int | None,
        max_records: int | None,
        look_again: bool,
    ) -> None:
        self.driver = TrafficDriver(
            FLAVOURS[self.name],
            policies=all_policies(),
            page_size=page_size,
            num_pages=max_batch * -(-CAPACITY // page_size) + spare_pages,
            max_batch=max_batch,
            max_kv_capacity=CAPACITY,
            recurrent_slots=slots,
            partial_slots=slots,
            vocab_size=3,
            look_again=look_again,
            config=ContextCacheConfig(
                max_records=max_records, checkpoint_interval_tokens=interval, policy_deadline_seconds=None
            ),
        )

    # Choices

    def live(self) -> list[ToySequence]:
        return list(self.driver.live.values()) if hasattr(self, "driver") else []

    def is_live(self) -> bool:
        return bool(self.live())

    def ready(self) -> list[ToySequence]:
        return [sequence for sequence in self.live() if sequence.finalized]

    def is_ready(self) -> bool:
        return bool(self.ready())

    def some(self, data: st.DataObject, sequences: list[ToySequence], least: int = 1) -> list[ToySequence]:
        indices = st.lists(st.integers(0, len(sequences) - 1), min_size=least, unique=True)
        return [sequences[i] for i in data.draw(indices)]

    def run_step(self, work: list[tuple[ToySequence, int]], ending: list[ToySequence]) -> None:
        if self.driver.mixed_step(work, finish=ending) is None:
            assert self.driver.refused is not None
            self.driver.cancel(self.driver.refused)

    # Rules

    @rule(
        data=st.data(),
        more=st.lists(TOKENS, min_size=1, max_size=10),
        salt=st.sampled_from([None, None, 1]),
        lookup=st.sampled_from([None, None, ContextCacheLookupPolicy.BYPASS]),
        commit=st.sampled_from([None, ContextCacheCommitPolicy.PREFILL_STATE_ONLY]),
        priority=st.sampled_from(list(Priority)),
        boundary=st.integers(1, 12),
    )
    def admit(
        self,
        data: st.DataObject,
        more: list[int],
        salt: int | None,
        lookup: ContextCacheLookupPolicy | None,
        commit: ContextCacheCommitPolicy | None,
        priority: Priority,
        boundary: int,
    ) -> None:
        """A new prompt, the next turn of a live sequence, or a branch of it."""
        prompt = more
        if self.live() and data.draw(st.booleans()):
            base = data.draw(st.sampled_from(self.live())).tokens
            prompt = base[: data.draw(st.integers(0, min(len(base), 20)))] + more
        self.driver.admit(
            prompt,
            salt=salt,
            lookup=lookup,
            commit=commit,
            media=media_of(prompt) if salt else (),
            retention=Retention(priority),
            checkpoint_boundaries=[boundary] if boundary <= len(prompt) else [],
        )

    @precondition(is_live)
    @rule(data=st.data(), count=st.integers(1, 8))
    def chunk(self, data: st.DataObject, count: int) -> None:
        sequence = data.draw(st.sampled_from(self.live()))
        self.run_step([(sequence, DECODE if sequence.finalized else count)], [])

    @precondition(is_live)
    @rule(data=st.data(), count=st.integers(1, 8), ends=st.booleans())
    def packed_step(self, data: st.DataObject, count: int, ends: bool) -> None:
        """Some run, chunks and decode rows in any order; the others hold; one may end in this very step."""
        chosen = self.some(data, self.live(), least=0)
        work = [(sequence, DECODE if sequence.finalized else count) for sequence in chosen]
        self.run_step(work, [s for s, n in work if n == DECODE][:1] if ends else [])

    @precondition(is_ready)
    @rule()
    def decode(self) -> None:
        self.run_step([(sequence, DECODE) for sequence in self.ready()], [])

    @precondition(is_ready)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.driver.finish(*self.some(data, self.ready()))

    @precondition(is_live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.driver.cancel(*self.some(data, self.live()))

    @precondition(lambda self: self.driver.coordinator.manager.records.size > 0)
    @rule(data=st.data())
    def evict_record(self, data: st.DataObject) -> None:
        manager = self.driver.coordinator._manager
        manager.evict_record(data.draw(st.sampled_from(manager.records.lru_to_mru())))

    @rule(really=st.integers(0, 5))
    def evict_all(self, really: int) -> None:
        if really == 5:
            self.driver.coordinator._manager.evict_all()

    @rule(really=st.integers(0, 5))
    def drain_fails_then_recovers(self, really: int) -> None:
        if really == 5:
            self.driver.lose_container()
            self.driver.recover_container()

    @invariant()
    def state_is_its_own_and_every_page_is_accounted_for(self) -> None:
        if hasattr(self, "driver"):
            self.driver.recount()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.close()


@pytest.fixture(autouse=True)
def failed_drains_are_no_news() -> Iterator[None]:
    logger = logging.getLogger("edgellm")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("name", FLAVOURS)
def test_texts_are_those_of_solo_twins_under_any_interleaving(name: str) -> None:
    machine = type(f"Coordinator_{name}", (CoordinatorMachine,), {"name": name})
    case = machine.TestCase
    case.settings = settings(max_examples=50, stateful_step_count=40)
    case("runTest").runTest()
