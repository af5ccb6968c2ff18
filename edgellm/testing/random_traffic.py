"""Random traffic through a real coordinator: what `random_operations` does to the manager, one floor higher.

Sequences join, run their prompt in chunks, decode beside others, hold, look again, end or are cancelled (compaction),
records are evicted under them, drains fail, the coordinator is poisoned, and recovers.  A `ToyDriver` compares every
text with its solo twin and recounts every pool after every call.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from edgellm.cache.types import (
    ContextCacheCommitPolicy,
    ContextCacheConfig,
    ContextCacheCoordinatorStatus,
    ContextCacheLookupPolicy,
    Hash128,
    Retention,
    RetentionPriority,
)
from edgellm.errors import InvariantError, SessionLostError
from edgellm.testing.recount import recount, require_baseline
from edgellm.testing.toy_driver import DECODE, FLAVOURS, ToyDriver

if TYPE_CHECKING:
    from edgellm.plugins import PolicyRegistration
    from edgellm.testing.toy_sequence import ToySequence

LONGEST_PROMPT = 24
RESTART_EVERY = 300  # operations on one coordinator before it must come back empty and another shape is drawn


class TrafficDriver(ToyDriver):
    """A `ToyDriver` that survives a lost container.

    Attributes:
        operations: operations so far, each with its recount.
    """

    operations = 0

    def lose_container(self) -> None:
        """The stream cannot be drained when everybody leaves: quarantine, poison; nothing more is admitted."""
        self.sync.failing = True
        try:
            if self.live:
                self.cancel(*self.live.values())
            elif self.coordinator.finish(self.request) is ContextCacheCoordinatorStatus.OK:
                raise InvariantError("a request was finished although its stream could not be drained")
        except SessionLostError:
            self.request.abandon()
        if not self.coordinator.poisoned:
            raise InvariantError("a stream could not be drained, and the coordinator is not poisoned")
        if self.coordinator.recover():
            raise InvariantError("the coordinator recovered although the stream is not idle")
        recount(self.coordinator)

    def recover_container(self) -> None:
        """The stream is idle again: everything comes back, and a new container opens."""
        self.sync.failing = False
        if not self.coordinator.recover():
            raise InvariantError("the stream is idle, and the coordinator did not recover")
        for sequence in list(self.live.values()):
            sequence.live = False
            del self.live[sequence.request_id]
            self._return_slot(sequence.resident)
        require_baseline(self.coordinator)
        self.request = self._open()


Step = Callable[[random.Random, TrafficDriver], None]


def pick(rng: random.Random, driver: TrafficDriver) -> ToySequence:
    return rng.choice(list(driver.live.values()))


def random_prompt(rng: random.Random, driver: TrafficDriver) -> list[int]:
    """Half of the time what a live sequence has, cut somewhere and continued."""
    tail = rng.choices(range(2), k=rng.randint(1, 6))
    if driver.live and rng.random() < 0.6:
        base = pick(rng, driver)
        return base.tokens[: rng.randint(0, min(len(base.tokens), LONGEST_PROMPT - 6))] + tail
    return rng.choices(range(2), k=rng.randint(0, LONGEST_PROMPT - 6)) + tail


def media_of(prompt: list[int]) -> list[Hash128 | None]:
    """Every token 0 is a media position; the same token is the same content, so the twin's text stays right."""
    return [Hash128(5, 5) if token == 0 else None for token in prompt]


def admit(rng: random.Random, driver: TrafficDriver) -> None:
    if len(driver.live) == driver.deployment.max_batch_size:
        return cancel(rng, driver)
    prompt = random_prompt(rng, driver)
    salt = rng.choice((None, None, None, 1))
    driver.admit(
        prompt,
        salt=salt,
        lookup=rng.choice((None, None, None, None, ContextCacheLookupPolicy.BYPASS)),
        commit=rng.choice((None, None, ContextCacheCommitPolicy.PREFILL_STATE_ONLY)),
        media=media_of(prompt) if salt else (),
        retention=Retention(rng.choice(list(RetentionPriority)), rng.choice((None, None, 0.001, 60.0))),
        checkpoint_boundaries=sorted({rng.randint(1, len(prompt)) for _ in range(rng.randint(0, 2))}),
        reserve_pages=rng.choice((0, 0, 1)),
    )
    return None


def work_of(rng: random.Random, sequences: Iterable[ToySequence]) -> list[tuple[ToySequence, int]]:
    return [(sequence, DECODE if sequence.finalized else rng.randint(1, 9)) for sequence in sequences]


def run(driver: TrafficDriver, work: list[tuple[ToySequence, int]], ending: list[ToySequence] | None = None) -> None:
    """A step; a sequence that can get no page leaves."""
    if driver.mixed_step(work, finish=ending or []) is None and driver.refused is not None:
        driver.cancel(driver.refused)


def chunk(rng: random.Random, driver: TrafficDriver) -> None:
    run(driver, work_of(rng, [pick(rng, driver)]))


def packed_step(rng: random.Random, driver: TrafficDriver) -> None:
    """Some run, prompt chunks and decode rows packed in any order; the others hold."""
    work = [entry for entry in work_of(rng, driver.live.values()) if rng.random() < 0.7]
    rng.shuffle(work)
    ending = [sequence for sequence, count in work if count == DECODE and rng.random() < 0.1]
    run(driver, work, ending)


def decode(rng: random.Random, driver: TrafficDriver) -> None:
    run(driver, [(sequence, DECODE) for sequence in driver.live.values() if sequence.finalized])


def hold(rng: random.Random, driver: TrafficDriver) -> None:
    run(driver, [])


def finish(rng: random.Random, driver: TrafficDriver) -> None:
    ready = [sequence for sequence in driver.live.values() if sequence.finalized]
    if ready:
        driver.finish(*rng.sample(ready, rng.randint(1, len(ready))))


def cancel(rng: random.Random, driver: TrafficDriver) -> None:
    live = list(driver.live.values())
    driver.cancel(*rng.sample(live, rng.choice((1, 1, 1, len(live)))))


def evict(rng: random.Random, driver: TrafficDriver) -> None:
    """A record goes under whoever uses it; now and then everything."""
    manager = driver.coordinator._manager
    records = manager.records.lru_to_mru()
    if rng.random() < 0.1:
        manager.evict_all()
    elif records:
        manager.evict_record(rng.choice(records))


def fail_drain_and_recover(rng: random.Random, driver: TrafficDriver) -> None:
    driver.lose_container()
    driver.recover_container()


ANY_TIME: dict[Step, int] = {admit: 15, evict: 3, hold: 3, fail_drain_and_recover: 1}
LIVE: dict[Step, int] = {chunk: 12, packed_step: 18, decode: 9, finish: 3, cancel: 3}


def random_driver(
    rng: random.Random, name: str, policies: Iterable[PolicyRegistration] | None, **options: Any
) -> TrafficDriver:
    """A small deployment of a random shape."""
    page_size = rng.choice((2, 4))
    shape: dict[str, Any] = {
        "page_size": page_size,
        "num_pages": rng.randint(16, 30) * 4 // page_size,
        "max_batch": rng.randint(1, 4),
        "max_kv_capacity": 64,
        "recurrent_slots": rng.randint(2, 6),
        "partial_slots": rng.randint(2, 6),
        "vocab_size": rng.choice((2, 3, 97)),
        "config": ContextCacheConfig(
            max_records=rng.choice((None, None, 2)),
            checkpoint_interval_tokens=rng.choice((None, page_size, 4 * page_size)),
            policy_deadline_seconds=None,
        ),
    }
    needed = shape["max_batch"] * -(-64 // page_size)
    shape["num_pages"] = max(shape["num_pages"], needed)
    return TrafficDriver(FLAVOURS[name], policies=policies, **{**shape, **options})


def random_traffic(rng: random.Random, driver: TrafficDriver) -> str:
    """One random operation and a recount; its name."""
    steps = ANY_TIME | LIVE if driver.live else ANY_TIME
    step = rng.choices(list(steps), list(steps.values()))[0]
    try:
        step(rng, driver)
        driver.recount()
    except Exception as error:
        raise InvariantError(f"in {step.__name__}: {error!r}") from error
    driver.operations += 1
    return step.__name__


def run_traffic(
    name: str, operations: int, seed: int, policies: Iterable[PolicyRegistration] | None = None
) -> tuple[Counter[str], int, float]:
    """Random traffic on one flavour.

    Args:
        policies: None takes the installed plugins.
    Returns:
        How often each operation ran, how often everything was given back and counted, and the seconds it took.
    Raises:
        InvariantError: names flavour, seed and operation; the same seed gives the same run.
    """
    rng = random.Random(f"{seed}/{name}/traffic")
    kinds: Counter[str] = Counter()
    start, drains = time.perf_counter(), 0
    while kinds.total() < operations:
        driver = random_driver(rng, name, policies)
        last = min(operations, kinds.total() + RESTART_EVERY)
        while kinds.total() < last:
            try:
                kinds[random_traffic(rng, driver)] += 1
            except Exception as error:
                raise InvariantError(f"{name}, seed {seed}, after {kinds.total()} operations: {error}") from error
        driver.close()
        drains += 1
    return kinds, drains, time.perf_counter() - start
