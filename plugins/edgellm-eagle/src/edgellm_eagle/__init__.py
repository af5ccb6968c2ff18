"""Speculation and context reuse with drafters that own KV pages; see `edgellm_eagle.policy` and `.decoder`."""

from edgellm_eagle.policy import EagleSpecPolicy

__all__ = ["EagleSpecPolicy"]
