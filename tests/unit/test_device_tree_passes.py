"""`DeviceTreePasses` over a head that can be computed by hand: levels, masks, places, limits, padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ragged import permuted_page_rows

from edgellm.decoding.chain import KeptRow
from edgellm.decoding.device_trees import DeviceTreePasses, LevelSizes
from edgellm.decoding.draft_passes import DraftEntries
from edgellm.decoding.draft_tree import DraftTable
from edgellm.errors import BrokenInvariantError, StepDeviceError
from edgellm.models.config import KVLayer
from edgellm.models.device_attention import AttentionMode
from edgellm.models.device_ops import reference_ops
from edgellm.runtime.device import CpuDevice
from edgellm.runtime.kv_cache import KVCache

SLOTS, PAGES, PAGE, HEADS, DIM = 4, 8, 8, 2, 8
WIDTH = HEADS * DIM
TABLE = permuted_page_rows(SLOTS, PAGES, seed=2)


def candidates(token: int, position: int, own: float, top_k: int) -> tuple[list[int], list[float]]:
    """What comes behind a row: names of its place in the tree, and log-probabilities without ties."""
    tokens = [(7 * token + 3 * position + rank) % 1009 for rank in range(top_k)]
    return tokens, [-(rank + 1) * (1 + 0.3 * float(np.sin(9 * own + token))) for rank in range(top_k)]


class Averaging:
    """Its own hidden row is the mean of the hidden rows that a row sees, itself included: keys are hidden rows."""

    config: Any = SimpleNamespace(
        num_heads=HEADS, attention_scale=1.0, rms_norm_eps=1e-5, kv_layers=(KVLayer(HEADS, DIM),)
    )
    dtype = torch.float32
    hidden_width = width = WIDTH
    num_tokens = 1009

    def rank(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        step: Any,
        ends: torch.Tensor | None,
        *,
        projected: bool,
        top_k: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own = torch.full_like(hidden, float("nan"))
        step.attend(0, torch.cat((torch.zeros_like(hidden), hidden, hidden), dim=1), None, own)
        rows = range(len(token_ids)) if ends is None else ends.tolist()
        ranked = [candidates(int(token_ids[row]), int(step.positions[row]), float(own[row, 0]), top_k) for row in rows]
        tokens, log_probs = zip(*ranked, strict=True)
        return torch.tensor(tokens), torch.tensor(log_probs, dtype=torch.float32), own[[*rows]]


class GrownByHand:
    """The table of one sequence.

    Args:
        hidden: of its written entries, of which the last follows token `token`.
    """

    def __init__(self, hidden: list[float], token: int, top_k: int) -> None:
        self.table, self._entries, self._top_k = DraftTable(top_k), hidden, top_k
        own = float(np.mean(hidden))
        self._inputs: dict[int, list[float]] = {0: []}  # hidden rows of an entry's way
        self._own = {0: own}
        self._grow([candidates(token, len(hidden) - 1, own, top_k)])

    def level(self, number: int) -> None:
        ranked = []
        for entry in self.table.frontier:
            parent = self.table.parents[entry]
            self._inputs[entry] = [*self._inputs[parent], self._own[parent]]
            self._own[entry] = float(np.mean([*self._entries, *self._inputs[entry]]))
            place = len(self._entries) + number - 1
            ranked.append(candidates(self.table.token_ids[entry], place, self._own[entry], self._top_k))
        self._grow(ranked)

    def _grow(self, ranked: list[tuple[list[int], list[float]]]) -> None:
        tokens, log_probs = zip(*ranked, strict=True)
        self.table.grow(np.array(tokens), np.array(log_probs, np.float32))


def make(top_k: int, depth: int, head: Any = None) -> tuple[DeviceTreePasses, KVCache]:
    executor: Any = SimpleNamespace(device=CpuDevice(), ops=reference_ops(), table_shape=TABLE.shape)
    kv_cache = KVCache(num_layers=1, num_pages=SLOTS * PAGES, num_kv_heads=HEADS, page_size=PAGE, head_dim=DIM)
    kv_cache.fill_poison()
    return DeviceTreePasses(head or Averaging(), kv_cache, executor, top_k, depth), kv_cache


def write(passes: DeviceTreePasses, slot: int, hidden: list[float], past: int = 0) -> None:
    """Entries of a prompt; each follows token 5."""
    rows = torch.tensor(hidden, dtype=torch.float32)[:, None].repeat(1, WIDTH)
    entries = DraftEntries([slot], [past], [len(hidden)], [5] * len(hidden), TABLE)
    passes.write(entries, [KeptRow(slot, past, np.zeros(len(hidden), np.int32), [], step_hidden=rows)])


@pytest.mark.parametrize("mode", [AttentionMode.EXACT, AttentionMode.SPLIT])
@pytest.mark.parametrize(("top_k", "limits"), [(2, [4, 2, 1]), (3, [5, 5, 4]), (8, [6, 3, 2])])
def test_tables_are_those_that_grow_by_hand(
    top_k: int, limits: list[int], mode: AttentionMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sequences of other lengths and depths; what was not written is poison, and more than a word of a mask."""
    monkeypatch.setattr("edgellm.decoding.draft_staging.attention_mode", lambda dtype, deterministic: mode)
    passes, _ = make(top_k, 6)
    prompts = {2: [0.5, 1.0, -2.0, 0.25], 0: [1.5], 3: [0.1 * number for number in range(13)]}
    for slot, hidden in prompts.items():
        write(passes, slot, hidden)
    lengths = [len(hidden) for hidden in prompts.values()]
    for _ in range(2):  # scratch of the first round is there in the second
        tables = passes.tables(list(prompts), lengths, limits, TABLE)
        for (slot, hidden), limit, found in zip(prompts.items(), limits, tables, strict=True):
            wanted = GrownByHand(hidden, 5, top_k)
            for number in range(1, limit):
                wanted.level(number)
            assert (found.token_ids, found.parents) == (wanted.table.token_ids, wanted.table.parents), slot
            np.testing.assert_allclose(found.scores, wanted.table.scores, atol=1e-4)
            assert found.best(9).token_ids == wanted.table.best(9).token_ids


def test_only_scratch_of_its_own_is_written() -> None:
    passes, cache = make(3, 4)
    write(passes, 2, [1.0, 2.0])
    passes.tables([2], [2], [4], TABLE)
    pages = cache.pages(0)
    written = (~pages.isnan().any(dim=(1, 2, 4))).sum(dim=1)  # places of each page
    own = written[TABLE[2].tolist()].tolist()
    assert own == [PAGE, 3, *[0] * (PAGES - 2)]  # two entries and three levels of three
    assert int(written.sum()) == PAGE + 3


def test_a_row_with_fewer_levels_goes_on_at_its_last_place() -> None:
    passes, cache = make(3, 4)
    cache.pages(0).zero_()
    write(passes, 1, [1.0])
    write(passes, 2, [1.0])
    passes.tables([1, 2], [1, 1], [4, 2], TABLE)
    written = (cache.pages(0) != 0).any(dim=4).all(dim=(1, 2)).sum(dim=1)
    assert written[TABLE[2].tolist()].tolist() == [1 + 3, *[0] * (PAGES - 1)]


def test_a_slot_without_entries_is_refused() -> None:
    passes, _ = make(2, 3)
    write(passes, 1, [1.0])
    with pytest.raises(BrokenInvariantError, match="slot 0 is to propose and its draft has read nothing"):
        passes.tables([1, 0], [1, 0], [2, 2], TABLE)


def test_a_failed_level_is_an_error_of_the_device() -> None:
    head = Averaging()
    passes, _ = make(2, 3, head)
    write(passes, 1, [1.0])

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    head.rank = fails  # type: ignore[method-assign]
    with pytest.raises(StepDeviceError, match="a pass of the draft model failed: out of memory"):
        passes.tables([1], [1], [2], TABLE)


# ---- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top_k", "num_tokens", "depth", "each", "widths"),
    [
        (4, 1000, 5, 4, (4, 4, 4, 4)),
        (8, 2, 5, 2, (2, 4, 8, 8)),
        (8, 1, 4, 1, (1, 1, 1)),
        (3, 5, 1, 3, ()),
    ],
)
def test_levels_grow_behind_as_many_nodes_as_there_are(
    top_k: int, num_tokens: int, depth: int, each: int, widths: tuple[int, ...]
) -> None:
    sizes = LevelSizes.of(top_k, num_tokens, depth)
    assert (sizes.each, sizes.widths) == (each, widths)
    assert sizes.places(depth) == sum(widths) <= (depth - 1) * top_k
    assert sizes.places(1) == 0
    assert sizes.words(1) == 2 * each


def test_a_table_is_read_from_its_words() -> None:
    """Two levels, the second behind the second candidate and then the first."""
    sizes = LevelSizes.of(2, 9, 2)
    scores = np.array([-2.0, -1.0, -0.5, -0.25, -4.0, -3.0], np.float32).view(np.int32)
    words = np.concatenate([[4, 5], scores[:2], [1, 0], [6, 7, 8, 9], scores[2:]]).astype(np.int32)
    assert len(words) == sizes.words(2)
    table = sizes.table(words, 2)
    assert table.token_ids == [-1, 4, 5, 6, 7, 8, 9]
    assert table.parents == [-1, 0, 0, 2, 2, 1, 1]
    assert table.scores == [0.0, -2.0, -1.0, -1.5, -1.25, -6.0, -5.0]
    first = sizes.table(words, 1)
    assert first.token_ids == [-1, 4, 5]
