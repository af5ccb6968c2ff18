"""Traffic for a rig: a random walk in a container, and batches that come and go as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgellm.cache.types import ContextCacheCommitPolicy, ContextCacheLookupPolicy

if TYPE_CHECKING:
    from edgellm.testing.conformance_rig import Rig
    from edgellm.testing.toy_sequence import ToySequence

_COMMITS = (None, ContextCacheCommitPolicy.PREFILL_STATE_ONLY)
_LOOKUPS = (None, None, None, ContextCacheLookupPolicy.BYPASS)


class _Walk:
    """Prompts that share stems come, run in pieces, hold, end and are cancelled, in any order."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.random = np.random.default_rng(seed)
        self.stems = [rig.prompt(int(length)) for length in self.random.integers(3, 16, 3)]
        self.turns: list[list[int]] = []

    @property
    def live(self) -> list[ToySequence]:
        return list(self.rig.driver.live.values())

    def some(self, sequences: list[ToySequence]) -> list[ToySequence]:
        return [sequence for sequence in sequences if self.random.random() < 0.7]

    def admit(self) -> None:
        stems = [*self.stems, *self.turns[-2:]]
        stem = stems[int(self.random.integers(len(stems)))]
        kept = stem[: int(self.random.integers(1, len(stem) + 1))]
        tokens = [*kept, *self.rig.prompt(int(self.random.integers(0, 6)))]
        lookup = _LOOKUPS[int(self.random.integers(len(_LOOKUPS)))]
        commit = _COMMITS[int(self.random.integers(len(_COMMITS)))]
        self.rig.try_admit(tokens, lookup_policy=lookup, commit_policy=commit)

    def step(self) -> None:
        """Some prompts get a chunk and some answers a token, together; the rest hold."""
        chunks = [(s, int(self.random.integers(1, 8))) for s in self.some(self.live) if not s.finalized]
        decode = [s for s in self.some(self.live) if s.finalized]
        if (chunks or decode) and not self.rig.try_mixed(decode=decode, chunks=chunks):
            refused = self.rig.driver.refused
            if refused is not None:
                self.rig.cancel(refused)

    def end(self) -> None:
        finalized = [sequence for sequence in self.live if sequence.finalized]
        if finalized:
            sequence = finalized[int(self.random.integers(len(finalized)))]
            self.turns.append(list(sequence.tokens))
            self.rig.finish(sequence)

    def cancel(self) -> None:
        if self.live:
            self.rig.cancel(self.live[int(self.random.integers(len(self.live)))])


def random_walk(rig: Rig, *, seed: int, steps: int) -> None:
    """`steps` random operations, the same for the same seed and rig; ends at the first broken promise."""
    walk = _Walk(rig, seed)
    operations = (walk.admit, walk.step, walk.end, walk.cancel)
    for choice in walk.random.choice(len(operations), steps, p=(0.25, 0.55, 0.15, 0.05)):
        operations[int(choice)]()
        if rig.journal.findings:
            return


def batches(rig: Rig) -> None:
    """Batches over one another's prompts: run to the end, one leaves early, one is abandoned, one ends at once."""
    driver, size = rig.batch_driver, rig.coordinator.page_size
    first, second = rig.prompt(2 * size + 1), rig.prompt(size)
    for prompts, steps in (((first, second), size + 1), (([*first, 5, 6], second[:-1]), 2), ((first,), 0)):
        sequences = rig.begin_batch(*prompts)
        rig.prefill_batch()
        rig.decode(sequences, steps=steps)
        if len(sequences) > 1:
            rig.finish(sequences[0])
            rig.decode(sequences[1:], steps=2)
        rig.finish_batch()
        if rig.journal.findings:
            return
    rig.begin_batch([*second, 9, *rig.prompt(size)])
    rig.prefill_batch()
    driver.abandon_batch()
    rig.look()
    rig.begin_batch(rig.prompt(size + 2))
    driver.abandon_batch()
    rig.check_baseline()
