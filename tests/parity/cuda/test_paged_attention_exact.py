"""Attention of ragged rows by plain loops on CUDA: launches and refusals, then the device against the reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from prefill_cases import Batch, Case, assert_close, assert_written, feature_cases, make_batch
from row_ops import assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.paged_attention_exact import SPEC, launch_config, paged_attention_exact
from edgellm.kernels.ref import paged_attention_exact as ref
from edgellm.kernels.ref.paged_prefill import paged_prefill as ref_prefill

HEAD_DIMS = (8, 40, 64, 96, 128, 200, 256, 320, 512)
HALF = [torch.float16, torch.bfloat16]


def reference(batch: Batch) -> torch.Tensor:
    return batch.run(ref.paged_attention_exact)


def test_reference_is_that_of_prefill() -> None:
    for case in feature_cases(dtype=torch.float32, head_dim=24)[::4]:
        batch = make_batch(case)
        assert_same_bits(reference(batch), batch.run(ref_prefill))


def test_launch_config() -> None:
    assert launch_config(7, 9).grid == (63, 1, 1)
    assert launch_config(7, 9).block == (256, 1, 1)


def test_launches_and_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    batch = make_batch(Case(((3, 4), (20, 5)), dtype=torch.float32, head_dim=40, kv_heads=3, group=3, is_tree=True))
    batch.run(paged_attention_exact)
    assert [(launch.spec, launch.key) for launch in launches] == [(SPEC, (torch.float32, False, 256))]
    params = launches[0].params
    assert (params["num_rows"], params["num_sequences"], params["num_heads"], params["group"]) == (9, 2, 9, 3)
    assert (params["head_dim"], params["page_shift"], params["mask_words"]) == (40, 4, 2)


def test_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    cases = [
        Case(((3, 4),), dtype=torch.float16, head_dim=264),
        Case(((3, 4),), dtype=torch.bfloat16, head_dim=16, is_fp8=True),
        Case(((3, 4),), dtype=torch.bfloat16, head_dim=512),
    ]
    for case in cases:
        make_batch(case).run(paged_attention_exact)
    keys = [(torch.float16, False, 512), (torch.bfloat16, True, 256), (torch.bfloat16, False, 512)]
    assert [launch.key for launch in launches] == keys


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(((3, 4),), dtype=torch.float32, head_dim=12), "head_dim is 12; a multiple of 8 up to 512"),
        (Case(((3, 4),), dtype=torch.float32, head_dim=520), "head_dim is 520"),
        (Case(((3, 4),), dtype=torch.float32, is_fp8=True), "pages are torch.float8_e4m3fn and query is torch.float32"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, case: Case, message: str) -> None:
    launches = record_launches(monkeypatch)
    with pytest.raises(InvalidArgumentError, match=message):
        make_batch(case).run(paged_attention_exact)
    assert not launches


def test_cpu_tensors_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="query is on cpu; a CUDA tensor is needed"):
        make_batch(Case(((3, 4),), dtype=torch.float32)).run(paged_attention_exact)


def check(case: Case) -> None:
    batch = make_batch(case).to("cuda")
    out = batch.run(paged_attention_exact)
    assert_close(out, reference(batch))
    assert_written(batch, out)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_device_equals_reference(head_dim: int) -> None:
    for case in feature_cases(dtype=torch.float32, head_dim=head_dim):
        check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", [16, 80, 512])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_16_bit_rows_equal_reference(dtype: torch.dtype, head_dim: int, is_fp8: bool) -> None:
    for case in feature_cases(dtype=dtype, head_dim=head_dim, is_fp8=is_fp8):
        check(case)


@pytest.mark.gpu
def test_shape_of_the_default_model() -> None:
    check(Case(((0, 200), (1500, 1), (40, 1)), dtype=torch.float32, kv_heads=3, group=3))


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
        case = Case(((0, 600),), dtype=torch.float32, page_size=page_size, window=window, kv_heads=1)
        batch = make_batch(case).to("cuda")
        results.append(batch.run(paged_attention_exact))
        assert_same_bits(results[-1], results[0])
        borders = [0, 1, 31, 32, 33, 300, 599, 600]
        for first, end in itertools.pairwise(borders):
            assert_same_bits(rows_of(batch, first, end).run(paged_attention_exact), results[0][first:end])


@pytest.mark.gpu
def test_graph_equals_eager_with_other_lengths() -> None:
    batch = make_batch(Case(((100, 30), (7, 16)), dtype=torch.float32), pages_per_slot=20).to("cuda")
    other = make_batch(Case(((200, 2), (1, 44)), dtype=torch.float32, seed=3), pages_per_slot=20).to("cuda")
    out = torch.full_like(batch.run(paged_attention_exact), 7.0)
    graph = captured(lambda: paged_attention_exact(**batch.operands, out=out))
    for name, value in other.operands.items():
        if isinstance(value, torch.Tensor):
            batch.operands[name].copy_(value)
    graph.replay()
    assert_same_bits(out, other.run(paged_attention_exact))


@pytest.mark.gpu
def test_sanitizer_paged_attention_exact() -> None:
    for is_tree in (False, True):
        check(Case(((0, 3), (-1, 2), (60, 4)), dtype=torch.float32, head_dim=40, is_tree=is_tree))
    for is_fp8 in (False, True):
        check(Case(((0, 3), (-1, 2), (60, 4)), dtype=torch.bfloat16, head_dim=512, is_fp8=is_fp8))
