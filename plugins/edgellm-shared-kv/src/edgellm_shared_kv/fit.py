"""Whether an assistant goes with a base model, told from their configs before the weights of either are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.errors import UnsupportedModelError
from edgellm.models.config import read_config_json
from edgellm.models.fields import Fields, naming
from edgellm.models.registry import Architecture
from edgellm.shipped import draft_folder
from edgellm_shared_kv import gemma_layout, plain_layout
from edgellm_shared_kv.layout_fields import check_matches

if TYPE_CHECKING:
    from pathlib import Path

    from edgellm.decoding.options import DecoderChoice
    from edgellm.models.config import ModelConfig

REMEDY = "use an assistant that was trained for this model"
BASES = {plain_layout.ARCHITECTURE: plain_layout.BASES, gemma_layout.ARCHITECTURE: (Architecture.GEMMA4,)}


def check_fits(choice: DecoderChoice) -> None:
    """
    Raises:
        InvalidArgumentError: no assistant was given, and none is brought for this base; or trees are asked for.
        UnsupportedModelError, WeightFileError: it is no assistant of this base, or its config is damaged.
    """
    choice.require_chains()
    folder = draft_folder(choice, "shared_kv_mtp", "an assistant")
    with naming(folder):
        _check_config(folder, choice.config)


def _check_config(folder: Path, base: ModelConfig) -> None:
    fields = Fields(str(folder / "config.json"), read_config_json(folder), remedy=REMEDY)
    named = fields.texts("architectures")
    architecture = next((name for name in named if name in BASES), None)
    if architecture is None:
        raise UnsupportedModelError(
            f"{', '.join(named) or 'no architecture'} is no shared-KV assistant; supported: {', '.join(BASES)}"
        )
    if base.architecture not in BASES[architecture]:
        raise UnsupportedModelError(
            f"{architecture} reads the pages of a {' or '.join(each.value for each in BASES[architecture])} model; the "
            f"model is {base.architecture.value}"
        )
    check_matches(fields, "backbone_hidden_size", base.hidden_size)
