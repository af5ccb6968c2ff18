"""`SpecCommonStateTracker`: how far base and draft state agree, while the draft trails by one accepted span."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.errors import ContractViolation, InvalidArgumentError


class SpecCommonStateTracker:
    """Common lengths of the sequences of one speculative request, kept by the runtime that drafts.

    A verification round accepts tokens whose base state exists at once; their draft state is written by the *next*
    draft pass.  So what a round accepts is pending until then: the draft trails the base by exactly the last
    accepted span.  Before the first round the draft prefill itself is pending: nothing is common yet that the
    initial length does not say.

    Slots are places in the request's execution order.
    """

    __slots__ = ("_common", "_pending", "_prefill_pending")

    def __init__(self) -> None:
        self._common: list[int] = []
        self._pending: list[int] = []
        self._prefill_pending = True

    @property
    def draft_prefill_pending(self) -> bool:
        """Whether the outputs of the draft prefill are still to be materialised (round 0)."""
        return self._prefill_pending

    @property
    def common_lengths(self) -> list[int]:
        """Common length of every slot, as the coordinator wants it; a copy."""
        return list(self._common)

    def __len__(self) -> int:
        return len(self._common)

    def initialize(self, slot: int, input_length: int) -> None:
        """A prompt of `input_length` tokens is prefilled, by base and (ordered before the first round) draft.

        Raises:
            InvalidArgumentError: a negative length, or a slot that leaves a gap.
        """
        if input_length < 0 or not 0 <= slot <= len(self._common):
            raise InvalidArgumentError(
                f"slot {slot} with input length {input_length}: slots are dense ({len(self._common)} known), "
                "lengths not negative"
            )
        if slot == len(self._common):
            self._common.append(0)
            self._pending.append(0)
        self._common[slot], self._pending[slot] = input_length, 0

    def record_accepted(self, slot: int, num_tokens: int) -> None:
        """A verification round accepted `num_tokens` tokens of `slot`; their draft state is pending.

        Raises:
            ContractViolation: an unknown slot, or the span accepted before was never materialised.
            InvalidArgumentError: a negative number.
        """
        self._require(slot)
        if num_tokens < 0:
            raise InvalidArgumentError(f"slot {slot} accepted {num_tokens} tokens; it cannot be negative")
        if self._pending[slot]:
            raise ContractViolation(
                f"slot {slot} has {self._pending[slot]} accepted tokens without draft state; materialise them first"
            )
        self._pending[slot] = num_tokens

    def materialize_pending(self, draft_round: int) -> None:
        """A draft pass ran: in round 0 it finished the draft prefill, later it wrote what the last round accepted."""
        if draft_round < 0:
            raise InvalidArgumentError(f"draft_round is {draft_round}; rounds start at 0")
        self._prefill_pending = False
        if draft_round == 0:
            return
        for slot, pending in enumerate(self._pending):
            self._common[slot] += pending
            self._pending[slot] = 0

    def pending(self, slot: int) -> int:
        """Accepted tokens of `slot` whose draft state does not exist yet."""
        self._require(slot)
        return self._pending[slot]

    def compact(self, old_to_new: Sequence[int]) -> None:
        """Follow a batch compaction: -1 retires, survivors keep their order.

        Raises:
            InvalidArgumentError: not one entry per slot, or survivors out of order.
        """
        survivors = [slot for slot, new in enumerate(old_to_new) if new >= 0]
        if len(old_to_new) != len(self._common) or [old_to_new[slot] for slot in survivors] != [*range(len(survivors))]:
            raise InvalidArgumentError(f"mapping {list(old_to_new)} does not fit {len(self._common)} slots in order")
        self._common = [self._common[slot] for slot in survivors]
        self._pending = [self._pending[slot] for slot in survivors]

    def reset(self) -> None:
        """Forget everything; the next request begins in round 0."""
        self._common, self._pending, self._prefill_pending = [], [], True

    def _require(self, slot: int) -> None:
        if not 0 <= slot < len(self._common):
            raise ContractViolation(f"slot {slot} is unknown; {len(self._common)} are initialised")
