"""Media identity of a prompt: which position shows which part of which item.

The tokenizer writes an item (an image, a piece of audio) as one run of placeholder ids.  Placeholders are the same
for every item, so a block with media is known by the digests of its positions and not by their token ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edgellm._core.block_hash import hash_opaque_identity
from edgellm.cache.types import Hash128
from edgellm.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy.typing as npt

_NOBODY = -1


@dataclass(frozen=True, slots=True)
class MediaItems:
    """The items of one modality in a prompt.

    Attributes:
        placeholder_ids: token ids that stand for this modality.
        content_digests: one per item, in prompt order: of the decoded content and of everything that shapes its
            embeddings (size, crop, sampling rate).
    """

    placeholder_ids: tuple[int, ...]
    content_digests: tuple[Hash128, ...]


def media_positions(token_ids: npt.ArrayLike, placeholders: Mapping[str, MediaItems]) -> tuple[Hash128 | None, ...]:
    """What `ContextCacheSequenceAdmission.per_position_media_hash` wants: one digest (or None) per token.

    Each contiguous run of a modality's placeholders is the next item of that modality.  The digest of a position is
    made of the item's digest, the modality, the length of the run and the place in it: equal content at an equal
    place gives equal blocks, the same content elsewhere others.

    Args:
        token_ids: (n,) integers, the whole prompt.
        placeholders: modality name to its items; an id of several modalities belongs to the first that names it.
    Returns:
        n entries; none at all when the prompt shows no media, which then is text like any other.
    Raises:
        InvalidArgumentError: a modality has more or fewer runs than items, an item has no digest, or the ids are not
            one row of integers.
    """
    tokens = np.asarray(token_ids)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise InvalidArgumentError(f"token_ids has shape {tokens.shape} and dtype {tokens.dtype}; pass (n,) integers")
    runs = _runs(tokens, list(placeholders.values()))
    positions: list[Hash128 | None] = [None] * len(tokens)
    for order, (modality, items) in enumerate(placeholders.items()):
        own = [(start, end) for owner, start, end in runs if owner == order]
        _check_items(modality, items, len(own))
        for (start, end), digest in zip(own, items.content_digests, strict=True):
            positions[start:end] = [_position_digest(modality, digest, end - start, at) for at in range(end - start)]
    return tuple(positions) if runs else ()


def _runs(tokens: npt.NDArray[np.integer], modalities: Sequence[MediaItems]) -> list[tuple[int, int, int]]:
    """(place of the modality, start, end) of every run of placeholders, in prompt order."""
    owner = np.full(len(tokens), _NOBODY)
    for order, items in enumerate(modalities):
        owner[np.isin(tokens, items.placeholder_ids) & (owner == _NOBODY)] = order
    edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(tokens)]
    spans = [(start, end) for start, end in itertools.pairwise(edges) if start < end]
    return [(int(owner[start]), start, end) for start, end in spans if owner[start] != _NOBODY]


def _check_items(modality: str, items: MediaItems, runs: int) -> None:
    if runs != len(items.content_digests):
        raise InvalidArgumentError(
            f"the prompt has {runs} runs of {modality} placeholders and {len(items.content_digests)} {modality} items; "
            "give exactly one item for each run"
        )
    for number, digest in enumerate(items.content_digests):
        if digest is None or digest.is_zero():
            raise InvalidArgumentError(
                f"{modality} item {number} has no content digest; its blocks would be taken for those of another item: "
                "admit this sequence with the lookup policy BYPASS"
            )


def _position_digest(modality: str, content: Hash128, length: int, place: int) -> Hash128:
    """Fields of fixed width, so that no two combinations read the same."""
    name = modality.encode("utf-8")
    fields = b"".join(number.to_bytes(8, "little") for number in (len(name), content.hi, content.lo, length, place))
    return hash_opaque_identity(fields + name)
