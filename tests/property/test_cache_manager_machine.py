"""The manager against its plain-Python model, by random operations; a full recount and comparison after each.

Invariants I1 to I14 of the context cache as far as they concern attention-only requests, behaviour 45 (planning), 96
(random operations) and 172 (forced hash collisions: `hash_mask` 0 or 1 makes every block collide).
"""

from __future__ import annotations

from cache_model import CacheDriver
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgellm._core.block_index import DEFAULT_HASH_MASK

TOKENS = st.integers(0, 1)


class CacheMachine(RuleBasedStateMachine):
    driver: CacheDriver

    @initialize(
        page_size=st.sampled_from([2, 4]),
        capacity=st.integers(4, 24),
        max_records=st.sampled_from([None, None, 0, 1, 2]),
        hash_mask=st.sampled_from([DEFAULT_HASH_MASK, 0, 1]),
    )
    def build(self, page_size: int, capacity: int, max_records: int | None, hash_mask: int) -> None:
        self.driver = CacheDriver(page_size, capacity, max_records=max_records, hash_mask=hash_mask)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.driver.live) - 1))

    def pick_some(self, data: st.DataObject) -> list[int]:
        return data.draw(st.lists(st.integers(0, len(self.driver.live) - 1), min_size=1, max_size=4, unique=True))

    def has_live(self) -> bool:
        return bool(self.driver.live)

    @rule(
        namespace=st.integers(0, 1), tokens=st.lists(TOKENS, max_size=20), extra=st.integers(0, 4), bypass=st.booleans()
    )
    def acquire(self, namespace: int, tokens: list[int], extra: int, bypass: bool) -> None:
        self.driver.acquire(namespace, tokens, min_tokens=len(tokens) + extra, bypass=bypass)

    @precondition(has_live)
    @rule(data=st.data(), more=st.lists(TOKENS, max_size=6))
    def acquire_continuation(self, data: st.DataObject, more: list[int]) -> None:
        """The next turn: what a running sequence has, and a little more."""
        base = self.driver.live[self.pick(data)]
        self.driver.acquire(base.namespace, base.tokens + more)

    @precondition(lambda self: bool(self.driver.model.block_of))
    @rule(data=st.data(), beyond=st.integers(-2, 1), reserve=st.integers(0, 2))
    def acquire_cached_prompt_up_to_the_last_page(self, data: st.DataObject, beyond: int, reserve: int) -> None:
        """A hit that needs about as many more pages as there are: what it shares cannot be evicted for it."""
        model = self.driver.model
        namespace, tokens = data.draw(st.sampled_from(sorted(model.page_of)))
        pages = len(tokens) // model.page_size + len(model.free) + len(model.lru) + beyond
        self.driver.acquire(namespace, [*tokens, 0], min_tokens=max(0, pages) * model.page_size, reserve=reserve)

    @precondition(has_live)
    @rule(data=st.data())
    def acquire_twin_in_flight(self, data: st.DataObject) -> None:
        """The same prompt once more on private pages; later it may share, pin or duplicate what its twin publishes."""
        base = self.driver.live[self.pick(data)]
        self.driver.acquire(base.namespace, base.tokens, bypass=True)

    @precondition(has_live)
    @rule(data=st.data())
    def twin_publishes_and_the_other_looks_again(self, data: st.DataObject) -> None:
        which = self.pick(data)
        self.driver.publish(which, len(self.driver.live[which].tokens), make_record=False)
        for other, sequence in enumerate(self.driver.live):
            if sequence.tokens == self.driver.live[which].tokens:
                self.driver.rebind(other)

    @precondition(has_live)
    @rule(data=st.data(), additional=st.integers(0, 3))
    def grow(self, data: st.DataObject, additional: int) -> None:
        self.driver.grow(self.pick(data), additional)

    @precondition(has_live)
    @rule(data=st.data(), extra=st.integers(0, 5))
    def ensure_coverage(self, data: st.DataObject, extra: int) -> None:
        self.driver.ensure_coverage(self.pick_some(data), extra)

    @precondition(has_live)
    @rule(data=st.data(), make_record=st.booleans())
    def publish(self, data: st.DataObject, make_record: bool) -> None:
        which = self.pick(data)
        resident = data.draw(st.integers(0, len(self.driver.live[which].tokens)))
        self.driver.publish(which, resident, make_record=make_record)

    @precondition(has_live)
    @rule(data=st.data())
    def publish_all_with_record(self, data: st.DataObject) -> None:
        which = self.pick(data)
        self.driver.publish(which, len(self.driver.live[which].tokens), make_record=True)

    @precondition(has_live)
    @rule(data=st.data(), token=TOKENS, publish=st.booleans(), lookahead=st.integers(0, 2))
    def append(self, data: st.DataObject, token: int, publish: bool, lookahead: int) -> None:
        self.driver.append(self.pick_some(data), token, publish=publish, lookahead=lookahead)

    @precondition(has_live)
    @rule(data=st.data())
    def rebind(self, data: st.DataObject) -> None:
        self.driver.rebind(self.pick(data))

    @precondition(has_live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.driver.release(self.pick(data))

    @precondition(lambda self: bool(self.driver.model.records))
    @rule(data=st.data())
    def evict_record(self, data: st.DataObject) -> None:
        self.driver.evict_record(data.draw(st.integers(0, len(self.driver.model.records) - 1)))

    @rule(really=st.integers(0, 7))
    def evict_all(self, really: int) -> None:
        if really == 7:
            self.driver.evict_all()

    @invariant()
    def free_and_indexed_and_leased_pages_are_all_pages(self) -> None:
        if hasattr(self, "driver"):
            model = self.driver.model
            used = set(model.block_of) | {page for page, count in model.active.items() if count}
            assert used | set(model.free) == set(range(model.capacity))
            assert not used & set(model.free)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.finish()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=50)
