"""Random operations on the context cache, recounted after each, for as long as one likes.

    python -m edgellm.testing.random_operations --operations 1000000 --seed 0 --flavour all --pages 16

Pools of up to 1,000 pages get a full recount after every operation; larger ones get cheap counts, and a full recount
every 1,000.  Prints operations, seeds, leaks, distinct pages at drain and the run time; a failure names its seed.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import TypeVar

from edgellm._core.block_index import DEFAULT_HASH_MASK
from edgellm.cache.types import CheckpointKind, ResourceType, RetentionPriority
from edgellm.errors import InvariantError
from edgellm.testing.cache_workout import FLAVOURS, MEDIA_NAMESPACE, CacheFlavour, CacheWorkout, StagedCheckpoint

SMALL_POOL_PAGES = 1000
RESTART_EVERY = 1000  # operations on one small cache before it must come back empty and another shape is drawn
RESTART_LARGE_EVERY = 250_000
RECOUNT_LARGE_EVERY = 1000

WorkoutT = TypeVar("WorkoutT", bound=CacheWorkout)
Step = Callable[[random.Random, "Shape", CacheWorkout], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """How large prompts are and how many sequences run at once."""

    vocabulary: int
    longest_prompt: int
    most_live: int
    longest_chunk: int

    @classmethod
    def of(cls, page_size: int, pages: int) -> Shape:
        if pages <= SMALL_POOL_PAGES:
            return cls(3, min(24, page_size * pages), 6, 2 * page_size)
        return cls(4, 40 * page_size, 64, 8 * page_size)


def pick(rng: random.Random, workout: CacheWorkout) -> int:
    return rng.randrange(len(workout.live))


def random_prompt(rng: random.Random, shape: Shape, workout: CacheWorkout) -> tuple[int, list[int]]:
    """Half of the time what a live sequence has, cut somewhere and continued; else something new."""
    fresh = rng.choices(range(shape.vocabulary), k=rng.randint(0, 6))
    if workout.live and rng.random() < 0.6:
        base = rng.choice(workout.live)
        cut = rng.choice((len(base.symbols), rng.randint(0, len(base.symbols))))
        return base.namespace, base.symbols[: min(cut, shape.longest_prompt)] + fresh
    namespace = rng.choice((0, 0, 1, MEDIA_NAMESPACE))
    tokens = rng.choices(range(shape.vocabulary), k=rng.randint(0, shape.longest_prompt))
    return namespace, workout.symbols_of(namespace, tokens)


def acquire(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    if len(workout.live) >= shape.most_live:
        return release(rng, shape, workout)
    namespace, symbols = random_prompt(rng, shape, workout)
    sequence = workout.acquire(
        namespace,
        symbols,
        speculative=workout.flavour.contract is not None and rng.random() < 0.75,
        bypass=rng.random() < 0.1,
        extra=rng.randint(0, 3),
        draft_extra=rng.randint(0, 5),
        reserve=rng.choice((0, 0, 0, 1, 3)),
        priority=rng.choice(list(RetentionPriority)),
        ttl=rng.choice((0, 0, 5, 50)),
    )
    if sequence is not None and rng.random() < 0.8:
        workout.release_sources(len(workout.live) - 1)


def compute(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    workout.compute(pick(rng, workout), rng.randint(1, shape.longest_chunk), draft=rng.random() < 0.8)


def prefill_chunk(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    """Look again, compute a chunk, publish what it completed."""
    which = pick(rng, workout)
    workout.rebind(which)
    workout.compute(which, rng.randint(1, shape.longest_chunk))
    workout.publish(which, make_record=False)


def grow(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    workout.grow(pick(rng, workout), rng.randint(0, 3), rng.randint(0, 3))


def ensure_coverage(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    which = rng.sample(range(len(workout.live)), rng.randint(1, min(4, len(workout.live))))
    workout.ensure_coverage(which, rng.randint(0, 4), rng.randint(0, 4))


def append(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    which = rng.sample(range(len(workout.live)), rng.randint(1, min(4, len(workout.live))))
    for i in which:
        workout.compute(i, 1 << 20)
    workout.append(
        which,
        rng.randrange(shape.vocabulary),
        publish=rng.random() < 0.7,
        lookahead=rng.randint(0, 1),
        fail_after=rng.choice((0, 0, rng.randint(1, 8)))
        if workout.fault_every and not workout.flavour.index_only
        else 0,
    )


def accept(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    """A verified step of a speculative sequence: some tokens, then their state; draft state may lag."""
    which = pick(rng, workout)
    workout.extend(which, rng.choices(range(shape.vocabulary), k=rng.randint(1, 3)))
    if rng.random() < 0.7:
        workout.ensure_coverage([which], rng.randint(0, 2), rng.randint(0, 2))
    workout.compute(which, 3, draft=rng.random() < 0.7)


def publish(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    workout.publish(pick(rng, workout), make_record=rng.random() < 0.5)


def end_normally(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    """Compute what is left, publish everything with its tail, and mostly release."""
    which = pick(rng, workout)
    workout.compute(which, 1 << 20)
    workout.publish(which, make_record=True, retain_tail=rng.random() < 0.8)
    if rng.random() < 0.7:
        workout.release(which)


def rebind(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    workout.rebind(pick(rng, workout))


def release_sources(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    workout.release_sources(pick(rng, workout))


def release(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    """Cancel midway, or retire."""
    workout.release(pick(rng, workout))


def reserve_checkpoint(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    which = pick(rng, workout)
    if len(workout.live[which].staged) < 2:
        workout.reserve_checkpoint(which)


def publish_checkpoint(rng: random.Random, workout: CacheWorkout, which: int, stage: StagedCheckpoint) -> None:
    lengths = range(1, stage.length)
    keep = rng.sample(lengths, min(len(lengths), rng.choice((0, 0, 2))))
    workout.publish_checkpoint(which, stage, kind=rng.choice(list(CheckpointKind)), keep_lengths=keep)


def advance_checkpoint(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    """One step of a staged checkpoint: captured, published, retired; or given up."""
    staged = [(i, stage) for i, sequence in enumerate(workout.live) for stage in sequence.staged]
    if not staged:
        return reserve_checkpoint(rng, shape, workout)
    which, stage = rng.choice(staged)
    if not stage.is_written and workout.capture_checkpoint(which, stage) and rng.random() < 0.3:
        return None
    if stage.is_written and rng.random() < 0.9:
        publish_checkpoint(rng, workout, which, stage)
    workout.retire_checkpoint(which, stage)
    return None


def whole_checkpoint(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    """A chunk that ends in a published checkpoint."""
    which = pick(rng, workout)
    sequence = workout.live[which]
    workout.compute(which, rng.randint(1, shape.longest_chunk))
    if sequence.staged or not workout.reserve_checkpoint(which):
        return
    stage = sequence.staged[-1]
    if workout.capture_checkpoint(which, stage):
        publish_checkpoint(rng, workout, which, stage)
    workout.retire_checkpoint(which, stage)


def rebind_checkpoint(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    workout.rebind_checkpoint(pick(rng, workout))


def evict_record(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    if workout.manager.records.size:
        workout.evict_record(rng.randrange(workout.manager.records.size))


def evict_all(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    if rng.random() < (0.1 if workout.recount_every == 1 else 0.001):
        workout.evict_all()


def pass_time(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    workout.pass_time(rng.choice((1, 4, 20)))


def expire(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    workout.expire()


def note_withheld(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    workout.note_withheld(pick(rng, workout), rng.randint(0, 3))


def set_volatile_from(rng: random.Random, shape: Shape, workout: CacheWorkout) -> None:
    which = pick(rng, workout)
    workout.set_volatile_from(which, rng.randint(-1, len(workout.live[which].symbols)))


ANY_TIME: dict[Step, int] = {acquire: 4, evict_record: 1, evict_all: 1, pass_time: 1, expire: 1}
LIVE: dict[Step, int] = {
    compute: 3,
    prefill_chunk: 4,
    grow: 1,
    ensure_coverage: 1,
    publish: 3,
    end_normally: 4,
    release_sources: 1,
    release: 2,
    note_withheld: 1,
    set_volatile_from: 1,
}
ATTENTION: dict[Step, int] = {rebind: 1}
ONE_TOKEN: dict[Step, int] = {append: 4}
SPECULATIVE: dict[Step, int] = {accept: 4}
CHECKPOINTS: dict[Step, int] = {
    reserve_checkpoint: 1,
    advance_checkpoint: 4,
    whole_checkpoint: 5,
    rebind_checkpoint: 1,
}


@cache
def steps_of(flavour: CacheFlavour, has_live: bool) -> tuple[list[Step], list[int]]:
    """Operations that make sense, with cumulative weights."""
    steps = dict(ANY_TIME)
    if has_live:
        steps |= LIVE | ONE_TOKEN | (CHECKPOINTS if flavour.checkpoints else ATTENTION)
    if has_live and (flavour.contract is not None or flavour.index_only):
        steps |= SPECULATIVE
    return list(steps), list(accumulate(steps.values()))


def random_step(rng: random.Random, shape: Shape, workout: CacheWorkout) -> str:
    """One random operation; its name."""
    steps, weights = steps_of(workout.flavour, bool(workout.live))
    step = rng.choices(steps, cum_weights=weights)[0]
    try:
        step(rng, shape, workout)
    except Exception as error:
        raise InvariantError(f"in {step.__name__}: {error!r}") from error
    return step.__name__


def random_workout(rng: random.Random, flavour: CacheFlavour, pages: int, kind: type[WorkoutT]) -> WorkoutT:
    """A cache of a random shape with at most `pages` pages."""
    small = pages <= SMALL_POOL_PAGES
    page_size = rng.choice((1, 2, 2, 3, 4, 4)) if small else 16
    chosen = rng.randint(min(4, pages), pages) if small else pages
    return kind(
        flavour,
        page_size,
        pages * 4 if flavour.index_only and small else chosen,
        draft_pages=rng.choice((chosen, max(1, chosen - 2), chosen + 2)) if small else pages,
        recurrent_slots=rng.randint(1, 6) if small else max(8, pages // 50),
        partial_slots=rng.randint(1, 6) if small else max(8, pages // 50),
        max_records=rng.choice((None, None, None, 0, 1, 3)) if small else None,
        hash_mask=rng.choice((DEFAULT_HASH_MASK, 0, 1)) if small else DEFAULT_HASH_MASK,
        recount_every=1 if small else RECOUNT_LARGE_EVERY,
        # Index pages come with a publication: what was evicted for them stays evicted when that fails.
        fault_every=rng.choice((0, 7)) if small and not flavour.index_only else 0,
    )


@dataclass(slots=True)
class RunReport:
    """What one flavour's run did.

    Attributes:
        operations: manager calls that were followed by a check.
        drains: how often everything was released and forgotten; all pages must be back then.
        faults: calls in which memory ran out and nothing changed.
        leaks: units that did not come back; missing_pages: pages that the free list did not name once.
    """

    flavour: str
    seed: int
    operations: int = 0
    drains: int = 0
    evicted_pages: int = 0
    faults: int = 0
    leaks: int = 0
    missing_pages: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.flavour}: {self.operations:,} operations, seed {self.seed}, {self.faults:,} faults, "
            f"{self.evicted_pages:,} pages evicted, {self.drains} drains, {self.leaks} leaks, "
            f"{self.missing_pages} pages not distinct at drain, {self.seconds:.1f} s"
        )


def drain(workout: CacheWorkout, report: RunReport) -> None:
    """Everything released and forgotten: all pages must be back, each once."""
    report.drains += 1
    metrics = workout.manager.metrics()
    report.evicted_pages += metrics.reclaimed_base_kv_pages + metrics.reclaimed_draft_kv_pages
    workout.finish()
    report.leaks += workout.count_leaks()
    for kind in ResourceType:
        free = workout.manager.pools.pool(kind).free_list()
        report.missing_pages += workout.capacities.get(kind) - len(set(free))


def run_flavour(flavour: CacheFlavour, operations: int, seed: int, pages: int) -> RunReport:
    """Random operations until so many were checked.

    Raises:
        InvariantError: names flavour, seed and operation; the same seed gives the same run.
    """
    rng = random.Random(f"{seed}/{flavour.name}/{pages}")
    report = RunReport(flavour.name, seed)
    start = time.perf_counter()
    while report.operations < operations:
        workout = random_workout(rng, flavour, pages, CacheWorkout)
        shape = Shape.of(workout.page_size, pages)
        limit = RESTART_EVERY if workout.recount_every == 1 else RESTART_LARGE_EVERY
        while workout.operations < min(limit, operations - report.operations):
            try:
                report.kinds[random_step(rng, shape, workout)] += 1
            except Exception as error:
                done = report.operations + workout.operations
                raise InvariantError(f"{flavour.name}, seed {seed}, after {done} operations: {error}") from error
        drain(workout, report)
        report.operations += workout.operations
        report.faults += workout.faults
    report.seconds = time.perf_counter() - start
    return report


def traffic(operations: int, seed: int) -> None:
    """Through coordinators with toy state (needs torch and the policy plugins)."""
    from edgellm.testing.random_traffic import run_traffic
    from edgellm.testing.toy_driver import FLAVOURS as TOY_FLAVOURS

    logging.getLogger("edgellm").setLevel(logging.CRITICAL)  # failed drains are part of it
    for name in TOY_FLAVOURS:
        kinds, drains, seconds = run_traffic(name, operations, seed)
        sys.stdout.write(
            f"coordinator, {name}: {kinds.total():,} operations, seed {seed}, all given back {drains} times, "
            f"poisoned and recovered {kinds['fail_drain_and_recover']} times, {seconds:.1f} s\n"
        )
        sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m edgellm.testing.random_operations", description=__doc__)
    parser.add_argument("--operations", type=int, default=100_000, help="for each flavour")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flavour", choices=["all", *FLAVOURS], default="all")
    parser.add_argument("--pages", type=int, default=16, help="pages in the pool; up to 1,000 is a small pool")
    parser.add_argument("--traffic", type=int, default=0, help="operations through a coordinator, for each flavour")
    options = parser.parse_args(arguments)
    names = list(FLAVOURS) if options.flavour == "all" else [options.flavour]
    reports = []
    for name in names:
        reports.append(run_flavour(FLAVOURS[name], options.operations, options.seed, options.pages))
        sys.stdout.write(f"{reports[-1]}\n")
        sys.stdout.flush()
    if options.traffic:
        traffic(options.traffic, options.seed)
    total = sum(report.operations for report in reports)
    seconds = sum(report.seconds for report in reports)
    sys.stdout.write(f"total: {total:,} operations in {seconds:.1f} s, {sum(r.leaks for r in reports)} leaks\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
