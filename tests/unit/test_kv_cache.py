"""`KVCache`: what is written is gathered, pages are copied whole, and budgets buy the right number of pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgellm.errors import InvalidArgumentError, StepDeviceError
from edgellm.kernels.ref.fp8_pages import dequantise_rows, quantise_rows, split_pages
from edgellm.runtime import kv_cache
from edgellm.runtime.kv_cache import KVBudget, KVCache, parse_kv_budget, parse_size

GIB = 1 << 30


def make_cache(dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(num_layers=2, num_pages=5, num_kv_heads=3, page_size=4, head_dim=6, dtype=dtype)


def test_sizes() -> None:
    cache = make_cache()
    assert cache.bytes_per_token == 2 * 2 * 3 * 6 * 4
    assert cache.bytes_per_page == 4 * cache.bytes_per_token
    assert cache.num_bytes == 5 * cache.bytes_per_page
    assert make_cache(torch.bfloat16).bytes_per_token == 2 * 2 * 3 * 6 * 2
    assert cache.pages(1).shape == (5, 2, 3, 4, 6)


def uneven_cache(dtype: torch.dtype = torch.float32) -> KVCache:
    """Three layers of two shapes; the page ids are those of all."""
    shapes = [(3, 6), (1, 8), (3, 6)]
    return KVCache(num_layers=3, num_pages=5, num_kv_heads=3, page_size=16, head_dim=6, dtype=dtype, shapes=shapes)


def test_layers_of_different_shapes_share_one_budget() -> None:
    cache = uneven_cache()
    assert cache.bytes_per_token == 2 * (3 * 6 + 8 + 3 * 6) * 4
    assert cache.num_bytes == 5 * 16 * cache.bytes_per_token == sum(cache.pages(layer).nbytes for layer in range(3))
    assert [tuple(cache.pages(layer).shape) for layer in range(3)] == [
        (5, 2, 3, 16, 6),
        (5, 2, 1, 16, 8),
        (5, 2, 3, 16, 6),
    ]
    with pytest.raises(InvalidArgumentError, match=r"layers of 2 x \(3, 6\), 1 x \(1, 8\).*need one shape"):
        _ = cache.storage


def test_layers_of_different_shapes_are_written_copied_and_poisoned_together() -> None:
    cache = uneven_cache()
    offsets = np.array([48, 49], np.int64)
    written = []
    for layer, (heads, head_dim) in enumerate(cache.shapes):
        rows = torch.randn(2, 2, heads, head_dim)
        cache.write(layer, rows[0], rows[1], offsets)
        written.append(rows.transpose(1, 2))
    cache.copy_pages(np.array([3], np.int32), np.array([1], np.int32))
    cache.fill_poison(np.array([3], np.int32))
    for layer, rows in enumerate(written):
        assert torch.equal(cache.gather(layer, np.array([1], np.int32), 2), rows)
        assert bool(cache.pages(layer)[3].isnan().all())


def test_shapes_of_other_layers_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="shapes has 1 entries; one for each of 2 layers"):
        KVCache(num_layers=2, num_pages=5, num_kv_heads=3, page_size=4, head_dim=6, shapes=[(3, 6)])


def test_written_tokens_are_gathered_in_order_and_nothing_else_is_touched() -> None:
    cache = make_cache()
    cache.fill_poison()
    k, v = torch.randn(6, 3, 6), torch.randn(6, 3, 6)
    pages = np.array([3, 1], np.int32)
    offsets = np.array([12, 13, 14, 15, 4, 5], np.int64)
    cache.write(1, k, v, offsets)
    gathered = cache.gather(1, pages, 6)
    assert gathered.shape == (2, 3, 6, 6)
    assert torch.equal(gathered[0], k.transpose(0, 1))
    assert torch.equal(gathered[1], v.transpose(0, 1))
    assert int(cache.pages(1).isnan().sum()) == (5 * 4 - 6) * 2 * 3 * 6
    assert bool(cache.pages(0).isnan().all())


def test_indexed_write_equals_the_kernel() -> None:
    """The road of devices without the CPU kernel stores the same."""
    ours, theirs = make_cache(), make_cache()
    ours.fill_poison()
    theirs.fill_poison()
    k, v = torch.randn(3, 3, 6), torch.randn(3, 3, 6)
    offsets = np.array([19, -1, 0], np.int64)
    ours.write(0, k, v, offsets)
    theirs._write_by_index(0, k, v, offsets)
    assert torch.equal(ours.pages(0).nan_to_num(9.0), theirs.pages(0).nan_to_num(9.0))


def test_copy_pages_reads_all_sources_first() -> None:
    cache = make_cache()
    for layer in range(2):
        for page in range(5):
            cache.pages(layer)[page] = 10 * layer + page
    cache.copy_pages(np.array([0, 1, 2], np.int32), np.array([1, 0, 4], np.int32))
    for layer in range(2):
        assert [cache.pages(layer)[page].unique().tolist() for page in range(5)] == [
            [10.0 * layer + value] for value in (1, 0, 2, 3, 2)
        ]


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([0], [5], r"target pages \[5\] are not all in \[0, 5\)"),
        ([-1], [0], r"source pages \[-1\]"),
        ([0, 1], [2], "2 source pages, 1 target pages"),
        ([0, 1], [2, 2], "each once"),
    ],
)
def test_copy_pages_refuses(sources: list[int], targets: list[int], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make_cache().copy_pages(np.array(sources, np.int32), np.array(targets, np.int32))


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([0.5], [1], r"source pages are float64 of shape \(1,\); a list of whole page numbers in \[0, 5\) is needed"),
        ([[0], [1]], [2, 3], r"source pages are int64 of shape \(2, 1\)"),
        ([0], 3, r"target pages are int64 of shape \(\)"),
        ([0], [True], "target pages are bool"),
        ([0], [2**32], r"target pages \[4294967296\] are not all in \[0, 5\)"),
    ],
)
def test_copy_pages_refuses_what_are_no_page_numbers(sources: object, targets: object, message: str) -> None:
    cache = make_cache()
    cache.pages(0).fill_(1.0)
    with pytest.raises(InvalidArgumentError, match=message):
        cache.copy_pages(np.array(sources), np.array(targets))
    assert bool((cache.pages(0) == 1.0).all())


def test_a_device_that_fails_while_pages_are_copied_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(cache, "_copy_pages", broken)
    with pytest.raises(StepDeviceError, match="copying 2 pages failed: CUDA error: an illegal") as caught:
        cache.copy_pages(np.array([0, 1], np.int32), np.array([2, 3], np.int32))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_gather_refuses_pages_that_do_not_cover_the_length() -> None:
    with pytest.raises(InvalidArgumentError, match="9 tokens are not covered by pages"):
        make_cache().gather(0, np.array([0, 1], np.int32), 9)
    with pytest.raises(InvalidArgumentError, match="not covered"):
        make_cache().gather(0, np.array([0, -1], np.int32), 5)


def test_poison_of_some_pages_leaves_the_others() -> None:
    cache = make_cache()
    cache.pages(0).zero_()
    cache.pages(1).zero_()
    cache.fill_poison(np.array([1, 3], np.int32))
    for layer in range(2):
        assert [bool(cache.pages(layer)[page].isnan().all()) for page in range(5)] == [False, True, False, True, False]


def make_device_cache(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, *, page_size: int = 16, device: str = "cpu"
) -> KVCache:
    """A cache as a CUDA device has it; on the CPU it takes the same road, by index instead of the CPU's kernels."""
    monkeypatch.setattr(kv_cache, "CPU_DTYPES", kv_cache.DEVICE_DTYPES)
    cache = KVCache(
        num_layers=2, num_pages=5, num_kv_heads=3, page_size=page_size, head_dim=6, dtype=dtype, device=device
    )
    cache._has_cpu_kernels = False
    return cache


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_fp8_sizes_count_the_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_device_cache(monkeypatch, torch.float8_e4m3fn)
    assert cache.dtype == torch.float8_e4m3fn
    assert cache.bytes_per_token == 2 * 2 * 3 * (6 + 4)
    assert cache.num_bytes == cache.storage.numel() == 5 * 16 * cache.bytes_per_token
    assert cache.pages(1).shape == (5, 2, 3, 16 * (6 + 4))
    assert cache.pages(1).dtype == torch.uint8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_device_cache_writes_and_gathers(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, device: str) -> None:
    cache = make_device_cache(monkeypatch, dtype, device=device)
    cache.fill_poison()
    k, v = torch.randn(2, 18, 3, 6, device=device).bfloat16()
    offsets = np.array([*range(48, 64), 17, -1], np.int64)
    cache.write(1, k, v, offsets)
    gathered = cache.gather(1, np.array([3, 1], np.int32), 18)
    assert gathered.shape == (2, 3, 18, 6)
    assert bool(gathered[:, :, 16].isnan().all())  # place 0 of page 1 was not written
    expected = torch.stack((k, v))[:, :17].transpose(1, 2)
    is_fp8 = dtype == torch.float8_e4m3fn
    expected = dequantise_rows(*quantise_rows(expected)) if is_fp8 else expected.to(dtype)
    assert torch.equal(gathered[:, :, [*range(16), 17]], expected)
    assert int(cache.gather(1, np.arange(5, dtype=np.int32), 80).isnan().sum()) == (5 * 16 - 17) * 2 * 3 * 6
    assert bool(cache.gather(0, np.arange(5, dtype=np.int32), 80).isnan().all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_moved_tokens_keep_their_values_and_scales(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, device: str
) -> None:
    """Sources are read before targets are written: 17 goes to 16, and what 17 gets is the old 19."""
    cache = make_device_cache(monkeypatch, dtype, device=device)
    rows = torch.randn(2, 80, 3, 6, device=device)
    for layer in range(2):
        cache.write(layer, rows[0], rows[1], np.arange(80, dtype=np.int64))
    before = [cache.gather(layer, np.arange(5, dtype=np.int32), 80) for layer in range(2)]
    cache.move_tokens(np.array([17, 19, 70], np.int64), np.array([16, 17, 2], np.int64))
    for layer, old in enumerate(before):
        new = cache.gather(layer, np.arange(5, dtype=np.int32), 80)
        moved = [*range(80)]
        moved[16], moved[17], moved[2] = 17, 19, 70
        assert torch.equal(new, old[:, :, moved])


def test_tokens_move_in_layers_of_every_shape() -> None:
    cache = KVCache(
        num_layers=3, num_pages=2, num_kv_heads=2, page_size=4, head_dim=8, shapes=[(2, 8), (1, 16), (2, 8)]
    )
    for layer in range(3):
        cache.pages(layer).copy_(torch.arange(8).view(2, 1, 1, 4, 1).float() + 10 * layer)
    cache.move_tokens(np.array([7], np.int64), np.array([1], np.int64))
    for layer in range(3):
        places = cache.gather(layer, np.arange(2, dtype=np.int32), 8)[0, 0, :, 0] - 10 * layer
        assert places.tolist() == [0, 7, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_pages_carry_their_scales(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    cache = make_device_cache(monkeypatch, torch.float8_e4m3fn, device=device)
    cache.fill_poison()
    k, v = torch.randn(2, 16, 3, 6, device=device) * 1000
    cache.write(0, k, v, np.arange(16, dtype=np.int64))
    for source, target in (([0], [4]), ([4, 0], [0, 2])):
        cache.copy_pages(np.array(source, np.int32), np.array(target, np.int32))
    pages = [cache.gather(0, np.array([page], np.int32), 16) for page in (0, 2, 4)]
    assert not pages[0].isnan().any()
    assert torch.equal(pages[0], pages[1])
    assert torch.equal(pages[0], pages[2])
    cache.fill_poison(np.array([2], np.int32))
    values, scales = split_pages(cache.storage, 16, 6)
    assert bool(scales[:, 2].isnan().all())
    assert bool((values[:, 2] == 0x7F).all())
    assert torch.equal(cache.gather(0, np.array([0], np.int32), 16), pages[0])


def test_device_cache_refuses_what_the_cpu_kernels_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_device_cache(monkeypatch, torch.float16)
    rows = torch.zeros(2, 3, 6)
    with pytest.raises(InvalidArgumentError, match="offset 80 is beyond the last place 79"):
        cache.write(0, rows, rows, np.array([0, 80], np.int64))
    with pytest.raises(InvalidArgumentError, match=r"K is \(2, 3, 6\) and V \(1, 3, 6\); \(2, 3, 6\) is needed"):
        cache.write(0, rows, rows[:1], np.array([0, 1], np.int64))
    for pages, length in (([0, 1], 33), ([0, -1], 17), ([0, 5], 17)):
        with pytest.raises(InvalidArgumentError, match=f"{length} tokens are not covered"):
            cache.gather(0, np.array(pages, np.int32), length)


def test_fp8_pages_need_whole_accesses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match="an fp8 page of 4 tokens takes 40 bytes a head; a multiple of 16"):
        make_device_cache(monkeypatch, torch.float8_e4m3fn, page_size=4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_types_of_cuda_devices_are_refused_on_the_cpu(dtype: torch.dtype) -> None:
    message = f"KV dtype is {dtype}; supported on cpu: torch.float32, torch.bfloat16; on a CUDA device float16 and fp8"
    with pytest.raises(InvalidArgumentError, match=message):
        make_cache(dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 0}, "num_pages is 0"),
        ({"dtype": torch.float16}, "KV dtype is torch.float16; supported"),
        ({"dtype": torch.int8}, "KV dtype is torch.int8; supported"),
    ],
)
def test_158_bad_sizes_and_other_types_are_refused(changes: dict[str, object], message: str) -> None:
    sizes = {"num_layers": 1, "num_pages": 1, "num_kv_heads": 1, "page_size": 1, "head_dim": 2}
    with pytest.raises(InvalidArgumentError, match=message):
        KVCache(**(sizes | changes))  # type: ignore[arg-type]


def budget_pages(budget: int | float | str | None) -> int:
    """1 MiB pages of 32 tokens, 4 GiB free, 1,000 tokens by default."""
    return parse_kv_budget(
        budget, bytes_per_page=1 << 20, page_size=32, free_bytes=4 * GIB, default_tokens=1000
    ).num_pages


@pytest.mark.parametrize(
    ("budget", "pages"),
    [
        (None, 32),
        (1, 1),
        (32, 1),
        (33, 2),
        (4096, 128),
        ("1GiB", 1024),
        ("512MB", 488),
        ("1.5 gib", 1536),
        ("2097152 B", 2),
        (0.25, 1024),
        (0.95, 3891),
    ],
)
def test_budgets(budget: int | float | str | None, pages: int) -> None:
    assert budget_pages(budget) == pages


def test_default_takes_at_most_half_of_free_memory() -> None:
    result = parse_kv_budget(None, bytes_per_page=1 << 20, page_size=32, free_bytes=GIB, default_tokens=10**9)
    assert result.num_pages == 512


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (0, "kv_budget is 0 tokens; at least 1"),
        (-5, "kv_budget is -5 tokens"),
        (True, "kv_budget is True; pass an int for tokens"),
        (0.0, r"fraction 0.0; it must be in \(0, 0.95\]"),
        (0.96, r"fraction 0.96; it must be in \(0, 0.95\]"),
        (1.0, r"fraction 1.0; it must be in \(0, 0.95\]"),
        (1.5, r"fraction 1.5"),
        (float("nan"), "fraction nan"),
        ("lots", "kv_budget is 'lots'; pass an int for tokens, a size like '2GiB' for bytes, or a float"),
        ("16384", "kv_budget is '16384', text without a unit; pass an int for tokens, a size like '2GiB' for bytes"),
        ("0.25", "kv_budget is '0.25', text without a unit; pass an int .*a float for a fraction of free memory"),
        ([1], r"kv_budget is \[1\]; pass an int for tokens"),
        ("1KiB", "holds no page: one page of 32 tokens takes 1.0 MiB, 4.0 GiB are free"),
        ("5GiB", "needs 5.0 GiB, 4.0 GiB are free; at most 131072 tokens fit"),
        (200_000, "at most 131072 tokens fit"),
    ],
)
def test_bad_budgets_are_refused(budget: int | float | str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        budget_pages(budget)


@pytest.mark.parametrize(("tokens", "warns"), [(32, True), (33, False)])
def test_a_pool_of_one_page_is_warned_about(tokens: int, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="edgellm"):
        budget_pages(tokens)
    expected = ["the KV pool has 1 page of 32 tokens; raise kv_budget or lower page_size, or nothing can be reused"]
    assert [record.getMessage() for record in caplog.records] == (expected if warns else [])


def test_budget_prints() -> None:
    budget = KVBudget(num_pages=256, page_size=32, bytes_per_page=1474560, free_bytes=20 * GIB)
    assert (budget.total_bytes, budget.num_tokens) == (377487360, 8192)
    assert str(budget) == "KV cache 360.0 MiB of 20.0 GiB free: 8,192 tokens in 256 pages of 32 (1.4 MiB a page)"


def test_sizes_with_units() -> None:
    assert [parse_size(text) for text in ("1k", "1KiB", "2MB", "3 T", "10B")] == [1000, 1024, 2000000, 3 * 10**12, 10]
    with pytest.raises(InvalidArgumentError):
        parse_size("10iB")
