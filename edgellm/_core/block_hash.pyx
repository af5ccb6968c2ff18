"""Block identity: a 128-bit hash over a tagged word stream, chained so that it names a whole prefix.

The hash is MurmurHash3 x64 128 (Austin Appleby, public domain).  It is not a cryptographic hash and need
not be one: the block index believes a hit only after it compared parent, tokens and media digests.  Identities
that nothing can be compared with afterwards (`hash_opaque_identity`) use BLAKE2b instead.

The stream of one block, in little-endian 64-bit words; a tag sits in the top byte of its word:

    EXTRAS + presence bits + number of media entries | the present values, see `encode_key_extras`
    TOKENS + count       | the int32 ids, two a word                                            (text only)
    MIXED_TOKENS + count | per position: TEXT_TOKEN + id   or   MEDIA_TOKEN | hi | lo           (some media)
    zero words or half words up to a multiple of 16 bytes
    parent.hi | parent.lo

Every run is of fixed size or preceded by its count, so two different blocks never give one stream.  The parent
comes last, and what is constant comes first, for speed: the state after EXTRAS and TOKENS is computed once a chain,
and the tokens of the next block can be mixed while the hash of this one, its parent, is still being finished.
"""

cimport cython
from cpython.buffer cimport PyObject_CheckBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp.vector cimport vector

from edgellm._core.types cimport block_hash_t, token_t

import hashlib
import sys

import numpy as np

from edgellm.cache.types import BlockKeyExtras, Hash128
from edgellm.errors import InvalidArgumentError, InvariantError

if sys.byteorder != "little":
    raise ImportError("edgellm._core hashes memory as it lies and needs a little-endian machine")

# What `TokenChain.tokens` holds at a position that has a media digest.
cdef token_t _MEDIA_TOKEN_ID = -1
MEDIA_TOKEN_ID = _MEDIA_TOKEN_ID

OPAQUE_CHUNK_BYTES = 1 << 20

cdef enum:
    PRESENT_ADAPTER = 1
    PRESENT_POSITION = 2
    PRESENT_EMBEDDING = 4
    PRESENT_ISOLATION = 8

cdef enum:
    TAG_EXTRAS = 1
    TAG_TOKENS = 2
    TAG_MIXED_TOKENS = 3
    TAG_TEXT_TOKEN = 4
    TAG_MEDIA_TOKEN = 5


# --- the hash ------------------------------------------------------------------------------------------------

cdef inline uint64_t tagged(uint64_t tag, uint64_t value) noexcept nogil:
    """Tag in the top byte, a value below 2**56 under it."""
    return (tag << 56) | value


cdef inline uint64_t rotl(uint64_t x, int r) noexcept nogil:
    return (x << r) | (x >> (64 - r))


cdef inline uint64_t fmix(uint64_t k) noexcept nogil:
    k ^= k >> 33
    k *= 0xFF51AFD7ED558CCDULL
    k ^= k >> 33
    k *= 0xC4CEB9FE1A85EC53ULL
    k ^= k >> 33
    return k


cdef inline uint64_t scramble1(uint64_t k) noexcept nogil:
    return rotl(k * <uint64_t>0x87C37B91114253D5ULL, 31) * <uint64_t>0x4CF5AD432745937FULL


cdef inline uint64_t scramble2(uint64_t k) noexcept nogil:
    return rotl(k * <uint64_t>0x4CF5AD432745937FULL, 33) * <uint64_t>0x87C37B91114253D5ULL


cdef inline void mix(murmur_t* m, uint64_t k1, uint64_t k2) noexcept nogil:
    m.h1 = (rotl(m.h1 ^ scramble1(k1), 27) + m.h2) * 5 + 0x52DCE729
    m.h2 = (rotl(m.h2 ^ scramble2(k2), 31) + m.h1) * 5 + 0x38495AB5


cdef inline block_hash_t finish(murmur_t m, uint64_t num_bytes) noexcept nogil:
    cdef block_hash_t out
    m.h1 ^= num_bytes
    m.h2 ^= num_bytes
    m.h1 += m.h2
    m.h2 += m.h1
    m.h1 = fmix(m.h1)
    m.h2 = fmix(m.h2)
    m.h1 += m.h2
    m.h2 += m.h1
    out.hi = m.h1
    out.lo = m.h2
    return out


cdef inline uint64_t load_word(const void* data) noexcept nogil:
    """Eight bytes from any alignment."""
    cdef uint64_t word
    memcpy(&word, data, 8)
    return word


cdef inline block_hash_t finish_block(murmur_t m, block_hash_t parent, uint64_t num_bytes) noexcept nogil:
    mix(&m, parent.hi, parent.lo)
    return finish(m, num_bytes + 16)


# --- one block -----------------------------------------------------------------------------------------------

cdef murmur_t block_prefix(const uint64_t* key_words, size_t num_key_words, uint64_t tokens_word) noexcept nogil:
    """State after the EXTRAS run (always an odd number of words) and the word that opens the tokens."""
    cdef murmur_t m
    cdef size_t i = 0
    m.h1 = 0
    m.h2 = 0
    while i + 1 < num_key_words:
        mix(&m, key_words[i], key_words[i + 1])
        i += 2
    mix(&m, key_words[i], tokens_word)
    return m


cdef inline size_t padded_token_bytes(Py_ssize_t num_tokens) noexcept nogil:
    return (<size_t>num_tokens * sizeof(token_t) + 15) & ~<size_t>15


cdef inline void mix_tokens(murmur_t* m, const token_t* tokens, Py_ssize_t count) noexcept nogil:
    cdef Py_ssize_t i = 0
    cdef uint64_t rest[2]
    while i + 4 <= count:
        mix(m, load_word(tokens + i), load_word(tokens + i + 2))
        i += 4
    if i < count:
        rest[0] = 0
        rest[1] = 0
        memcpy(rest, tokens + i, <size_t>(count - i) * sizeof(token_t))
        mix(m, rest[0], rest[1])


cdef inline void mix_tokens_twice(
    murmur_t* m, const token_t* tokens, murmur_t* m2, const token_t* tokens2, Py_ssize_t count
) noexcept nogil:
    """Two blocks in step: each is one dependency chain, so together they take little longer than one."""
    cdef Py_ssize_t i = 0
    while i + 4 <= count:
        mix(m, load_word(tokens + i), load_word(tokens + i + 2))
        mix(m2, load_word(tokens2 + i), load_word(tokens2 + i + 2))
        i += 4
    mix_tokens(m, tokens + i, count - i)
    mix_tokens(m2, tokens2 + i, count - i)


cdef block_hash_t hash_text_block(
    block_hash_t parent, const token_t* tokens, Py_ssize_t num_tokens, const uint64_t* key_words, size_t num_key_words
) noexcept nogil:
    """The hash of one block without media; `key_words` is the encoded EXTRAS run."""
    cdef murmur_t m = block_prefix(key_words, num_key_words, tagged(TAG_TOKENS, <uint64_t>num_tokens))
    mix_tokens(&m, tokens, num_tokens)
    return finish_block(m, parent, (num_key_words + 1) * 8 + padded_token_bytes(num_tokens))


cdef void hash_text_blocks(
    block_hash_t parent,
    const token_t* tokens,
    Py_ssize_t num_blocks,
    Py_ssize_t page_size,
    murmur_t start,
    size_t num_key_words,
    block_hash_t* out,
) noexcept nogil:
    """`num_blocks` chained full blocks, two by two; the same values as `hash_text_block` one by one.

    start: `block_prefix` of a full text block.
    """
    cdef uint64_t num_bytes = (num_key_words + 1) * 8 + padded_token_bytes(page_size)
    cdef murmur_t first
    cdef murmur_t second
    while num_blocks >= 2:
        first = start
        second = start
        mix_tokens_twice(&first, tokens, &second, tokens + page_size, page_size)
        parent = finish_block(first, parent, num_bytes)
        out[0] = parent
        parent = finish_block(second, parent, num_bytes)
        out[1] = parent
        out += 2
        tokens += 2 * page_size
        num_blocks -= 2
    if num_blocks > 0:
        first = start
        mix_tokens(&first, tokens, page_size)
        out[0] = finish_block(first, parent, num_bytes)


cdef block_hash_t hash_mixed_block(
    block_hash_t parent,
    const token_t* tokens,
    Py_ssize_t num_tokens,
    const media_position_t* media,
    size_t num_media,
    int64_t first_position,
    const uint64_t* key_words,
    size_t num_key_words,
) noexcept nogil:
    """The hash of one block with at least one digest; `media` lists those of this block in order."""
    cdef murmur_t m = block_prefix(key_words, num_key_words, tagged(TAG_MIXED_TOKENS, <uint64_t>num_tokens))
    cdef size_t num_words = <size_t>num_tokens + 2 * num_media
    cdef size_t next_media = 0
    cdef uint64_t pair[2]
    cdef uint64_t word
    cdef size_t i
    cdef Py_ssize_t position = 0
    cdef int part = 0
    for i in range(num_words):
        if next_media < num_media and media[next_media].position == first_position + position:
            word = mixed_media_word(media[next_media].digest, part)
            part += 1
            if part == 3:
                part = 0
                next_media += 1
                position += 1
        else:
            word = tagged(TAG_TEXT_TOKEN, <uint32_t>tokens[position])
            position += 1
        pair[i & 1] = word
        if i & 1:
            mix(&m, pair[0], pair[1])
    if num_words & 1:
        mix(&m, pair[0], 0)
    return finish_block(m, parent, (num_key_words + 1 + num_words + (num_words & 1)) * 8)


cdef inline uint64_t mixed_media_word(block_hash_t digest, int part) noexcept nogil:
    if part == 0:
        return tagged(TAG_MEDIA_TOKEN, 0)
    return digest.hi if part == 1 else digest.lo


cdef size_t media_lower_bound(const vector[media_position_t]* media, Py_ssize_t position) noexcept nogil:
    """Index of the first media entry at or after `position`."""
    cdef size_t low = 0
    cdef size_t high = media.size()
    cdef size_t middle
    while low < high:
        middle = (low + high) // 2
        if media[0][middle].position < position:
            low = middle + 1
        else:
            high = middle
    return low


cdef block_hash_t hash_range(
    block_hash_t parent,
    const token_t* tokens,
    Py_ssize_t first,
    Py_ssize_t count,
    const vector[media_position_t]* media,
    const vector[uint64_t]* key_words,
) noexcept nogil:
    """The chained hash of tokens [first, first + count) of a sequence: a full block or a shorter tail."""
    cdef size_t begin = media_lower_bound(media, first)
    cdef size_t end = media_lower_bound(media, first + count)
    if begin == end:
        return hash_text_block(parent, tokens + first, count, key_words.data(), key_words.size())
    return hash_mixed_block(
        parent, tokens + first, count, media.data() + begin, end - begin, first, key_words.data(), key_words.size()
    )


cdef block_hash_t murmur3_x64_128(const uint8_t* data, size_t num_bytes, uint32_t seed) noexcept nogil:
    """The published algorithm for any byte length."""
    cdef murmur_t m
    cdef uint64_t tail[2]
    cdef size_t body = num_bytes & ~<size_t>15
    cdef size_t i
    m.h1 = seed
    m.h2 = seed
    for i in range(0, body, 16):
        mix(&m, load_word(data + i), load_word(data + i + 8))
    if body < num_bytes:
        tail[0] = 0
        tail[1] = 0
        memcpy(tail, data + body, num_bytes - body)
        # A zero word leaves its lane unchanged, as the published switch over the tail length does.
        m.h2 ^= scramble2(tail[1])
        m.h1 ^= scramble1(tail[0])
    return finish(m, num_bytes)


# --- Python values at the border -----------------------------------------------------------------------------

cdef object to_hash128(block_hash_t value):
    return Hash128(value.hi, value.lo)


cdef uint64_t _u64(object value, str name) except? 0:
    try:
        return <uint64_t>value.__index__()
    except (AttributeError, OverflowError):
        raise InvalidArgumentError(f"{name} is {value!r}; it must be an integer in [0, 2**64)") from None


cdef uint64_t _i64(object value, str name) except? 0:
    """A signed value in two's complement."""
    try:
        return <uint64_t><int64_t>value.__index__()
    except (AttributeError, OverflowError):
        raise InvalidArgumentError(f"{name} is {value!r}; it must be an integer in [-2**63, 2**63)") from None


cdef block_hash_t from_hash128(object value) except *:
    cdef block_hash_t out
    if not isinstance(value, Hash128):
        raise InvalidArgumentError(f"{value!r} is not a Hash128; digests are passed as Hash128(hi, lo)")
    out.hi = _u64(value.hi, "Hash128.hi")
    out.lo = _u64(value.lo, "Hash128.lo")
    return out


cdef int _append_hash(vector[uint64_t]* words, object value) except -1:
    cdef block_hash_t digest = from_hash128(value)
    words.push_back(digest.hi)
    words.push_back(digest.lo)
    return 0


cdef int _encode_media_spans(vector[uint64_t]* words, object spans) except -1:
    """Each entry has five fixed-size fields, each under its own tag word."""
    for span in spans:
        words.push_back(tagged(0x10, 0))
        _append_hash(words, span.content_digest)
        words.push_back(tagged(0x11, 0))
        _append_hash(words, span.placement_digest)
        words.push_back(tagged(0x12, 0))
        words.push_back(_i64(span.offset_within_block, "offset_within_block"))
        words.push_back(tagged(0x13, 0))
        words.push_back(_i64(span.item_order, "item_order"))
        words.push_back(tagged(0x14, 0))
        words.push_back(_i64(span.modality, "modality"))
    return 0


cdef int _encode_extras(vector[uint64_t]* words, object extras) except -1:
    cdef uint64_t present = 0
    digests = (extras.position_digest, extras.custom_embedding_digest, extras.isolation_digest)
    if extras.adapter is not None:
        present |= PRESENT_ADAPTER
    if digests[0] is not None:
        present |= PRESENT_POSITION
    if digests[1] is not None:
        present |= PRESENT_EMBEDDING
    if digests[2] is not None:
        present |= PRESENT_ISOLATION
    words.push_back(tagged(TAG_EXTRAS, (present << 48) | <uint64_t><uint32_t>len(extras.media)))
    _encode_media_spans(words, extras.media)
    if extras.adapter is not None:
        words.push_back(_u64(extras.adapter.id, "adapter id"))
        words.push_back(_u64(extras.adapter.generation, "adapter generation"))
    for digest in digests:
        if digest is not None:
            _append_hash(words, digest)
    return 0


cdef int _collect_media(vector[media_position_t]* out, object digests) except -1:
    """The positions with a non-zero digest, in order; None and zero mean text."""
    cdef media_position_t entry
    cdef int32_t position = 0
    entry.token_id = _MEDIA_TOKEN_ID
    for digest in digests:
        if digest is not None:
            entry.position = position
            entry.digest = from_hash128(digest)
            if entry.digest.hi != 0 or entry.digest.lo != 0:
                out.push_back(entry)
        position += 1
    return 0


cdef int _raise_bad_token(object value, Py_ssize_t index) except -1:
    raise InvalidArgumentError(f"token {value!r} at index {index} is not an int32; pass token ids as integers")


cdef int _read_sequence(vector[token_t]* out, object token_ids) except -1:
    cdef Py_ssize_t index = 0
    if token_ids is None:
        raise InvalidArgumentError("tokens are None; pass a sequence or an array of token ids")
    for value in token_ids:
        try:
            out.push_back(<token_t>value.__index__())
        except (AttributeError, OverflowError):
            _raise_bad_token(value, index)
        index += 1
    return 0


cdef object _as_int32(object token_ids):
    """A contiguous int32 array of the same ids (a view where it already is one), or None if not an array."""
    if isinstance(token_ids, (list, tuple, range)) or not (
        hasattr(token_ids, "__array__") or PyObject_CheckBuffer(token_ids)
    ):
        return None
    array = np.asarray(token_ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"tokens have shape {array.shape} and dtype {array.dtype}; pass a one-dimensional array of integers"
        )
    if array.dtype != np.int32:
        if array.size and (array.min() < -(1 << 31) or array.max() >= 1 << 31):
            raise InvalidArgumentError(f"token ids reach {array.max()} and {array.min()}; they must fit int32")
        array = array.astype(np.int32)
    return np.ascontiguousarray(array)


cdef int _check_page_size(object page_size) except -1:
    if not isinstance(page_size, int) or page_size <= 0 or page_size > 1 << 20:
        raise InvalidArgumentError(f"page_size is {page_size!r}; it must be an integer from 1 to {1 << 20}")
    return 0


# --- the chain -----------------------------------------------------------------------------------------------

@cython.final
cdef class TokenChain:
    """Tokens and chained block hashes of one sequence, append-only: committing tokens never rehashes old ones.

    Args:
        page_size: P, tokens per block.
        extras: request-constant identity; part of every block and of `key_bytes`.
        media: one digest (or None, or zero: text) per leading token position; later positions are text.

    Owns its storage.  Single-writer, not thread-safe; copies what it is given.
    """

    def __cinit__(self, page_size, extras=None, media=()):
        _check_page_size(page_size)
        self.page_size = page_size
        _encode_extras(&self._key_words, BlockKeyExtras() if extras is None else extras)
        self.key_bytes = (<const char*>self._key_words.data())[:self._key_words.size() * 8]
        _collect_media(&self._media, media)
        self.has_media = self._media.size() > 0
        self._block_start = block_prefix(
            self._key_words.data(), self._key_words.size(), tagged(TAG_TOKENS, <uint64_t>self.page_size)
        )

    # C interface

    cdef int append_token(self, token_t token_id) except -1:
        """One committed token; hashes its block when that is now full."""
        self._store(&token_id, 1)
        if self.tokens.size() % <size_t>self.page_size == 0:
            self._hash_new_blocks()
        return 0

    cdef int extend_tokens(self, const token_t* token_ids, Py_ssize_t count) except -1:
        """`count` committed tokens, copied; then hashes every block that became full."""
        self._store(token_ids, count)
        self._hash_new_blocks()
        return 0

    cdef int _store(self, const token_t* token_ids, Py_ssize_t count) except -1:
        """Append ids; raises before anything changed (both vectors have their room first)."""
        cdef size_t old = self.tokens.size()
        cdef size_t new = old + <size_t>count
        if new > 0x7FFFFFFF:
            raise InvalidArgumentError(f"a sequence of {new} tokens exceeds {0x7FFFFFFF}; split the request")
        if new // <size_t>self.page_size > self.hashes.capacity():
            self.hashes.reserve(max(2 * self.hashes.capacity(), new // <size_t>self.page_size))
        if new > self.tokens.capacity():
            # Room for a reply as well: its first token must not copy the whole prompt.
            self.tokens.reserve(max(2 * self.tokens.capacity(), new + new // 8 + 256))
        self.tokens.insert(self.tokens.end(), token_ids, token_ids + count)
        if self.has_media:
            self._mark_media(old)
        return 0

    cdef void _mark_media(self, size_t first) noexcept nogil:
        """Move placeholder ids at or after `first` aside, MEDIA_TOKEN_ID in their place."""
        cdef size_t i = media_lower_bound(&self._media, <Py_ssize_t>first)
        cdef size_t position
        while i < self._media.size():
            position = <size_t>self._media[i].position
            if position >= self.tokens.size():
                return
            self._media[i].token_id = self.tokens[position]
            self.tokens[position] = _MEDIA_TOKEN_ID
            i += 1

    cdef void _hash_new_blocks(self) noexcept nogil:
        """Hash every full block that has none; the vector has room, `_store` reserved it."""
        cdef Py_ssize_t page_size = self.page_size
        cdef Py_ssize_t num_full = <Py_ssize_t>self.tokens.size() // page_size
        cdef Py_ssize_t i = <Py_ssize_t>self.hashes.size()
        cdef block_hash_t value = self.hashes[i - 1] if i > 0 else _ROOT
        if not self.has_media:
            self.hashes.resize(num_full)
            hash_text_blocks(
                value, self.tokens.data() + i * page_size, num_full - i, page_size,
                self._block_start, self._key_words.size(), self.hashes.data() + i,
            )
            return
        while i < num_full:
            value = hash_range(
                value, self.tokens.data(), i * page_size, page_size, &self._media, &self._key_words
            )
            self.hashes.push_back(value)
            i += 1

    cdef bint block_has_media(self, Py_ssize_t block_idx) noexcept nogil:
        cdef Py_ssize_t first = block_idx * self.page_size
        cdef size_t i = media_lower_bound(&self._media, first)
        return i < self._media.size() and self._media[i].position < first + self.page_size

    cdef bytes block_media_bytes(self, Py_ssize_t block_idx):
        """`block_media` without the index check."""
        cdef Py_ssize_t first = block_idx * self.page_size
        cdef size_t end = media_lower_bound(&self._media, first + self.page_size)
        cdef vector[uint64_t] words
        cdef size_t i
        for i in range(media_lower_bound(&self._media, first), end):
            words.push_back(<uint64_t>(self._media[i].position - first))
            words.push_back(self._media[i].digest.hi)
            words.push_back(self._media[i].digest.lo)
        return (<const char*>words.data())[:words.size() * 8] if words.size() > 0 else b""

    # Python interface

    def extend(self, token_ids):
        """Append committed token ids and hash the blocks that became full.

        Args:
            token_ids: (n,) int32 contiguous buffer (`array("i")`, NumPy: no Python object per token), any other
                integer array, or a sequence of int.
        Raises:
            InvalidArgumentError: an id is not an int32 or the shape is wrong.  Nothing was changed.
        """
        cdef const token_t[::1] view
        cdef vector[token_t] copied
        array = _as_int32(token_ids)
        if array is None:
            _read_sequence(&copied, token_ids)
            self.extend_tokens(copied.data(), <Py_ssize_t>copied.size())
            return
        view = array
        if view.shape[0] > 0:
            self.extend_tokens(&view[0], view.shape[0])

    def append(self, token_id):
        """Append one committed token id.  Raises InvalidArgumentError when it is not an int32."""
        cdef token_t value = 0
        try:
            value = token_id.__index__()
        except (AttributeError, OverflowError):
            _raise_bad_token(token_id, <Py_ssize_t>self.tokens.size())
        self.append_token(value)

    @property
    def num_tokens(self):
        return self.tokens.size()

    @property
    def num_blocks(self):
        """Full blocks, each with a hash."""
        return self.hashes.size()

    def __len__(self):
        return self.tokens.size()

    def hash_at(self, block_idx):
        """Hash128 that names blocks 0..block_idx.  Raises InvalidArgumentError outside [0, num_blocks)."""
        return to_hash128(self.hashes[self._checked_block(block_idx)])

    def block_media(self, block_idx):
        """The block's media identity as bytes: per digest its offset in the block, hi, lo (u64); b"" for text.

        Raises InvalidArgumentError outside [0, num_blocks).
        """
        return self.block_media_bytes(self._checked_block(block_idx))

    def prefix_hash(self, length):
        """Identity of the first `length` tokens: full blocks, then the tail as a shorter block.

        Raises InvalidArgumentError outside [0, num_tokens].
        """
        cdef Py_ssize_t count = self._checked_length(length)
        cdef Py_ssize_t num_full = count // self.page_size
        cdef Py_ssize_t first = num_full * self.page_size
        cdef block_hash_t parent = self.hashes[num_full - 1] if num_full > 0 else _ROOT
        if first == count:
            return to_hash128(parent)
        return to_hash128(
            hash_range(parent, self.tokens.data(), first, count - first, &self._media, &self._key_words)
        )

    def token_ids(self):
        """All ids as given, a new (num_tokens,) int32 array."""
        return self.tokens_from(0)

    def tokens_from(self, start):
        """The ids from `start` on as given, a new int32 array.

        Raises InvalidArgumentError outside [0, num_tokens].
        """
        cdef Py_ssize_t first = self._checked_length(start)
        cdef Py_ssize_t count = <Py_ssize_t>self.tokens.size() - first
        cdef token_t[::1] view
        cdef size_t i
        out = np.empty(count, dtype=np.int32)
        if count == 0:
            return out
        view = out
        memcpy(&view[0], self.tokens.data() + first, <size_t>count * sizeof(token_t))
        for i in range(media_lower_bound(&self._media, first), media_lower_bound(&self._media, first + count)):
            view[self._media[i].position - first] = self._media[i].token_id
        return out

    def check_invariants(self):
        """Recompute every hash and compare.  Raises InvariantError on a difference.  Cost: O(num_tokens)."""
        cdef block_hash_t value = _ROOT
        cdef Py_ssize_t i
        if <Py_ssize_t>self.hashes.size() != <Py_ssize_t>self.tokens.size() // self.page_size:
            raise InvariantError(
                f"{self.hashes.size()} hashes for {self.tokens.size()} tokens, {self.page_size} a block"
            )
        for i in range(<Py_ssize_t>self.hashes.size()):
            value = hash_range(
                value, self.tokens.data(), i * self.page_size, self.page_size, &self._media, &self._key_words
            )
            if not hash_equal(value, self.hashes[i]):
                raise InvariantError(f"the stored hash of block {i} is not the hash of its tokens")

    cdef Py_ssize_t _checked_block(self, object block_idx) except -1:
        if not 0 <= block_idx < self.hashes.size():
            raise InvalidArgumentError(f"block {block_idx} is not in [0, {self.hashes.size()}), the full blocks")
        return block_idx

    cdef Py_ssize_t _checked_length(self, object length) except -1:
        if not 0 <= length <= self.tokens.size():
            raise InvalidArgumentError(f"length {length} is not in [0, {self.tokens.size()}], the tokens of the chain")
        return length


# --- module functions ----------------------------------------------------------------------------------------

@cython.final
cdef class BlockHashes:
    """Read-only sequence of Hash128; the values are made when they are asked for.  Equal to any equal sequence."""

    cdef vector[block_hash_t] values

    def __len__(self):
        return self.values.size()

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.values.size()))]
        cdef Py_ssize_t i = index
        cdef Py_ssize_t count = <Py_ssize_t>self.values.size()
        if i < 0:
            i += count
        if not 0 <= i < count:
            raise IndexError(f"block {index} of {count}")
        return to_hash128(self.values[i])

    def __eq__(self, other):
        if not isinstance(other, (BlockHashes, list, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other))

    def __repr__(self):
        return f"BlockHashes({list(self)!r})"


cdef object _int32_tokens(object tokens):
    """Any accepted form of token ids as a contiguous int32 array."""
    cdef vector[token_t] copied
    cdef token_t[::1] view
    array = _as_int32(tokens)
    if array is not None:
        return array
    _read_sequence(&copied, tokens)
    array = np.empty(copied.size(), dtype=np.int32)
    if copied.size() > 0:
        view = array
        memcpy(&view[0], copied.data(), copied.size() * sizeof(token_t))
    return array


cdef int _check_media_length(object media, Py_ssize_t num_tokens) except -1:
    if len(media) not in (0, num_tokens):
        raise InvalidArgumentError(
            f"{len(media)} media digests for {num_tokens} tokens; pass none, or one (or None) for each token"
        )
    return 0


@cython.final
cdef class _HashInput:
    """Checked arguments of one hashing call: tokens, media and the extras of each block."""

    cdef object array
    cdef const token_t* tokens
    cdef Py_ssize_t num_tokens
    cdef Py_ssize_t page_size
    cdef vector[media_position_t] media
    cdef vector[uint64_t] key_words
    cdef object extras_per_block

    def __cinit__(self, tokens, page_size, extras_per_block, media):
        cdef const token_t[::1] view
        _check_page_size(page_size)
        self.array = _int32_tokens(tokens)
        view = self.array
        self.num_tokens = view.shape[0]
        self.tokens = &view[0] if self.num_tokens > 0 else NULL
        self.page_size = page_size
        _check_media_length(media, self.num_tokens)
        _collect_media(&self.media, media)
        self.extras_per_block = extras_per_block
        _encode_extras(&self.key_words, BlockKeyExtras())

    cdef int check_extras(self, Py_ssize_t num_blocks) except -1:
        if len(self.extras_per_block) not in (0, num_blocks):
            raise InvalidArgumentError(
                f"{len(self.extras_per_block)} extras for {num_blocks} blocks; pass none, or one for each block"
            )
        return 0

    cdef int chain(self, Py_ssize_t num_blocks, block_hash_t* out) except -1:
        """Hash blocks 0..num_blocks; the last may be shorter."""
        cdef block_hash_t value = _ROOT
        cdef Py_ssize_t first, count, i
        for i in range(num_blocks):
            first = i * self.page_size
            count = min(self.page_size, self.num_tokens - first)
            if len(self.extras_per_block) > 0:
                self.key_words.clear()
                _encode_extras(&self.key_words, self.extras_per_block[i])
            value = hash_range(value, self.tokens, first, count, &self.media, &self.key_words)
            out[i] = value
        return 0


def hash_block(parent, tokens, extras=None, per_position_media_hash=None):
    """The hash of one block after `parent`.

    Args:
        parent: Hash128 of the prefix before, `CHAIN_ROOT` for the first block.
        tokens: (n,) int32 ids, buffer or sequence.
        per_position_media_hash: empty or None for text, else one Hash128 (None or zero: text) per token; the id at
            a position with a digest has no influence.
    Raises:
        InvalidArgumentError: a wrong token, size or digest.
    """
    cdef _HashInput args = _HashInput(tokens, 1, (), () if per_position_media_hash is None else per_position_media_hash)
    cdef vector[uint64_t] key_words
    _encode_extras(&key_words, BlockKeyExtras() if extras is None else extras)
    return to_hash128(hash_range(from_hash128(parent), args.tokens, 0, args.num_tokens, &args.media, &key_words))


def hash_full_blocks(tokens, page_size, extras_per_block=(), media=()):
    """Chained hashes of the len(tokens) // page_size full blocks; a partial last block has no influence.

    Args:
        tokens: (n,) int32 contiguous buffer (no Python object per token), other integer array, or sequence of int.
        extras_per_block: empty, or one BlockKeyExtras per full block.
        media: empty, or one Hash128 (None or zero: text) per token.
    Returns:
        A sequence of Hash128.
    Raises:
        InvalidArgumentError: page_size <= 0, a wrong count, or a token that is not an int32.
    """
    cdef _HashInput args = _HashInput(tokens, page_size, extras_per_block, media)
    cdef Py_ssize_t num_blocks = args.num_tokens // args.page_size
    cdef BlockHashes out = BlockHashes()
    cdef murmur_t start
    args.check_extras(num_blocks)
    out.values.resize(num_blocks)
    if len(extras_per_block) > 0 or args.media.size() > 0:
        args.chain(num_blocks, out.values.data())
        return out
    start = block_prefix(args.key_words.data(), args.key_words.size(), tagged(TAG_TOKENS, <uint64_t>args.page_size))
    hash_text_blocks(
        _ROOT, args.tokens, num_blocks, args.page_size, start, args.key_words.size(), out.values.data()
    )
    return out


def hash_exact_prefix(tokens, page_size, extras_per_block=(), media=()):
    """Identity of exactly these tokens: the full blocks, then the tail (with its media) as a shorter block.

    Args: as `hash_full_blocks`; `extras_per_block` is empty or has one entry per block, the tail included.
    Returns: Hash128; the last full-block hash for aligned input, `CHAIN_ROOT` for no tokens.
    Raises: InvalidArgumentError as `hash_full_blocks`.
    """
    cdef _HashInput args = _HashInput(tokens, page_size, extras_per_block, media)
    cdef Py_ssize_t num_blocks = (args.num_tokens + args.page_size - 1) // args.page_size
    cdef vector[block_hash_t] values
    args.check_extras(num_blocks)
    if num_blocks == 0:
        return CHAIN_ROOT
    values.resize(num_blocks)
    args.chain(num_blocks, values.data())
    return to_hash128(values[num_blocks - 1])


def hash128(data, seed=0):
    """MurmurHash3 x64 128 of a byte buffer, as Hash128(h1, h2).

    Args:
        data: contiguous bytes-like object.
        seed: 0 <= seed < 2**32.
    """
    cdef const uint8_t[::1] view = data
    if not 0 <= seed < 1 << 32:
        raise InvalidArgumentError(f"seed is {seed}; it must be in [0, 2**32)")
    return to_hash128(murmur3_x64_128(&view[0] if view.shape[0] > 0 else NULL, <size_t>view.shape[0], seed))


def append_each(list chains not None, const token_t[::1] tokens):
    """Append one committed token to each chain: `chain.append(token)` for a whole step, without objects per token.

    Args:
        chains: TokenChains, each at most once.
        tokens: (len(chains),) int32, contiguous.
    Raises:
        InvalidArgumentError: the sizes differ or an entry is not a TokenChain.  Nothing was changed.
    """
    cdef Py_ssize_t i
    if tokens.shape[0] != len(chains):
        raise InvalidArgumentError(f"{tokens.shape[0]} tokens for {len(chains)} chains; pass one for each")
    for chain in chains:
        if not isinstance(chain, TokenChain):
            raise InvalidArgumentError(f"chains contains {chain!r}; pass TokenChain objects")
    for i in range(tokens.shape[0]):
        (<TokenChain>chains[i]).append_token(tokens[i])


def encode_key_extras(extras):
    """The tagged stream of the request-constant identity; equal bytes exactly when equal identity.

    Layout, in 64-bit words: EXTRAS tag with presence bits and the number of media entries; the media entries; then
    the present ones of adapter (id, generation), position, embedding and isolation digest (hi, lo), in this order.
    Raises InvalidArgumentError when a value does not fit 64 bits.
    """
    cdef vector[uint64_t] words
    _encode_extras(&words, extras)
    return (<const char*>words.data())[:words.size() * 8]


class OpaqueIdentity:
    """Identity of a byte string that arrives in pieces of any size (adapter name, media content, salt).

    BLAKE2b-128 over the length and the BLAKE2b-256 digests of its chunks of OPAQUE_CHUNK_BYTES, so that chunks may be
    digested anywhere, also in parallel.  Cryptographic, because nothing is compared with the content later.
    """

    def __init__(self):
        self._num_bytes = 0
        self._chunk = self._new_chunk()
        self._chunk_digests = []

    @staticmethod
    def _new_chunk():
        return hashlib.blake2b(digest_size=32, person=b"edgellm-chunk-1")

    def update(self, data):
        """Append the bytes of any contiguous buffer."""
        view = memoryview(data).cast("B")
        while len(view) > 0:
            room = OPAQUE_CHUNK_BYTES - self._num_bytes % OPAQUE_CHUNK_BYTES
            piece = view[:room]
            self._chunk.update(piece)
            self._num_bytes += len(piece)
            view = view[room:]
            if self._num_bytes % OPAQUE_CHUNK_BYTES == 0:
                self._chunk_digests.append(self._chunk.digest())
                self._chunk = self._new_chunk()

    def digest(self):
        """Hash128 of the bytes so far; more may follow."""
        final = hashlib.blake2b(self._num_bytes.to_bytes(8, "little"), digest_size=16, person=b"edgellm-ident-1")
        for digest in self._chunk_digests:
            final.update(digest)
        if self._num_bytes % OPAQUE_CHUNK_BYTES != 0:
            final.update(self._chunk.digest())
        value = final.digest()
        return Hash128(int.from_bytes(value[:8], "little"), int.from_bytes(value[8:], "little"))


def hash_opaque_identity(data):
    """Hash128 identity of a byte string, see `OpaqueIdentity`; never the zero hash for the empty one."""
    identity = OpaqueIdentity()
    identity.update(data)
    return identity.digest()


CHAIN_ROOT = hash128(b"edgellm block chain, version 1")
cdef block_hash_t _ROOT = from_hash128(CHAIN_ROOT)
