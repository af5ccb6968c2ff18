"""Block identity: the published hash, the tagged stream, chains, and the token chain of one sequence."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array

import numpy as np
import pytest

from edgellm._core.block_hash import (
    CHAIN_ROOT,
    MEDIA_TOKEN_ID,
    OPAQUE_CHUNK_BYTES,
    OpaqueIdentity,
    TokenChain,
    encode_key_extras,
    hash128,
    hash_block,
    hash_exact_prefix,
    hash_full_blocks,
    hash_opaque_identity,
)
from edgellm.cache.types import AdapterKey, BlockKeyExtras, Hash128, MediaSpanKey
from edgellm.errors import InvalidArgumentError

P = 4
ZERO = Hash128(0, 0)
D1 = Hash128(11, 12)
D2 = Hash128(21, 22)
TENANT = BlockKeyExtras(isolation_digest=Hash128(5, 6))


def le(*words: int) -> bytes:
    return b"".join(word.to_bytes(8, "little") for word in words)


def span(offset: int, content: Hash128 = D1) -> MediaSpanKey:
    return MediaSpanKey(content, Hash128(3, 4), offset_within_block=offset, item_order=0, modality=1)


# --- the published algorithm


def test_hash128_has_the_published_smhasher_verification_value() -> None:
    digests = b""
    for i in range(256):
        value = hash128(bytes(range(i)), seed=256 - i)
        digests += le(value.hi, value.lo)
    assert hash128(digests).hi & 0xFFFFFFFF == 0x6384BA69


@pytest.mark.parametrize(
    ("data", "hi", "lo"),
    [
        (b"", 0, 0),
        (b"hello", 0xCBD8A7B341BD9B02, 0x5B1E906A48AE1D19),
        (b"The quick brown fox jumps over the lazy dog", 0xE34BBC7BBC071B6C, 0x7A433CA9C49A9347),
    ],
)
def test_hash128_test_vectors(data: bytes, hi: int, lo: int) -> None:
    assert hash128(data) == Hash128(hi, lo)
    assert hash128(bytearray(data)) == Hash128(hi, lo)


def test_hash128_refuses_a_seed_of_more_than_32_bits() -> None:
    for seed in (-1, 1 << 32):
        with pytest.raises(InvalidArgumentError, match="seed"):
            hash128(b"x", seed=seed)


# --- numbered behaviours of block identity


def test_1_equal_input_gives_equal_hash_also_in_another_process() -> None:
    here = hash_block(CHAIN_ROOT, [1, 2, 3, 4], TENANT)
    assert here == hash_block(CHAIN_ROOT, [1, 2, 3, 4], TENANT)
    script = (
        "from edgellm._core.block_hash import CHAIN_ROOT, hash_block\n"
        "from edgellm.cache.types import BlockKeyExtras, Hash128\n"
        "h = hash_block(CHAIN_ROOT, [1, 2, 3, 4], BlockKeyExtras(isolation_digest=Hash128(5, 6)))\n"
        "print(h.hi, h.lo)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "123"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == [str(here.hi), str(here.lo)]


def test_the_block_hash_is_the_hash_of_the_documented_stream() -> None:
    text = le(1 << 56, 2 << 56 | 4) + np.array([1, 2, 3, -4], np.int32).tobytes() + le(CHAIN_ROOT.hi, CHAIN_ROOT.lo)
    assert hash_block(CHAIN_ROOT, [1, 2, 3, -4]) == hash128(text)
    odd = le(1 << 56, 2 << 56 | 3) + np.array([1, 2, 3, 0], np.int32).tobytes() + le(D1.hi, D1.lo)
    assert hash_block(D1, [1, 2, 3]) == hash128(odd)
    isolated = le(1 << 56 | 8 << 48, 5, 6, 2 << 56 | 2) + np.array([1, 2, 0, 0], np.int32).tobytes() + le(D1.hi, D1.lo)
    assert hash_block(D1, [1, 2], TENANT) == hash128(isolated)
    mixed = le(1 << 56, 3 << 56 | 3, 4 << 56 | 1, 5 << 56, 21, 22, 4 << 56 | 0xFFFFFFFF, 0, D1.hi, D1.lo)
    assert hash_block(D1, [1, 9, -1], None, [None, D2, None]) == hash128(mixed)


def test_2_another_first_token_changes_every_block_hash() -> None:
    first = hash_full_blocks([0, *range(1, 16)], P)
    second = hash_full_blocks([9, *range(1, 16)], P)
    assert len(first) == 4
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_3_nine_tokens_give_two_hashes_and_the_ninth_has_no_influence() -> None:
    hashes = hash_full_blocks(list(range(9)), P)
    assert len(hashes) == 2
    assert hashes == hash_full_blocks([*range(8), 99], P)
    assert hashes == [hash_block(CHAIN_ROOT, [0, 1, 2, 3]), hash_block(hashes[0], [4, 5, 6, 7])]


def test_4_exact_prefix_of_aligned_input_is_the_last_full_block_hash() -> None:
    tokens = list(range(8))
    assert hash_exact_prefix(tokens, P) == hash_full_blocks(tokens, P)[-1]
    assert hash_exact_prefix([], P) == CHAIN_ROOT
    assert not CHAIN_ROOT.is_zero()
    assert len(hash_full_blocks([], P)) == 0


def test_5_exact_prefix_covers_the_partial_tail() -> None:
    at_8 = hash_exact_prefix(list(range(8)), P)
    at_9 = hash_exact_prefix(list(range(9)), P)
    assert at_9 != at_8
    assert at_9 != hash_exact_prefix([*range(8), 99], P)
    assert at_9 == hash_block(at_8, [8])


def test_6_absent_differs_from_present_and_zero() -> None:
    extras = [
        BlockKeyExtras(),
        BlockKeyExtras(adapter=AdapterKey(0, 0)),
        BlockKeyExtras(position_digest=ZERO),
        BlockKeyExtras(custom_embedding_digest=ZERO),
        BlockKeyExtras(isolation_digest=ZERO),
    ]
    assert len({hash_block(CHAIN_ROOT, [1, 2], e) for e in extras}) == 5
    assert len({encode_key_extras(e) for e in extras}) == 5


def test_7_another_adapter_generation_gives_another_hash() -> None:
    first = hash_block(CHAIN_ROOT, [1], BlockKeyExtras(adapter=AdapterKey(7, 1)))
    assert first != hash_block(CHAIN_ROOT, [1], BlockKeyExtras(adapter=AdapterKey(7, 2)))


def test_8_order_and_offset_of_media_entries_matter() -> None:
    a, b = span(0), span(0, content=D2)
    first = hash_block(CHAIN_ROOT, [1], BlockKeyExtras(media=(a, b)))
    assert first != hash_block(CHAIN_ROOT, [1], BlockKeyExtras(media=(b, a)))
    at_0 = hash_block(CHAIN_ROOT, [1], BlockKeyExtras(media=(span(0),)))
    assert at_0 != hash_block(CHAIN_ROOT, [1], BlockKeyExtras(media=(span(1),)))
    assert at_0 != hash_block(CHAIN_ROOT, [1])


def test_9_the_digest_counts_and_the_placeholder_id_does_not() -> None:
    media = [None, None, D1, None, None, None, None, None]
    tokens = list(range(8))
    hashes = hash_full_blocks(tokens, P, media=media)
    assert hashes == hash_full_blocks([0, 1, 77, 3, 4, 5, 6, 7], P, media=media)
    changed = hash_full_blocks(tokens, P, media=[None, None, D2, *media[3:]])
    assert changed[0] != hashes[0]
    assert changed[1] != hashes[1]
    other_text = hash_full_blocks([0, 1, 2, 9, 4, 5, 6, 7], P, media=media)
    assert other_text[0] != hashes[0]


def test_10_a_list_of_zeros_equals_no_list() -> None:
    tokens = list(range(9))
    for zeros in ([ZERO] * 9, [None] * 9):
        assert hash_full_blocks(tokens, P, media=zeros) == hash_full_blocks(tokens, P)
        assert hash_exact_prefix(tokens, P, media=zeros) == hash_exact_prefix(tokens, P)
        assert hash_block(D1, tokens, None, zeros) == hash_block(D1, tokens)


@pytest.mark.parametrize("count", [1, 3])
def test_11_a_wrong_number_of_extras_is_refused(count: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{count} extras for 2 blocks"):
        hash_full_blocks(list(range(9)), P, [TENANT] * count)
    with pytest.raises(InvalidArgumentError, match=f"{count + 1} extras for 3 blocks"):
        hash_exact_prefix(list(range(9)), P, [TENANT] * (count + 1))


def test_11_a_wrong_number_of_media_digests_is_refused() -> None:
    for function in (hash_full_blocks, hash_exact_prefix):
        with pytest.raises(InvalidArgumentError, match="8 media digests for 9 tokens"):
            function(list(range(9)), P, media=[D1] * 8)
    with pytest.raises(InvalidArgumentError, match="1 media digests for 2 tokens"):
        hash_block(CHAIN_ROOT, [1, 2], None, [D1])


@pytest.mark.parametrize("page_size", [0, -4, 2.5, None, (1 << 20) + 1])
def test_11_an_impossible_page_size_is_refused(page_size: object) -> None:
    for call in (hash_full_blocks, hash_exact_prefix):
        with pytest.raises(InvalidArgumentError, match="page_size"):
            call([1, 2], page_size)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="page_size"):
        TokenChain(page_size)  # type: ignore[arg-type]


def test_12_opaque_identity_of_nothing_is_not_zero_and_chunking_does_not_matter() -> None:
    assert not hash_opaque_identity(b"").is_zero()
    data = np.random.default_rng(1).integers(0, 256, 5 << 20, dtype=np.uint8).tobytes()
    whole = hash_opaque_identity(data)
    for piece in (1 << 20, 333_333):
        identity = OpaqueIdentity()
        for start in range(0, len(data), piece):
            identity.update(data[start : start + piece])
        assert identity.digest() == whole
    assert hash_opaque_identity(data[:-1]) != whole
    assert hash_opaque_identity(data[OPAQUE_CHUNK_BYTES:] + data[:OPAQUE_CHUNK_BYTES]) != whole


def test_opaque_identity_separates_trailing_zeros_and_chunk_boundaries() -> None:
    sizes = [0, 1, 2, OPAQUE_CHUNK_BYTES - 1, OPAQUE_CHUNK_BYTES, OPAQUE_CHUNK_BYTES + 1]
    assert len({hash_opaque_identity(bytes(size)) for size in sizes}) == len(sizes)


def test_opaque_identity_may_be_read_midway() -> None:
    identity = OpaqueIdentity()
    identity.update(b"ab")
    assert identity.digest() == hash_opaque_identity(b"ab")
    identity.update(b"c")
    assert identity.digest() == hash_opaque_identity(b"abc")


# --- chains


def test_each_block_may_have_its_own_extras_and_the_tail_too() -> None:
    tokens = list(range(9))
    other = BlockKeyExtras(adapter=AdapterKey(1, 1))
    first = hash_block(CHAIN_ROOT, tokens[:4], TENANT)
    second = hash_block(first, tokens[4:8], other)
    assert hash_full_blocks(tokens, P, [TENANT, other]) == [first, second]
    assert hash_exact_prefix(tokens, P, [TENANT, other, TENANT]) == hash_block(second, [8], TENANT)


def test_exact_prefix_includes_the_media_of_the_tail() -> None:
    media = [None] * 8 + [D1]
    tail = hash_exact_prefix(list(range(9)), P, media=media)
    assert tail == hash_exact_prefix([*range(8), 55], P, media=media)
    assert tail != hash_exact_prefix(list(range(9)), P)
    assert tail != hash_exact_prefix(list(range(9)), P, media=[None] * 8 + [D2])


def test_a_shorter_block_never_equals_one_padded_with_zeros() -> None:
    assert len({hash_block(CHAIN_ROOT, [0] * n) for n in range(9)}) == 9


def test_a_text_id_never_equals_a_media_digest_of_the_same_bits() -> None:
    as_media = hash_block(CHAIN_ROOT, [MEDIA_TOKEN_ID, 5], None, [Hash128(0, 5), None])
    assert as_media != hash_block(CHAIN_ROOT, [MEDIA_TOKEN_ID, 5])


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 6, 16, 64])
def test_every_form_of_token_input_gives_the_same_hashes(page_size: int) -> None:
    ids = [(i * 7919) % 50_000 for i in range(200)]
    expected = [CHAIN_ROOT]
    for start in range(0, 200 // page_size * page_size, page_size):
        expected.append(hash_block(expected[-1], ids[start : start + page_size]))
    forms = [
        ids,
        tuple(ids),
        array("i", ids),
        np.array(ids, np.int32),
        np.array(ids, np.int64),
        np.array(ids, np.uint16),
        np.repeat(np.array(ids, np.int32), 2)[::2],
        memoryview(array("i", ids)),
    ]
    for form in forms:
        assert hash_full_blocks(form, page_size) == expected[1:]
        chain = TokenChain(page_size)
        chain.extend(form)
        assert [chain.hash_at(i) for i in range(chain.num_blocks)] == expected[1:]
        assert chain.token_ids().tolist() == ids


def test_block_hashes_behave_as_a_sequence() -> None:
    hashes = hash_full_blocks(list(range(12)), P)
    assert hashes[-1] == hashes[2]
    assert hashes[1:] == [hashes[1], hashes[2]]
    assert hashes == list(hashes)
    assert hashes != list(hashes)[:2]
    assert (hashes == 3) is False
    for index in (3, -4):
        with pytest.raises(IndexError):
            hashes[index]


# --- refused tokens


@pytest.mark.parametrize(
    "bad",
    [
        [1, 2.0],
        [1, "2"],
        [1, None],
        [1, 1 << 31],
        [1, -(1 << 31) - 1],
        None,
        np.array([1.0, 2.0]),
        np.array([[1, 2]], np.int32),
        np.array([1 << 31]),
        b"abcd",
    ],
)
def test_bad_tokens_are_refused_and_nothing_changes(bad: object) -> None:
    chain = TokenChain(2)
    chain.extend([1, 2, 3])
    before = chain.hash_at(0)
    with pytest.raises(InvalidArgumentError):
        chain.extend(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        hash_full_blocks(bad, 2)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        hash_block(CHAIN_ROOT, bad)  # type: ignore[arg-type]
    assert (chain.num_tokens, chain.num_blocks, chain.hash_at(0)) == (3, 1, before)
    assert chain.token_ids().tolist() == [1, 2, 3]


@pytest.mark.parametrize("bad", [1.5, "1", None, 1 << 31])
def test_append_refuses_what_is_not_an_int32(bad: object) -> None:
    chain = TokenChain(2)
    with pytest.raises(InvalidArgumentError, match="not an int32"):
        chain.append(bad)  # type: ignore[arg-type]
    assert chain.num_tokens == 0


def test_digests_are_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="not a Hash128"):
        hash_block(3, [1])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="not a Hash128"):
        TokenChain(2, None, [7])  # type: ignore[list-item]
    for hi in (1 << 64, -1, 0.5):
        with pytest.raises(InvalidArgumentError, match=r"Hash128.hi"):
            hash_block(Hash128(hi, 0), [1])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="adapter id"):
        encode_key_extras(BlockKeyExtras(adapter=AdapterKey(-1, 0)))
    with pytest.raises(InvalidArgumentError, match="offset_within_block"):
        encode_key_extras(BlockKeyExtras(media=(span(1 << 63),)))


# --- the key of a namespace


def test_key_extras_are_encoded_as_documented() -> None:
    assert encode_key_extras(BlockKeyExtras()) == le(1 << 56)
    assert encode_key_extras(TENANT) == le(1 << 56 | 8 << 48, 5, 6)
    extras = BlockKeyExtras(
        adapter=AdapterKey(1, 2),
        position_digest=Hash128(3, 4),
        custom_embedding_digest=Hash128(5, 6),
        isolation_digest=Hash128(7, 8),
    )
    assert encode_key_extras(extras) == le(1 << 56 | 15 << 48, 1, 2, 3, 4, 5, 6, 7, 8)
    one_media = encode_key_extras(BlockKeyExtras(media=(span(9),)))
    assert one_media == le(
        1 << 56 | 1, 0x10 << 56, 11, 12, 0x11 << 56, 3, 4, 0x12 << 56, 9, 0x13 << 56, 0, 0x14 << 56, 1
    )
    assert TokenChain(P, TENANT).key_bytes == encode_key_extras(TENANT)


def test_the_same_digest_in_another_field_is_another_identity() -> None:
    keys = {
        encode_key_extras(BlockKeyExtras(position_digest=D1)),
        encode_key_extras(BlockKeyExtras(custom_embedding_digest=D1)),
        encode_key_extras(BlockKeyExtras(isolation_digest=D1)),
        encode_key_extras(BlockKeyExtras(adapter=AdapterKey(D1.hi, D1.lo))),
    }
    assert len(keys) == 4


# --- the token chain


def test_committing_token_by_token_equals_committing_at_once() -> None:
    ids = list(range(100, 131))
    at_once = TokenChain(P, TENANT)
    at_once.extend(array("i", ids))
    one_by_one = TokenChain(P, TENANT)
    for i, token in enumerate(ids):
        assert one_by_one.num_blocks == i // P
        one_by_one.append(token)
    mixed = TokenChain(P, TENANT)
    for start in range(0, 31, 5):
        mixed.extend(ids[start : start + 5])
    expected = list(hash_full_blocks(ids, P, [TENANT] * 7))
    for chain in (at_once, one_by_one, mixed):
        assert [chain.hash_at(i) for i in range(7)] == expected
        assert (chain.num_tokens, len(chain), chain.num_blocks) == (31, 31, 7)
        chain.check_invariants()


def test_prefix_hash_at_every_length_equals_hash_exact_prefix() -> None:
    ids = list(range(10))
    media = [None, D1, None, None, None, None, None, None, None, D2]
    chain = TokenChain(P, TENANT, media)
    chain.extend(ids)
    for length in range(11):
        blocks = -(-length // P)
        expected = hash_exact_prefix(ids[:length], P, [TENANT] * blocks, media[:length])
        assert chain.prefix_hash(length) == expected
    for length in (-1, 11):
        with pytest.raises(InvalidArgumentError, match="length"):
            chain.prefix_hash(length)


def test_a_chain_says_where_its_media_lie() -> None:
    media = [None, D1, ZERO, None, None, None, None, None, D2]
    chain = TokenChain(P, BlockKeyExtras(), media)
    chain.extend([1, 50, 3, 4, 5, 6, 7, 8, 60])
    chain.extend([10, 11, 12])
    assert chain.has_media
    assert chain.block_media(0) == le(1, 11, 12)
    assert chain.block_media(1) == b""
    assert chain.block_media(2) == le(0, 21, 22)
    assert chain.token_ids().tolist() == [1, 50, 3, 4, 5, 6, 7, 8, 60, 10, 11, 12]
    assert chain.tokens_from(8).tolist() == [60, 10, 11, 12]
    expected = hash_full_blocks(chain.token_ids(), P, media=[*media, None, None, None])
    assert [chain.hash_at(i) for i in range(3)] == list(expected)
    chain.check_invariants()


def test_a_chain_without_digests_has_no_media() -> None:
    chain = TokenChain(P, media=[None, ZERO])
    chain.extend([1, 2, 3, 4])
    assert not chain.has_media
    assert chain.block_media(0) == b""


def test_token_ids_are_copies() -> None:
    source = np.array([1, 2, 3], np.int32)
    chain = TokenChain(P)
    chain.extend(source)
    source[0] = 99
    out = chain.token_ids()
    out[1] = 98
    assert chain.token_ids().tolist() == [1, 2, 3]
    assert chain.token_ids().dtype == np.int32
    assert chain.tokens_from(3).tolist() == []
    for start in (-1, 4):
        with pytest.raises(InvalidArgumentError, match="length"):
            chain.tokens_from(start)


@pytest.mark.parametrize("index", [-1, 1])
def test_block_indices_are_checked(index: int) -> None:
    chain = TokenChain(P)
    chain.extend([1, 2, 3, 4, 5])
    with pytest.raises(InvalidArgumentError, match="block"):
        chain.hash_at(index)
    with pytest.raises(InvalidArgumentError, match="block"):
        chain.block_media(index)


def test_extending_by_nothing_changes_nothing() -> None:
    chain = TokenChain(P)
    for empty in ([], (), array("i"), np.array([], np.int32)):
        chain.extend(empty)
    assert (chain.num_tokens, chain.num_blocks) == (0, 0)
