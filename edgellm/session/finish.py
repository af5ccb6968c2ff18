"""The finish decision: when does a sequence end, and why?  Written once, for every decoder."""

from __future__ import annotations

from edgellm.session._finish import FinishRule
from edgellm.session.types import FinishReason

__all__ = ["OVERRIDDEN_BY_STOP_STRING", "FinishRule"]

# A stop string found late (while flushing, or in the one-shot decode) replaces these reasons only.
OVERRIDDEN_BY_STOP_STRING = frozenset({FinishReason.NOT_FINISHED, FinishReason.END_ID, FinishReason.LENGTH})
