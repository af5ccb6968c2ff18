"""C interface of the block hash: the token chain of one sequence and the hash of one block."""

cimport cython
from libc.stdint cimport int32_t, uint64_t
from libc.string cimport memcmp
from libcpp.vector cimport vector

from edgellm._core.types cimport block_hash_t, token_t


cdef struct media_position_t:
    int32_t position        # token index in the sequence
    token_t token_id        # the caller's placeholder id there, kept for `token_ids()` only
    block_hash_t digest     # never zero


cdef struct murmur_t:
    uint64_t h1
    uint64_t h2


cdef inline bint hash_equal(block_hash_t a, block_hash_t b) noexcept nogil:
    return a.hi == b.hi and a.lo == b.lo


cdef block_hash_t hash_text_block(
    block_hash_t parent, const token_t* tokens, Py_ssize_t num_tokens, const uint64_t* key_words, size_t num_key_words
) noexcept nogil

cdef object to_hash128(block_hash_t value)
cdef block_hash_t from_hash128(object value) except *


@cython.final
cdef class TokenChain:
    """See block_hash.pyx.  The C fields are for readers in `_core`; only this class writes them.

    tokens:    the committed ids; a position that has a media digest holds MEDIA_TOKEN_ID, so that a plain
               memory compare of two blocks ignores placeholder ids (compare `block_media` as well then).
    hashes:    hashes[i] names blocks 0..i; len(hashes) == len(tokens) // page_size.
    key_bytes: the encoded request-constant identity: equal bytes, same namespace.
    """

    cdef vector[token_t] tokens
    cdef vector[block_hash_t] hashes
    cdef readonly int32_t page_size
    cdef readonly bytes key_bytes
    cdef readonly bint has_media
    cdef vector[uint64_t] _key_words
    cdef vector[media_position_t] _media
    cdef murmur_t _block_start      # hash state before the first token of a full text block

    cdef inline Py_ssize_t token_count(self) noexcept nogil:
        return <Py_ssize_t>self.tokens.size()

    cdef inline Py_ssize_t block_count(self) noexcept nogil:
        return <Py_ssize_t>self.hashes.size()

    cdef inline const token_t* block_tokens(self, Py_ssize_t block_idx) noexcept nogil:
        """The page_size ids of full block `block_idx`; valid until the next extend or append."""
        return self.tokens.data() + block_idx * self.page_size

    cdef inline bint block_tokens_equal(self, Py_ssize_t block_idx, const token_t* other) noexcept nogil:
        return memcmp(self.block_tokens(block_idx), other, self.page_size * sizeof(token_t)) == 0

    cdef int append_token(self, token_t token_id) except -1
    cdef int extend_tokens(self, const token_t* token_ids, Py_ssize_t count) except -1
    cdef bytes block_media_bytes(self, Py_ssize_t block_idx)
    cdef bint block_has_media(self, Py_ssize_t block_idx) noexcept nogil
    cdef Py_ssize_t _checked_block(self, object block_idx) except -1
    cdef Py_ssize_t _checked_length(self, object length) except -1
    cdef int _store(self, const token_t* token_ids, Py_ssize_t count) except -1
    cdef void _mark_media(self, size_t first) noexcept nogil
    cdef void _hash_new_blocks(self) noexcept nogil
