"""Fields of an assistant's config that must say what the base says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellm.models.fields import Fields


def check_matches(fields: Fields, name: str, base_value: int) -> None:
    """
    Raises:
        UnsupportedModelError: the field has another value, or is missing.
    """
    value = fields.get(name)
    if isinstance(value, bool) or value != base_value:
        raise fields.refusal(name, f"the base's {base_value}")
