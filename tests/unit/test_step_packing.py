"""`StepInputs`: the exact words of a padded step, changed page rows, refusals, and the compiled module's stub."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged import permuted_page_rows, ragged_batch
from test_core_stubs import built_names, built_parameters, declared_names, same_parameters, stub_parameters

from edgellm.errors import ContractViolation, InvariantError
from edgellm.runtime import _step_packing
from edgellm.runtime.step_inputs import StepInputs, StepShape, section_starts, split_rows

NUM_SLOTS, PAGES_PER_SLOT, PAGE_SIZE = 6, 5, 4
VOCAB = 50


def make_inputs(sent: list[tuple[list[int], torch.Tensor]] | None = None) -> StepInputs:
    def update(table: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        table[slots.long()] = rows
        if sent is not None:
            sent.append((slots.tolist(), rows.clone()))

    inputs = StepInputs(
        device=torch.device("cpu"),
        num_slots=NUM_SLOTS,
        pages_per_slot=PAGES_PER_SLOT,
        page_size=PAGE_SIZE,
        num_pages=NUM_SLOTS * PAGES_PER_SLOT,
        update_table=update,
    )
    inputs.reserve(StepShape(40, 6, 6, 12))
    return inputs


def test_the_words_of_a_padded_step() -> None:
    """Two chunks, two decode rows; padded to eight context tokens, three context rows, four decode rows."""
    inputs = make_inputs()
    rows = [(4, 0, [11, 12, 13]), (1, 6, [14, 15]), (0, 9, [16]), (5, 3, [17])]
    batch = ragged_batch(rows, permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=1))
    batch.logits_index, batch.logits_to_seq = np.array([4, 5, 6]), np.array([1, 2, 3], np.int32)
    assert split_rows(batch, decode_apart=True) == StepShape(5, 2, 2, 3)
    shape = StepShape(8, 3, 4, 7)
    inputs.stage(batch, shape)
    step = inputs.views(shape)
    assert step.token_ids.tolist() == [11, 12, 13, 14, 15, 0, 0, 0, 16, 17, 0, 0]
    assert step.positions.tolist() == [0, 1, 2, 6, 7, 0, 0, 0, 9, 3, 0, 0]
    assert step.token_seq.tolist() == [0, 0, 0, 1, 1, -1, -1, -1, 3, 4, -1, -1]
    assert step.slots.tolist() == [4, 1, -1, 0, 5, -1, -1]
    assert step.query_start.tolist() == [0, 3, 5, 5, 9, 10, 11, 12]
    assert step.past_len.tolist() == [0, 6, 0, 9, 3, 0, 0]
    assert step.lengths.tolist() == [3, 8, 0, 10, 4, 0, 0]
    assert step.logits_index.tolist() == [4, 8, 9, 0, 0, 0, 0]
    assert step.checkpoint_start.tolist() == [-1] * 7


def test_all_rows_as_context_rows() -> None:
    inputs = make_inputs()
    batch = ragged_batch(
        [(2, 0, [7, 8]), (3, 5, [9]), (1, 1, [4])], permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=2)
    )
    shape = StepShape(16, 4, 0, 4)
    inputs.stage(batch, shape, np.array([0, -1, 2], np.int32))
    step = inputs.views(shape)
    assert step.token_ids.tolist() == [7, 8, 9, 4] + [0] * 12
    assert step.token_seq.tolist() == [0, 0, 1, 2] + [-1] * 12
    assert step.query_start.tolist() == [0, 2, 3, 4, 4]
    assert step.slots.tolist() == [2, 3, 1, -1]
    assert step.logits_index.tolist() == [1, 2, 3, 0]
    assert step.checkpoint_start.tolist() == [0, -1, 2, -1]


def test_a_step_of_padding_alone() -> None:
    inputs = make_inputs()
    inputs.stage(
        ragged_batch([(2, 0, [7, 8])], permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=3)), StepShape(2, 1, 0, 1)
    )
    shape = StepShape(3, 2, 1, 3)
    inputs.stage_padding(shape)
    step = inputs.views(shape)
    assert step.token_seq.tolist() == [-1] * 4
    assert step.slots.tolist() == step.checkpoint_start.tolist() == [-1] * 3
    for section in (step.token_ids, step.positions, step.query_start, step.past_len, step.lengths, step.logits_index):
        assert not section.any()


def test_sections_start_at_multiples_of_sixteen_bytes() -> None:
    starts = section_starts(StepShape(5, 2, 2, 3))
    assert starts == (0, 8, 16, 24, 28, 36, 40, 44, 48, 52, 56, 60, 96)


def test_the_devices_table_equals_the_hosts_wherever_a_step_reads() -> None:
    """Random rows, random changes behind the executor's back; what is read was sent, what was sent is kept."""
    rng = np.random.default_rng(4)
    sent: list[tuple[list[int], torch.Tensor]] = []
    inputs = make_inputs(sent)
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=4)
    for _ in range(60):
        slot = int(rng.integers(NUM_SLOTS))
        page_rows[slot] = rng.permutation(NUM_SLOTS * PAGES_PER_SLOT)[:PAGES_PER_SLOT]
        slots = rng.permutation(NUM_SLOTS)[: rng.integers(1, NUM_SLOTS + 1)].tolist()
        pasts = rng.integers(0, PAGE_SIZE * PAGES_PER_SLOT, len(slots)).tolist()
        batch = ragged_batch([(s, p, [1]) for s, p in zip(slots, pasts, strict=True)], page_rows)
        inputs.stage(batch, split_rows(batch, decode_apart=True))
        for s, p in zip(slots, pasts, strict=True):
            blocks = p // PAGE_SIZE + 1
            assert inputs.table[s, :blocks].tolist() == page_rows[s, :blocks].tolist()
        before = len(sent)
        inputs.stage(batch, split_rows(batch, decode_apart=True))
        assert len(sent) == before, "nothing changed, and rows were sent"
        assert np.array_equal(inputs.table.numpy(), inputs._shadow)


def test_after_a_failure_every_row_is_sent_again() -> None:
    sent: list[tuple[list[int], torch.Tensor]] = []
    inputs = make_inputs(sent)
    batch = ragged_batch([(3, 5, [1]), (2, 0, [1])], permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=5))
    for _ in range(2):
        inputs.stage(batch, StepShape(0, 0, 2, 2))
    inputs.forget()
    inputs.stage(batch, StepShape(0, 0, 2, 2))
    assert [slots for slots, _ in sent] == [[3, 2], [3, 2]]
    assert sent[1][1][1].tolist()[1:] == [-1, -1, -1], "entries that nobody reads are not sent as pages"


def test_a_batch_larger_than_the_step_is_a_broken_invariant() -> None:
    inputs = make_inputs()
    batch = ragged_batch([(2, 0, [7, 8, 9])], permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=6))
    for shape in (StepShape(2, 1, 0, 1), StepShape(4, 0, 0, 1), StepShape(4, 1, 0, 0)):
        with pytest.raises(InvariantError, match="fit"):
            inputs.stage(batch, shape)
    with pytest.raises(InvariantError, match=r"does not fit .* words"):
        inputs.stage(batch, StepShape(100_000, 1, 0, 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", [1, VOCAB, 3]),
        ("token_ids", [1, -1, 3]),
        ("positions", [0, 2, 3]),
        ("positions", [0, 1]),
        ("query_start", [0, 2, 4]),
        ("query_start", [1, 3, 4]),
        ("query_start", [0, 2]),
        ("query_len", [2, 0]),
        ("query_len", [3, 0]),
        ("query_len", [2, 9]),
        ("past_len", [-1, 7]),
        ("past_len", [0]),
        ("past_len", [19, 7]),
        ("state_index", [NUM_SLOTS, 1]),
        ("state_index", [-1, 1]),
        ("state_index", [0, 5]),
        ("logits_index", [3]),
        ("logits_index", [-1]),
    ],
)
def test_every_contradiction_is_refused(field: str, value: list[int]) -> None:
    """Two rows, of two tokens and of one; slot 5 has an entry outside the pool."""
    page_rows = permuted_page_rows(NUM_SLOTS, PAGES_PER_SLOT, seed=7)
    page_rows[5, 1] = NUM_SLOTS * PAGES_PER_SLOT
    inputs = make_inputs()
    batch: Any = ragged_batch([(0, 0, [1, 2]), (1, 7, [3])], page_rows)
    inputs.check(batch, VOCAB)
    setattr(batch, field, np.array(value, getattr(batch, field).dtype))
    with pytest.raises(ContractViolation):
        inputs.check(batch, VOCAB)


def test_the_stub_declares_the_module() -> None:
    stub_path = Path(_step_packing.__file__).with_name("_step_packing.pyi")
    stub = declared_names(ast.parse(stub_path.read_text(encoding="utf-8")).body)
    assert set(stub) == set(built_names(_step_packing))
    for name, declared in stub.items():
        if not isinstance(declared, ast.FunctionDef):
            continue
        built = inspect.signature(getattr(_step_packing, name))
        assert same_parameters(stub_parameters(declared), built_parameters(built)), name
