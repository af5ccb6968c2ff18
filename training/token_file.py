"""Token sequences on disk: one header line of JSON, then LZMA of the numbers."""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import numpy.typing as npt

_PRESET = 1  # higher ones take minutes for a few per cent
MOST_TOKEN = (1 << 16) - 1


@dataclass(slots=True)
class TokenFile:
    """Sequences of one tokenizer.

    Attributes:
        tokens: (sum of lengths,) uint16.
        starts: (n + 1,) int64, sequence i is tokens[starts[i] : starts[i + 1]].
        prompt_lens: (n,) int32, leading tokens of each that nobody generated.
        notes: free fields of the header.
    """

    tokens: npt.NDArray[np.uint16]
    starts: npt.NDArray[np.int64]
    prompt_lens: npt.NDArray[np.int32]
    notes: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompt_lens)

    def __getitem__(self, index: int) -> npt.NDArray[np.uint16]:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.starts)

    @classmethod
    def of(cls, sequences: Sequence[Iterable[int]], prompt_lens: Sequence[int], **notes: Any) -> TokenFile:
        """
        Raises:
            ValueError: a token that needs more than 16 bits.
        """
        rows = [np.asarray(list(sequence), np.int64) for sequence in sequences]
        flat = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        if len(flat) and (flat.min() < 0 or flat.max() > MOST_TOKEN):
            raise ValueError(
                f"tokens from {flat.min()} to {flat.max()}: one does not fit 16 bits; use a smaller vocabulary"
            )
        starts = np.cumsum([0, *map(len, rows)]).astype(np.int64)
        return cls(flat.astype(np.uint16), starts, np.asarray(prompt_lens, np.int32), notes)

    def write(self, path: Path) -> None:
        """In one rename, so that a killed run leaves no half file."""
        header = {"sequences": len(self), "tokens": len(self.tokens), **self.notes}
        numbers = self.lengths.astype("<u4").tobytes() + self.prompt_lens.astype("<u4").tobytes()
        body = lzma.compress(numbers + self.tokens.astype("<u2").tobytes(), preset=_PRESET)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(json.dumps(header).encode() + b"\n" + body)
        partial.rename(path)


def read_tokens(path: Path) -> TokenFile:
    """
    Raises:
        ValueError: the file is none of ours, or cut short.
    """
    line, _, body = path.read_bytes().partition(b"\n")
    try:
        header = json.loads(line)
        count = header.pop("sequences")
        raw = lzma.decompress(body)
    except (ValueError, KeyError, AttributeError, lzma.LZMAError) as error:
        raise ValueError(f"{path} is no token file or damaged ({error}); write it again") from error
    lengths = np.frombuffer(raw, "<u4", count)
    prompt_lens = np.frombuffer(raw, "<u4", count, 4 * count)
    tokens = np.frombuffer(raw, "<u2", offset=8 * count)
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if len(tokens) != header.pop("tokens") or starts[-1] != len(tokens):
        raise ValueError(f"{path} holds {len(tokens)} tokens, its header says otherwise; write it again")
    return TokenFile(tokens.astype(np.uint16), starts, prompt_lens.astype(np.int32), header)


def join(files: Sequence[TokenFile]) -> TokenFile:
    """All sequences of several files, in order; the notes of the first."""
    starts = np.concatenate(([0], np.cumsum(np.concatenate([file.lengths for file in files]))))
    return TokenFile(
        np.concatenate([file.tokens for file in files]),
        starts.astype(np.int64),
        np.concatenate([file.prompt_lens for file in files]),
        files[0].notes,
    )
