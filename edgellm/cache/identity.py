"""Identity of a request's context beside its tokens: model, KV dtype, salt and adapter, framed unambiguously."""

from __future__ import annotations

from edgellm._core.block_hash import hash_opaque_identity
from edgellm.cache.types import AdapterKey, BlockKeyExtras, Hash128
from edgellm.errors import InvalidArgumentError

_ABSENT = b"\x00"
_PRESENT = b"\x01"


def frame(*fields: str | None) -> bytes:
    """Text fields as one byte string: each is absent, or present with its length before it.

    So ("ab", "c") differs from ("a", "bc"), and None from "".
    """
    out = bytearray()
    for value in fields:
        if value is None:
            out += _ABSENT
            continue
        data = value.encode("utf-8")
        out += _PRESENT + len(data).to_bytes(8, "little") + data
    return bytes(out)


def isolation_digest(*, model_fingerprint: str, kv_dtype: str, cache_salt: str | None = None) -> Hash128:
    """What separates caches: two requests share context only where all three agree.

    Args:
        model_fingerprint: identity of the weights.
        kv_dtype: element type of the KV pages.
        cache_salt: the request's salt; None shares with every request that has none, and "" is a salt.
    """
    if not model_fingerprint or not kv_dtype:
        raise InvalidArgumentError(
            f"model_fingerprint is {model_fingerprint!r} and kv_dtype {kv_dtype!r}; both must be non-empty text"
        )
    return hash_opaque_identity(frame("isolation", model_fingerprint, kv_dtype, cache_salt))


def adapter_key(name: str, generation: int) -> AdapterKey:
    """Identity of a weight adapter; a reload under the same name must pass a higher generation."""
    digest = hash_opaque_identity(frame("adapter", name))
    return AdapterKey(id=digest.lo, generation=generation)


def request_key_extras(
    *, model_fingerprint: str, kv_dtype: str, cache_salt: str | None = None, adapter: AdapterKey | None = None
) -> BlockKeyExtras:
    """The request-constant part of every block key of one request."""
    digest = isolation_digest(model_fingerprint=model_fingerprint, kv_dtype=kv_dtype, cache_salt=cache_salt)
    return BlockKeyExtras(adapter=adapter, isolation_digest=digest)
