"""The advances that a policy hook is given: applied once, and checked against the ledger when the hook is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgellm._core.block_hash import TokenChain
from edgellm.cache.advances import OneTokenAdvances, apply_advances, is_hold, took_part
from edgellm.cache.types import ContextCacheSequenceAdvance, ReusePlanMode
from edgellm.errors import ContractViolation

if TYPE_CHECKING:
    from edgellm.cache.request import Impl


class PolicyStep:
    """The advances that a policy hook was given, and where the ledger must stand when it is done.

    Attributes:
        applied: a policy applied them through `apply_step`.
        tokens_before: (N,) token counts before the step.
        num_tokens, committed: (N,) what both must be afterwards.
    """

    __slots__ = ("advances", "applied", "committed", "num_tokens", "tokens_before")

    def __init__(self, impl: Impl, advances: Sequence[ContextCacheSequenceAdvance]) -> None:
        lengths, size = impl.lengths, impl.lengths.size
        self.advances = advances
        self.applied = False
        self.tokens_before = lengths.num_tokens[:size].copy()
        if isinstance(advances, OneTokenAdvances):
            active = advances.token_ids >= 0
            self.num_tokens = self.tokens_before + active
            self.committed = lengths.committed[:size] + active
            return
        accepted = [len(advance.accepted_token_ids) for advance in advances]
        self.num_tokens = self.tokens_before + np.array(accepted, np.int64)
        self.committed = lengths.committed[:size].copy()
        for slot, advance in enumerate(advances):
            if not is_hold(advance):
                self.committed[slot] = advance.committed_state_length

    def accepted(self, slot: int) -> list[int]:
        """The accepted tokens of one sequence."""
        if isinstance(self.advances, OneTokenAdvances):
            return [int(self.advances.token_ids[slot])] if took_part(self.advances, slot) else []
        return [int(token_id) for token_id in self.advances[slot].accepted_token_ids]


def apply_step(impl: Impl, advances: Sequence[ContextCacheSequenceAdvance]) -> None:
    """`apply_advances` on behalf of a policy: the advances of the current step, once.

    Raises:
        ContractViolation: other advances, no step, or a second time.
    """
    step = impl.step
    if step is None or advances is not step.advances:
        raise ContractViolation("a policy may apply only the advances that its hook was given")
    if step.applied:
        raise ContractViolation("the advances of this step were applied before; apply them once")
    step.applied = True
    apply_advances(impl, advances)


def settle_ledger(impl: Impl, step: PolicyStep) -> list[int]:
    """Make the ledger say what the device holds, whatever a policy hook left out or added.

    A hook that moved the ledger by other means than `apply_step` has its tokens compared one by one.

    Returns:
        The sequences that were wrong.
    """
    lengths, size = impl.lengths, impl.lengths.size
    wrong = (lengths.num_tokens[:size] != step.num_tokens) | (lengths.committed[:size] != step.committed)
    wrong |= np.array([chain.num_tokens for chain in impl.chains], np.int64) != step.num_tokens
    if not step.applied:
        for slot in range(size):
            added = impl.chains[slot].tokens_from(int(step.tokens_before[slot])).tolist()
            wrong[slot] |= added != step.accepted(slot)
    slots: list[int] = np.flatnonzero(wrong).tolist()
    for slot in slots:
        _settle_one(impl, step, slot)
    return sorted({*slots, *_settle_common(impl)})


def prove_step(impl: Impl, step: PolicyStep, common_state_lengths: Sequence[int] | None) -> None:
    """Remember what the runtime reported as final in this decode step, before a policy sees the ledger.

    A verification proves the draft pass over a prompt: for a joiner the first one it takes part in, for the prompts of
    a batch any, since they were initialised before all of them.
    """
    _prove_lengths(impl, step, common_state_lengths)
    unproven = impl.lengths.draft_unproven
    for slot in np.flatnonzero(unproven[: impl.lengths.size]).tolist():
        unproven[slot] = impl.sequences[slot].joined and not took_part(step.advances, slot)


def prove_prompts(impl: Impl, step: PolicyStep, common_state_lengths: Sequence[int] | None) -> None:
    """The same for the complete prompts of a batch, whose draft pass may still be queued."""
    _prove_lengths(impl, step, common_state_lengths)
    for slot, lease in enumerate(impl.leases):
        impl.lengths.draft_unproven[slot] = lease.mode is ReusePlanMode.SPEC


def _prove_lengths(impl: Impl, step: PolicyStep, common_state_lengths: Sequence[int] | None) -> None:
    proven = impl.lengths.proven[: impl.lengths.size]
    if common_state_lengths is not None:
        common = np.asarray(common_state_lengths, np.int64)
        proven[:] = np.where(common >= 0, common, proven)
    elif not impl.tracks_common or not impl.owner.profile.owns_paged_spec_state:
        proven[:] = step.committed


class LedgerAtRest:
    """The lengths around a hook that is given no advances: it may move none."""

    __slots__ = ("committed", "num_tokens")

    def __init__(self, impl: Impl) -> None:
        lengths, size = impl.lengths, impl.lengths.size
        self.committed = lengths.committed[:size].copy()
        self.num_tokens = lengths.num_tokens[:size].copy()

    def restore(self, impl: Impl) -> list[int]:
        """Put back what the hook moved; the sequences that it moved."""
        lengths, size = impl.lengths, impl.lengths.size
        moved = (lengths.committed[:size] != self.committed) | (lengths.num_tokens[:size] != self.num_tokens)
        lengths.committed[:size] = self.committed
        lengths.num_tokens[:size] = self.num_tokens
        return sorted({*np.flatnonzero(moved).tolist(), *_settle_common(impl)})


def _settle_common(impl: Impl) -> list[int]:
    """No common length beyond what was reported; the sequences where one was."""
    lengths, size = impl.lengths, impl.lengths.size
    beyond = lengths.common[:size] > lengths.proven[:size]
    if not beyond.any():
        return []
    lengths.common[:size] = np.minimum(lengths.common[:size], lengths.proven[:size])
    slots: list[int] = np.flatnonzero(beyond).tolist()
    return slots


def _settle_one(impl: Impl, step: PolicyStep, slot: int) -> None:
    """A failure between chain and lengths leaves tokens in the chain already; a lie leaves other ones there."""
    lengths, before, accepted = impl.lengths, int(step.tokens_before[slot]), step.accepted(slot)
    chain = impl.chains[slot]
    added = chain.tokens_from(before).tolist()
    if added != accepted[: len(added)]:
        chain = _rebuilt_chain(impl, slot, before)
        added = []
    for token_id in accepted[len(added) :]:
        chain.append(token_id)
    lengths.num_tokens[slot] = step.num_tokens[slot]
    lengths.committed[slot] = step.committed[slot]
    if not impl.tracks_common:
        lengths.common[slot] = step.committed[slot]


def mend_chains(impl: Impl) -> None:
    """Drop tokens that a faulty policy put into a chain beside the ledger."""
    for slot, chain in enumerate(impl.chains):
        num_tokens = int(impl.lengths.num_tokens[slot])
        if chain.num_tokens > num_tokens:
            _rebuilt_chain(impl, slot, num_tokens)


def _rebuilt_chain(impl: Impl, slot: int, num_tokens: int) -> TokenChain:
    """The chain of the first `num_tokens` tokens, in place of one that holds tokens nobody reported."""
    sequence, old = impl.sequences[slot], impl.chains[slot]
    chain = TokenChain(old.page_size, sequence.key_extras, sequence.per_position_media_hash)
    chain.extend(old.token_ids()[:num_tokens])
    sequence.chain = impl.chains[slot] = chain
    return chain
