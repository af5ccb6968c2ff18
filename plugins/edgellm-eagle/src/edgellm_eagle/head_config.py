"""`config.json` of an EAGLE-3 head: its shape, and that it asks for nothing which the head here does not do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from edgellm.errors import UnsupportedModelError
from edgellm.models.config import ModelConfig, config_from_hf, read_config_json
from edgellm.models.fields import Fields

if TYPE_CHECKING:
    from pathlib import Path

REMEDY = "use another head for this model"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NOT_LLAMA = ("draft_vocab_size", "architectures", "model_type", "eagle_config")
# What some trainers can switch on and the published layout is without.
_OFF = ("attention_bias", "qkv_bias", "mlp_bias", "use_sliding_window", "norm_before_residual", "norm_before_fc")


def hidden_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers of a target of n in front of which the hidden rows are read.

    Raises:
        UnsupportedModelError: the target is too shallow.
    """
    chosen = (2, num_layers // 2, num_layers - 3)
    if not 0 <= chosen[0] <= chosen[1] <= chosen[2]:
        raise UnsupportedModelError(
            f"the target has {num_layers} layers; EAGLE-3 reads three depths and needs at least 5"
        )
    return chosen


def read_head_config(folder: Path, target: ModelConfig) -> tuple[ModelConfig, int]:
    """The head as a Llama of one layer, and the size of its vocabulary; rope and context are the target's where it
    states none.

    Raises:
        WeightFileError: the file is missing or damaged.
        UnsupportedModelError: a field has a value that the head or the target does not go with.
    """
    raw = read_config_json(folder)
    fields = Fields(str(folder / "config.json"), raw, remedy=REMEDY)
    _check_layout(fields, target)
    llama = {name: value for name, value in raw.items() if name not in _NOT_LLAMA}
    llama.update(architectures=["LlamaForCausalLM"], vocab_size=target.vocab_size, num_hidden_layers=1)
    if "rope_theta" not in fields and not raw.get("rope_parameters"):
        llama["rope_theta"] = target.rope.theta
    config = config_from_hf(llama, source=folder / "config.json")
    draft_vocab = fields.integer("draft_vocab_size", 1, target.vocab_size, default=target.vocab_size)
    return dataclasses.replace(config, max_positions=target.max_positions), draft_vocab


def _check_layout(fields: Fields, target: ModelConfig) -> None:
    """What does not follow from the shapes of the tensors."""
    eagle = fields.section("eagle_config")
    for part in (fields, eagle):
        for name in _OFF:
            if part.flag(name, default=False):
                raise part.refusal(name, "false")
        _check_layer_ids(part, hidden_layers(target.num_layers))
    if not eagle.flag("use_aux_hidden_state", default=True):
        raise eagle.refusal("use_aux_hidden_state", "true")
    if set(fields.texts("layer_types")) - {"full_attention"}:
        raise fields.refusal("layer_types", "'full_attention' alone")
    for name, value, needed in (
        ("num_hidden_layers", 1, "1"),
        ("vocab_size", target.vocab_size, f"the model's {target.vocab_size}"),
    ):
        if name in fields and fields.get(name) != value:
            raise fields.refusal(name, needed)


def _check_layer_ids(fields: Fields, read: tuple[int, ...]) -> None:
    """Trainers count in two ways: the layer that reads the rows, or the one in front of it, which writes them."""
    before = [layer - 1 for layer in read]
    if fields.get(LAYER_IDS) not in (None, [], list(read), before):
        raise fields.refusal(LAYER_IDS, f"{list(read)}, or {before} counted from the layer in front,")
