"""Checks that the wrappers share: cheap, on the host, no device reads.  Shapes and types first, the device last."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgellm.errors import InvalidArgumentError

TYPE_NAMES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float8_e4m3fn: "__nv_fp8_e4m3",
}
SCALE_BYTES = 4  # one float32 a token and head, behind the e4m3 bytes
PAGE_SIZES = (16, 32, 64, 128)


def type_name(dtype: torch.dtype) -> str:
    """The C++ name of an element type.

    Raises:
        InvalidArgumentError: kernels have no such type.
    """
    try:
        return TYPE_NAMES[dtype]
    except KeyError:
        known = ", ".join(map(str, TYPE_NAMES))
        raise InvalidArgumentError(f"{dtype} is no element type of the CUDA kernels; use one of {known}") from None


def describe(tensor: torch.Tensor) -> str:
    """Shape, dtype, strides and device, for a message."""
    return f"{tuple(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}, on {tensor.device}"


def check_rows(
    name: str,
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    rows: int | None = None,
    width: int | None = None,
    min_width: int | None = None,
    contiguous: bool = False,
) -> None:
    """Refuse anything but (rows, width) with neighbouring elements in a row; rows may be apart unless `contiguous`.

    Raises:
        InvalidArgumentError: names the tensor, what it is and what is needed.
    """
    # One look at each property: this runs before every launch.
    shape, strides = tensor.shape, tensor.stride()
    good = len(shape) == 2 and (
        (dtype is None or tensor.dtype == dtype or (type(dtype) is tuple and tensor.dtype in dtype))
        and (rows is None or shape[0] == rows)
        and (width is None or shape[1] == width)
        and (min_width is None or shape[1] >= min_width)
        and ((strides[1] == 1 and (strides[0] >= shape[1] or shape[0] == 1)) or tensor.is_contiguous())
        and (not contiguous or strides[0] == shape[1] or tensor.is_contiguous())
    )
    if not good:
        _refuse_rows(name, tensor, dtype, rows, f">= {min_width}" if min_width is not None else width, contiguous)
    check_device(name, tensor)


def _refuse_rows(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None,
    rows: int | None,
    width: int | str | None,
    contiguous: bool,
) -> None:
    allowed = dtype if isinstance(dtype, tuple) else (dtype,)
    types = "any type" if dtype is None else " or ".join(map(str, allowed))
    layout = "contiguous" if contiguous else "rows that do not overlap, stride 1 inside a row"
    raise InvalidArgumentError(
        f"{name} is {describe(tensor)}; ({'rows' if rows is None else rows}, {'width' if width is None else width}) "
        f"{types}, {layout}, is needed"
    )


def check_vector(name: str, tensor: torch.Tensor, size: int, dtype: torch.dtype) -> None:
    """Refuse anything but (size,) of one type, contiguous."""
    check_shape(name, tensor, (size,), dtype)


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse anything but a contiguous tensor of this shape and type; -1 in `shape` leaves that length open.

    Raises:
        InvalidArgumentError: names the tensor, what it is and what is needed.
    """
    if not (tensor.shape == shape or _fits(tensor.shape, shape)) or tensor.dtype != dtype or not tensor.is_contiguous():
        raise InvalidArgumentError(f"{name} is {describe(tensor)}; {shape} {dtype}, contiguous, is needed")
    check_device(name, tensor)


def _fits(shape: torch.Size, wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(want in (-1, have) for want, have in zip(wanted, shape, strict=True))


def check_device(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that no kernel can read."""
    if not tensor.is_cuda:
        raise InvalidArgumentError(f"{name} is on {tensor.device}; a CUDA tensor is needed")


def check_alignment(name: str, tensor: torch.Tensor, size: int = 16) -> None:
    """Refuse a tensor whose address, or whose row stride, is no multiple of `size` bytes.

    Raises:
        InvalidArgumentError: says which of the two.
    """
    if tensor.data_ptr() % size:
        raise InvalidArgumentError(f"{name} starts at an address that is no multiple of {size} bytes; copy it")
    if tensor.dim() > 1 and (tensor.stride(0) * tensor.element_size()) % size and tensor.shape[0] > 1:
        raise InvalidArgumentError(
            f"rows of {name} are {tensor.stride(0) * tensor.element_size()} bytes apart; a multiple of {size} is needed"
        )


def address(tensor: torch.Tensor | None) -> int | None:
    """What a pointer field of a parameter struct takes: the data's address, or None (null) without a tensor."""
    return None if tensor is None else tensor.data_ptr()


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How one layer's pages are laid out: (pages, K and V, kv_heads, page_size, head_dim) of `dtype`.

    For `torch.float8_e4m3fn` a head's block is page_size * head_dim e4m3 bytes, then page_size float32 scales.
    """

    kv_heads: int
    page_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def is_fp8(self) -> bool:
        return self.dtype == torch.float8_e4m3fn

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's K (or V) of one page, scales included."""
        scale_bytes = SCALE_BYTES if self.is_fp8 else 0
        return self.page_size * (self.head_dim * self.dtype.itemsize + scale_bytes)

    @property
    def page_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_bytes


def kv_layout(pages: torch.Tensor, head_dim: int | None = None) -> KVLayout:
    """The layout of one layer's pages.

    Args:
        pages: (num_pages, 2, kv_heads, page_size, head_dim) float32, float16 or bfloat16; or uint8
            (num_pages, 2, kv_heads, page_size * head_dim + 4 * page_size) for fp8.  Contiguous.
        head_dim: needed for fp8, whose shape does not show it; otherwise compared when given.
    Raises:
        InvalidArgumentError: pages have another shape, type or page size.
    """
    layout = _fp8_layout(pages, head_dim) if pages.dtype == torch.uint8 else _plain_layout(pages)
    if layout is None or not pages.is_contiguous() or (head_dim is not None and layout.head_dim != head_dim):
        wanted = "head_dim" if head_dim is None else head_dim
        raise InvalidArgumentError(
            f"pages is {describe(pages)}; (num_pages, 2, kv_heads, page_size, {wanted}) float32, float16 or bfloat16, "
            f"or uint8 (num_pages, 2, kv_heads, page_size * ({wanted} + {SCALE_BYTES})), contiguous, with a page size "
            f"of {', '.join(map(str, PAGE_SIZES))} is needed"
        )
    check_device("pages", pages)
    return layout


def _plain_layout(pages: torch.Tensor) -> KVLayout | None:
    if pages.dim() != 5 or pages.shape[1] != 2 or pages.shape[3] not in PAGE_SIZES or pages.dtype not in TYPE_NAMES:
        return None
    return KVLayout(pages.shape[2], pages.shape[3], pages.shape[4], pages.dtype)


def _fp8_layout(pages: torch.Tensor, head_dim: int | None) -> KVLayout | None:
    if head_dim is None:
        raise InvalidArgumentError("pages are fp8 (uint8), whose shape does not show the head size; pass head_dim")
    if pages.dim() != 4 or pages.shape[1] != 2 or pages.shape[3] % (head_dim + SCALE_BYTES):
        return None
    page_size = pages.shape[3] // (head_dim + SCALE_BYTES)
    return KVLayout(pages.shape[2], page_size, head_dim, torch.float8_e4m3fn) if page_size in PAGE_SIZES else None
