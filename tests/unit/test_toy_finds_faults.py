"""The toy finds seeded faults: each breaks one thing that users' reports were about, and a run must not survive it."""

from __future__ import annotations

import random

import pytest
from plugin_policies import all_policies
from test_toy_driver import SMALL, tokens, wander

from edgellm.cache import copies, snapshots, spec_endpoints
from edgellm.cache.binding import RowBinder
from edgellm.errors import BrokenInvariantError, InvalidArgumentError
from edgellm.runtime.snapshot_storage import HybridSnapshotStorage
from edgellm.testing.toy_driver import FLAVOURS, ToyDriver
from edgellm.testing.toy_model import ToyModel


def nothing(*args, **kwargs):
    return None


def forget_copied_tails(patch):
    patch.setattr(copies, "_copy", nothing)


def forget_copied_draft_tails(patch):
    copy = copies._copy
    calls = []

    def base_only(cache, sources, targets):
        calls.append(cache)
        if cache is calls[0]:
            copy(cache, sources, targets)

    patch.setattr(copies, "_copy", base_only)


def forget_to_restore_partial_pages(patch):
    patch.setattr(HybridSnapshotStorage, "restore_partial_kv", nothing)


def forget_to_capture(patch):
    patch.setattr(HybridSnapshotStorage, "capture_recurrent", nothing)


def forget_to_zero(patch):
    patch.setattr(HybridSnapshotStorage, "zero_recurrent", nothing)


def restore_into_the_next_resident(patch):
    restore = HybridSnapshotStorage.restore_recurrent
    patch.setattr(
        HybridSnapshotStorage,
        "restore_recurrent",
        lambda self, snapshot, resident: restore(self, snapshot, resident ^ 1),
    )


def save_another_hidden_row(patch):
    capture = HybridSnapshotStorage.capture_boundary_hidden
    patch.setattr(
        HybridSnapshotStorage,
        "capture_boundary_hidden",
        lambda self, snapshot, hidden, row: capture(self, snapshot, hidden, max(0, row - 1)),
    )


def straddling_page_by_the_wrong_unit(patch):
    page_of = snapshots._partial_page

    def shifted(coordinator, sequence, length):
        return page_of(coordinator, sequence, max(1, length - coordinator.page_size))

    patch.setattr(snapshots, "_partial_page", shifted)


def common_is_what_base_has(patch):
    def too_long(impl, common_state_lengths):
        size = impl.lengths.size
        impl.lengths.common[:size] = impl.lengths.proven[:size] = impl.lengths.committed[:size]

    patch.setattr(spec_endpoints, "set_common_lengths", too_long)


def rows_of_the_neighbour(patch):
    bind = RowBinder.bind

    def swapped(self, sequences):
        bind(self, sequences)
        for sequence in sequences:
            pages = self.pages_of(sequence.lease)[::-1]
            self.table.set_rows([(sequence.resident.slot, pages)])

    patch.setattr(RowBinder, "bind", swapped)


FAULTS = [
    (forget_copied_tails, ["attention", "eagle", "dflash", "shared-kv"]),
    (forget_copied_draft_tails, ["eagle", "dflash"]),
    (forget_to_restore_partial_pages, ["hybrid", "mtp"]),
    (forget_to_capture, ["hybrid", "recurrent", "mtp"]),
    (forget_to_zero, ["hybrid", "recurrent", "mtp"]),
    (restore_into_the_next_resident, ["hybrid", "recurrent", "mtp"]),
    (save_another_hidden_row, ["mtp"]),
    (straddling_page_by_the_wrong_unit, ["hybrid", "mtp"]),
    (common_is_what_base_has, ["eagle", "dflash"]),
    (rows_of_the_neighbour, ["attention", "eagle", "hybrid", "mtp"]),
]


def run(driver):
    wander(driver, random.Random(8), tokens(8, 30), 200)


@pytest.mark.parametrize(("fault", "flavour"), [(fault, flavour) for fault, flavours in FAULTS for flavour in flavours])
def test_a_seeded_fault_is_found(monkeypatch, fault, flavour):
    driver = ToyDriver(FLAVOURS[flavour], policies=all_policies(), **SMALL)
    fault(monkeypatch)
    with pytest.raises((BrokenInvariantError, InvalidArgumentError)):
        run(driver)
    driver.request.abandon()


def test_ignoring_the_look_ahead_is_found():
    """The draft looks one token ahead, and the deployment says that it does not."""
    driver = ToyDriver(FLAVOURS["dflash"], policies=all_policies(), **SMALL)
    driver.model = driver.machine.model = ToyModel(draft_looks_ahead=True)
    with pytest.raises(BrokenInvariantError):
        run(driver)
    driver.request.abandon()


def test_no_fault_no_finding():
    for flavour in FLAVOURS:
        driver = ToyDriver(FLAVOURS[flavour], policies=all_policies(), **SMALL)
        run(driver)
        driver.close()
