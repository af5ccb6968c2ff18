"""Whether a head goes with a model, told before the weights of either are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.decoding.draft_tensors import SAFETENSORS
from edgellm.decoding.options import tree_nodes
from edgellm.decoding.tree_draft import TREE_DEPTH
from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.log import get_logger
from edgellm.models.config import read_config_json
from edgellm.models.fields import naming
from edgellm.shipped import draft_folder
from edgellm_eagle.checkpoint import FILES, LAYERS
from edgellm_eagle.head_config import hidden_layers, read_head_config

if TYPE_CHECKING:
    from pathlib import Path

    from edgellm.decoding.options import DecoderChoice, SpeculativeOptions

logger = get_logger(__name__)


def check_fits(choice: DecoderChoice) -> None:
    """
    Raises:
        InvalidArgumentError: no head was given, and none is brought for this model.
        UnsupportedModelError, WeightFileError: it is no EAGLE-3 head of this target, or damaged.
    """
    with naming(choice.path):
        hidden_layers(choice.config.num_layers)
    if choice.options is not None and choice.options.top_k > 1:
        _compare_sizes(choice.options)
    folder = draft_folder(choice, "eagle", "an EAGLE-3 head")
    with naming(folder):
        _require_head(folder)
        read_head_config(folder, choice.config)


def _compare_sizes(options: SpeculativeOptions) -> None:
    """Say so where trees can never be as large as they may be: the places for the rest are taken all the same."""
    depth = options.depth or TREE_DEPTH
    nodes = tree_nodes(options.top_k, depth)
    if options.num_drafts is not None and options.num_drafts > nodes:
        logger.warning(
            "num_drafts is %d, and a tree with top_k %d and depth %d has %d nodes: pass at most %d, or more of the "
            "others",
            *(options.num_drafts, options.top_k, depth, nodes, nodes),
        )


def _require_head(folder: Path) -> None:
    """
    Raises:
        WeightFileError: the file is missing or damaged.
        UnsupportedModelError: it can be listed, and lacks a tensor that only a head has.
    """
    if not any((folder / name).is_file() for name in FILES):
        raise WeightFileError(f"{folder} holds no {' or '.join(FILES)}; an EAGLE-3 head is that file and config.json")
    path = folder / SAFETENSORS
    if not path.is_file() or not _names(path).isdisjoint(f"{layer}hidden_norm.weight" for layer in LAYERS):
        return
    named = read_config_json(folder).get("architectures")
    names = ", ".join(map(str, named)) if isinstance(named, list) else "no architecture"
    raise UnsupportedModelError(
        f"{folder} is no EAGLE-3 head: it stores no tensor {LAYERS[0]}hidden_norm.weight, and its config.json names "
        f"{names}; train or download a head for this model"
    )


def _names(path: Path) -> set[str]:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as tensors:
            return set(tensors.keys())
    except Exception as error:  # the library has errors of its own for a damaged file
        raise WeightFileError(f"{path} cannot be read: {error}; download it again") from error
