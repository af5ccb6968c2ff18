"""`DevicePasses` over a head whose proposals can be computed by hand: rows that wait, positions, limits, padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ragged import permuted_page_rows

from edgellm.decoding.chain import KeptRow
from edgellm.decoding.device_drafts import DevicePasses
from edgellm.decoding.draft_passes import DraftEntries
from edgellm.decoding.draft_staging import check_layers
from edgellm.errors import BrokenInvariantError, InvalidArgumentError, StepDeviceError
from edgellm.kernels.cu.paged_attention_exact import MAX_HEAD_DIM
from edgellm.models.config import KVLayer
from edgellm.models.device_ops import reference_ops
from edgellm.runtime.device import CpuDevice
from edgellm.runtime.kv_cache import KVCache

SLOTS, PAGES, PAGE, HEADS, DIM, DRAFTS = 5, 6, 8, 2, 8, 4
WIDTH = HEADS * DIM
TABLE = permuted_page_rows(SLOTS, PAGES, seed=2)


class Summing:
    """Proposes the sum of token, position and hidden row; its own row is twice the one it read.

    Attends as well, so that pages are written and read: keys are the hidden rows.
    """

    config: Any = SimpleNamespace(
        num_heads=HEADS, attention_scale=1.0, rms_norm_eps=1e-5, kv_layers=(KVLayer(HEADS, DIM),)
    )
    dtype = torch.float32
    hidden_width = width = WIDTH

    def __init__(self) -> None:
        self.attended: list[torch.Tensor] = []

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, step: Any, ends: torch.Tensor | None, *, projected: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full_like(hidden, float("nan"))
        step.attend(0, torch.cat((torch.zeros_like(hidden), hidden, hidden), dim=1), None, out)
        self.attended.append(out)
        tokens = token_ids + step.positions + hidden[:, 0]
        if ends is not None:
            tokens, hidden = tokens[ends], hidden[ends]
        return tokens.long() % 1000, hidden * 2


def make() -> tuple[DevicePasses, Summing]:
    executor: Any = SimpleNamespace(device=CpuDevice(), ops=reference_ops(), table_shape=TABLE.shape)
    kv_cache = KVCache(num_layers=1, num_pages=SLOTS * PAGES, num_kv_heads=HEADS, page_size=PAGE, head_dim=DIM)
    kv_cache.fill_poison()
    head = Summing()
    return DevicePasses(head, kv_cache, executor, DRAFTS), head


def hidden_rows(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None].repeat(1, WIDTH)


def kept(slot: int, count: int, hidden: torch.Tensor, first: int = 0) -> KeptRow:
    return KeptRow(slot, 0, np.zeros(count, np.int32), [], step_hidden=hidden, first=first)


@torch.inference_mode()
def ran(passes: DevicePasses, hidden: torch.Tensor, *rows: tuple[int, int, int], branches: bool = False) -> None:
    """The target's step of (slot, past, tokens) rows, one behind the other, and a padding one."""
    counts = [count for _, _, count in rows]
    places = [past + within for _, past, count in rows for within in range(count)]
    owners = np.repeat(np.arange(len(rows)), counts).tolist()
    vectors = {
        "positions": places if not branches else [0] * len(places),
        "token_seq": owners,
        "slots": [slot for slot, _, _ in rows],
        "lengths": [past + count for _, past, count in rows],
    }
    tensors = {name: torch.tensor([*vector, -1], dtype=torch.int32) for name, vector in vectors.items()}
    tree = SimpleNamespace(places=torch.tensor([*places, -1], dtype=torch.int32)) if branches else None
    step: Any = SimpleNamespace(**tensors, tree=tree)
    passes.keep(step, torch.cat((hidden, hidden_rows(-1))))


def entries(slots: list[int], past: list[int], counts: list[int], tokens: list[int]) -> DraftEntries:
    return DraftEntries(slots, past, counts, tokens, TABLE)


def test_a_prompt_then_rows_that_waited_then_chains_of_different_lengths() -> None:
    passes, head = make()
    prompt = hidden_rows(1, 2, 3, 10, 20)
    passes.write(entries([3, 1], [0, 0], [3, 2], [5, 6, 7, 8, 9]), [kept(1, 2, prompt, 3), kept(3, 3, prompt)])
    torch.testing.assert_close(head.attended[-1][2], hidden_rows(2)[0])  # zero queries: the mean of what is seen
    torch.testing.assert_close(head.attended[-1][4], hidden_rows(15)[0])
    # Slot 3 proposes 7 + 2 + 3, slot 1 9 + 1 + 20; each further token adds its position and the doubled row.
    chains = passes.chains([3, 1], [3, 2], [3, 1], TABLE)
    assert chains == [[12, 12 + 3 + 6, 21 + 4 + 12], [30]]
    torch.testing.assert_close(head.attended[-1][0], hidden_rows(1)[0] * (1 + 2 + 3 + 6 + 12) / 5)

    ran(passes, hidden_rows(100, 4), (1, 2, 1), (3, 3, 1))
    ran(passes, hidden_rows(5, 6), (3, 4, 2))
    passes.write(entries([3, 1], [3, 2], [3, 1], [1, 2, 3, 50]))
    torch.testing.assert_close(head.attended[-1][2], hidden_rows(1)[0] * (1 + 2 + 3 + 4 + 5 + 6) / 6)
    assert passes.chains([1, 3], [3, 6], [2, 2], TABLE) == [[152, 152 + 3 + 200], [14, 14 + 6 + 12]]


def test_a_row_at_the_boundary_of_a_checkpoint_comes_first() -> None:
    passes, _ = make()
    passes.begin(2, hidden_rows(7)[0])
    passes.write(entries([2], [4], [3], [1, 2, 3]), [kept(2, 2, hidden_rows(8, 9))])
    assert passes.chains([2], [7], [1], TABLE) == [[3 + 6 + 9]]
    passes.begin(2, None)
    with pytest.raises(BrokenInvariantError, match="slot 2 is to propose and its draft has read nothing"):
        passes.chains([2], [7], [1], TABLE)


def test_a_chain_ends_where_its_pages_do() -> None:
    """The last slot's last place: what a longer chain beside it computes there is written nowhere else."""
    passes, _ = make()
    most = PAGE * PAGES
    for slot, count in ((4, most - 1), (0, 1)):
        rows = hidden_rows(*range(count))
        passes.write(entries([slot], [0], [count], list(range(count))), [kept(slot, count, rows)])
    chains = passes.chains([0, 4], [1, most - 1], [4, 2], TABLE)
    assert list(map(len, chains)) == [4, 2]
    first = (2 * (most - 2) + most - 2) % 1000
    assert chains[1] == [first, (first + most - 1 + 2 * (most - 2)) % 1000]


def test_what_ran_for_nothing_is_written_again() -> None:
    """A step that was run ahead and dropped, and proposals that were not kept."""
    passes, _ = make()
    passes.write(entries([0], [0], [1], [1]), [kept(0, 1, hidden_rows(1))])
    ran(passes, hidden_rows(50, 60, 70), (0, 1, 3))
    ran(passes, hidden_rows(8), (0, 2, 1))
    passes.write(entries([0], [1], [2], [0, 4]))
    assert passes.chains([0], [3], [1], TABLE) == [[4 + 2 + 8]]


def test_more_rows_wait_than_there_is_room_for_once_round() -> None:
    passes, head = make()
    passes.write(entries([0], [0], [1], [1]), [kept(0, 1, hidden_rows(1))])
    past, total = 1, 1
    for count in (passes.deferred, 5, 9):
        for place in range(past, past + count):
            ran(passes, hidden_rows(place), (0, place, 1))
            total += place
        ran(passes, hidden_rows(-1000), (0, past + count, 1))  # ahead
        passes.write(entries([0], [past], [count], [0] * count))
        past += count
        torch.testing.assert_close(head.attended[-1][count - 1], hidden_rows(1)[0] * total / past)


def test_more_entries_than_rows_that_wait_are_a_broken_invariant() -> None:
    passes, _ = make()
    passes.write(entries([0], [0], [1], [1]), [kept(0, 1, hidden_rows(1))])
    room = passes.deferred + DRAFTS + 2
    message = f"slot 0 adds {room + 1} draft entries, and {room} hidden rows wait at most"
    with pytest.raises(BrokenInvariantError, match=message):
        passes.write(entries([0], [1], [room + 1], [1] * (room + 1)))
    with pytest.raises(BrokenInvariantError, match=f"hidden row {room} of slot 0 is wanted, of {room} that wait"):
        passes.held_row(0, 1, room)


def test_branches_of_trees_are_held_from_where_they_lie() -> None:
    passes, _ = make()
    both = [kept(0, 1, hidden_rows(1)), kept(1, 1, hidden_rows(5))]
    passes.write(entries([0, 1], [0, 0], [1, 1], [0, 0]), both)
    step = hidden_rows(3, 91, 4, 92, 6)
    branch = KeptRow(0, 1, np.zeros(2, np.int32), [], step_hidden=step, first=0, branch=[0, 2])
    assert branch.hidden is not None
    assert branch.hidden[:, 0].tolist() == [3, 4]
    ran(passes, step, (0, 1, 4), (1, 1, 1), branches=True)
    passes.hold([branch, kept(1, 1, step, 4)])
    assert [passes.held_row(slot, 1, number)[0] for slot, number in ((0, 0), (0, 1), (1, 0))] == [3, 4, 6]
    passes.write(entries([0, 1], [1, 1], [2, 1], [0, 0, 0]))
    assert passes.chains([0, 1], [3, 2], [1, 1], TABLE) == [[2 + 4], [1 + 6]]


def test_a_failed_pass_is_an_error_of_the_device() -> None:
    passes, head = make()

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    head.forward = fails  # type: ignore[method-assign]
    with pytest.raises(StepDeviceError, match="a pass of the draft model failed: out of memory"):
        passes.write(entries([0], [0], [1], [1]), [kept(0, 1, hidden_rows(1))])


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (KVLayer(2, 20), f"have 20 dimensions; the CUDA kernels serve multiples of 8 up to {MAX_HEAD_DIM}"),
        (KVLayer(2, 1024), "have 1024 dimensions"),
        (KVLayer(1, 64), "34 query heads of the draft model share a KV head; the CUDA kernels serve up to 16"),
    ],
)
def test_heads_that_no_kernel_serves(layer: KVLayer, message: str) -> None:
    layers: Any = SimpleNamespace(num_heads=34, attention_scale=1.0, rms_norm_eps=1e-5, kv_layers=(layer,))
    with pytest.raises(InvalidArgumentError, match=message):
        check_layers(layers)
