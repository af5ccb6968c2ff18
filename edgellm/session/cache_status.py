"""What a session makes of the context cache's answers."""

from __future__ import annotations

from edgellm.cache.types import ContextCacheCoordinatorStatus
from edgellm.errors import BrokenInvariantError


def require_ok(status: ContextCacheCoordinatorStatus, call: str) -> None:
    """For calls that the session's own order makes right.

    Raises:
        BrokenInvariantError: the cache refused `call` all the same; the session is lost.
    """
    if status is not ContextCacheCoordinatorStatus.OK:
        raise BrokenInvariantError(f"{call}: the context cache answered {status.value}")
