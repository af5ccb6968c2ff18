"""Context reuse with drafters that keep no KV of their own; see `edgellm_shared_kv.policy`."""

from edgellm_shared_kv.policy import SharedKvSpecPolicy

__all__ = ["SharedKvSpecPolicy"]
