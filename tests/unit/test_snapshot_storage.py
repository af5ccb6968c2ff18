"""Snapshot storage: sizing by bytes, exact copies, checks before anything is copied (behaviours 101 and 102)."""

from __future__ import annotations

import pytest
import torch

from edgellm.errors import InvalidArgumentError
from edgellm.runtime.snapshot_storage import HybridSnapshotStorage

PAGE, BATCH, PAGES, DRAFT_PAGES, WIDTH = 4, 3, 5, 6, 8


def pattern(*shape, dtype=torch.float32, start=0):
    count = int(torch.tensor(shape).prod())
    return (torch.arange(count, dtype=torch.int64) + start).reshape(shape).to(dtype)


class Live:
    """The state of a hybrid model with two recurrent layers, two attention layers and a draft layer."""

    def __init__(self, device="cpu"):
        self.recurrent = [
            pattern(BATCH, 2, 3, start=1).to(device),
            pattern(BATCH, 4, dtype=torch.bfloat16, start=50).to(device),
        ]
        self.pages = [pattern(PAGES, 2, 1, PAGE, 2, start=100 * layer).to(device) for layer in (1, 2)]
        self.draft_pages = [pattern(DRAFT_PAGES, 2, 1, PAGE, 2, dtype=torch.float16, start=7).to(device)]
        self.hidden = pattern(6, WIDTH, dtype=torch.float16).to(device)

    def storage(self, *, recurrent_slots=2, partial_slots=2, draft=True, hidden=True, **changes):
        recurrent_bytes = 2 * 3 * 4 + 4 * 2 + (WIDTH * 2 if hidden else 0)
        partial_bytes = 2 * (2 * PAGE * 2 * 4) + (2 * PAGE * 2 * 2 if draft else 0)
        arguments = {
            "recurrent_slabs": self.recurrent,
            "page_slabs": self.pages,
            "draft_page_slabs": self.draft_pages if draft else (),
            "hidden_width": WIDTH if hidden else 0,
            "hidden_dtype": torch.float16 if hidden else None,
            "recurrent_budget_bytes": recurrent_slots * recurrent_bytes,
            "partial_budget_bytes": partial_slots * partial_bytes,
            "page_size": PAGE,
            "token_dim": -2,
        }
        return HybridSnapshotStorage(**{**arguments, **changes})


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def live(request):
    return Live(request.param)


def test_101_slots_are_the_budget_over_the_bytes_of_all_slabs():
    live = Live()
    storage = live.storage()
    assert storage.bytes_per_recurrent_slot == 24 + 8 + 16
    assert storage.bytes_per_partial_slot == 2 * 64 + 32
    assert (storage.num_recurrent_slots, storage.num_partial_slots) == (2, 2)
    almost = live.storage(recurrent_budget_bytes=3 * 48 - 1, partial_budget_bytes=4 * 160 + 159)
    assert (almost.num_recurrent_slots, almost.num_partial_slots) == (2, 4)
    plain = live.storage(draft=False, hidden=False)
    assert (plain.bytes_per_recurrent_slot, plain.bytes_per_partial_slot) == (32, 128)


@pytest.mark.parametrize(("name", "one_slot"), [("recurrent_budget_bytes", 48), ("partial_budget_bytes", 160)])
def test_101_a_budget_one_byte_below_a_slot_is_refused(name, one_slot):
    live = Live()
    with pytest.raises(InvalidArgumentError, match=f"budget of {one_slot - 1} bytes holds no slot.*{one_slot} bytes"):
        live.storage(**{name: one_slot - 1})
    assert live.storage(**{name: one_slot}).bytes_per_recurrent_slot == 48
    with pytest.raises(InvalidArgumentError, match="must not be negative"):
        live.storage(**{name: -1})


def test_101_layers_that_borrow_kv_add_no_bytes():
    live = Live()
    donor = live.pages[0]
    storage = live.storage(page_slabs=[*live.pages, donor, donor.view(donor.shape)])
    assert storage.bytes_per_partial_slot == 160


def test_101_a_pure_recurrent_model_needs_no_partial_budget():
    storage = Live().storage(page_slabs=(), draft_page_slabs=(), partial_budget_bytes=0)
    assert (storage.num_recurrent_slots, storage.num_partial_slots) == (2, 0)
    with pytest.raises(InvalidArgumentError, match="partial snapshot slot 0 is not in"):
        storage.capture_partial_kv(0, 0, valid_token_count=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"recurrent_slabs": []},
        {"recurrent_slabs": [pattern(2, 4), pattern(3, 4)]},
        {"page_slabs": [pattern(4, 4), pattern(5, 4)]},
        {"page_slabs": ()},
        {"page_size": 0},
        {"hidden_dtype": None},
        {"hidden_width": -1},
    ],
)
def test_101_slabs_that_disagree_are_refused(wrong):
    with pytest.raises(InvalidArgumentError):
        Live().storage(**wrong)


def test_102_recurrent_state_comes_back_byte_for_byte(live):
    storage = live.storage()
    before = [slab.clone() for slab in live.recurrent]
    storage.capture_recurrent(1, 2)
    for slab in live.recurrent:
        slab.fill_(-1)
    storage.restore_recurrent(1, 0)
    for slab, old in zip(live.recurrent, before, strict=True):
        assert torch.equal(slab[0], old[2])
        assert (slab[1:] == -1).all()
    storage.zero_recurrent(0)
    assert all((slab[0] == 0).all() for slab in live.recurrent)
    storage.restore_recurrent(1, 1)
    assert torch.equal(live.recurrent[0][1], before[0][2])


@pytest.mark.parametrize("valid", [1, PAGE - 1, PAGE])
def test_102_a_partial_page_comes_back_in_every_layer(live, valid):
    storage = live.storage()
    before = [slab.clone() for slab in (*live.pages, *live.draft_pages)]
    storage.capture_partial_kv(0, 3, 5, valid_token_count=valid)
    for slab in (*live.pages, *live.draft_pages):
        slab.fill_(-1)
    storage.restore_partial_kv(0, 1, 2, valid_token_count=valid)
    for slab, old, page, source in zip((*live.pages, *live.draft_pages), before, (1, 1, 2), (3, 3, 5), strict=True):
        assert torch.equal(slab[page][:, :, :valid], old[source][:, :, :valid])
        untouched = [index for index in range(len(slab)) if index != page]
        assert (slab[untouched] == -1).all()


def test_102_a_plain_request_restores_the_base_page_alone(live):
    storage = live.storage()
    storage.capture_partial_kv(0, 3, 5, valid_token_count=2)
    draft = live.draft_pages[0].clone()
    storage.restore_partial_kv(0, 1, valid_token_count=2)
    assert torch.equal(live.pages[1][1], live.pages[1][3])
    assert torch.equal(live.draft_pages[0], draft)


def test_102_the_hidden_row_comes_back(live):
    storage = live.storage()
    saved = live.hidden[4].clone()
    storage.capture_boundary_hidden(1, live.hidden, 4)
    live.hidden.zero_()
    storage.restore_boundary_hidden(1, live.hidden, 0)
    assert torch.equal(live.hidden[0], saved)
    assert (live.hidden[1:] == 0).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda s, live: s.zero_recurrent(BATCH),
        lambda s, live: s.capture_recurrent(2, 0),
        lambda s, live: s.restore_recurrent(0, -1),
        lambda s, live: s.capture_partial_kv(0, 0, 0, valid_token_count=0),
        lambda s, live: s.capture_partial_kv(0, 0, 0, valid_token_count=PAGE + 1),
        lambda s, live: s.restore_partial_kv(0, 0, 0, valid_token_count=0),
        lambda s, live: s.restore_partial_kv(0, 0, 0, valid_token_count=PAGE + 1),
        lambda s, live: s.capture_partial_kv(0, PAGES, 0, valid_token_count=1),
        lambda s, live: s.restore_partial_kv(0, 0, DRAFT_PAGES, valid_token_count=1),
        lambda s, live: s.capture_boundary_hidden(0, live.hidden, 6),
        lambda s, live: s.capture_boundary_hidden(2, live.hidden, 0),
        lambda s, live: s.restore_boundary_hidden(0, live.hidden.float(), 0),
        lambda s, live: s.restore_boundary_hidden(0, live.hidden[:, 1:], 0),
        lambda s, live: s.restore_boundary_hidden(0, live.hidden[0], 0),
    ],
)
def test_102_ranges_are_checked_before_anything_is_copied(call):
    live = Live()
    storage = live.storage()
    before = [slab.clone() for slab in (*live.recurrent, *live.pages, *live.draft_pages, live.hidden)]
    with pytest.raises(InvalidArgumentError):
        call(storage, live)
    after = (*live.recurrent, *live.pages, *live.draft_pages, live.hidden)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_102_a_storage_without_hidden_row_says_so():
    live = Live()
    with pytest.raises(InvalidArgumentError, match="saves no hidden row"):
        live.storage(hidden=False).capture_boundary_hidden(0, live.hidden, 0)


def test_fingerprints_name_the_payload_and_not_the_slot():
    live = Live()
    storage = live.storage()
    storage.capture_recurrent(0, 1)
    storage.capture_recurrent(1, 1)
    assert storage.fingerprint(0) == storage.fingerprint(1) == storage.live_fingerprint(1)
    storage.capture_recurrent(1, 2)
    assert storage.fingerprint(0) != storage.fingerprint(1)
    live.pages[0][3, :, :, 2:] = 9
    storage.capture_partial_kv(0, 3, 5, valid_token_count=2)
    live.pages[0][3, :, :, 2:] = 11
    storage.capture_partial_kv(1, 3, 5, valid_token_count=2)
    assert storage.partial_fingerprint(0) == storage.partial_fingerprint(1)
    live.pages[0][3, :, :, 1] = 13
    storage.capture_partial_kv(1, 3, 5, valid_token_count=2)
    assert storage.partial_fingerprint(0) != storage.partial_fingerprint(1)


def test_poison_fills_exactly_the_named_slots():
    live = Live()
    storage = live.storage()
    storage.capture_recurrent(0, 1)
    storage.capture_recurrent(1, 1)
    before = storage.fingerprint(0)
    storage.poison([1], [0])
    storage.restore_recurrent(1, 0)
    assert live.recurrent[0][0].isnan().all()
    storage.restore_partial_kv(0, 2, 2, valid_token_count=1)
    assert live.pages[0][2].isnan().all()
    assert live.draft_pages[0][2].isnan().all()
    assert storage.fingerprint(0) == before
    whole = HybridSnapshotStorage(
        [torch.zeros(2, 3, dtype=torch.int64)], recurrent_budget_bytes=24, partial_budget_bytes=0, page_size=2
    )
    whole.poison([0], value=-5)
    assert whole._recurrent[0].tolist() == [[-5, -5, -5]]
    with pytest.raises(InvalidArgumentError):
        storage.poison([2])


@pytest.mark.gpu
def test_102_copies_are_ordered_on_the_stream_without_a_wait():
    live = Live("cuda")
    storage = live.storage()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for sleep_cycles in (1, 500_000_000):  # the first round loads the kernels, which may wait
            torch.cuda._sleep(sleep_cycles)
            live.recurrent[0][1] += 1000
            storage.capture_recurrent(0, 1)
            storage.capture_partial_kv(0, 3, 5, valid_token_count=2)
            storage.restore_recurrent(0, 2)
        done = torch.cuda.Event()
        done.record(stream)
        waited = done.query()
    assert not waited
    stream.synchronize()
    assert torch.equal(live.recurrent[0][2], live.recurrent[0][1])
