"""Block identity for any input, against a plain-Python encoder of the documented stream."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgellm._core.block_hash import (
    CHAIN_ROOT,
    TokenChain,
    encode_key_extras,
    hash128,
    hash_exact_prefix,
    hash_full_blocks,
)
from edgellm.cache.types import AdapterKey, BlockKeyExtras, Hash128, MediaSpanKey

U64 = st.integers(0, (1 << 64) - 1)
DIGESTS = st.builds(Hash128, U64, U64)
TOKENS = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=40)
SMALL = st.integers(-(1 << 63), (1 << 63) - 1)
EXTRAS = st.builds(
    BlockKeyExtras,
    media=st.lists(st.builds(MediaSpanKey, DIGESTS, DIGESTS, SMALL, SMALL, SMALL), max_size=2).map(tuple),
    adapter=st.none() | st.builds(AdapterKey, U64, U64),
    position_digest=st.none() | DIGESTS,
    custom_embedding_digest=st.none() | DIGESTS,
    isolation_digest=st.none() | DIGESTS,
)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[Hash128 | None], BlockKeyExtras, int]:
    tokens = draw(TOKENS)
    digest = st.none() | st.just(Hash128(0, 0)) | DIGESTS
    media = draw(st.just([]) | st.lists(digest, min_size=len(tokens), max_size=len(tokens)))
    return tokens, media, draw(EXTRAS), draw(st.integers(1, 9))


def words(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def token_stream(tokens: list[int], media: list[Hash128 | None]) -> bytes:
    if not any(digest is not None and not digest.is_zero() for digest in media):
        return words(2 << 56 | len(tokens)) + np.array(tokens, np.int32).tobytes()
    out = words(3 << 56 | len(tokens))
    for token, digest in zip(tokens, media, strict=True):
        if digest is None or digest.is_zero():
            out += words(4 << 56 | token & 0xFFFFFFFF)
        else:
            out += words(5 << 56, digest.hi, digest.lo)
    return out


def model_block(parent: Hash128, tokens: list[int], media: list[Hash128 | None], extras: BlockKeyExtras) -> Hash128:
    stream = encode_key_extras(extras) + token_stream(tokens, media)
    return hash128(stream + bytes(-len(stream) % 16) + words(parent.hi, parent.lo))


def model_chain(
    tokens: list[int], media: list[Hash128 | None], extras: BlockKeyExtras, page_size: int
) -> list[Hash128]:
    """One hash per block, a partial last block included."""
    out, parent = [], CHAIN_ROOT
    for start in range(0, len(tokens), page_size):
        end = start + page_size
        parent = model_block(parent, tokens[start:end], media[start:end], extras)
        out.append(parent)
    return out


@given(prompts())
def test_chained_hashes_equal_those_of_the_documented_stream(
    prompt: tuple[list[int], list[Hash128 | None], BlockKeyExtras, int],
) -> None:
    tokens, media, extras, page_size = prompt
    expected = model_chain(tokens, media, extras, page_size)
    num_full = len(tokens) // page_size
    assert hash_full_blocks(tokens, page_size, [extras] * num_full, media) == expected[:num_full]
    exact = hash_exact_prefix(tokens, page_size, [extras] * len(expected), media)
    assert exact == (expected[-1] if expected else CHAIN_ROOT)


@given(prompts(), st.data())
def test_a_chain_extended_in_any_pieces_equals_one_call(
    prompt: tuple[list[int], list[Hash128 | None], BlockKeyExtras, int], data: st.DataObject
) -> None:
    tokens, media, extras, page_size = prompt
    chain = TokenChain(page_size, extras, media)
    start = 0
    while start < len(tokens):
        size = data.draw(st.integers(1, len(tokens) - start))
        if size == 1:
            chain.append(tokens[start])
        else:
            chain.extend(np.array(tokens[start : start + size], np.int32))
        start += size
        chain.check_invariants()
    expected = model_chain(tokens, media, extras, page_size)
    assert [chain.hash_at(i) for i in range(chain.num_blocks)] == expected[: len(tokens) // page_size]
    assert chain.token_ids().tolist() == tokens
    for length in range(len(tokens) + 1):
        assert chain.prefix_hash(length) == hash_exact_prefix(
            tokens[:length], page_size, [extras] * -(-length // page_size), media[:length]
        )


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_two_prompts_share_exactly_the_hashes_of_their_common_full_blocks(
    first: list[int], second: list[int], page_size: int
) -> None:
    common = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if common is None:
        common = min(len(first), len(second))
    a, b = hash_full_blocks(first, page_size), hash_full_blocks(second, page_size)
    shared = common // page_size
    assert a[:shared] == b[:shared]
    assert not set(a[shared:]) & set(b[shared:])


@given(st.lists(EXTRAS, min_size=2, max_size=4))
def test_key_bytes_are_equal_exactly_when_the_extras_are(extras: list[BlockKeyExtras]) -> None:
    for a in extras:
        for b in extras:
            assert (encode_key_extras(a) == encode_key_extras(b)) == (a == b)


@given(prompts())
def test_media_bytes_name_each_digest_at_its_place(
    prompt: tuple[list[int], list[Hash128 | None], BlockKeyExtras, int],
) -> None:
    tokens, media, extras, page_size = prompt
    chain = TokenChain(page_size, extras, media)
    chain.extend(tokens)
    for block_idx in range(chain.num_blocks):
        start = block_idx * page_size
        expected = b"".join(
            words(offset, digest.hi, digest.lo)
            for offset, digest in enumerate(media[start : start + page_size])
            if digest is not None and not digest.is_zero()
        )
        assert chain.block_media(block_idx) == expected
