"""Context reuse with drafters that own KV pages; see `edgellm_eagle.policy`."""

from edgellm_eagle.policy import EagleSpecPolicy

__all__ = ["EagleSpecPolicy"]
