"""Speculation and context reuse with drafters that keep no KV of their own; see `.policy` and `.decoder`."""

from edgellm_shared_kv.policy import SharedKvSpecPolicy

__all__ = ["SharedKvSpecPolicy"]
