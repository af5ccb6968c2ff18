"""An assistant on disk: which of the two layouts a folder has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.decoding.draft_tensors import DraftTensors
from edgellm.errors import UnsupportedModelError
from edgellm.models.config import read_config_json
from edgellm.models.fields import Fields, naming
from edgellm_shared_kv import gemma_layout, plain_layout

if TYPE_CHECKING:
    from pathlib import Path

    from edgellm.models.loader import LoadedModel
    from edgellm_shared_kv.assistant_model import AssistantConfig, AssistantWeights

REMEDY = "use an assistant that was trained for this model"
LAYOUTS = {plain_layout.ARCHITECTURE: plain_layout.read, gemma_layout.ARCHITECTURE: gemma_layout.read}


def read_assistant(folder: Path, base: LoadedModel) -> tuple[AssistantConfig, AssistantWeights]:
    """Read an assistant for a base model, whose dtype, device and embedding it takes.

    Raises:
        WeightFileError: a file is missing or damaged, or a tensor has another shape than the config says.
        UnsupportedModelError: this is no shared-KV assistant, or one of another base.
    """
    with naming(folder):
        fields = Fields(str(folder / "config.json"), read_config_json(folder), remedy=REMEDY)
        named = fields.texts("architectures")
        read = next((LAYOUTS[name] for name in named if name in LAYOUTS), None)
        if read is None:
            raise UnsupportedModelError(
                f"{', '.join(named) or 'no architecture'} is no shared-KV assistant; supported: {', '.join(LAYOUTS)}"
            )
        if fields.get("quantization_config"):
            raise fields.refusal("quantization_config", "no such field (an unquantised assistant)")
        return read(fields, DraftTensors(folder, base.weights.embedding, what="an assistant"), base)
