"""Drafters of the toy: what they propose follows from a script, or from the draft state itself.

A drafter that looks at draft state notices a stale entry twice: reading a canary raises, and any other wrong value
changes which proposals are right, hence the acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from edgellm.testing.toy import fold_state, mix_token

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from edgellm.testing.toy_model import SoloRun

    UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class DraftView:
    """What a drafter may look at before it proposes one token.

    Attributes:
        request_id: of the request; scripts are keyed by it, never by a row.
        position: place of the proposed token in the text.
        step: 0 for the first proposal of a round.
        truth: the token that the base model will choose there, or None once a proposal before was wrong.
        state: draft entries so far (paired), or the base values (a draft that borrows base state).
    """

    request_id: int
    position: int
    step: int
    truth: int | None
    state: UInt64Array


class ToyDrafter(Protocol):
    def propose(self, view: DraftView, vocab_size: int) -> int:
        """The next proposal."""
        ...


def wrong_token(token_id: int | None, vocab_size: int) -> int:
    """A proposal that the base model will not choose."""
    return ((token_id or 0) + 1) % vocab_size


class StateDrafter:
    """Right or wrong by the state it reads: about `wrong_in_16` of 16 proposals are wrong."""

    def __init__(self, wrong_in_16: int = 4) -> None:
        self.wrong_in_16 = wrong_in_16

    def propose(self, view: DraftView, vocab_size: int) -> int:
        luck = mix_token(view.step, view.position, fold_state(view.state)) % 16
        if view.truth is None or luck < self.wrong_in_16:
            return wrong_token(view.truth, vocab_size)
        return view.truth


Script = Sequence[int] | Callable[[int], int]


@dataclass(slots=True)
class ScriptedDrafter:
    """How many proposals of a round are right comes from a script.

    Attributes:
        accepts: request id to its script: one number per round (the last one repeats), or a function of the
            position of the round's first proposal.
        default: for requests without a script.
        proposals: (request id, position) to the token proposed there, whatever the script says.
    """

    accepts: Mapping[int, Script] = field(default_factory=dict)
    default: int = 0
    proposals: Mapping[tuple[int, int], int] = field(default_factory=dict)
    _rounds: dict[int, int] = field(default_factory=dict)
    _current: dict[int, int] = field(default_factory=dict)

    def propose(self, view: DraftView, vocab_size: int) -> int:
        if view.step == 0:
            self._current[view.request_id] = self._scripted(view)
        fixed = self.proposals.get((view.request_id, view.position))
        if fixed is not None:
            return fixed
        if view.truth is None or view.step >= self._current[view.request_id]:
            return wrong_token(view.truth, vocab_size)
        return view.truth

    def _scripted(self, view: DraftView) -> int:
        script = self.accepts.get(view.request_id)
        if script is None:
            return self.default
        if callable(script):
            return script(view.position)
        number = self._rounds.get(view.request_id, 0)
        self._rounds[view.request_id] = number + 1
        return script[min(number, len(script) - 1)]


class TruthTeller:
    """Tells the drafting loop what the base model will choose, as long as every proposal before was right."""

    def __init__(self, twin: SoloRun) -> None:
        self._twin = twin.copy()
        self._lost = False

    def truth(self) -> int | None:
        return None if self._lost else self._twin.next_token()

    def proposed(self, token_id: int) -> None:
        if self._lost or token_id != self._twin.next_token():
            self._lost = True
            return
        self._twin.append(token_id)
