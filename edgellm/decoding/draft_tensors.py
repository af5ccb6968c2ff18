"""`DraftTensors`: the tensors of a draft's checkpoint by name, each checked where it is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from edgellm.errors import WeightFileError
from edgellm.models.fields import show

if TYPE_CHECKING:
    from pathlib import Path

SAFETENSORS = "model.safetensors"
# Codes of quantised files say nothing without their scales, whatever torch calls their type.
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class DraftTensors:
    """Reads a whole file: drafts are small.

    Args:
        what: a draft of the kind, in words with an article, for messages.
        like: gives dtype and device of what is taken.
        files: names that the file may have, the first that is there is read; ".bin" is a dict that torch saved.
    Raises:
        WeightFileError: no such file is there, it is damaged, or it holds something else than dense tensors by name.
    """

    def __init__(self, folder: Path, like: torch.Tensor, *, what: str, files: tuple[str, ...] = (SAFETENSORS,)) -> None:
        path = next((folder / name for name in files if (folder / name).is_file()), None)
        if path is None:
            raise WeightFileError(f"{folder} holds no {' or '.join(files)}; {what} is that file and config.json")
        self._tensors = _load(path)
        self._path = path
        self._like = like
        self._what = what
        self._unread = set(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def matrix(self, name: str, *shape: int) -> torch.Tensor:
        """A weight, contiguous, of the dtype and on the device of `like`.

        Raises:
            WeightFileError: it is missing, of another shape, or not of real numbers.
        """
        tensor = self._take(name, shape)
        if tensor.dtype not in FLOATS:
            raise WeightFileError(
                f"{self._path}: tensor {name!r} is stored as {tensor.dtype}; use {self._what} that is not quantised"
            )
        # A file of torch keeps strides, and a sign that is still to be applied; those who read the memory know neither.
        return tensor.detach().resolve_neg().to(self._like.device, self._like.dtype).contiguous()

    def norm(self, name: str, size: int) -> torch.Tensor:
        """(size,) weights of a norm in float32, rounded to the dtype of `like`.

        Raises: as `matrix`.
        """
        return self.matrix(name, size).float()

    def joined(self, names: tuple[str, ...], rows: int, columns: int) -> torch.Tensor:
        """(len(names) * rows, columns): weights of one shape below each other.

        Raises: as `matrix`.
        """
        return torch.cat([self.matrix(name, rows, columns) for name in names])

    def integers(self, name: str, size: int) -> torch.Tensor:
        """(size,) int64, on the CPU; the range is the caller's to check.

        Raises:
            WeightFileError: it is missing, of another shape, or not of integers.
        """
        tensor = self._take(name, (size,))
        if tensor.dtype not in INTEGERS:
            raise WeightFileError(f"{self._path}: tensor {name!r} is stored as {tensor.dtype}; integers are needed")
        return tensor.long().contiguous()

    def model_tokens(self, name: str, size: int, vocab_size: int) -> torch.Tensor:
        """(size,) int64 on the device of `like`: the model's id of each token of the draft.

        Args:
            name: of the tensor of their differences; not looked for where the draft has the whole vocabulary, in order.
            vocab_size: of the model.
        Raises:
            WeightFileError: as `integers`, or the model has no such token.
        """
        ids = torch.arange(size)
        if size < vocab_size or name in self:
            ids += self.integers(name, size)
        wrong = ((ids < 0) | (ids >= vocab_size)).nonzero()
        if len(wrong):
            place = int(wrong[0])
            raise WeightFileError(
                f"{self._path}: {name} names the model's token {int(ids[place])} at place {place}, the model has "
                f"{vocab_size}; use {self._what} that was trained for this model"
            )
        return ids.to(self._like.device)

    def refuse_unread(self, *, ignored: tuple[str, ...]) -> None:
        """Nothing that would change the proposals may be left.

        Args:
            ignored: ends of names that may be.
        Raises:
            WeightFileError: a tensor was never taken.
        """
        left = sorted(name for name in self._unread if not name.endswith(ignored))
        if left:
            raise WeightFileError(
                f"{self._path} stores {left[0]!r} (and {len(left) - 1} more such tensors), which {self._what} of this "
                "config.json does not have; check that the two belong together, or use another"
            )

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._tensors:
            raise WeightFileError(f"{self._path} lacks the tensor {name!r}; download it again")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise WeightFileError(
                f"{self._path}: tensor {name!r} is {list(tensor.shape)}, config.json and the model need {list(shape)}; "
                f"use {self._what} that was trained for this model"
            )
        self._unread.discard(name)
        return tensor


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        loaded = _read(path)
    except Exception as error:  # either library has errors of its own for a damaged file
        raise WeightFileError(f"{path} cannot be read: {error}; download it again") from error
    if not isinstance(loaded, dict):
        raise WeightFileError(f"{path} holds a {type(loaded).__name__}; a dict of tensors by name is needed")
    for name, tensor in loaded.items():
        _check_entry(path, name, tensor)
    return loaded


def _read(path: Path) -> Any:
    if path.suffix == ".bin":
        return torch.load(path, map_location="cpu", weights_only=True)
    from safetensors.torch import load_file

    return load_file(path)


def _check_entry(path: Path, name: Any, tensor: Any) -> None:
    """
    Raises:
        WeightFileError: the name is no text, or what stands under it no dense tensor in memory.
    """
    if not isinstance(name, str):
        raise WeightFileError(f"{path} holds the key {show(name)}; names of tensors are needed, which are text")
    if not isinstance(tensor, torch.Tensor):
        raise WeightFileError(f"{path} holds a {type(tensor).__name__} under {show(name)}; a tensor is needed")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type != "cpu":
        kind = f"{tensor.layout} on {tensor.device}{', nested' if tensor.is_nested else ''}"
        raise WeightFileError(f"{path}: tensor {name!r} is {kind}; store it as a dense one, with its numbers")
