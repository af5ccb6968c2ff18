"""`StoredTensors`: the tensors of an assistant by name, checked where they are taken; and the writer of its folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from edgellm.errors import WeightFileError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILE = "model.safetensors"


class StoredTensors:
    """Reads a whole file: assistants are small.

    Args:
        like: gives dtype and device of what is taken.
    Raises:
        WeightFileError: the file is missing or damaged.
    """

    def __init__(self, folder: Path, like: torch.Tensor) -> None:
        from safetensors.torch import load_file

        path = folder / FILE
        if not path.is_file():
            raise WeightFileError(f"{folder} holds no {FILE}; an assistant is that file and config.json")
        try:
            self._tensors = load_file(path)
        except Exception as error:  # the library has errors of its own for a damaged file
            raise WeightFileError(f"{path} cannot be read: {error}; download it again") from error
        self._path = path
        self._like = like
        self._unread = set(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def matrix(self, name: str, *shape: int) -> torch.Tensor:
        """A weight, of the dtype and on the device of `like`.

        Raises:
            WeightFileError: it is missing, of another shape, or of integers.
        """
        tensor = self._take(name, shape)
        if not tensor.is_floating_point():
            raise WeightFileError(
                f"{self._path}: tensor {name!r} is stored as {tensor.dtype}; use the unquantised assistant"
            )
        return tensor.to(self._like.device, self._like.dtype)

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

    def token_ids(self, name: str, size: int) -> torch.Tensor:
        """(size,) int64, on the CPU; the range is the caller's to check.

        Raises:
            WeightFileError: it is missing, of another shape, or not of integers.
        """
        tensor = self._take(name, (size,))
        if tensor.is_floating_point() or tensor.is_complex():
            raise WeightFileError(f"{self._path}: tensor {name!r} is stored as {tensor.dtype}; integers are needed")
        return tensor.long()

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
                f"{self._path} stores {left[0]!r} (and {len(left) - 1} more such tensors), which config.json does not "
                "mention; check that it belongs to these weights"
            )

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._tensors:
            raise WeightFileError(f"{self._path} lacks the tensor {name!r}; download the assistant again")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise WeightFileError(
                f"{self._path}: tensor {name!r} is {list(tensor.shape)}, config.json and the base need {list(shape)}; "
                "use an assistant that was trained for this model"
            )
        self._unread.discard(name)
        return tensor


def save_assistant(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write an assistant's folder.

    Args:
        config: the fields of `config.json`.
        tensors: by their stored names.
    """
    import json

    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)
