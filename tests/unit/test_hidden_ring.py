"""`HiddenRing` against a dictionary of the rows by slot and place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from edgellm.decoding.chain import KeptRow
from edgellm.decoding.hidden_ring import HiddenRing
from edgellm.errors import BrokenInvariantError
from edgellm.models.device_ops import reference_ops
from edgellm.runtime.device import CpuDevice

SLOTS, ROOM, WIDTH = 3, 6, 4


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make() -> HiddenRing:
    executor: Any = SimpleNamespace(device=CpuDevice(), ops=reference_ops())
    return HiddenRing(torch.zeros(SLOTS, ROOM, WIDTH), executor)


def new_step(rows: list[tuple[int, int, int]], padding: int = 2, tree: bool = False) -> Any:
    """Rows of (slot, past, tokens); the tokens of trees are children of the first one."""
    places = [place for _, past, count in rows for place in range(past, past + count)] + [0] * padding
    owners = [number for number, (_, _, count) in enumerate(rows) for _ in range(count)] + [-1] * padding
    positions = [
        place if not tree or owner < 0 else rows[owner][1] + 1 for place, owner in zip(places, owners, strict=True)
    ]
    return SimpleNamespace(
        positions=int32(positions),
        token_seq=int32(owners),
        slots=int32([*(slot for slot, _, _ in rows), -1]),
        lengths=int32([*(past + count for _, past, count in rows), 0]),
        tree=SimpleNamespace(places=int32(places)) if tree else None,
    )


def random_rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_the_latest_rows_of_every_sequence_are_there() -> None:
    ring, generator = make(), np.random.default_rng(3)
    lengths, wanted = [0] * SLOTS, {}
    for number in range(40):
        slots = generator.permutation(SLOTS)[: generator.integers(1, SLOTS + 1)].tolist()
        counts = generator.choice([1, 1, 2, 4, 15], len(slots)).tolist()
        step = new_step([(slot, lengths[slot], count) for slot, count in zip(slots, counts, strict=True)])
        hidden = random_rows(sum(counts) + 2, number)
        ring.keep(step, hidden)
        start = 0
        for slot, count in zip(slots, counts, strict=True):
            wanted |= {(slot, lengths[slot] + within): hidden[start + within] for within in range(count)}
            start += count
            # As many as a verification keeps: what is behind is written again.
            lengths[slot] += int(generator.integers(1, count + 1)) if count < 5 else count
            first = max(0, lengths[slot] - 2)  # proposals that were not kept take the places of older rows
            places = list(range(first, lengths[slot]))
            found = ring.gathered(int32([slot] * len(places)), int32(places))
            assert torch.equal(found, torch.stack([wanted[slot, place] for place in places]))
            assert torch.equal(ring.copy_of(slot, places[-1]), wanted[slot, places[-1]])


def test_padding_writes_nothing() -> None:
    ring = make()
    ring.keep(new_step([], padding=5), random_rows(5))
    assert not ring._rows.any()
    assert ring.gathered(int32([-1, 1]), int32([4, 0])).shape == (2, WIDTH)


def test_an_accepted_branch_goes_to_the_places_of_its_tokens() -> None:
    ring, hidden = make(), random_rows(7)
    ring.keep(new_step([(1, 8, 4), (0, 3, 1)], tree=True), hidden)
    assert torch.equal(ring.gathered(int32([1] * 4 + [0]), int32([8, 9, 10, 11, 3])), hidden[:5])
    row = KeptRow(1, 8, np.zeros(2, np.int32), [1, 2], step_hidden=hidden, first=0, branch=[0, 3])
    ring.put([row])
    assert torch.equal(ring.gathered(int32([1, 1, 0]), int32([8, 9, 3])), hidden[[0, 3, 4]])


def test_rows_without_hidden_rows_are_refused() -> None:
    with pytest.raises(BrokenInvariantError, match="slot 1 ran without the hidden rows that its draft needs"):
        make().put([KeptRow(1, 8, np.zeros(2, np.int32), [1, 2])])
