"""One sequence of a toy driver: its text, how far its state reaches, and the twin that says what both must be."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from edgellm.errors import InvariantError
from edgellm.testing.toy_model import HiddenRow, SoloRun

if TYPE_CHECKING:
    from edgellm.cache.types import ReuseReport
    from edgellm.session.types import ResidentRef
    from edgellm.testing.toy_machine import ToyMachine


@dataclass(slots=True, eq=False)
class ToySequence:
    """State follows the request: everything here is found by `request_id`, never by a row or a place in the batch.

    Attributes:
        twin: the same tokens computed alone; prompt and accepted tokens.
        committed: tokens that have base state.
        drafted: leading draft entries that are right (their successors are known and theirs).
        reuse: what the cache gave.
        boundaries: prompt lengths at which chunks end.
        hiddens: hidden rows from `drafted` on, which the draft model still has to read.
        finalized: the prompt is complete.
        rounds: accepted counts of its verification rounds (proposals and bonus).
        proposals: what was proposed in each round.
    """

    request_id: int
    resident: ResidentRef
    prompt: tuple[int, ...]
    twin: SoloRun
    committed: int
    drafted: int
    reuse: ReuseReport
    boundaries: tuple[int, ...] = ()
    hiddens: dict[int, HiddenRow] = field(default_factory=dict)
    finalized: bool = False
    live: bool = True
    rounds: list[int] = field(default_factory=list)
    proposals: list[list[int]] = field(default_factory=list)

    @property
    def slot(self) -> int:
        return self.resident.slot

    @property
    def tokens(self) -> list[int]:
        return self.twin.tokens

    @property
    def generated(self) -> list[int]:
        return self.twin.tokens[len(self.prompt) :]

    @property
    def prompt_remaining(self) -> int:
        return max(0, len(self.prompt) - self.committed)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Append chosen tokens.

        Raises:
            InvariantError: the text departs from what the twin says.
        """
        for token_id in token_ids:
            expected = self.twin.next_token()
            if token_id != expected:
                raise InvariantError(
                    f"request {self.request_id}: token {len(self.tokens)} is {token_id}, and {expected} when run alone"
                )
            self.twin.append(token_id)

    def chunk_end(self, num_tokens: int, *, stop_at_boundaries: bool = True) -> int:
        """Where a chunk of at most `num_tokens` ends: at the next boundary or the prompt's end at the latest."""
        end = min(self.committed + num_tokens, len(self.prompt))
        ahead = [length for length in self.boundaries if self.committed < length < end]
        return min(ahead) if ahead and stop_at_boundaries else end


def check_state(machine: ToyMachine, sequence: ToySequence) -> None:
    """Everything the device holds for a sequence equals its twin at the same token counts.

    Raises:
        InvariantError: a value differs.
        PoisonReadError: a value is not there.
    """
    twin, committed = sequence.twin, sequence.committed
    if machine.model.has_attention:
        _compare(sequence, "base state", machine.base_state(sequence.slot, committed), twin.values[:committed])
    if machine.model.has_recurrent:
        state = machine.recurrent_state(sequence.slot)
        if state != twin.recurrents[committed]:
            wrong = "conv window" if state.value == twin.recurrents[committed].value else "recurrent state"
            raise InvariantError(f"request {sequence.request_id}: the {wrong} is not that of {committed} tokens")
    if machine.draft is not None and sequence.drafted:
        drafts = machine.draft_state(sequence.slot, sequence.drafted)
        _compare(sequence, "draft state", drafts, twin.drafts[: sequence.drafted])


def _compare(sequence: ToySequence, what: str, found: np.ndarray, expected: list[int]) -> None:
    differs = np.flatnonzero(found != np.array(expected, dtype=np.uint64))
    if len(differs):
        raise InvariantError(
            f"request {sequence.request_id}: {what} at position {int(differs[0])} of {len(expected)} is not its own"
        )


def state_fingerprint(machine: ToyMachine, sequence: ToySequence) -> str:
    """Digest of a sequence's base, recurrent and conv state as the device holds it, and of how far it reaches."""
    digest = hashlib.blake2b(str((sequence.committed, len(sequence.tokens))).encode(), digest_size=16)
    if machine.model.has_attention:
        digest.update(machine.base_state(sequence.slot, sequence.committed).tobytes())
    if machine.model.has_recurrent:
        digest.update(_recurrent_bytes(machine.recurrent_state(sequence.slot)))
    return digest.hexdigest()


def solo_fingerprint(twin: SoloRun, committed: int) -> str:
    """`state_fingerprint` of a solo run over `committed` tokens and one look-ahead token."""
    digest = hashlib.blake2b(str((committed, committed + 1)).encode(), digest_size=16)
    if twin.model.has_attention:
        digest.update(np.array(twin.values[:committed], dtype=np.uint64).tobytes())
    if twin.model.has_recurrent:
        digest.update(_recurrent_bytes(twin.recurrents[committed]))
    return digest.hexdigest()


def checkpoint_fingerprint(twin: SoloRun, length: int) -> str:
    """What `HybridSnapshotStorage.fingerprint` must give for a checkpoint of `length` tokens."""
    return hashlib.blake2b(_recurrent_bytes(twin.recurrents[length]), digest_size=16).hexdigest()


def _recurrent_bytes(state: tuple[int, tuple[int, ...]]) -> bytes:
    value, window = state
    return np.array([value, *window], dtype=np.uint64).tobytes()
