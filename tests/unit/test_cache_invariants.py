"""The coordinator's invariant check finds every violation that it names: one state broken on purpose in each test."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from coordinator_rig import Rig, all_policies

from edgellm.cache.invariants import check_coordinator
from edgellm.cache.request import Phase
from edgellm.cache.types import ContextCacheConfig, ResourceType
from edgellm.errors import InvariantError
from edgellm.session.types import ResidentRef
from edgellm.testing.toy_driver import FLAVOURS, ToyDriver

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5]  # two whole pages and one token


class Broken:
    """A container with one finalized sequence in slot 2, one still at its first chunk in slot 1; healthy so far."""

    def __init__(self):
        self.rig = Rig()
        self.request = self.rig.container()
        self.rig.join(self.request, TOKENS, 2)
        self.rig.chunk(self.request, 0, 9)
        self.rig.join(self.request, [8, 8, 8, 8, 8], 1)
        self.rig.chunk(self.request, 1, 2)
        self.impl = self.request.impl
        self.lengths = self.impl.lengths
        self.sequence, self.ghost = self.impl.sequences
        self.rig.coordinator.check_invariants()

    def violates(self, message):
        with pytest.raises(InvariantError, match=message):
            self.rig.coordinator.check_invariants()


def test_what_the_steps_leave_holds():
    broken = Broken()
    assert (broken.sequence.committed_state_length, broken.sequence.num_tokens) == (9, 10)
    assert (broken.ghost.committed_state_length, broken.ghost.num_tokens) == (2, 5)


def test_k1_the_active_count_is_that_of_the_requests():
    broken = Broken()
    broken.rig.coordinator._active_requests += 1
    broken.violates("^K1: active count 2, 1 live, 0 quarantined requests$")


def test_k7_a_quarantined_request_means_poison():
    broken = Broken()
    with pytest.raises(InvariantError, match=r"^K7: 1 quarantined requests without poison$"):
        check_coordinator(broken.rig.coordinator, [], [broken.impl])


def test_k9_every_lease_belongs_to_a_live_request():
    broken = Broken()
    broken.rig.coordinator._active_requests = 0
    with pytest.raises(InvariantError, match=r"^K9: 2 live leases, 0 sequences of live requests$"):
        check_coordinator(broken.rig.coordinator, [], [])


def test_two_sequences_never_share_a_slot():
    broken = Broken()
    broken.ghost.resident = ResidentRef(2, 9)
    broken.violates("two live sequences occupy slot 2$")


@pytest.mark.parametrize("field", ["_pending", "_awaiting"])
def test_an_admitted_request_has_no_work(field):
    rig = Rig()
    request = rig.begun(rig.admission(TOKENS, 0))
    rig.coordinator.check_invariants()
    setattr(request.impl, field, True)
    expected = (field == "_pending", field == "_awaiting")
    with pytest.raises(InvariantError, match=r"^admitted with pending={}, awaiting={}$".format(*expected)):
        rig.coordinator.check_invariants()


def test_k5_awaiting_needs_pending_work_and_never_happens_to_a_container():
    broken = Broken()
    broken.impl._awaiting = True
    broken.violates("^K5: awaiting the first speculative completion with nothing pending$")
    broken.impl._pending = True
    broken.violates("^K5: a container awaits a first completion")


def test_a_batch_may_await_while_work_is_pending():
    rig = Rig()
    request = rig.begun(rig.admission(TOKENS, 0))
    assert rig.coordinator.prepare_prefill(request).name == "OK"
    request.impl._awaiting = True
    request.sequence(0).frozen_spec_prefill_length = 0
    rig.coordinator.check_invariants()
    request.impl._awaiting = False
    with pytest.raises(InvariantError, match=r"^K5: a frozen prefill length without awaiting$"):
        rig.coordinator.check_invariants()


@pytest.mark.parametrize("which", ["leases", "chains"])
def test_the_lists_of_a_request_have_one_entry_a_sequence(which):
    broken = Broken()
    getattr(broken.impl, which).pop()
    left = {"leases": 2, "chains": 2, which: 1}
    broken.violates(f"^2 sequences, {left['leases']} leases, {left['chains']} chains, 2 length entries$")


def test_the_length_ledger_has_one_entry_a_sequence():
    broken = Broken()
    broken.lengths.size = 3
    broken.violates("^2 sequences, 2 leases, 2 chains, 3 length entries$")


def test_k6_a_staged_checkpoint_belongs_to_a_step():
    broken = Broken()
    broken.sequence.staged_hybrid_publication = object()
    broken.violates("^K6: a staged checkpoint outside a step$")


def test_no_step_is_left_staged_between_calls():
    broken = Broken()
    broken.impl.step = object()
    broken.violates("the advances of a step are still staged between calls")


def test_the_chain_and_the_ledger_agree():
    broken = Broken()
    broken.lengths.num_tokens[0] = 11
    broken.violates("^slot 2: the chain has 10 tokens, the ledger 11$")


def test_k3_nothing_committed_is_below_the_reuse_or_beyond_the_tokens():
    broken = Broken()
    broken.lengths.reuse[1] = 3
    broken.violates("^K3 slot 1: reuse 3, committed 2, tokens 5$")
    broken.lengths.reuse[1] = 0
    broken.lengths.committed[1] = 6
    broken.violates("^K3 slot 1: reuse 0, committed 6, tokens 5$")


def test_k3_common_is_committed_where_nothing_tracks_it():
    broken = Broken()
    broken.lengths.common[1] = 1
    broken.violates("^K3 slot 1: common 1, committed 2$")
    broken.impl.tracks_common = True
    broken.rig.coordinator.check_invariants()
    broken.lengths.common[1] = 3  # tracked or not, never beyond what is committed
    broken.violates("^K3 slot 1: common 3, committed 2$")
    broken.lengths.reuse[1] = 2
    broken.lengths.common[1] = 1  # nor below what was reused
    broken.violates("^K3 slot 1: common 1, committed 2$")


def test_k3_a_finalized_sequence_is_one_token_ahead_of_its_state():
    broken = Broken()
    broken.lengths.committed[0] = broken.lengths.common[0] = 8
    broken.violates("^K3 slot 2: 10 tokens at committed 8$")


def test_k4_nothing_is_published_beyond_the_state():
    broken = Broken()
    broken.lengths.offered_blocks[0] = 3
    broken.violates("^K4 slot 2: 3 blocks published at 9$")


def test_k4_no_checkpoint_is_published_beyond_the_state():
    broken = Broken()
    broken.sequence.published_exact_length = 9
    broken.ghost.published_exact_length = 5  # a boundary is published in the middle of the step that commits it
    broken.rig.coordinator.check_invariants()
    broken.ghost.published_exact_length = 6
    broken.violates("^K4 slot 1: a checkpoint published at 6, not 5$")
    broken.sequence.published_exact_length = 10
    broken.violates("^K4 slot 2: a checkpoint published at 10, not 9$")


def test_a_frozen_length_is_committed():
    broken = Broken()
    broken.sequence.frozen_spec_prefill_length = 9
    broken.rig.coordinator.check_invariants()
    broken.sequence.frozen_spec_prefill_length = 10
    broken.violates("^slot 2: frozen at 10, committed 9$")


def test_coverage_is_what_the_leased_pages_hold():
    broken = Broken()
    covered = int(broken.lengths.coverage[0])
    broken.lengths.coverage[0] = covered + 1
    broken.violates(f"^slot 2: committed 9, coverage {covered + 1}, leased {covered}$")
    broken.lengths.coverage[0] = covered
    broken.lengths.draft_coverage[0] = 4
    broken.violates("^slot 2: draft coverage 4, leased 0$")


class ForgetfulManager:
    """The manager, except that no page of one pool has an active reference and nothing else is checked."""

    def __init__(self, manager, kind):
        self._manager = manager
        self.pools = SimpleNamespace(
            pool=lambda asked: SimpleNamespace(
                active_ref=lambda unit: 0 if asked is kind else manager.pools.pool(asked).active_ref(unit)
            )
        )

    def check_invariants(self):
        pass

    def __getattr__(self, name):
        return getattr(self._manager, name)


def test_k7_leased_pages_have_references():
    broken = Broken()
    manager = broken.rig.coordinator._manager
    pages = broken.sequence.lease.base_pages.tolist()
    broken.rig.coordinator._manager = ForgetfulManager(manager, ResourceType.BASE_KV_PAGE)
    broken.violates(rf"^K7: slot 2 leases BASE_KV_PAGE {re.escape(str(pages))} without a reference$")
    broken.rig.coordinator._manager = ForgetfulManager(manager, ResourceType.DRAFT_KV_PAGE)
    broken.rig.coordinator.check_invariants()  # there are no draft pages


def driver_for(flavour):
    return ToyDriver(
        FLAVOURS[flavour], policies=all_policies(), config=ContextCacheConfig(policy_deadline_seconds=None)
    )


@pytest.mark.parametrize("kind", [ResourceType.RECURRENT_SNAPSHOT, ResourceType.PARTIAL_KV_SNAPSHOT])
def test_k7_staged_snapshots_have_references(kind):
    driver = driver_for("hybrid")
    sequence = driver.admit(TOKENS)
    coordinator, state = driver.coordinator, driver.request.sequence(driver.index(sequence))
    impl = driver.request.impl
    (boundary, *_) = coordinator.checkpoint_boundaries(driver.request, 0)
    assert boundary == len(TOKENS)
    assert coordinator.prepare_decode_step(driver.request, driver.headroom, []).name == "OK"
    assert coordinator.enqueue_prefill_captures(driver.request, [0], [boundary]).name == "OK"
    staged = state.staged_hybrid_publication
    coordinator.check_invariants()
    slot = {
        ResourceType.RECURRENT_SNAPSHOT: staged.snapshots.recurrent_snapshot_slot,
        ResourceType.PARTIAL_KV_SNAPSHOT: staged.snapshots.partial_kv_snapshot_slot,
    }[kind]
    manager = coordinator._manager
    coordinator._manager = ForgetfulManager(manager, kind)
    with pytest.raises(InvariantError, match=rf"^K7: slot {sequence.slot} leases {kind.name} \[{slot}\] without"):
        coordinator.check_invariants()
    coordinator._manager = manager
    impl.mark_device_work_synchronized()
    with pytest.raises(InvariantError, match=r"^K6: a staged checkpoint outside a step$"):
        coordinator.check_invariants()


def test_k2_a_row_names_the_pages_of_its_lease():
    broken = Broken()
    pages = broken.rig.row(2)
    broken.rig.table.set_rows([(2, pages[:-1])])
    broken.violates(r"^K2: base row 2 is \[")
    broken.rig.table.set_rows([(2, pages)])
    broken.rig.coordinator.check_invariants()
    broken.rig.table.set_rows([(2, pages[::-1])])
    broken.violates(r"^K2: base row 2 is \[")


def test_k2_a_draft_row_names_the_draft_pages_of_its_lease():
    driver = driver_for("eagle")
    sequence = driver.admit(TOKENS)
    driver.coordinator.check_invariants()
    driver.coordinator.rows.draft.table.clear_row(sequence.slot)
    with pytest.raises(InvariantError, match=rf"^K2: draft row {sequence.slot} is \["):
        driver.coordinator.check_invariants()


def test_a_finishing_request_may_have_no_rows_but_never_wrong_ones():
    broken = Broken()
    pages = broken.rig.row(2)
    broken.impl.mark_finishing()
    assert broken.impl.phase is Phase.FINISHING
    broken.rig.table.clear_row(2)
    broken.rig.coordinator.check_invariants()
    broken.rig.table.set_rows([(2, pages[::-1])])
    broken.violates(r"^K2: base row 2 is \[")


def test_a_free_slot_has_an_empty_row():
    broken = Broken()
    broken.rig.table.set_rows([(3, [0, 1])])
    broken.violates("^row 3 has 2 pages and no live sequence$")


def test_a_lease_has_draft_pages_exactly_where_the_request_drafts():
    driver = driver_for("eagle")
    sequence = driver.admit(TOKENS)
    driver.request.impl.speculative_request = False
    with pytest.raises(InvariantError, match=rf"^slot {sequence.slot} has a spec lease$"):
        driver.coordinator.check_invariants()
    broken = Broken()
    broken.rig.coordinator.runs_paired_draft = lambda speculative: True
    broken.violates("^slot 2 has a vanilla lease$")


def test_rows_wait_while_a_compaction_is_outstanding():
    broken = Broken()
    assert broken.rig.coordinator.begin_batch_compaction(broken.request, [0, -1], 1).name == "OK"
    broken.rig.table.clear_row(1)
    broken.rig.coordinator.check_invariants()


def test_k4_only_a_checkpoint_deployment_publishes_ahead_and_only_before_its_prompt_is_complete():
    broken = Broken()
    assert (broken.ghost.common_state_length, broken.ghost.num_tokens) == (2, 5)
    broken.lengths.offered_blocks[broken.ghost.index] = 1
    broken.violates("^K4 slot 1: 1 blocks published at 2$")
    config = ContextCacheConfig(policy_deadline_seconds=None)
    driver = ToyDriver(FLAVOURS["hybrid"], policies=all_policies(), config=config)
    driver.prefill(driver.admit(TOKENS[:7]))
    state = driver.request.sequence(0)
    assert (state.common_state_length, state.num_tokens) == (7, 8)
    lengths = driver.request.impl.lengths
    offered = int(lengths.offered_blocks[0])
    lengths.offered_blocks[0] = 2
    with pytest.raises(InvariantError, match=r"^K4 slot \d: 2 blocks published at 7$"):
        driver.coordinator.check_invariants()
    lengths.offered_blocks[0] = offered
    driver.admit([3, 3, 3, 3, 3])
    assert lengths.common[:2].tolist() == [7, 0]
    lengths.offered_blocks[1] = 1
    driver.coordinator.check_invariants()  # the checkpoint of a step that is not committed yet
