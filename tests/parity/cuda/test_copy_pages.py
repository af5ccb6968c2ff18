"""Copies of pages and of parts of pages on CUDA, against the reference; the reference against the CPU's cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from paged_case import FP8, random_storage
from row_ops import assert_same_bits, captured, record_launches

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.cu.copy_pages import copy_pages, launch_config
from edgellm.kernels.ref import copy_pages as ref
from edgellm.kernels.ref.fp8_pages import split_pages
from edgellm.runtime.kv_cache import KVCache

KV_TYPES = (torch.float32, torch.float16, torch.bfloat16, FP8)
LAYERS, PAGES = 3, 10


def int32(values: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_reference_copies_what_the_cache_copies() -> None:
    cache = KVCache(num_layers=LAYERS, num_pages=PAGES, num_kv_heads=2, page_size=16, head_dim=8)
    cache.storage.copy_(torch.randn_like(cache.storage))
    storage = cache.storage.clone()
    cache.copy_pages(np.array([1, 2], np.int32), np.array([5, 7], np.int32))
    ref.copy_pages(storage, int32([1, 2, -1, 0]), int32([5, 7, 3, -1]))
    assert torch.equal(storage, cache.storage)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_reference_copies_the_first_places(dtype: torch.dtype) -> None:
    storage = random_storage(LAYERS, PAGES, 2, 16, 8, dtype)
    before = storage.clone()
    ref.copy_pages(storage, int32([1, 2]), int32([5, 7]), places=int32([3, 99]), head_dim=8)
    assert torch.equal(storage[:, 7], before[:, 2])
    parts, old_parts = (split_pages(x, 16, 8) if dtype == FP8 else (x,) for x in (storage, before))
    for part, old in zip(parts, old_parts, strict=True):
        assert torch.equal(part[:, 5, :, :, :3], old[:, 1, :, :, :3])
        assert torch.equal(part[:, 5, :, :, 3:], old[:, 5, :, :, 3:])


def test_launch_config() -> None:
    assert launch_config(4, 28, 65536).grid == (4, 28, 4)
    assert launch_config(1, 1, 64).grid == (1, 1, 1)


def test_launches_and_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    storage = random_storage(LAYERS, PAGES, 2, 16, 64, FP8)
    copy_pages(storage, int32([1]), int32([2]))
    copy_pages(storage, int32([1]), int32([2]), places=int32([3]), head_dim=64)
    copy_pages(storage, int32([]), int32([]))
    whole, part = (launch.params for launch in launches)
    page = 2 * 2 * 16 * 68
    assert (whole["page_bytes"], whole["layer_bytes"], whole["num_pages"]) == (page, PAGES * page, PAGES)
    assert (part["head_bytes"], part["place_bytes"], part["page_size"]) == (16 * 68, 64, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"storage": torch.zeros(4, 4)}, "storage is"),
        ({"storage": torch.zeros(4, 4, 8).transpose(0, 1)}, "storage is"),
        ({"storage": torch.zeros(4, 4, 3)}, "pages of 12 bytes; .*a multiple of 16"),
        ({"source": torch.zeros(2)}, "source is"),
        ({"target": int32([1])}, "target is"),
        ({"places": int32([1])}, "places is"),
        ({"places": int32([1, 2]), "storage": torch.zeros(2, 4, 2, 2, 12, 8)}, "page size"),
        (
            {"places": int32([1, 2]), "storage": torch.zeros(2, 4, 2, 2, 16 * 68, dtype=torch.uint8)},
            "pass head_dim",
        ),
        ({"places": int32([1, 2]), "storage": torch.zeros(2, 4, 2, 2, 16, 3).half()}, "head takes 6 bytes"),
    ],
)
def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
    launches = record_launches(monkeypatch)
    arguments = {"storage": torch.zeros(2, 4, 2, 2, 16, 8), "source": int32([0, 1]), "target": int32([2, 3])}
    with pytest.raises(InvalidArgumentError, match=message):
        copy_pages(**(arguments | changes))
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize(("kv_heads", "page_size", "head_dim"), [(8, 16, 128), (2, 64, 64), (1, 16, 4), (3, 32, 36)])
def test_device_equals_reference(dtype: torch.dtype, kv_heads: int, page_size: int, head_dim: int) -> None:
    storage = random_storage(LAYERS, PAGES, kv_heads, page_size, head_dim, dtype)
    source, target = int32([3, 8, -1, 0, 5, 99, 1]), int32([1, 2, 4, -1, 6, 7, 0])
    places = int32([0, 1, 5, 5, page_size - 1, 3, page_size])
    source[6] = 9
    for options in ({}, {"places": places, "head_dim": head_dim}):
        expected, actual = storage.clone(), storage.cuda()
        ref.copy_pages(expected, source, target, **options)
        moved = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        copy_pages(actual, source.cuda(), target.cuda(), **moved)
        assert_same_bits(actual, expected)


@pytest.mark.gpu
def test_pages_of_many_chunks() -> None:
    storage = torch.randn(2, 6, 50_000, device="cuda")
    expected = storage.clone()
    expected[:, [5, 0]] = expected[:, [2, 3]]
    copy_pages(storage, int32([2, 3], "cuda"), int32([5, 0], "cuda"))
    assert_same_bits(storage, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KV_TYPES)
def test_the_cache_copies_also_in_circles(dtype: torch.dtype) -> None:
    cache = KVCache(num_layers=2, num_pages=6, num_kv_heads=2, page_size=16, head_dim=8, dtype=dtype, device="cuda")
    for source, target in (([0, 1], [4, 5]), ([0, 1, 2], [1, 0, 4])):
        cache.storage.copy_(random_storage(2, 6, 2, 16, 8, dtype))
        expected = cache.storage.clone()
        expected[:, target] = cache.storage[:, source]
        cache.copy_pages(np.array(source, np.int32), np.array(target, np.int32))
        assert_same_bits(cache.storage, expected)


@pytest.mark.gpu
def test_graph_equals_eager() -> None:
    before = random_storage(2, 8, 2, 16, 64, torch.bfloat16).cuda()
    storage, source, target = before.clone(), int32([0, 1], "cuda"), int32([2, 3], "cuda")
    graph = captured(lambda: copy_pages(storage, source, target))
    storage.copy_(before)
    source.copy_(int32([5, -1]))
    target.copy_(int32([7, 3]))
    graph.replay()
    before[:, 7] = before[:, 5]
    assert_same_bits(storage, before)


@pytest.mark.gpu
def test_sanitizer_copy_pages() -> None:
    storage = random_storage(2, 4, 3, 16, 36, FP8).cuda()
    copy_pages(storage, int32([0, -1], "cuda"), int32([3, 2], "cuda"))
    copy_pages(storage, int32([0], "cuda"), int32([2], "cuda"), places=int32([5], "cuda"), head_dim=36)
    torch.cuda.synchronize()
