"""Attention for heads of 512 columns on CUDA: launches and refusals, then the device against the reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from prefill_cases import Batch, Case, assert_close, assert_written, feature_cases, make_batch
from row_ops import assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.paged_attention_wide import SPEC, launch_config, paged_attention_wide
from edgellm.kernels.ref import paged_attention_wide as ref
from edgellm.kernels.ref.paged_prefill import paged_prefill as ref_prefill

HALF = [torch.float16, torch.bfloat16]


def test_reference_is_that_of_prefill() -> None:
    for case in feature_cases(head_dim=512)[::4]:
        batch = make_batch(case)
        assert_same_bits(batch.run(ref.paged_attention_wide), batch.run(ref_prefill))


def test_launch_config() -> None:
    assert launch_config(100, 3, 2, 4).grid == (2, 28, 1)
    assert launch_config(100, 3, 2, 4).block == (256, 1, 1)
    assert launch_config(1, 1, 1, 1).shared_bytes <= 99 * 1024


def test_launches_and_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    batch = make_batch(Case(((3, 4), (20, 5)), head_dim=512, kv_heads=3, group=3, is_tree=True))
    batch.run(paged_attention_wide)
    make_batch(Case(((3, 4),), head_dim=512, dtype=torch.float16, is_fp8=True)).run(paged_attention_wide)
    keys = [(torch.bfloat16, False), (torch.float16, True)]
    assert [(launch.spec, launch.key) for launch in launches] == [(SPEC, key) for key in keys]
    params = launches[0].params
    assert (params["num_rows"], params["num_sequences"], params["num_heads"], params["group"]) == (9, 2, 9, 3)
    assert launches[0].config.grid == (3, 9 * 3 // 16 + 2, 1)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(((3, 4),), head_dim=256), "head_dim is 256; this kernel has 512 alone"),
        (Case(((3, 4),), head_dim=512, dtype=torch.float32), "query is .*torch.float16"),
        (Case(((0, 300000),), head_dim=512, kv_heads=1, group=4), "75001 row tiles; at most 65535"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, case: Case, message: str) -> None:
    launches = record_launches(monkeypatch)
    rows = sum(new for _, new in case.sequences)
    if rows > 1000:
        batch = make_batch(Case(((3, 4),), head_dim=512, kv_heads=1, group=4))
        batch.operands["query"] = torch.empty(rows, 4 * 512, dtype=torch.bfloat16, device="meta")
    else:
        batch = make_batch(case)
    with pytest.raises(InvalidArgumentError, match=message):
        batch.run(paged_attention_wide)
    assert not launches


def check(case: Case) -> None:
    batch = make_batch(case).to("cuda")
    out = batch.run(paged_attention_wide)
    assert_close(out, batch.run(ref.paged_attention_wide))
    assert_written(batch, out)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_device_equals_reference(dtype: torch.dtype, is_fp8: bool) -> None:
    for case in feature_cases(dtype=dtype, head_dim=512, is_fp8=is_fp8):
        check(case)


def rows_of(batch: Batch, first: int, end: int) -> Batch:
    """Rows [first, end) of a batch of one sequence without a past."""
    changed: dict[str, Any] = {
        "query": batch.operands["query"][first:end],
        "query_start": torch.tensor([0, end - first], dtype=torch.int32, device="cuda"),
        "past_len": torch.tensor([first], dtype=torch.int32, device="cuda"),
    }
    return Batch(batch.case, batch.operands | changed)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 100])
def test_bits_do_not_depend_on_chunks_or_pages(window: int) -> None:
    results = []
    for page_size in (16, 128):
        case = Case(((0, 300),), head_dim=512, page_size=page_size, window=window, kv_heads=1)
        batch = make_batch(case).to("cuda")
        results.append(batch.run(paged_attention_wide))
        assert_same_bits(results[-1], results[0])
        borders = [0, 1, 31, 32, 33, 150, 299, 300]
        for first, end in itertools.pairwise(borders):
            assert_same_bits(rows_of(batch, first, end).run(paged_attention_wide), results[0][first:end])


@pytest.mark.gpu
def test_graph_equals_eager_with_other_lengths() -> None:
    batch = make_batch(Case(((100, 30), (7, 16)), head_dim=512), pages_per_slot=20).to("cuda")
    other = make_batch(Case(((200, 2), (1, 44)), head_dim=512, seed=3), pages_per_slot=20).to("cuda")
    out = torch.full_like(batch.run(paged_attention_wide), 7.0)
    graph = captured(lambda: paged_attention_wide(**batch.operands, out=out))
    for name, value in other.operands.items():
        if isinstance(value, torch.Tensor):
            batch.operands[name].copy_(value)
    graph.replay()
    assert_same_bits(out, other.run(paged_attention_wide))


@pytest.mark.gpu
def test_sanitizer_paged_attention_wide() -> None:
    for is_fp8 in (False, True):
        check(Case(((0, 3), (-1, 2), (60, 4)), head_dim=512, is_fp8=is_fp8, is_tree=is_fp8))
