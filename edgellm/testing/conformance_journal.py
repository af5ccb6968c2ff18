"""What the conformance suite knows to be true about every sequence, and what it found.

The journal keeps its own ledger from the arguments of the hooks, never from what a policy did with them.  From that it
knows, for any token list, how much of it may be findable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from edgellm.cache.request import SequenceState


class Promise(Enum):
    """What every policy promises; the value completes the sentence "the policy ..."."""

    NOTHING_EARLY = "publishes state only once it is complete"
    NOTHING_BEYOND = "publishes nothing beyond the committed (with draft state: common) length"
    COMMIT_POLICY = "publishes no generated token under PREFILL_STATE_ONLY"
    BYPASS = "publishes nothing of a sequence that bypasses the cache"
    NO_LEAK = "gives back every lease, page and snapshot"
    PROGRESS = "moves the ledger by exactly what ran"
    CHUNKS = "lets a prompt of n chunks take n steps, and no page more than it covers"
    HOLDS = "leaves a sequence that held alone"
    RAISES_NOTHING = "raises nothing and returns what its hooks declare"
    HONEST_STATUS = "tells the truth about its status"
    DEADLINE = "finishes each hook within the deadline"
    SAME_TEXT = "changes no text"
    SERVES = "serves what it says it serves"


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken promise: where it was seen, and what was seen."""

    promise: Promise
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(slots=True)
class SequenceTruth:
    """What is true about one sequence, live or ended.  Lengths in tokens.

    Attributes:
        sequence: the coordinator's object (kept, so that its identity stays unique).
        tokens: prompt and accepted tokens.
        prompt_length: of these, the prompt.
        committed, common: as the runtime reported them.
        proven: state up to here is complete for everything this flavour keeps, and may be published.
        finalized: the prompt is complete.
        publishes, publishes_generated: what lookup and commit policy of the request allow.
    """

    sequence: SequenceState
    tokens: list[int]
    prompt_length: int
    committed: int
    common: int
    proven: int
    finalized: bool
    publishes: bool
    publishes_generated: bool

    @property
    def permitted(self) -> int:
        """Of the proven tokens, those that the request's policies allow to publish."""
        if not self.publishes:
            return 0
        return self.proven if self.publishes_generated else min(self.proven, self.prompt_length)

    @property
    def is_at_rest(self) -> bool:
        """The prompt is complete and nothing is waiting for a proof."""
        return self.finalized and self.proven >= min(self.committed, self.common)


def common_prefix_length(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> int:
    """How many leading tokens two lists share."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size


@dataclass(slots=True)
class Journal:
    """Findings and truths of one run.

    Attributes:
        faulty_calls: hook calls in which the watch saw something that the coordinator may count as a fault.
        observations: broken promises seen, repetitions included.
        where: the hook or call that is being watched now.
    """

    findings: list[Finding] = field(default_factory=list)
    truths: dict[int, SequenceTruth] = field(default_factory=dict)
    faulty_calls: int = 0
    observations: int = 0
    where: str = "between two calls"

    def add(self, promise: Promise, what: str) -> None:
        """Note a broken promise at the current place; the same words once."""
        self.observations += 1
        finding = Finding(promise, self.where, what)
        if finding not in self.findings:
            self.findings.append(finding)

    def of(self, *promises: Promise) -> list[Finding]:
        """Findings about these promises, in order."""
        return [finding for finding in self.findings if finding.promise in promises]

    def truth(self, sequence: SequenceState) -> SequenceTruth:
        """The truth about a sequence; the first call takes it down as it was admitted."""
        known = self.truths.get(id(sequence))
        if known is None:
            known = _admitted(sequence)
            self.truths[id(sequence)] = known
        return known

    def may_be_findable(self, tokens: npt.NDArray[np.int32]) -> tuple[int, int]:
        """(tokens that some sequence proved, tokens that some sequence may have published) at the front of a list."""
        proven = permitted = 0
        for truth in self.truths.values():
            shared = common_prefix_length(tokens, np.asarray(truth.tokens, np.int32))
            proven = max(proven, min(shared, truth.proven))
            permitted = max(permitted, min(shared, truth.permitted))
        return proven, permitted


def _admitted(sequence: SequenceState) -> SequenceTruth:
    lengths, index = sequence.lengths, sequence.index
    reuse = int(lengths.reuse[index])
    tokens = [int(token_id) for token_id in sequence.token_ids]
    return SequenceTruth(
        sequence=sequence,
        tokens=tokens,
        prompt_length=len(tokens),
        committed=reuse,
        common=reuse,
        proven=reuse,
        finalized=False,
        publishes=bool(lengths.publishes[index]),
        publishes_generated=bool(lengths.publishes_generated[index]),
    )
