"""Commit of accepted tree rows on CUDA, against the reference; the reference against plain gathering."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_case import FP8, page_table, random_storage
from row_ops import assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.commit_rows import commit_rows, launch_config, word_size
from edgellm.kernels.cu.tensors import KVLayout
from edgellm.kernels.ref import commit_rows as ref

KV_TYPES = (torch.float32, torch.float16, torch.bfloat16, FP8)
LAYERS = 3
WIDTH = 20  # columns of index


def int32(values: list[Any], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_case(
    dtype: torch.dtype, *, kv_heads: int = 2, page_size: int = 16, head_dim: int = 64
) -> dict[str, torch.Tensor]:
    """Trees that start anywhere in a page and span two; a chain, no tokens, one token, more than a batch; padding."""
    base = [0, page_size - 2, page_size + 5, 3]
    slots = [5, 1, 0, 3]
    table, num_pages = page_table(page_size, [length + 40 for length in base], slots)
    chosen = [[0, 3, 4, 9], [0, 2, 5, 6, 7, 10, 11, 14, 15, 17, 20, 21, 25, 30, 31, 32, 39], list(range(6)), [7]]
    index = torch.full((5, WIDTH), 10_000, dtype=torch.int32)
    for row, nodes in enumerate(chosen):
        index[row, : len(nodes)] = int32(nodes)
    index[4, :3] = int32([0, 2, 5])
    return {
        "storage": random_storage(LAYERS, num_pages, kv_heads, page_size, head_dim, dtype),
        "page_table": table,
        "slots": int32([*slots, -1]),
        "base_len": int32([*base, 0]),
        "index": index,
        "count": int32([len(nodes) for nodes in chosen] + [3]),
    }


def on_device(case: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in case.items()}


def test_reference_gathers_the_accepted_rows() -> None:
    case = make_case(torch.bfloat16)
    before = case["storage"].clone()
    ref.commit_rows(**case)

    for sequence in range(4):
        slot, length, count = case["slots"][sequence], int(case["base_len"][sequence]), int(case["count"][sequence])
        pages = case["page_table"][slot][case["page_table"][slot] >= 0].long()
        old, new = (storage[:, pages].permute(0, 2, 3, 1, 4, 5).flatten(3, 4) for storage in (before, case["storage"]))
        kept = case["index"][sequence, :count].long() + length
        assert torch.equal(new[..., length : length + count, :], old[..., kept, :])
        assert torch.equal(new[..., :length, :], old[..., :length, :])
        assert torch.equal(new[..., length + count :, :], old[..., length + count :, :])


def test_launch_config_and_words() -> None:
    assert launch_config(8, 28, 16 * 16).grid == (8, 28, 2)
    assert word_size(KVLayout(2, 16, 128, torch.bfloat16), 28) == 16
    assert word_size(KVLayout(2, 16, 6, torch.bfloat16), 28) == 4
    assert word_size(KVLayout(2, 16, 64, FP8), 28) == 16


def test_launches_and_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    commit_rows(**make_case(FP8, kv_heads=3), head_dim=64)
    commit_rows(**(make_case(torch.bfloat16) | {"index": torch.empty(5, 0, dtype=torch.int32)}))
    assert len(launches) == 1
    assert launches[0].key == (16,)
    params = launches[0].params
    assert (params["place_bytes"], params["scale_bytes"], params["num_heads"], params["max_count"]) == (64, 4, 6, WIDTH)
    assert launches[0].config == launch_config(5, LAYERS, (4 + 1) * 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"storage": torch.zeros(3, 4, 2, 2, 12, 8)}, "page size"),
        ({"storage": torch.zeros(3, 4, 2, 2, 16, 3).half()}, "heads of 6 bytes"),
        ({"page_table": int32([1, 2])}, "page_table is"),
        ({"slots": int32([[1], [2]])}, "slots is"),
        ({"base_len": int32([1])}, "base_len is"),
        ({"count": torch.zeros(5)}, "count is"),
        ({"index": int32([[1, 2]])}, "index is"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, changes: dict[str, torch.Tensor], message: str) -> None:
    launches = record_launches(monkeypatch)
    with pytest.raises(InvalidArgumentError, match=message):
        commit_rows(**(make_case(torch.float32) | changes))
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize(("kv_heads", "page_size", "head_dim"), [(8, 32, 128), (2, 16, 64), (1, 16, 4), (3, 64, 36)])
def test_device_equals_reference(dtype: torch.dtype, kv_heads: int, page_size: int, head_dim: int) -> None:
    case = make_case(dtype, kv_heads=kv_heads, page_size=page_size, head_dim=head_dim)
    device_case = on_device(case)
    commit_rows(**device_case, head_dim=head_dim)
    ref.commit_rows(**case, head_dim=head_dim)
    assert_same_bits(device_case["storage"], case["storage"])


@pytest.mark.gpu
def test_indices_that_do_not_increase_or_have_no_page_move_nothing_more() -> None:
    case = make_case(torch.bfloat16)
    case["index"][0, :4] = int32([0, 3, 2, 9])
    case["index"][1, :4] = int32([0, 0, 5, 6])
    case["index"][2, :3] = int32([1, 4, 10_000])
    case["slots"][3] = 77
    device_case = on_device(case)
    commit_rows(**device_case)
    case["count"].copy_(int32([2, 1, 2, 0, 0]))
    case["slots"][3] = 3
    ref.commit_rows(**case)
    assert_same_bits(device_case["storage"], case["storage"])


@pytest.mark.gpu
def test_graph_equals_eager() -> None:
    case = on_device(make_case(torch.bfloat16))
    before = case["storage"].clone()
    graph = captured(lambda: commit_rows(**case))
    case["storage"].copy_(before)
    case["count"].copy_(int32([1, 9, 6, 1, 0]))
    case["slots"][0] = -1
    graph.replay()
    eager = case | {"storage": before}
    commit_rows(**eager)
    assert_same_bits(case["storage"], before)


@pytest.mark.gpu
def test_sanitizer_commit_rows() -> None:
    for head_dim in (64, 36):
        commit_rows(**on_device(make_case(FP8, head_dim=head_dim)), head_dim=head_dim)
    torch.cuda.synchronize()
