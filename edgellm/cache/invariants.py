"""Checkable invariants K1 to K7 and K9 of the coordinator (the manager checks its own)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from edgellm.cache.request import Phase
from edgellm.cache.types import UNUSED_PAGE_ENTRY, DecodingTokenStateContract, ResourceType
from edgellm.errors import InvariantError

if TYPE_CHECKING:
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl, SequenceState


def check_coordinator(
    coordinator: ContextCacheCoordinator, live: Collection[Impl], quarantine: Collection[Impl]
) -> None:
    """Raise InvariantError at the first violation.  Cost: O(rows x pages)."""
    coordinator.manager.check_invariants()
    coordinator.rows.table.check_invariants()
    if coordinator.active_requests != len(live) + len(quarantine):
        raise InvariantError(
            f"K1: active count {coordinator.active_requests}, {len(live)} live, {len(quarantine)} quarantined requests"
        )
    if quarantine and not coordinator.poisoned:
        raise InvariantError(f"K7: {len(quarantine)} quarantined requests without poison")
    slots: set[int] = set()
    for impl in (*live, *quarantine):
        _check_states(impl)
        for sequence in impl.sequences:
            if sequence.resident.slot in slots:
                raise InvariantError(f"two live sequences occupy slot {sequence.resident.slot}")
            slots.add(sequence.resident.slot)
            _check_lengths(coordinator, impl, sequence)
            _check_row(coordinator, impl, sequence)
    _check_free_rows(coordinator, slots)


def _check_states(impl: Impl) -> None:
    pending, awaiting = impl.has_pending_device_work(), impl.awaiting_first_spec_completion()
    if impl.phase is Phase.ADMITTED and (pending or awaiting):
        raise InvariantError(f"admitted with pending={pending}, awaiting={awaiting}")
    if impl.phase is Phase.EXECUTING and awaiting and not pending:
        raise InvariantError("K5: awaiting the first speculative completion with nothing pending")
    if not len(impl.sequences) == len(impl.leases) == len(impl.chains) == impl.lengths.size:
        raise InvariantError(
            f"{len(impl.sequences)} sequences, {len(impl.leases)} leases, {len(impl.chains)} chains, "
            f"{impl.lengths.size} length entries"
        )
    if not awaiting and any(sequence.frozen_spec_prefill_length is not None for sequence in impl.sequences):
        raise InvariantError("K5: a frozen prefill length without awaiting")


def _check_lengths(coordinator: ContextCacheCoordinator, impl: Impl, sequence: SequenceState) -> None:
    where = f"slot {sequence.resident.slot}"
    committed, tokens = sequence.committed_state_length, sequence.num_tokens
    if sequence.chain.num_tokens != tokens:
        raise InvariantError(f"{where}: the chain has {sequence.chain.num_tokens} tokens, the ledger {tokens}")
    if not sequence.reuse_token_length <= committed <= tokens:
        raise InvariantError(f"K3 {where}: reuse {sequence.reuse_token_length}, committed {committed}, tokens {tokens}")
    lookahead = impl.token_state_contract is DecodingTokenStateContract.COMMITTED_PLUS_LOOKAHEAD
    if sequence.finalized and tokens != committed + lookahead:
        raise InvariantError(f"K3 {where}: {tokens} tokens at committed {committed}")
    if sequence.published_full_block_count * coordinator.page_size > committed:
        raise InvariantError(f"K4 {where}: {sequence.published_full_block_count} blocks published at {committed}")
    covered = sequence.lease.num_base_pages * coordinator.page_size
    if committed > covered or int(impl.lengths.coverage[sequence.index]) != covered:
        raise InvariantError(
            f"{where}: committed {committed}, coverage {int(impl.lengths.coverage[sequence.index])}, leased {covered}"
        )


def _check_row(coordinator: ContextCacheCoordinator, impl: Impl, sequence: SequenceState) -> None:
    table = coordinator.rows.table
    slot = sequence.resident.slot
    row: list[int] = table.row(slot).tolist()
    pages: list[int] = sequence.lease.base_pages.tolist()
    if impl.phase is not Phase.ADMITTED and row != pages + [UNUSED_PAGE_ENTRY] * (len(row) - len(pages)):
        raise InvariantError(f"K2: row {slot} is {row}, the lease has {pages}")
    pool = coordinator.manager.pools.pool(ResourceType.BASE_KV_PAGE)
    idle = [page for page in pages if pool.active_ref(page) < 1]
    if idle:
        raise InvariantError(f"K7: slot {slot} leases pages {idle} that have no active reference")


def _check_free_rows(coordinator: ContextCacheCoordinator, occupied: set[int]) -> None:
    table = coordinator.rows.table
    for slot in range(table.num_slots):
        if slot not in occupied and table.row_length(slot) != 0:
            raise InvariantError(f"row {slot} has {table.row_length(slot)} pages and no live sequence")
