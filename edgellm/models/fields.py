"""`Fields`: the metadata of a checkpoint, each value checked for type and range where it is read.

Whatever a damaged file holds, the answer is a value in range or an error that names file, field and value.
"""

from __future__ import annotations

import json
import math
import reprlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from edgellm.errors import UnsupportedModelError, WeightFileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

FieldError = type[UnsupportedModelError] | type[WeightFileError]


class Fields:
    """A read-only view of named values.  A value of None counts as absent, as `null` does in JSON.

    Args:
        source: the file, as error messages show it.
        remedy: what to do about a wrong value; ends every message.
        error: class of the errors.
        prefix: what error messages put before a name ("rope_scaling.").
    """

    __slots__ = ("_error", "_prefix", "_remedy", "_source", "_values")

    def __init__(
        self,
        source: str,
        values: Mapping[str, Any],
        *,
        remedy: str = "download the file again, or correct the field",
        error: FieldError = UnsupportedModelError,
        prefix: str = "",
    ) -> None:
        self._source = source
        self._values = values
        self._remedy = remedy
        self._error = error
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str) -> Any:
        """The value as it stands, None where it is absent."""
        return self._values.get(name)

    def with_values(self, values: Mapping[str, Any], *, prefix: str) -> Fields:
        """Other values of the same file."""
        return Fields(self._source, values, remedy=self._remedy, error=self._error, prefix=prefix)

    def refusal(self, name: str, needed: str) -> UnsupportedModelError | WeightFileError:
        """The error for a field: what it is and what is needed instead."""
        state = f"is {show(self._values[name])}" if name in self else "is missing"
        return self._error(f"{self._source}: {self._prefix}{name} {state}; {needed} is needed: {self._remedy}")

    def integer(self, name: str, low: int, high: int, *, default: int | None = None) -> int:
        """An integer in [low, high]; `default` stands in for an absent one, which is refused without it."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refusal(name, f"an integer from {low} to {high}")
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        return self.integer(name, low, high) if name in self else None

    def number(self, name: str, *, above: float, most: float = 1e30, default: float | None = None) -> float:
        """A finite number in (above, most]; `default` as for `integer`."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        # An integer may be too large to be a float: compared before it is converted.
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and above < value <= most
        if not fits or not math.isfinite(value):  # type: ignore[arg-type]
            raise self.refusal(name, f"a number above {above:g} and up to {most:g}")
        return float(value)  # type: ignore[arg-type]

    def optional_number(self, name: str, *, above: float, most: float = 1e30) -> float | None:
        return self.number(name, above=above, most=most) if name in self else None

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def text(self, name: str, *, default: str | None = None) -> str:
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.refusal(name, "text")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of texts; an absent one is empty."""
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refusal(name, "a list of names")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One id below `vocab_size`, or a list of them; an absent one is empty."""
        value = self._values.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < vocab_size for item in ids):
            raise self.refusal(name, f"a token id from 0 to {vocab_size - 1}, or a list of them,")
        return tuple(ids)

    def optional_id(self, name: str, vocab_size: int) -> int | None:
        """An id below `vocab_size`; -1, which older checkpoints write for none, is None."""
        return None if self._values.get(name) == -1 else self.optional_integer(name, 0, vocab_size - 1)

    def section(self, name: str) -> Fields:
        """The fields of a nested object; empty where it is absent."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(name, "an object")
        return self.with_values(value or {}, prefix=f"{self._prefix}{name}.")

    def items(self) -> Iterator[tuple[str, Any]]:
        """Every name whose value is not None, and the value."""
        return ((name, value) for name, value in self._values.items() if value is not None)


def show(value: Any) -> str:
    """A value for an error message, shortened."""
    return reprlib.repr(value)


def parse_json_object(text: bytes) -> dict[str, Any]:
    """A JSON object in UTF-8.

    Raises:
        ValueError: it is something else; the message says what.
    """
    try:
        parsed = json.loads(text.decode("utf-8"))
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"it holds a {type(parsed).__name__}, not a JSON object")
    return parsed


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        WeightFileError: the file cannot be read, or holds something else.
    """
    try:
        return parse_json_object(path.read_bytes())
    except (ValueError, OSError) as error:
        raise WeightFileError(f"{path} cannot be read as JSON ({error}); download it again") from error


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Refusals of a checkpoint that leave this block name `path`."""
    try:
        yield
    except (UnsupportedModelError, WeightFileError) as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error.__cause__
