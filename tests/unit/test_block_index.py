"""Block index: the verified tree walk, collisions, media and namespaces (behaviours 19 to 22, 24 and 172).

In the tree a block is inserted below the block in front of it, so 21 ("h0 and h2 indexed, h1 not") cannot come about:
the same content without its prefix is refused.  And one page can be erased only as a leaf (22).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edgellm._core.block_hash import TokenChain
from edgellm._core.block_index import DEFAULT_HASH_MASK, BlockIndex
from edgellm.cache.types import AdapterKey, BlockKeyExtras, Hash128
from edgellm.errors import InvalidArgumentError

P = 4
MASKS = pytest.mark.parametrize("mask", [DEFAULT_HASH_MASK, 0, 1], ids=["hashed", "all-collide", "two-buckets"])


def chain(
    tokens: Sequence[int], extras: BlockKeyExtras | None = None, media: Sequence[Hash128 | None] = ()
) -> TokenChain:
    out = TokenChain(P, extras or BlockKeyExtras(), media)
    out.extend(tokens)
    return out


def filled(tokens: Sequence[int], pages: Sequence[int], mask: int = DEFAULT_HASH_MASK) -> BlockIndex:
    index = BlockIndex(P, 8, mask)
    for i, page in enumerate(pages):
        assert index.insert(chain(tokens), i, page) == (page, True)
    return index


@MASKS
def test_19_first_committer_wins(mask: int) -> None:
    index = filled(range(4), [3], mask)
    assert index.insert(chain(range(4)), 0, 5) == (3, False)
    assert 5 not in index
    assert index.size == 1


@MASKS
def test_20_page_indexed_as_another_block_is_refused(mask: int) -> None:
    index = filled(range(8), [3], mask)
    with pytest.raises(InvalidArgumentError, match="indexed as another block"):
        index.insert(chain(range(8)), 1, 3)
    assert index.lookup_prefix(chain(range(8))) == [3]
    index.check_invariants()


def test_21_block_without_its_prefix_is_refused() -> None:
    index = filled(range(12), [0])
    with pytest.raises(InvalidArgumentError, match="needs its 2 leading blocks; 1 are indexed"):
        index.insert(chain(range(12)), 2, 4)
    assert index.lookup_prefix(chain(range(12))) == [0]
    assert index.size == 1


@MASKS
def test_22_erase(mask: int) -> None:
    index = filled(range(8), [3, 4], mask)
    index.erase_page(7)
    with pytest.raises(InvalidArgumentError, match="1 children; erase them first"):
        index.erase_page(3)
    assert index.lookup_prefix(chain(range(8))) == [3, 4]
    first = index.hash_of(3)
    index.erase_page(4)
    index.erase_page(3)
    assert index.lookup_prefix(chain(range(8))) == []
    assert (index.hash_of(3), index.size, index.num_namespaces) == (None, 0, 0)
    assert first is not None
    assert index.evicted(first)
    assert not index.evicted(Hash128(first.hi, first.lo ^ 1))
    assert index.insert(chain(range(8)), 0, 6) == (6, True)
    index.check_invariants()


@MASKS
def test_24_walk_stops_at_the_first_other_block(mask: int) -> None:
    index = filled(range(12), [5, 2, 7], mask)
    assert index.lookup_prefix(chain(range(12))) == [5, 2, 7]
    assert index.lookup_prefix(chain([*range(8), 99, 9, 10, 11])) == [5, 2]
    assert index.lookup_prefix(chain([*range(11)])) == [5, 2]
    assert index.lookup_prefix(chain([0, 1, 2, 4, *range(4, 12)])) == []
    assert index.path_of(7) == [5, 2, 7]
    assert [index.parent_of(p) for p in (5, 2, 7)] == [None, 5, 2]
    assert [index.child_count(p) for p in (5, 2, 7)] == [1, 1, 0]
    tokens = index.tokens_of(2)
    assert tokens is not None
    assert tokens.tolist() == [4, 5, 6, 7]


@MASKS
def test_172_colliding_blocks_live_side_by_side(mask: int) -> None:
    index = BlockIndex(P, 8, mask)
    prompts = [[n, 0, 0, 0, 9, 9, 9, 9] for n in range(4)]
    for n, prompt in enumerate(prompts):
        index.insert(chain(prompt), 0, 2 * n)
        index.insert(chain(prompt), 1, 2 * n + 1)
    for n, prompt in enumerate(prompts):
        assert index.lookup_prefix(chain(prompt)) == [2 * n, 2 * n + 1]
    # Same second block under another first one: equal tokens, another parent.
    assert index.lookup_prefix(chain([7, 0, 0, 0, 9, 9, 9, 9])) == []
    index.erase_page(3)
    index.erase_page(2)
    assert [index.lookup_prefix(chain(p)) for p in prompts] == [[0, 1], [], [4, 5], [6, 7]]
    index.check_invariants()


@MASKS
def test_namespaces_never_share(mask: int) -> None:
    index = BlockIndex(P, 8, mask)
    keys = [
        BlockKeyExtras(),
        BlockKeyExtras(adapter=AdapterKey(0, 0)),
        BlockKeyExtras(adapter=AdapterKey(0, 1)),
        BlockKeyExtras(isolation_digest=Hash128(0, 0)),
    ]
    for page, extras in enumerate(keys):
        assert index.lookup_prefix(chain(range(4), extras)) == []
        assert index.insert(chain(range(4), extras), 0, page) == (page, True)
    assert [index.lookup_prefix(chain(range(4), extras)) for extras in keys] == [[0], [1], [2], [3]]
    assert index.num_namespaces == 4
    index.erase_page(1)
    assert index.num_namespaces == 3
    assert index.insert(chain(range(4), BlockKeyExtras(adapter=AdapterKey(5, 5))), 0, 6) == (6, True)
    assert index.lookup_prefix(chain(range(4), keys[1])) == []
    index.check_invariants()


@MASKS
def test_media_digests_are_compared_as_well(mask: int) -> None:
    index = BlockIndex(P, 8, mask)
    cat, dog = Hash128(1, 1), Hash128(2, 2)
    with_cat = [None, cat, None, None]
    prompts = [
        chain([5, 0, 6, 7]),
        chain([5, 0, 6, 7], media=with_cat),
        chain([5, 0, 6, 7], media=[None, dog, None, None]),
        chain([5, 0, 6, 7], media=[None, None, cat, None]),
    ]
    for page, prompt in enumerate(prompts):
        assert index.insert(prompt, 0, page) == (page, True)
    assert [index.lookup_prefix(p) for p in prompts] == [[0], [1], [2], [3]]
    # The placeholder id at a media position does not count.
    assert index.lookup_prefix(chain([5, 42, 6, 7], media=with_cat)) == [1]
    index.erase_page(1)
    assert [index.lookup_prefix(p) for p in prompts] == [[0], [], [2], [3]]
    assert index.insert(prompts[1], 0, 7) == (7, True)
    index.check_invariants()


def test_bad_arguments_change_nothing() -> None:
    index = BlockIndex(P, 4)
    for page in (-1, 4, "0", None):
        with pytest.raises(InvalidArgumentError, match="not an integer from 0 to 3"):
            index.insert(chain(range(4)), 0, page)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="block 1 is not a full block"):
        index.insert(chain(range(7)), 1, 0)
    with pytest.raises(InvalidArgumentError, match="page size 2, the index 4"):
        index.lookup_prefix(TokenChain(2))
    assert index.size == 0
    for arguments in ((0, 4), (4, -1), (4, 4, -1), (4, 4, 1 << 128)):
        with pytest.raises(InvalidArgumentError):
            BlockIndex(*arguments)


def test_memory_of_evictions_is_bounded() -> None:
    index = BlockIndex(P, 1)
    hashes = []
    for n in range(500):
        index.insert(chain([n, n, n, n]), 0, 0)
        hashes.append(index.hash_of(0))
        index.erase_page(0)
    assert index.evicted(hashes[-1])  # the newest is always remembered
    assert sum(index.evicted(h) for h in hashes) <= 64
