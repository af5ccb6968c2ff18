"""A publication policy to copy; see the README beside it."""

from edgellm_template.policy import PromptOnlyPolicy

__all__ = ["PromptOnlyPolicy"]
