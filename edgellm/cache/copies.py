"""Copy-on-write of a partly reused page: the shared tokens of a block move into the sequence's first private page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.cache.coordinator import ContextCacheCoordinator
    from edgellm.cache.request import SequenceState


def copy_tails(coordinator: ContextCacheCoordinator, sequences: Sequence[SequenceState]) -> None:
    """Enqueue the page copies of these sequences in one call a pool, then unpin their sources.

    Unpinning at once is safe: whoever is given the source page next writes it on the same stream, after the copy.
    """
    tailed = [sequence for sequence in sequences if sequence.lease.tail_source is not None]
    if not tailed:
        return
    leases = [sequence.lease for sequence in tailed]
    _copy(
        coordinator.resources.base_cache,
        [lease.tail_source for lease in leases],
        [int(lease.base_pages[lease.shared_block_count]) for lease in leases],
    )
    paired = [lease for lease in leases if lease.draft_tail_source is not None]
    if paired:
        _copy(
            coordinator.resources.draft_cache,
            [lease.draft_tail_source for lease in paired],
            [int(lease.draft_pages[lease.shared_draft_block_count]) for lease in paired],
        )
    for lease in leases:
        coordinator.counters.tail_copies += 1
        coordinator.counters.tail_copied_tokens += lease.tail_token_count
        coordinator._manager.release_tail_source(lease)


def _copy(cache: object, sources: Sequence[int | None], targets: Sequence[int]) -> None:
    cache.copy_pages(np.array(sources, np.int32), np.array(targets, np.int32))  # type: ignore[attr-defined]
