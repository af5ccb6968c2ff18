"""`KVCache`: the one owner and accessor of the KV layout, and the budget that sizes it.

Layout: one tensor `[layer, page, 2 (K, V), kv_head, place, dim]`, so a page of one layer is contiguous and the
tokens of one head within it are too.  Where layers have different heads, one such tensor for each shape; a page id then
names the same page of all of them.  For fp8 the last two axes are bytes: the e4m3 values, then one float32 scale a
token (`edgellm.kernels.ref.fp8_pages`), so that a page carries its scales wherever it goes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edgellm.errors import InvalidArgumentError
from edgellm.kernels.ref import fp8_pages
from edgellm.log import get_logger
from edgellm.memory import count, format_bytes
from edgellm.runtime.device_cuda import device_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from edgellm.models.config import ModelConfig

logger = get_logger(__name__)

FP8 = torch.float8_e4m3fn
CPU_DTYPES = (torch.float32, torch.bfloat16)
DEVICE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, FP8)
BLOCK_BYTES = 16  # kernels read a head's block by accesses of this size
DEFAULT_MEMORY_FRACTION = 0.5
MAX_MEMORY_FRACTION = 0.95  # the rest is for scratch memory and for whatever else runs
BUDGET_FORMS = "pass an int for tokens, a size like '2GiB' for bytes, or a float for a fraction of free memory"
_SIZE_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)\s*", re.IGNORECASE)
_SIZE_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBudget:
    """How many pages a budget buys.

    Attributes:
        total_bytes: memory of all pages.
        free_bytes: memory that was free when the budget was made.
    """

    num_pages: int
    page_size: int
    bytes_per_page: int
    free_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.num_pages * self.bytes_per_page

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    def __str__(self) -> str:
        return (
            f"KV cache {format_bytes(self.total_bytes)} of {format_bytes(self.free_bytes)} free: "
            f"{self.num_tokens:,} tokens in {self.num_pages:,} pages of {self.page_size} "
            f"({format_bytes(self.bytes_per_page)} a page)"
        )


class KVCache:
    """Paged keys and values of all layers.

    Not thread-safe: one session drives it.  Pages are not cleared; whoever reads must know what was written.

    Args:
        shapes: (kv heads, head_dim) of each layer, where they differ; the other two are the first layer's then.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shapes: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        for name, value in (
            ("num_layers", num_layers),
            ("num_pages", num_pages),
            ("num_kv_heads", num_kv_heads),
            ("page_size", page_size),
            ("head_dim", head_dim),
        ):
            if value < 1:
                raise InvalidArgumentError(f"{name} is {value}; it must be at least 1")
        self.shapes = tuple(shapes or [(num_kv_heads, head_dim)] * num_layers)
        if len(self.shapes) != num_layers:
            raise InvalidArgumentError(
                f"shapes has {len(self.shapes)} entries; one for each of {num_layers} layers is needed"
            )
        for _, dim in self.shapes:
            _check_dtype(dtype, torch.device(device), page_size, dim)
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.num_kv_heads = num_kv_heads
        self.page_size = page_size
        self.head_dim = head_dim
        self._dtype = dtype
        # By shape, in the order in which shapes first appear.
        self._storages: dict[tuple[int, int], torch.Tensor] = {}
        for heads, dim in dict.fromkeys(self.shapes):
            shape = (self.shapes.count((heads, dim)), num_pages, 2, heads, *_block_shape(dtype, page_size, dim))
            stored = torch.uint8 if dtype == FP8 else dtype
            self._storages[heads, dim] = torch.empty(shape, dtype=stored, device=device)
        unbound = {shape: iter(storage.unbind(0)) for shape, storage in self._storages.items()}
        self._layers = [next(unbound[shape]) for shape in self.shapes]
        self._device = self._layers[0].device
        self._has_cpu_kernels = self._device.type == "cpu"

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """A cache of the model's shape."""
        return cls(
            num_layers=max(1, config.num_kv_layers),
            num_pages=num_pages,
            num_kv_heads=config.num_kv_heads,
            page_size=page_size,
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
            shapes=[(layer.num_kv_heads, layer.head_dim) for layer in config.kv_layers],
        )

    @staticmethod
    def page_bytes(config: ModelConfig, *, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page of such a cache; 0 for a model without attention layers."""
        scale_bytes = fp8_pages.SCALE_BYTES if dtype == FP8 else 0
        rows = (layer.num_kv_heads * (layer.head_dim * dtype.itemsize + scale_bytes) for layer in config.kv_layers)
        return 2 * page_size * sum(rows)

    def check_model(self, config: ModelConfig) -> None:
        """
        Raises:
            InvalidArgumentError: these are not pages of the model's shape.
        """
        wanted = tuple((layer.num_kv_heads, layer.head_dim) for layer in config.kv_layers)
        if self.shapes != (wanted or ((config.num_kv_heads, config.head_dim),)):
            raise InvalidArgumentError(
                f"the KV cache has layers of {_counted(self.shapes)} (kv heads, head_dim), the model "
                f"{_counted(wanted)}; build it with KVCache.for_model"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values; fp8 is stored as bytes."""
        return self._dtype

    @property
    def storage(self) -> torch.Tensor:
        """All layers, (num_layers, num_pages, 2, kv_heads, ...), for kernels that move pages and tokens.

        Raises:
            InvalidArgumentError: the layers have different shapes.
        """
        if len(self._storages) > 1:
            raise InvalidArgumentError(
                f"the KV cache has layers of {_counted(self.shapes)} (kv heads, head_dim); kernels that take all "
                "layers need one shape"
            )
        return next(iter(self._storages.values()))

    @property
    def storages(self) -> list[tuple[int, torch.Tensor]]:
        """(head_dim, `storage`) of each shape that layers have."""
        return [(head_dim, storage) for (_, head_dim), storage in self._storages.items()]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, its fp8 scales included."""
        scale_bytes = fp8_pages.SCALE_BYTES if self._dtype == FP8 else 0
        return 2 * sum(heads * (dim * self._dtype.itemsize + scale_bytes) for heads, dim in self.shapes)

    @property
    def bytes_per_page(self) -> int:
        return self.bytes_per_token * self.page_size

    @property
    def num_bytes(self) -> int:
        return self.bytes_per_page * self.num_pages

    @property
    def layers(self) -> list[torch.Tensor]:
        """(num_pages, ...) of every layer; see `pages`."""
        return list(self._layers)

    def pages(self, layer: int) -> torch.Tensor:
        """(num_pages, 2, kv_heads, page_size, head_dim) of one layer, for kernels that read pages in place.

        fp8: uint8 (num_pages, 2, kv_heads, page_size * (head_dim + 4)).
        """
        return self._layers[layer]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, kv_offsets: npt.NDArray[np.int64]) -> None:
        """Store K and V of T tokens.

        Args:
            k, v: (T, kv_heads, head_dim) on the cache's device, rows contiguous; rounded to the cache's dtype.
            kv_offsets: (T,) int64, page_id * page_size + place; negative skips the token.
        Raises:
            InvalidArgumentError: shapes disagree or an offset is beyond the last page.  Nothing was written.
        """
        if self._has_cpu_kernels:
            from edgellm.kernels.cpu.paged_attention import write_kv

            write_kv(self._layers[layer], k, v, kv_offsets)
            return
        self._check_rows(layer, k, v, kv_offsets)
        self._write_by_index(layer, k, v, kv_offsets)

    def gather(self, layer: int, page_ids: npt.NDArray[np.int32], length: int) -> torch.Tensor:
        """Copy the first `length` tokens of a sequence out of its pages.

        Args:
            page_ids: the sequence's pages in order; more than needed is allowed.
        Returns:
            (2, kv_heads, length, head_dim): keys, values; a new tensor of the cache's dtype (fp8: float32).
        Raises:
            InvalidArgumentError: the pages do not cover `length`.
        """
        if self._has_cpu_kernels:
            from edgellm.kernels.cpu.paged_attention import gather_kv

            return gather_kv(self._layers[layer], page_ids, length)
        used = page_ids[: -(-length // self.page_size)]
        if len(used) * self.page_size < length or (len(used) and not 0 <= used.min() <= used.max() < self.num_pages):
            raise InvalidArgumentError(
                f"{length} tokens are not covered by pages {used.tolist()} of {self.page_size} tokens "
                f"in [0, {self.num_pages})"
            )
        pages = self._layers[layer][self._index(used)]
        if self._dtype == FP8:
            pages = fp8_pages.dequantise_pages(pages, self.page_size, self.shapes[layer][1])
        return pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].contiguous()

    def copy_pages(self, source_pages: npt.NDArray[np.int32], target_pages: npt.NDArray[np.int32]) -> None:
        """Copy whole pages, all layers; all sources are read before any target is written.

        Raises:
            InvalidArgumentError: no page numbers, lengths differ, an id is out of range or a target is named twice.
                Nothing was copied.
            StepDeviceError: the device failed; what the targets hold is unknown.
        """
        for name, ids in (("source", source_pages), ("target", target_pages)):
            self._check_page_ids(name, ids)
        if len(source_pages) != len(target_pages) or len(set(target_pages.tolist())) != len(target_pages):
            raise InvalidArgumentError(
                f"{len(source_pages)} source pages, {len(target_pages)} target pages {target_pages.tolist()}; "
                "as many targets as sources, each once, are needed"
            )
        with device_errors(f"copying {count(len(source_pages), 'page')}"):
            for storage in self._storages.values():
                self._copy_pages(storage, source_pages, target_pages)

    def _check_page_ids(self, name: str, ids: npt.NDArray[np.int32]) -> None:
        if ids.ndim != 1 or not (np.issubdtype(ids.dtype, np.integer) or not ids.size):
            raise InvalidArgumentError(
                f"{name} pages are {ids.dtype} of shape {ids.shape}; a list of whole page numbers in "
                f"[0, {self.num_pages}) is needed"
            )
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_pages):
            raise InvalidArgumentError(f"{name} pages {ids.tolist()} are not all in [0, {self.num_pages})")

    def _copy_pages(
        self, storage: torch.Tensor, source_pages: npt.NDArray[np.int32], target_pages: npt.NDArray[np.int32]
    ) -> None:
        if storage.is_cuda and not np.intersect1d(source_pages, target_pages).size:
            from edgellm.kernels.cu.copy_pages import copy_pages

            copy_pages(storage, self._upload(source_pages), self._upload(target_pages))
            return
        # Through a copy of the sources: a page may be the target of one pair and the source of another.
        storage[:, self._index(target_pages)] = storage[:, self._index(source_pages)]

    def move_tokens(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """Copy K and V of single tokens, all layers; all sources are read before any target is written.

        Args:
            sources, targets: (M,) page_id * page_size + place; no target is named twice.
        Raises:
            InvalidArgumentError: lengths differ or a place is out of range.
        """
        places = self.num_pages * self.page_size
        for name, offsets in (("source", sources), ("target", targets)):
            if len(offsets) and (offsets.min() < 0 or offsets.max() >= places):
                raise InvalidArgumentError(f"{name} places {offsets.tolist()} are not all in [0, {places})")
        if len(sources) != len(targets):
            raise InvalidArgumentError(f"{len(sources)} sources and {len(targets)} targets; as many are needed")
        source_pages, target_pages = self._index(sources // self.page_size), self._index(targets // self.page_size)
        source_places, target_places = self._index(sources % self.page_size), self._index(targets % self.page_size)
        for (_, head_dim), storage in self._storages.items():
            parts: tuple[torch.Tensor, ...] = (storage,)
            if self._dtype == FP8:
                parts = fp8_pages.split_pages(storage, self.page_size, head_dim)
            for part in parts:
                part[:, target_pages, :, :, target_places] = part[:, source_pages, :, :, source_places]

    def fill_poison(self, page_ids: npt.NDArray[np.int32] | None = None) -> None:
        """Fill pages (all of them by default) with NaN, so that reading one that was not written shows."""
        pages = slice(None) if page_ids is None else self._index(page_ids)
        for (_, head_dim), storage in self._storages.items():
            if self._dtype != FP8:
                storage[:, pages] = float("nan")
                continue
            values, scales = fp8_pages.split_pages(storage, self.page_size, head_dim)
            values[:, pages] = fp8_pages.E4M3_NAN
            scales[:, pages] = float("nan")

    def _index(self, page_ids: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(page_ids.astype(np.int64)).to(self._device)

    def _upload(self, page_ids: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(page_ids, np.int32)).to(self._device)

    def _check_rows(self, layer: int, k: torch.Tensor, v: torch.Tensor, kv_offsets: npt.NDArray[np.int64]) -> None:
        wanted = (len(kv_offsets), *self.shapes[layer])
        if k.shape != wanted or v.shape != wanted:
            raise InvalidArgumentError(f"K is {tuple(k.shape)} and V {tuple(v.shape)}; {wanted} is needed")
        if len(kv_offsets) and kv_offsets.max() >= self.num_pages * self.page_size:
            raise InvalidArgumentError(
                f"offset {kv_offsets.max()} is beyond the last place {self.num_pages * self.page_size - 1}"
            )

    def _write_by_index(self, layer: int, k: torch.Tensor, v: torch.Tensor, kv_offsets: npt.NDArray[np.int64]) -> None:
        kept = torch.from_numpy(np.flatnonzero(kv_offsets >= 0)).to(self._device)
        offsets = torch.from_numpy(kv_offsets).to(self._device)[kept]
        pages, places = offsets // self.page_size, offsets % self.page_size
        rows = torch.stack((k[kept], v[kept]), dim=1)
        if self._dtype != FP8:
            self._layers[layer][pages, :, :, places] = rows.to(self._dtype)
            return
        values, scales = fp8_pages.split_pages(self._layers[layer], self.page_size, self.shapes[layer][1])
        values[pages, :, :, places], scales[pages, :, :, places] = fp8_pages.quantise_rows(rows)


def _counted(shapes: Sequence[tuple[int, int]]) -> str:
    """Shapes for an error message: "2 x (4, 64), 1 x (1, 128)"."""
    return ", ".join(f"{shapes.count(shape)} x {shape}" for shape in dict.fromkeys(shapes)) or "none"


def _check_dtype(dtype: torch.dtype, device: torch.device, page_size: int, head_dim: int) -> None:
    supported = CPU_DTYPES if device.type == "cpu" else DEVICE_DTYPES
    if dtype not in supported:
        remedy = "; on a CUDA device float16 and fp8 as well" if dtype in DEVICE_DTYPES else ""
        raise InvalidArgumentError(
            f"KV dtype is {dtype}; supported on {device.type}: {', '.join(map(str, supported))}{remedy}"
        )
    if dtype == FP8 and fp8_pages.head_block_bytes(page_size, head_dim) % BLOCK_BYTES:
        raise InvalidArgumentError(
            f"an fp8 page of {page_size} tokens takes {fp8_pages.head_block_bytes(page_size, head_dim)} bytes a head; "
            f"a multiple of {BLOCK_BYTES} is needed, so use a page size of 16, 32, 64 or 128"
        )


def _block_shape(dtype: torch.dtype, page_size: int, head_dim: int) -> tuple[int, ...]:
    """Axes of one head in one page."""
    return (fp8_pages.head_block_bytes(page_size, head_dim),) if dtype == FP8 else (page_size, head_dim)


def parse_kv_budget(
    budget: int | float | str | None,
    *,
    bytes_per_page: int,
    page_size: int,
    free_bytes: int,
    default_tokens: int,
) -> KVBudget:
    """How many pages a budget buys.

    Args:
        budget: tokens (int), bytes ("4GiB", "512MB"), a fraction of free memory (float in (0, 0.95]), or None:
            `default_tokens`, but at most half of free memory.
        free_bytes: memory that a new allocation could use.
    Raises:
        InvalidArgumentError: not one of these forms, less than one page, or more than is free.
    """
    num_pages = units_of(budget, bytes_per_page, page_size, free_bytes, default_tokens)
    result = KVBudget(num_pages=num_pages, page_size=page_size, bytes_per_page=bytes_per_page, free_bytes=free_bytes)
    if num_pages < 1:
        raise InvalidArgumentError(
            f"kv_budget {budget!r} holds no page: one page of {page_size} tokens takes {format_bytes(bytes_per_page)}, "
            f"{format_bytes(free_bytes)} are free; raise kv_budget or lower page_size"
        )
    if num_pages < 2:
        logger.warning(
            "the KV pool has 1 page of %d tokens; raise kv_budget or lower page_size, or nothing can be reused",
            page_size,
        )
    if result.total_bytes > free_bytes:
        raise InvalidArgumentError(
            f"kv_budget {budget!r} needs {format_bytes(result.total_bytes)}, {format_bytes(free_bytes)} are free; "
            f"at most {free_bytes // bytes_per_page * page_size} tokens fit"
        )
    return result


def units_of(
    budget: int | float | str | None, bytes_per_page: int, page_size: int, free_bytes: int, default_tokens: int
) -> int:
    """Pages, or other units of `bytes_per_page` for `page_size` tokens, that a budget holds; may be 0 or too many.

    Raises:
        InvalidArgumentError: it is of no form that a budget has.
    """
    if budget is None:
        most = int(free_bytes * DEFAULT_MEMORY_FRACTION) // bytes_per_page
        return min(-(-default_tokens // page_size), most)
    if isinstance(budget, bool):
        raise InvalidArgumentError(f"kv_budget is {budget!r}; {BUDGET_FORMS}")
    if isinstance(budget, int):
        if budget < 1:
            raise InvalidArgumentError(f"kv_budget is {budget} tokens; at least 1 is needed")
        return -(-budget // page_size)
    if isinstance(budget, float):
        if not 0.0 < budget <= MAX_MEMORY_FRACTION:
            raise InvalidArgumentError(
                f"kv_budget is the fraction {budget}; it must be in (0, {MAX_MEMORY_FRACTION}]; {BUDGET_FORMS}"
            )
        return int(free_bytes * budget) // bytes_per_page
    return parse_size(budget) // bytes_per_page


def parse_size(text: str) -> int:
    """Bytes of "4GiB", "512MB", "1.5 GiB" or "1024B"; MB is 10^6, MiB is 2^20.

    Raises:
        InvalidArgumentError: not a size, or a number without a unit (which could mean anything).
    """
    match = _SIZE_PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None or (match[3] and not match[2]):
        raise InvalidArgumentError(f"kv_budget is {text!r}; {BUDGET_FORMS}")
    if not match[2] and not match[4]:
        raise InvalidArgumentError(f"kv_budget is {text!r}, text without a unit; {BUDGET_FORMS}")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _SIZE_PREFIXES[match[2].upper()])
