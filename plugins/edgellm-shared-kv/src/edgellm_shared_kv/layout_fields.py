"""Fields of an assistant's config that must say what the base says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.models.config import rope_from_hf

if TYPE_CHECKING:
    from edgellm.models.config import ModelConfig, RopeConfig
    from edgellm.models.fields import Fields

ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")


def check_matches(fields: Fields, name: str, base_value: int) -> None:
    """
    Raises:
        UnsupportedModelError: the field has another value, or is missing.
    """
    value = fields.get(name)
    if isinstance(value, bool) or value != base_value:
        raise fields.refusal(name, f"the base's {base_value}")


def check_rope(fields: Fields, base: ModelConfig) -> None:
    """Of an assistant that turns its queries as the base turns its keys.

    Raises:
        UnsupportedModelError: the config states another rope.
    """
    stated = {name: fields.get(name) for name in ROPE_FIELDS if name in fields}
    if not stated:
        return
    context = {"rope_theta": base.rope.theta, "max_position_embeddings": base.max_positions}
    rope = rope_from_hf(fields.with_values(context | stated, prefix=""))
    if rope != base.rope and not _is_plain(rope, base.rope):
        needed = f"the base's rope ({base.rope.kind}, theta {base.rope.theta:g}), or no such field,"
        raise fields.refusal(next(iter(stated)), needed)


def _is_plain(rope: RopeConfig, base: RopeConfig) -> bool:
    """Whether both are the same and not scaled: their other fields then mean nothing."""
    return rope.kind == base.kind == "default" and rope.theta == base.theta and not base.freq_factors
