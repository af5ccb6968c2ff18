"""An assistant on disk: which of the two layouts a folder has."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from edgellm.decoding.draft_tensors import DraftTensors
from edgellm.errors import UnsupportedModelError
from edgellm.models.config import read_config_json
from edgellm.models.fields import Fields, naming
from edgellm_shared_kv import gemma_layout, plain_layout
from edgellm_shared_kv.layout_fields import check_matches

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from edgellm.models.config import ModelConfig
    from edgellm.models.loader import LoadedModel
    from edgellm.models.registry import Architecture
    from edgellm_shared_kv.assistant_model import AssistantConfig, AssistantWeights

REMEDY = "use an assistant that was trained for this model"


class Layout(NamedTuple):
    """How assistants of one architecture are stored, and which models they are for."""

    read: Callable[[Fields, DraftTensors, LoadedModel], tuple[AssistantConfig, AssistantWeights]]
    bases: tuple[Architecture, ...]


LAYOUTS = {
    plain_layout.ARCHITECTURE: Layout(plain_layout.read, plain_layout.BASES),
    gemma_layout.ARCHITECTURE: Layout(gemma_layout.read, gemma_layout.BASES),
}


def read_assistant(folder: Path, base: LoadedModel) -> tuple[AssistantConfig, AssistantWeights]:
    """Read an assistant for a base model, whose dtype, device and embedding it takes.

    Raises:
        WeightFileError: a file is missing or damaged, or a tensor has another shape than the config says.
        UnsupportedModelError: this is no shared-KV assistant, or one of another base.
    """
    with naming(folder):
        fields, layout = open_config(folder, base.config)
        return layout.read(fields, DraftTensors(folder, base.weights.embedding, what="an assistant"), base)


def open_config(folder: Path, base: ModelConfig) -> tuple[Fields, Layout]:
    """The fields of `config.json` and the layout that it names, which is one for this base.

    Raises: as `read_assistant`, without the folder's name.
    """
    fields = Fields(str(folder / "config.json"), read_config_json(folder), remedy=REMEDY)
    named = fields.texts("architectures")
    architecture = next((name for name in named if name in LAYOUTS), None)
    if architecture is None:
        raise UnsupportedModelError(
            f"{', '.join(named) or 'no architecture'} is no shared-KV assistant; supported: {', '.join(LAYOUTS)}"
        )
    layout = LAYOUTS[architecture]
    if base.architecture not in layout.bases:
        raise UnsupportedModelError(
            f"{architecture} reads the pages of a {' or '.join(each.value for each in layout.bases)} model; the model "
            f"is {base.architecture.value}"
        )
    check_matches(fields, "backbone_hidden_size", base.hidden_size)
    if fields.get("quantization_config"):
        raise fields.refusal("quantization_config", "no such field (an unquantised assistant)")
    return fields, layout
