"""Advances: what the runtime reports after a step, how it is checked, and how it moves the length ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from edgellm._core.block_hash import append_each
from edgellm.cache.types import (
    HOLD_COMMITTED_STATE_LENGTH,
    ContextCacheSequenceAdvance,
    DecodingTokenStateContract,
)
from edgellm.errors import InvalidArgumentError, InvariantError

if TYPE_CHECKING:
    import numpy.typing as npt

    from edgellm.cache.request import Impl

_HOLD = ContextCacheSequenceAdvance()
HOLD_TOKEN = -1


class OneTokenAdvances(Sequence[ContextCacheSequenceAdvance]):
    """Advances of a decode step in one array: each sequence accepted one token, or holds.

    Reads like a list of `ContextCacheSequenceAdvance`, and costs no Python object per sequence.

    Args:
        token_ids: (N,) int32, the accepted token of each sequence; `HOLD_TOKEN` (-1) holds it.
        committed_before: (N,) committed lengths before the step, when somebody wants to read single
            advances; the coordinator itself does not need it.
    """

    __slots__ = ("_committed_before", "token_ids")

    def __init__(
        self, token_ids: npt.ArrayLike, committed_before: npt.NDArray[np.integer] | Sequence[int] | None = None
    ) -> None:
        self.token_ids: npt.NDArray[np.int32] = np.ascontiguousarray(token_ids, dtype=np.int32)
        if self.token_ids.ndim != 1:
            raise InvalidArgumentError(f"token_ids has shape {self.token_ids.shape}; pass one token per sequence, (N,)")
        self._committed_before = committed_before

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> ContextCacheSequenceAdvance: ...

    @overload
    def __getitem__(self, index: slice) -> list[ContextCacheSequenceAdvance]: ...

    def __getitem__(self, index: int | slice) -> ContextCacheSequenceAdvance | list[ContextCacheSequenceAdvance]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        token_id = int(self.token_ids[index])
        if token_id == HOLD_TOKEN:
            return _HOLD
        if self._committed_before is None:
            raise InvalidArgumentError("single advances need committed_before; pass it when building the object")
        return ContextCacheSequenceAdvance([token_id], int(self._committed_before[index]) + 1)

    def __iter__(self) -> Iterator[ContextCacheSequenceAdvance]:
        return (self[index] for index in range(len(self)))


def completed_token(slot: int, new_token_ids: Sequence[int], *, withdrawn: bool) -> int:
    """What a row that took part in a vanilla step reports: its token, or a hold when its sequence leaves unfinished.

    Args:
        new_token_ids: what the step gave it.
        withdrawn: the sequence was cancelled or failed, so nothing of this step counts.
    Returns:
        The entry of `OneTokenAdvances`.
    Raises:
        InvariantError: a sequence that goes on got no token; reporting an older one would move its ledger past its
            state.
    """
    if withdrawn:
        return HOLD_TOKEN
    if not len(new_token_ids):
        raise InvariantError(
            f"slot {slot} took part in a step and got no token, though it was neither cancelled nor failed; "
            "a decoder returns a token or an error for every row"
        )
    return int(new_token_ids[-1])


def took_part(advances: Sequence[ContextCacheSequenceAdvance], slot: int) -> bool:
    """Whether a sequence moved in a step (it did not hold)."""
    if isinstance(advances, OneTokenAdvances):
        return bool(advances.token_ids[slot] >= 0)
    return not is_hold(advances[slot])


def participants(advances: Sequence[ContextCacheSequenceAdvance]) -> list[int]:
    """The sequences that moved in a step."""
    return [slot for slot in range(len(advances)) if took_part(advances, slot)]


def is_hold(advance: ContextCacheSequenceAdvance) -> bool:
    return len(advance.accepted_token_ids) == 0 and advance.committed_state_length == HOLD_COMMITTED_STATE_LENGTH


def require_count(impl: Impl, advances: Sequence[ContextCacheSequenceAdvance]) -> None:
    if len(advances) != len(impl.sequences):
        raise InvalidArgumentError(
            f"{len(advances)} advances for {len(impl.sequences)} sequences; pass exactly one for each, holds included"
        )


def check_prefill_advance(impl: Impl, slot: int, advance: ContextCacheSequenceAdvance) -> None:
    """The advance that completes a prompt: one look-ahead token (or none when fully committed).

    Raises:
        InvalidArgumentError: wrong count or committed length.  Nothing was changed.
    """
    lookahead = impl.token_state_contract is DecodingTokenStateContract.COMMITTED_PLUS_LOOKAHEAD
    _check_entry(slot, advance)
    expected = 1 if lookahead else 0
    prompt_length = int(impl.lengths.num_tokens[slot])
    if len(advance.accepted_token_ids) != expected:
        raise InvalidArgumentError(
            f"slot {slot} accepted {len(advance.accepted_token_ids)} tokens at prefill end; "
            f"{impl.token_state_contract.value} needs exactly {expected}"
        )
    if advance.committed_state_length != prompt_length:
        raise InvalidArgumentError(
            f"slot {slot} committed {advance.committed_state_length} at prefill end; "
            f"the whole prompt is {prompt_length} tokens"
        )


def check_decode_advances(impl: Impl, advances: Sequence[ContextCacheSequenceAdvance]) -> None:
    """Every sequence's decode advance against the contract of the request (coordinator spec 5.6).

    Raises:
        InvalidArgumentError: the first wrong entry.  Nothing was changed.
    """
    require_count(impl, advances)
    if isinstance(advances, OneTokenAdvances):
        _check_one_token_advances(impl, advances)
        return
    for slot, advance in enumerate(advances):
        if not is_hold(advance):
            _check_decode_advance(impl, slot, advance)


def _check_one_token_advances(impl: Impl, advances: OneTokenAdvances) -> None:
    if impl.token_state_contract is DecodingTokenStateContract.FULLY_COMMITTED:
        raise InvalidArgumentError(
            "OneTokenAdvances serve look-ahead decoding only; pass ContextCacheSequenceAdvance objects"
        )
    lengths, size = impl.lengths, impl.lengths.size
    active = advances.token_ids >= 0
    wrong = active & (lengths.num_tokens[:size] != lengths.committed[:size] + 1)
    wrong |= advances.token_ids < HOLD_TOKEN
    wrong |= active & lengths.ended[:size]
    if wrong.any():
        slot = int(wrong.argmax())
        _require_not_ended(impl, slot)
        raise InvalidArgumentError(
            f"slot {slot} cannot accept token {int(advances.token_ids[slot])}: it has {int(lengths.num_tokens[slot])} "
            f"tokens and {int(lengths.committed[slot])} committed; finalize its prompt first or hold ({HOLD_TOKEN})"
        )


def _require_not_ended(impl: Impl, slot: int) -> None:
    if impl.lengths.ended[slot]:
        raise InvalidArgumentError(f"slot {slot} was reported as ended; it can only hold until it is compacted away")


def _check_decode_advance(impl: Impl, slot: int, advance: ContextCacheSequenceAdvance) -> None:
    _check_entry(slot, advance)
    _require_not_ended(impl, slot)
    accepted = len(advance.accepted_token_ids)
    old = int(impl.lengths.committed[slot])
    num_tokens = int(impl.lengths.num_tokens[slot])
    fully_committed = impl.token_state_contract is DecodingTokenStateContract.FULLY_COMMITTED
    if accepted == 0 and not fully_committed:
        raise InvalidArgumentError(
            f"slot {slot} accepted nothing but reports committed {advance.committed_state_length}; "
            f"use HOLD_COMMITTED_STATE_LENGTH ({HOLD_COMMITTED_STATE_LENGTH}) to leave it where it is"
        )
    if accepted > 1 and not (impl.speculative_request or fully_committed):
        raise InvalidArgumentError(f"slot {slot} accepted {accepted} tokens; a vanilla step accepts exactly 1")
    if advance.committed_state_length != old + accepted:
        raise InvalidArgumentError(
            f"slot {slot} reports committed {advance.committed_state_length}; "
            f"{old} + {accepted} accepted is {old + accepted}"
        )
    expected_before = old if fully_committed else old + 1
    if num_tokens != expected_before:
        raise InvalidArgumentError(
            f"slot {slot} has {num_tokens} tokens and {old} committed, it is not at a decode rest point; "
            "finalize its prompt before decoding it"
        )


def _check_entry(slot: int, advance: ContextCacheSequenceAdvance) -> None:
    if advance.accepted_token_ids is None:
        raise InvalidArgumentError(f"slot {slot} has accepted_token_ids None; pass an empty sequence for no tokens")
    for token_id in advance.accepted_token_ids:
        if not 0 <= int(token_id) < 2**31:
            raise InvalidArgumentError(f"slot {slot} accepted token id {token_id}; ids are from 0 to {2**31 - 1}")


def check_completed_slots(impl: Impl, completed_slots: Sequence[int]) -> None:
    """Slots that ended normally: in range, each once."""
    seen: set[int] = set()
    for slot in completed_slots:
        if not 0 <= slot < len(impl.sequences):
            raise InvalidArgumentError(
                f"completed slot {slot} is out of range; the request has {len(impl.sequences)} sequences"
            )
        if slot in seen:
            raise InvalidArgumentError(f"completed slot {slot} is listed twice; list each finished sequence once")
        seen.add(slot)


def apply_advances(impl: Impl, advances: Sequence[ContextCacheSequenceAdvance]) -> None:
    """Append accepted tokens and set committed lengths.  The advances were checked before."""
    if isinstance(advances, OneTokenAdvances):
        _apply_one_token_advances(impl, advances)
    else:
        for slot, advance in enumerate(advances):
            if not is_hold(advance):
                _apply_one(impl, slot, advance)


def apply_advance(impl: Impl, slot: int, advance: ContextCacheSequenceAdvance) -> None:
    """`apply_advances` for one sequence."""
    _apply_one(impl, slot, advance)


def _apply_one(impl: Impl, slot: int, advance: ContextCacheSequenceAdvance) -> None:
    for token_id in advance.accepted_token_ids:
        impl.chains[slot].append(int(token_id))
    lengths = impl.lengths
    lengths.num_tokens[slot] += len(advance.accepted_token_ids)
    lengths.committed[slot] = advance.committed_state_length
    if not impl.tracks_common:
        lengths.common[slot] = advance.committed_state_length


def _apply_one_token_advances(impl: Impl, advances: OneTokenAdvances) -> None:
    lengths, size = impl.lengths, impl.lengths.size
    active = advances.token_ids >= 0
    if active.all():
        append_each(impl.chains, advances.token_ids)
    else:
        slots = np.flatnonzero(active).tolist()
        append_each([impl.chains[slot] for slot in slots], advances.token_ids[active])
    lengths.num_tokens[:size] += active
    lengths.committed[:size] += active
    if not impl.tracks_common:
        lengths.common[:size] += active
