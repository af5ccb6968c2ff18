"""Whether an assistant goes with a base model, told from their configs before the weights of either are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.models.fields import naming
from edgellm.shipped import draft_folder
from edgellm_shared_kv.checkpoint import open_config

if TYPE_CHECKING:
    from edgellm.decoding.options import DecoderChoice


def check_fits(choice: DecoderChoice) -> None:
    """
    Raises:
        InvalidArgumentError: no assistant was given, and none is brought for this base; or trees are asked for.
        UnsupportedModelError, WeightFileError: it is no assistant of this base, or its config is damaged.
    """
    choice.require_chains()
    folder = draft_folder(choice, "shared_kv_mtp", "an assistant")
    with naming(folder):
        open_config(folder, choice.config)
