"""`CpuExecutor` refuses batches that contradict themselves, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged import ragged_batch
from safetensors.torch import save_file
from test_models_weights import CONFIG, tensors

from edgellm.errors import ContractViolation, InvalidArgumentError, StepDeviceError
from edgellm.models.loader import load_model
from edgellm.runtime.batch import RaggedBatch
from edgellm.runtime.executor_cpu import CpuExecutor
from edgellm.runtime.kv_cache import KVCache

ROWS = np.array([[0, 1, 2], [3, 4, -1], [5, 6, 99]], np.int32)


@pytest.fixture
def executor(tmp_path: Path) -> CpuExecutor:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    kv_cache = KVCache.for_model(model.config, num_pages=8, page_size=4)
    kv_cache.fill_poison()
    return CpuExecutor(model, kv_cache)


def change(**values: Any) -> Callable[[RaggedBatch], None]:
    def apply(batch: RaggedBatch) -> None:
        for name, value in values.items():
            setattr(batch, name, value)

    return apply


@pytest.mark.parametrize(
    ("rows", "damage", "message"),
    [
        ([(1, 0, [1] * 9)], None, r"slot 1 reads and writes positions \[0, 9\).*outside \[0, 8\); grow the row"),
        ([(2, 8, [1])], None, r"slot 2 reads and writes positions \[0, 9\).*99"),
        ([(0, 12, [1])], None, "position 12 needs block 3, but a page row has 3 blocks of 4 tokens"),
        ([(0, 0, [1, 11])], None, r"token id 11 is not in \[0, 11\)"),
        ([(0, 0, [1, -1])], None, "token id -1"),
        ([(0, 0, [1, 2])], change(positions=np.array([0, 2], np.int32)), "positions do not continue past_len"),
        ([(0, 0, [1, 2])], change(query_start=np.array([0, 1], np.int32)), "is not the prefix sum"),
        ([(0, 0, [1, 2])], change(query_len=np.array([0], np.int32)), "at least one token a sequence"),
        ([(0, 0, [1, 2])], change(logits_index=np.array([2])), r"logits rows \[2\] are not all in \[0, 2\)"),
    ],
)
def test_refused_and_nothing_written(
    executor: CpuExecutor,
    rows: list[tuple[int, int, list[int]]],
    damage: Callable[[RaggedBatch], None] | None,
    message: str,
) -> None:
    batch = ragged_batch(rows, ROWS)
    if damage is not None:
        damage(batch)
    with pytest.raises(ContractViolation, match=message):
        executor.forward(batch)
    assert all(bool(executor.kv_cache.pages(layer).isnan().all()) for layer in range(2))


def test_no_logits_wanted(executor: CpuExecutor) -> None:
    """A prompt chunk that is not the last asks for none; its state is written all the same."""
    batch = ragged_batch([(0, 0, [1, 2, 3])], ROWS)
    batch.logits_index, batch.logits_to_seq = np.zeros(0, np.int64), np.zeros(0, np.int32)
    assert executor.forward(batch).shape == (0, 11)
    assert not executor.kv_cache.gather(1, ROWS[0], 3).isnan().any()


def test_returned_logits_are_the_callers(executor: CpuExecutor) -> None:
    first = executor.forward(ragged_batch([(0, 0, [1, 2, 3])], ROWS))
    kept = first.clone()
    executor.forward(ragged_batch([(1, 0, [4, 5])], ROWS))
    assert torch.equal(first, kept)


def test_library_failure_is_a_device_error(executor: CpuExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(executor.kv_cache, "write", fail)
    with pytest.raises(StepDeviceError, match="forward pass of 2 tokens failed: no memory; close the session"):
        executor.forward(ragged_batch([(0, 0, [1, 2])], ROWS))


def test_cache_of_another_shape_is_refused(executor: CpuExecutor, tmp_path: Path) -> None:
    other = KVCache(num_layers=3, num_pages=1, num_kv_heads=2, page_size=4, head_dim=2)
    with pytest.raises(InvalidArgumentError, match=r"layers of 3 x \(2, 2\).*the model 2 x \(2, 2\)"):
        CpuExecutor(load_model(tmp_path), other)
