"""Where the replay puts recurrent checkpoints, each rule with a switch; no engine in sight.

With every switch on these are the rules of `edgellm-hybrid`, written a second time: the plain-Python model uses these,
the real manager the plugin's, and both must hit the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from edgellm.cache.types import CheckpointKind


class Ladder(Enum):
    """Checkpoints by distance: at the last multiple of every interval * 2**k, of the interval alone, or none."""

    POWERS = "powers"
    LAST = "last"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a prompt at admission: its length, of which `known` tokens were cached and `reuse` are used.

    boundaries: lengths that the caller named, ascending.
    """

    num_tokens: int
    reuse: int
    known: int
    boundaries: tuple[int, ...]
    page_size: int

    @property
    def branch(self) -> int:
        """The last whole page that was cached, and that leaves a token to compute."""
        return min(self.known, self.num_tokens - 1) // self.page_size * self.page_size


@dataclass(frozen=True, slots=True)
class Rules:
    """Switches of one replay.

    Attributes:
        interval: smallest distance of the ladder in tokens, whole pages.
        boundaries: a checkpoint at each boundary that the caller named.
        branch: one where the cache knew more tokens than it could reuse.
        ends: one at the prompt's end, when nothing else was placed, and at ends of replies.
        keep: the prompt's own ladder is not superseded by its deeper checkpoints.
        supersede: a deeper checkpoint of a later request puts those above it first in line for eviction.
        trim: blocks below the last checkpoint leave at once.  The manager has no switch for it; the model has.
        leaf_victims: a snapshot is taken from the least recently used leaf; else from the least recently used
            checkpoint.  Likewise a switch of the model alone.
    """

    interval: int = 512
    ladder: Ladder = Ladder.POWERS
    boundaries: bool = True
    branch: bool = True
    ends: bool = True
    keep: bool = True
    supersede: bool = True
    trim: bool = True
    leaf_victims: bool = True

    def ladder_lengths(self, num_tokens: int) -> tuple[int, ...]:
        """Lengths of a prompt's ladder, ascending, all below its end."""
        if self.ladder is Ladder.NONE:
            return ()
        lengths, step = set(), self.interval
        while step < num_tokens:
            lengths.add((num_tokens - 1) // step * step)
            if self.ladder is Ladder.LAST:
                break
            step *= 2
        return tuple(sorted(lengths))

    def places(self, prompt: Prompt) -> tuple[int, ...]:
        """Lengths at which a prompt should have a checkpoint, ascending; those up to `reuse` are there or are not."""
        lengths = set(self.ladder_lengths(prompt.num_tokens))
        if self.boundaries:
            lengths.update(prompt.boundaries)
        if self.branch and prompt.branch > prompt.reuse:
            lengths.add(prompt.branch)
        if self.ends and not any(length > prompt.reuse for length in lengths):
            lengths.add(prompt.num_tokens)
        return tuple(sorted(lengths))

    @staticmethod
    def kind_of(length: int, prompt: Prompt) -> CheckpointKind:
        """As the coordinator sorts them: the first of several boundaries ends what conversations share."""
        if len(prompt.boundaries) > 1 and length == prompt.boundaries[0]:
            return CheckpointKind.ANCHOR
        if length in prompt.boundaries or length >= prompt.num_tokens:
            return CheckpointKind.TAIL
        return CheckpointKind.BRANCH if length == prompt.branch else CheckpointKind.LADDER

    def wanted(self, places: tuple[int, ...], prompt: Prompt) -> tuple[int, ...]:
        """Lengths that stay wanted when the same request places a deeper checkpoint: all but ends."""
        if not self.keep:
            return ()
        return tuple(length for length in places if self.kind_of(length, prompt) is not CheckpointKind.TAIL)

    def wants_reply_end(self, length: int, places: tuple[int, ...], prompt: Prompt) -> bool:
        """Whether an answer that ends at `length` gets a checkpoint there; `places` are those of its prompt."""
        last = max(places, default=0)
        if not self.ends or length <= last:
            return False
        if (self.boundaries and prompt.boundaries) or last >= prompt.num_tokens:
            return True
        return length - last >= 2 * self.interval
