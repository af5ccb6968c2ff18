"""Checkable invariants K1 to K7 and K9 of the coordinator, for every flavour (the manager checks its own).

K8 (nothing is published that queued work may still write) and K10 (a refused call changed nothing) are about calls,
not about states: tests hold them against journals of calls.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from edgellm.cache.request import Phase
from edgellm.cache.types import UNUSED_PAGE_ENTRY, DecodingTokenStateContract, ResourceType, ReusePlanMode
from edgellm.errors import InvariantError

if TYPE_CHECKING:
    from edgellm.cache.binding import RowBinder
    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import Impl, SequenceState


def check_coordinator(
    coordinator: ContextCacheCoordinator, live: Collection[Impl], quarantine: Collection[Impl]
) -> None:
    """Raise InvariantError at the first violation.  Cost: O(rows x pages)."""
    coordinator._manager.check_invariants()
    if coordinator.active_requests != len(live) + len(quarantine):
        raise InvariantError(
            f"K1: active count {coordinator.active_requests}, {len(live)} live, {len(quarantine)} quarantined requests"
        )
    if quarantine and not coordinator.poisoned:
        raise InvariantError(f"K7: {len(quarantine)} quarantined requests without poison")
    slots: set[int] = set()
    num_leases = 0
    for impl in (*live, *quarantine):
        _check_states(impl)
        num_leases += len(impl.leases)
        for sequence in impl.sequences:
            if sequence.resident.slot in slots:
                raise InvariantError(f"two live sequences occupy slot {sequence.resident.slot}")
            slots.add(sequence.resident.slot)
            _check_lengths(coordinator, impl, sequence)
            _check_references(coordinator, sequence)
            _check_rows(coordinator, impl, sequence)
    if coordinator._manager.num_live_leases != num_leases:
        raise InvariantError(
            f"K9: {coordinator._manager.num_live_leases} live leases, {num_leases} sequences of live requests"
        )
    _check_free_rows(coordinator, slots)


def _check_states(impl: Impl) -> None:
    pending, awaiting = impl.has_pending_device_work(), impl.awaiting_first_spec_completion()
    if impl.phase is Phase.ADMITTED and (pending or awaiting):
        raise InvariantError(f"admitted with pending={pending}, awaiting={awaiting}")
    if impl.phase is Phase.EXECUTING and awaiting and not pending:
        raise InvariantError("K5: awaiting the first speculative completion with nothing pending")
    if awaiting and impl.is_container:
        raise InvariantError("K5: a container awaits a first completion; its sequences freeze one by one")
    if not len(impl.sequences) == len(impl.leases) == len(impl.chains) == impl.lengths.size:
        raise InvariantError(
            f"{len(impl.sequences)} sequences, {len(impl.leases)} leases, {len(impl.chains)} chains, "
            f"{impl.lengths.size} length entries"
        )
    for sequence in impl.sequences:
        if sequence.frozen_spec_prefill_length is not None and not (awaiting or sequence.joined):
            raise InvariantError("K5: a frozen prefill length without awaiting")
        if sequence.staged_hybrid_publication is not None and not pending:
            raise InvariantError("K6: a staged checkpoint outside a step")
    if impl.step is not None:
        raise InvariantError("the advances of a step are still staged between calls")


def _check_lengths(coordinator: ContextCacheCoordinator, impl: Impl, sequence: SequenceState) -> None:
    where = f"slot {sequence.resident.slot}"
    committed, tokens, common = sequence.committed_state_length, sequence.num_tokens, sequence.common_state_length
    if sequence.chain.num_tokens != tokens:
        raise InvariantError(f"{where}: the chain has {sequence.chain.num_tokens} tokens, the ledger {tokens}")
    if not sequence.reuse_token_length <= committed <= tokens:
        raise InvariantError(f"K3 {where}: reuse {sequence.reuse_token_length}, committed {committed}, tokens {tokens}")
    if not (sequence.reuse_token_length <= common <= committed and (impl.tracks_common or common == committed)):
        raise InvariantError(f"K3 {where}: common {common}, committed {committed}")
    lookahead = impl.token_state_contract is DecodingTokenStateContract.COMMITTED_PLUS_LOOKAHEAD
    if sequence.finalized and tokens != committed + lookahead:
        raise InvariantError(f"K3 {where}: {tokens} tokens at committed {committed}")
    _check_published(coordinator, sequence, where)
    if not coordinator.profile.has_attention:
        return
    covered = sequence.lease.num_base_pages * coordinator.page_size
    if committed > covered or int(impl.lengths.coverage[sequence.index]) != covered:
        raise InvariantError(
            f"{where}: committed {committed}, coverage {int(impl.lengths.coverage[sequence.index])}, leased {covered}"
        )
    covered = sequence.lease.num_draft_pages * coordinator.page_size
    if int(impl.lengths.draft_coverage[sequence.index]) != covered:
        raise InvariantError(
            f"{where}: draft coverage {int(impl.lengths.draft_coverage[sequence.index])}, leased {covered}"
        )


def _check_published(coordinator: ContextCacheCoordinator, sequence: SequenceState, where: str) -> None:
    limit = sequence.common_state_length
    if coordinator.profile.uses_checkpoint_reuse and not sequence.finalized:
        limit = sequence.num_tokens  # a boundary checkpoint is published in the middle of the step that commits it
    if sequence.published_full_block_count * coordinator.page_size > limit:
        raise InvariantError(f"K4 {where}: {sequence.published_full_block_count} blocks published at {limit}")
    limit = sequence.committed_state_length if sequence.finalized else sequence.num_tokens
    if sequence.published_exact_length > limit:
        raise InvariantError(f"K4 {where}: a checkpoint published at {sequence.published_exact_length}, not {limit}")
    frozen = sequence.frozen_spec_prefill_length
    if frozen is not None and frozen > sequence.committed_state_length:
        raise InvariantError(f"{where}: frozen at {frozen}, committed {sequence.committed_state_length}")


def _check_references(coordinator: ContextCacheCoordinator, sequence: SequenceState) -> None:
    """Whatever a live sequence may touch has an active reference."""
    lease, pools = sequence.lease, coordinator._manager.pools
    held = {
        ResourceType.BASE_KV_PAGE: lease.base_pages.tolist(),
        ResourceType.DRAFT_KV_PAGE: lease.draft_pages.tolist(),
        ResourceType.RECURRENT_SNAPSHOT: [lease.recurrent_snapshot_slot],
        ResourceType.PARTIAL_KV_SNAPSHOT: [lease.partial_kv_snapshot_slot],
    }
    staged = sequence.staged_hybrid_publication
    if staged is not None:
        held[ResourceType.RECURRENT_SNAPSHOT].append(staged.snapshots.recurrent_snapshot_slot)
        held[ResourceType.PARTIAL_KV_SNAPSHOT].append(staged.snapshots.partial_kv_snapshot_slot)
    for kind, units in held.items():
        pool = pools.pool(kind)
        idle = [unit for unit in units if unit is not None and pool.active_ref(unit) < 1]
        if idle:
            raise InvariantError(f"K7: slot {sequence.resident.slot} leases {kind.name} {idle} without a reference")


def _check_rows(coordinator: ContextCacheCoordinator, impl: Impl, sequence: SequenceState) -> None:
    if impl.phase is Phase.ADMITTED or impl.compaction_outstanding():
        return
    rows, ended = coordinator.rows, impl.phase is Phase.FINISHING
    if rows.base is not None:
        _check_row(rows.base, sequence, "base", ended=ended)
    if rows.draft is not None:
        _check_row(rows.draft, sequence, "draft", ended=ended)
    paired = sequence.lease.mode in (ReusePlanMode.SPEC, ReusePlanMode.HYBRID_MTP)
    if paired != coordinator.runs_paired_draft(impl.speculative_request):
        raise InvariantError(f"slot {sequence.resident.slot} has a {sequence.lease.mode.value} lease")


def _check_row(binder: RowBinder, sequence: SequenceState, which: str, *, ended: bool) -> None:
    slot = sequence.resident.slot
    if ended and binder.table.row_length(slot) == 0:
        return  # quarantined before its rows were bound
    row: list[int] = binder.table.row(slot).tolist()
    pages: list[int] = binder.pages_of(sequence.lease).tolist()
    if row != pages + [UNUSED_PAGE_ENTRY] * (len(row) - len(pages)):
        raise InvariantError(f"K2: {which} row {slot} is {row}, the lease has {pages}")


def _check_free_rows(coordinator: ContextCacheCoordinator, occupied: set[int]) -> None:
    for binder in (coordinator.rows.base, coordinator.rows.draft):
        if binder is None:
            continue
        binder.table.check_invariants()
        for slot in range(binder.table.num_slots):
            if slot not in occupied and binder.table.row_length(slot) != 0:
                raise InvariantError(f"row {slot} has {binder.table.row_length(slot)} pages and no live sequence")
