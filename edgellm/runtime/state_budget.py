"""How a memory budget is divided: pages of the base and of a draft, checkpoints of recurrent state.

Pages and checkpoints come out of one budget.  Checkpoints take `SNAPSHOT_SHARE` of it, and at least as many as two for
every seat, so that a turn of each can be kept while the next one is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.errors import InvalidArgumentError
from edgellm.memory import count, format_bytes
from edgellm.runtime.kv_cache import parse_kv_budget, units_of

SNAPSHOT_SHARE = 0.125
SNAPSHOTS_PER_SEAT = 2
DEFAULT_SNAPSHOTS_PER_SEAT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """What a deployment stores, in bytes.

    Attributes:
        base_page: K and V of one page, all layers; 0 for models without attention.
        draft_page: the same of a draft model with pages of its own; else 0.
        state: recurrent and conv state of one sequence; 0 for attention models.
        hidden: the hidden row that a checkpoint saves for a draft; else 0.
    """

    base_page: int
    draft_page: int = 0
    state: int = 0
    hidden: int = 0

    @property
    def snapshot(self) -> int:
        """One checkpoint: the state, the hidden row, and the page that straddles its boundary."""
        return self.state + self.hidden + self.base_page + self.draft_page if self.state else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePools:
    """Attributes:
    num_pages: of the base and of the draft alike; 0 for models without attention.
    num_snapshots: checkpoints of recurrent state.
    """

    num_pages: int
    num_snapshots: int


def divide(
    budget: int | float | str | None,
    sizes: StateSizes,
    *,
    page_size: int,
    free_bytes: int,
    default_tokens: int,
    max_batch_size: int,
) -> StatePools:
    """What a budget buys.

    Args:
        budget: as `parse_kv_budget`; for models without attention it counts checkpoints' bytes, and tokens are those of
            their pages' worth: one checkpoint for each page of tokens.
    Raises:
        InvalidArgumentError: see `parse_kv_budget`.
    """
    if not sizes.state:
        bought = parse_kv_budget(
            budget,
            bytes_per_page=sizes.base_page + sizes.draft_page,
            page_size=page_size,
            free_bytes=free_bytes,
            default_tokens=default_tokens,
        )
        return StatePools(num_pages=bought.num_pages, num_snapshots=0)
    live = sizes.state * max_batch_size
    least = SNAPSHOTS_PER_SEAT * max_batch_size
    if not sizes.base_page:
        wanted = units_of(
            budget,
            sizes.snapshot,
            page_size,
            free_bytes - live,
            DEFAULT_SNAPSHOTS_PER_SEAT * max_batch_size * page_size,
        )
        return StatePools(num_pages=0, num_snapshots=_fitting(budget, max(least, wanted), sizes, free_bytes - live))
    page = sizes.base_page + sizes.draft_page
    bought = parse_kv_budget(
        budget,
        bytes_per_page=round(page / (1 - SNAPSHOT_SHARE)),
        page_size=page_size,
        free_bytes=free_bytes - live - least * sizes.snapshot,
        default_tokens=default_tokens,
    )
    share = round(bought.num_pages * page * SNAPSHOT_SHARE / (1 - SNAPSHOT_SHARE))
    return StatePools(num_pages=bought.num_pages, num_snapshots=max(least, share // sizes.snapshot))


def _fitting(budget: object, num_snapshots: int, sizes: StateSizes, free_bytes: int) -> int:
    """
    Raises:
        InvalidArgumentError: so many checkpoints do not fit into the memory that the live state leaves.
    """
    if num_snapshots * sizes.snapshot > free_bytes:
        raise InvalidArgumentError(
            f"kv_budget {budget!r}: {count(num_snapshots, 'checkpoint')} of this model's state take "
            f"{format_bytes(num_snapshots * sizes.snapshot)}, {format_bytes(max(free_bytes, 0))} are free beside the "
            "live state; lower kv_budget or max_batch_size"
        )
    return num_snapshots
