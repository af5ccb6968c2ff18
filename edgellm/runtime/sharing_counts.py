"""`SharingCounts`: what decode steps did not read again because rows share the pages of a prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.metric_lines import metric_lines

if TYPE_CHECKING:
    from edgellm.runtime.shared_prefix import SharedPrefixes


@dataclass(slots=True)
class SharingCounts:
    """Of steps since an executor was made, those computed ahead included; zeros where rows never share.

    Attributes:
        steps: steps with a group.
        groups, rows: of these steps, added up.
        tokens_saved: tokens whose K and V each layer that shares did not read again.
    """

    steps: int = 0
    groups: int = 0
    rows: int = 0
    tokens_saved: int = 0

    def __str__(self) -> str:
        """One counter a line."""
        return metric_lines(self)

    def count(self, prefixes: SharedPrefixes) -> None:
        self.steps += 1
        self.groups += prefixes.count
        self.rows += prefixes.rows
        self.tokens_saved += prefixes.tokens_saved
