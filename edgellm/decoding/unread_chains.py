"""Chains that a device has proposed and the host has not read: sequences that are read when they are looked at.

What verifies them needs their lengths at first, and the device has the tokens; so the host reads them together with
what the target chose, and waits once a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

from edgellm.runtime.late_tokens import LateTokens

if TYPE_CHECKING:
    import torch

    from edgellm.decoding.draft_tree import DraftTree
    from edgellm.runtime.device import Device


class UnreadChains:
    """Chains of one round.

    Args:
        tokens: (depth, columns) int32 on the device; a chain in each of the first `len(limits)` columns.  They stay
            until the step that verifies is enqueued.
        limits: tokens of each chain, at most `depth`.
    """

    def __init__(self, device: Device, tokens: torch.Tensor, limits: Sequence[int]) -> None:
        self.tokens = tokens
        self._fetched = device.fetch(tokens)
        self._limits = limits
        self._found: list[list[int]] | None = None

    @property
    def is_read(self) -> bool:
        return self._found is not None

    def chains(self) -> list[UnreadChain]:
        return [UnreadChain(self, column, limit) for column, limit in enumerate(self._limits)]

    def read(self) -> list[list[int]]:
        """(columns, depth) tokens; waits for the device the first time.

        Raises:
            StepDeviceError: the device reports an error.
        """
        if self._found is None:
            self._found = self._fetched().T.tolist()
        return self._found


class UnreadChain(Sequence[int]):
    """One of them: reads as a list does, and is equal to one of the same tokens."""

    __slots__ = ("_length", "column", "source")

    def __init__(self, source: UnreadChains, column: int, length: int) -> None:
        self.source = source
        self.column = column
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = self.source.read()[self.column]
        if isinstance(index, int) and 0 <= index < self._length:
            return found[index]
        return found[: self._length][index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.source.read()[self.column][: self._length])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | UnreadChain) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self)) if self.source.is_read else f"<{self._length} tokens on the device>"


def late_tokens(proposals: Sequence[Sequence[int] | DraftTree]) -> LateTokens | None:
    """What the device knows of the proposals of a batch's sequences; None where the host knows all of it.

    Where proposals are of several rounds of a draft, the host reads them now.
    """
    unread = [
        (row, chain)
        for row, chain in enumerate(proposals)
        if isinstance(chain, UnreadChain) and len(chain) and not chain.source.is_read
    ]
    if not unread:
        return None
    source = unread[0][1].source
    if any(chain.source is not source for _, chain in unread):
        for _, chain in unread:
            chain.source.read()
        return None
    return LateTokens(
        source.tokens, [row for row, _ in unread], [chain.column for _, chain in unread], [len(c) for _, c in unread]
    )
