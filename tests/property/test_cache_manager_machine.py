"""The manager against its plain-Python model, by random operations; a full recount and comparison after each.

One machine for each flavour; EDGELLM_MACHINE_EXAMPLES=5000 runs it longer.  Invariants I1 to I14 of the context
cache, behaviours 45 (planning), 96 (random operations), 89 (faults change nothing) and 172 (forced hash collisions:
`hash_mask` 0 or 1 makes every block collide).
"""

from __future__ import annotations

import os
from typing import ClassVar

import pytest
from cache_model import Lockstep
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgellm._core.block_index import DEFAULT_HASH_MASK
from edgellm.cache.types import CheckpointKind, RetentionPriority
from edgellm.testing.cache_workout import FLAVOURS, MEDIA, MEDIA_NAMESPACE, CacheFlavour

EXAMPLES = int(os.environ.get("EDGELLM_MACHINE_EXAMPLES", "120"))
TOKENS = st.integers(0, 2)
PRIORITIES = st.sampled_from(list(RetentionPriority))
NAMESPACES = st.sampled_from([0, 0, 1, MEDIA_NAMESPACE])
LIFETIMES = st.sampled_from([0, 0, 3, 30])
KINDS = st.sampled_from([*CheckpointKind, CheckpointKind.TAIL, CheckpointKind.LADDER])


class CacheMachine(RuleBasedStateMachine):
    """Rules of every flavour; subclasses say which one and add theirs."""

    flavour: ClassVar[CacheFlavour] = FLAVOURS["vanilla"]
    work: Lockstep
    texts: list[tuple[int, list[int]]]

    @initialize(
        page_size=st.sampled_from([2, 3, 4]),
        pages=st.integers(4, 16),
        draft_pages=st.integers(3, 16),
        slots=st.sampled_from([1, 2, 3, 3, 5]),
        max_records=st.sampled_from([None, None, None, 0, 1, 2]),
        hash_mask=st.sampled_from([DEFAULT_HASH_MASK, 0, 1]),
        fault_every=st.sampled_from([0, 1]),
    )
    def build(
        self,
        page_size: int,
        pages: int,
        draft_pages: int,
        slots: int,
        max_records: int | None,
        hash_mask: int,
        fault_every: int,
    ) -> None:
        self.work = Lockstep(
            self.flavour,
            page_size,
            4 * pages if self.flavour.index_only else pages,
            draft_pages=draft_pages,
            recurrent_slots=slots,
            partial_slots=max(1, slots - 1),
            max_records=max_records,
            hash_mask=hash_mask,
            fault_every=fault_every,
        )
        self.texts = []

    def has_live(self) -> bool:
        return bool(self.work.live)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.work.live) - 1))

    def pick_some(self, data: st.DataObject) -> list[int]:
        return data.draw(st.lists(st.integers(0, len(self.work.live) - 1), min_size=1, max_size=3, unique=True))

    def draw_symbols(self, data: st.DataObject, namespace: int, most: int) -> list[int]:
        return self.work.symbols_of(namespace, data.draw(st.lists(TOKENS, max_size=most)))

    # Acquire

    @rule(
        data=st.data(),
        namespace=NAMESPACES,
        speculative=st.booleans(),
        bypass=st.booleans(),
        extra=st.integers(0, 4),
        draft_extra=st.integers(0, 5),
        priority=PRIORITIES,
        ttl=LIFETIMES,
    )
    def acquire(self, data: st.DataObject, namespace: int, **options: int) -> None:
        self.work.acquire(namespace, self.draw_symbols(data, namespace, 18), **self.options(options))

    def options(self, options: dict[str, int]) -> dict[str, int]:
        return {**options, "speculative": bool(options.get("speculative")) and self.flavour.contract is not None}

    def draw_text(self, data: st.DataObject) -> tuple[int, list[int]]:
        """A new prompt, the next turn, a branch or a prefix: mostly what was seen before, up to somewhere, and more."""
        seen = self.texts + [(s.namespace, s.symbols) for s in self.work.live]
        if not seen or data.draw(st.integers(0, 3)) == 0:
            namespace = data.draw(NAMESPACES)
            return namespace, self.draw_symbols(data, namespace, 14)
        namespace, symbols = data.draw(st.sampled_from(seen))
        cut = data.draw(st.sampled_from([len(symbols), len(symbols) - 1, len(symbols) // 2, 3]))
        return namespace, symbols[: max(0, cut)] + self.draw_symbols(data, namespace, 4)

    @rule(data=st.data(), speculative=st.booleans(), bypass=st.integers(0, 5), priority=PRIORITIES, ttl=LIFETIMES)
    def acquire_what_may_be_known(self, data: st.DataObject, bypass: int, **options: int) -> None:
        namespace, symbols = self.draw_text(data)
        self.work.acquire(namespace, symbols, bypass=bypass == 0, **self.options(options))

    @rule(
        data=st.data(),
        speculative=st.booleans(),
        priority=PRIORITIES,
        ttl=LIFETIMES,
        retain_tail=st.booleans(),
        volatile=st.integers(0, 5),
        stay=st.integers(0, 3),
    )
    def whole_request(self, data: st.DataObject, retain_tail: bool, volatile: int, stay: int, **options: int) -> None:
        """From admission to its end in one step."""
        namespace, symbols = self.draw_text(data)
        sequence = self.work.acquire(namespace, symbols, **self.options(options))
        if sequence is None:
            return
        which = self.work.live.index(sequence)
        self.work.release_sources(which)
        if volatile < 2:
            self.work.set_volatile_from(which, max(0, len(symbols) - 1 - volatile))
        self.run_to_its_end(data, which, retain_tail)
        self.texts = [*self.texts[-5:], (namespace, list(sequence.symbols))]
        if stay:
            self.work.release(which)

    def run_to_its_end(self, data: st.DataObject, which: int, retain_tail: bool) -> None:
        self.work.compute(which, 100)
        self.work.publish(which, make_record=True, retain_tail=retain_tail)

    @precondition(lambda self: bool(self.work.model.nodes))
    @rule(data=st.data(), beyond=st.integers(-2, 1), reserve=st.integers(0, 2), speculative=st.booleans())
    def acquire_cached_prompt_up_to_the_last_page(
        self, data: st.DataObject, beyond: int, reserve: int, speculative: bool
    ) -> None:
        """A hit that needs about as many more pages as there are: what it shares cannot be evicted for it."""
        model = self.work.model
        node = data.draw(st.sampled_from(model.nodes))
        cut = data.draw(st.integers(0, len(node.symbols)))
        symbols = [*node.symbols[:cut], *self.draw_symbols(data, node.namespace, 3)]
        pages = len(symbols) // model.page_size + len(model.base.free) + len(model.unused) + beyond
        extra = max(0, pages * model.page_size - len(symbols))
        options = self.options({"speculative": speculative})
        self.work.acquire(node.namespace, symbols, extra=extra, reserve=reserve, **options)

    @precondition(has_live)
    @rule(data=st.data())
    def acquire_twin_in_flight(self, data: st.DataObject) -> None:
        """The same prompt once more on private pages; later it may share, pin or duplicate what its twin publishes."""
        base = self.work.live[self.pick(data)]
        self.work.acquire(base.namespace, base.symbols, bypass=True, speculative=base.speculative)

    @precondition(has_live)
    @rule(data=st.data())
    def twin_publishes_and_the_other_looks_again(self, data: st.DataObject) -> None:
        which = self.pick(data)
        self.work.compute(which, 100)
        self.work.publish(which, make_record=False)
        for other, sequence in enumerate(self.work.live):
            if sequence.symbols == self.work.live[which].symbols:
                self.work.rebind(other)

    # Life of a sequence

    @precondition(has_live)
    @rule(data=st.data(), count=st.integers(1, 8), draft=st.booleans())
    def compute(self, data: st.DataObject, count: int, draft: bool) -> None:
        self.work.compute(self.pick(data), count, draft=draft)

    @precondition(has_live)
    @rule(data=st.data(), count=st.integers(1, 8))
    def prefill_chunk(self, data: st.DataObject, count: int) -> None:
        which = self.pick(data)
        self.work.rebind(which)
        self.work.compute(which, count)
        self.work.publish(which, make_record=False)

    @precondition(has_live)
    @rule(data=st.data(), base=st.integers(0, 3), draft=st.integers(0, 3))
    def grow(self, data: st.DataObject, base: int, draft: int) -> None:
        self.work.forecast_matches(base)
        self.work.grow(self.pick(data), base, draft)

    @precondition(has_live)
    @rule(data=st.data(), extra=st.integers(0, 5), draft_extra=st.integers(0, 5))
    def ensure_coverage(self, data: st.DataObject, extra: int, draft_extra: int) -> None:
        self.work.ensure_coverage(self.pick_some(data), extra, draft_extra)

    @precondition(has_live)
    @rule(data=st.data(), make_record=st.booleans())
    def publish(self, data: st.DataObject, make_record: bool) -> None:
        self.work.publish(self.pick(data), make_record=make_record)

    @precondition(has_live)
    @rule(data=st.data(), retain_tail=st.booleans(), release=st.booleans())
    def end_normally(self, data: st.DataObject, retain_tail: bool, release: bool) -> None:
        which = self.pick(data)
        self.work.compute(which, 100)
        self.work.publish(which, make_record=True, retain_tail=retain_tail)
        if release:
            self.work.release(which)

    @precondition(has_live)
    @rule(data=st.data(), token=TOKENS, publish=st.booleans(), lookahead=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int, publish: bool, lookahead: int) -> None:
        which = self.pick_some(data)
        for i in which:
            self.work.compute(i, 100)
        self.work.append(which, token, publish=publish, lookahead=lookahead)

    @precondition(has_live)
    @rule(data=st.data())
    def rebind(self, data: st.DataObject) -> None:
        self.work.rebind(self.pick(data))

    @precondition(has_live)
    @rule(data=st.data())
    def release_sources(self, data: st.DataObject) -> None:
        self.work.release_sources(self.pick(data))

    @precondition(has_live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.work.release(self.pick(data))

    @precondition(has_live)
    @rule(data=st.data(), block=st.integers(0, 3))
    def note_withheld(self, data: st.DataObject, block: int) -> None:
        self.work.note_withheld(self.pick(data), block)

    @precondition(has_live)
    @rule(data=st.data())
    def set_volatile_from(self, data: st.DataObject) -> None:
        which = self.pick(data)
        self.work.set_volatile_from(which, data.draw(st.integers(-1, len(self.work.live[which].symbols))))

    # Eviction and time

    @precondition(lambda self: bool(self.work.model.records))
    @rule(data=st.data())
    def evict_record(self, data: st.DataObject) -> None:
        self.work.evict_record(data.draw(st.integers(0, len(self.work.model.records) - 1)))

    @rule(really=st.integers(0, 7))
    def evict_all(self, really: int) -> None:
        if really == 7:
            self.work.evict_all()

    @rule(nanoseconds=st.sampled_from([1, 3, 10]))
    def time_passes(self, nanoseconds: int) -> None:
        self.work.pass_time(nanoseconds)

    @rule()
    def expire(self) -> None:
        self.work.expire()

    @invariant()
    def every_page_is_free_or_indexed_or_leased(self) -> None:
        if hasattr(self, "work"):
            for pool in self.work.model.pools():
                used = pool.cached | {unit for unit, count in enumerate(pool.active) if count}
                assert used | set(pool.free) == set(range(pool.capacity))
                assert not used & set(pool.free)

    def teardown(self) -> None:
        if hasattr(self, "work"):
            self.work.finish()


class SpecMachine(CacheMachine):
    @precondition(CacheMachine.has_live)
    @rule(
        data=st.data(),
        tokens=st.lists(TOKENS, min_size=1, max_size=3),
        extra=st.integers(0, 2),
        draft_extra=st.integers(0, 2),
        draft=st.booleans(),
    )
    def verified_step(self, data: st.DataObject, tokens: list[int], extra: int, draft_extra: int, draft: bool) -> None:
        """Accepted tokens, pages for them, then their state; draft state may lag behind."""
        which = self.pick(data)
        self.work.extend(which, tokens)
        self.work.ensure_coverage([which], extra, draft_extra)
        self.work.compute(which, 3, draft=draft)


class CheckpointMachine(CacheMachine):
    def staged(self) -> bool:
        return any(sequence.staged for sequence in self.work.live)

    def draw_keep(self, data: st.DataObject) -> list[int]:
        """Lengths that a policy wants to keep: now and then those of all checkpoints there are."""
        lengths = sorted({record.length for record in self.work.model.records})
        return lengths if data.draw(st.integers(0, 3)) == 0 else []

    @precondition(CacheMachine.has_live)
    @rule(data=st.data())
    def reserve_checkpoint(self, data: st.DataObject) -> None:
        which = self.pick(data)
        if len(self.work.live[which].staged) < 2:
            self.work.reserve_checkpoint(which)

    @precondition(staged)
    @rule(
        data=st.data(),
        kind=KINDS,
        act=st.sampled_from(["capture", "publish", "retire"]),
    )
    def advance_checkpoint(self, data: st.DataObject, kind: CheckpointKind, act: str) -> None:
        which = data.draw(st.sampled_from([i for i, s in enumerate(self.work.live) if s.staged]))
        sequence = self.work.live[which]
        staged = data.draw(st.sampled_from(sequence.staged))
        if act == "retire":
            self.work.retire_checkpoint(which, staged)
        elif act == "capture":
            self.work.capture_checkpoint(which, staged)
        else:
            self.work.publish_checkpoint(which, staged, kind=kind, keep_lengths=self.draw_keep(data))

    def run_to_its_end(self, data: st.DataObject, which: int, retain_tail: bool) -> None:
        """One or two checkpoints on the way."""
        for count in (data.draw(st.integers(1, 6)), 100):
            self.checkpoint_after(data, which, count, data.draw(KINDS))
        super().run_to_its_end(data, which, retain_tail)

    @precondition(CacheMachine.has_live)
    @rule(data=st.data(), count=st.integers(0, 8), kind=KINDS)
    def chunk_that_ends_in_a_checkpoint(self, data: st.DataObject, count: int, kind: CheckpointKind) -> None:
        self.checkpoint_after(data, self.pick(data), count, kind)

    def checkpoint_after(self, data: st.DataObject, which: int, count: int, kind: CheckpointKind) -> None:
        sequence = self.work.live[which]
        self.work.compute(which, count)
        if sequence.staged or not self.work.reserve_checkpoint(which):
            return
        staged = sequence.staged[-1]
        if self.work.capture_checkpoint(which, staged):
            self.work.publish_checkpoint(which, staged, kind=kind, keep_lengths=self.draw_keep(data))
        self.work.retire_checkpoint(which, staged)

    @precondition(CacheMachine.has_live)
    @rule(data=st.data())
    def rebind_checkpoint(self, data: st.DataObject) -> None:
        self.work.rebind_checkpoint(self.pick(data))


class CheckpointSpecMachine(CheckpointMachine, SpecMachine):
    pass


def machine_of(flavour: CacheFlavour) -> type[CacheMachine]:
    if flavour.checkpoints:
        kind = CheckpointMachine if flavour.contract is None else CheckpointSpecMachine
    else:
        kind = CacheMachine if flavour.contract is None else SpecMachine
    return type(f"Machine_{flavour.name}", (kind,), {"flavour": flavour})


@pytest.mark.parametrize("name", FLAVOURS)
def test_the_manager_does_what_the_model_says(name: str) -> None:
    case = machine_of(FLAVOURS[name]).TestCase
    case.settings = settings(max_examples=EXAMPLES, stateful_step_count=50)
    case("runTest").runTest()


def test_media_symbol_is_no_token_id() -> None:
    assert MEDIA < 0
