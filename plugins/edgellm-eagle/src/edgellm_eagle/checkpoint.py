"""An EAGLE-3 head on disk: its config, its tensors by their public names, and which target tokens its vocabulary means.

The layout is that of the published heads: one decoder layer whose attention reads embedding and hidden row side by
side (`midlayer.*`), `fc` over three hidden rows of the target, and a head over a reduced vocabulary with `d2t`, the
difference between a target's token id and the draft's.  (Li et al., "EAGLE-3: Scaling up Inference Acceleration of
Large Language Models via Training-Time Test", 2025.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from edgellm.decoding.draft_tensors import SAFETENSORS, DraftTensors
from edgellm.errors import UnsupportedModelError
from edgellm.models.fields import naming
from edgellm_eagle.head_config import read_head_config

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from edgellm.models.config import ModelConfig

HIDDEN_LAYERS = 3
LAYERS = ("midlayer.", "layers.0.")  # the one decoder layer goes by either name
FILES = (SAFETENSORS, "pytorch_model.bin")
_IGNORED = ("t2d", ".rotary_emb.inv_freq")  # the inverse of d2t, and the rope that the config states


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """D the head's hidden size, H the target's, V the draft's vocabulary, Q and K as in `LayerWeights`.

    Attributes:
        fc: (D, 3 H).
        hidden_norm, input_norm, mlp_norm, final_norm: (D,) float32.
        qkv: (Q + 2 K, 2 D), columns embedding, hidden.
        o: (D, Q).  gate_up: (2 F, D).  down: (D, F).
        lm_head: (V, D).
        embedding: (target's vocabulary, D); the target's own where the file has none.
        to_target: (V,) int64, the target's token id of each draft token.
    """

    fc: torch.Tensor
    hidden_norm: torch.Tensor
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    final_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    lm_head: torch.Tensor
    embedding: torch.Tensor
    to_target: torch.Tensor


def read_head(folder: Path, target: ModelConfig, embedding: torch.Tensor) -> tuple[ModelConfig, HeadWeights]:
    """Read a head for a target.

    Args:
        embedding: (vocab_size, hidden_size) of the target; gives dtype and device, and stands in for a missing one.
    Raises:
        WeightFileError: a file is missing or damaged, or a tensor has another shape than the config says, is no tensor
            of real numbers, or is not one of a head.
        UnsupportedModelError: this is no EAGLE-3 head, one of another target, or one that asks for more.
    """
    with naming(folder):
        config, draft_vocab = read_head_config(folder, target)
        tensors = DraftTensors(folder, embedding, what="an EAGLE-3 head", files=FILES)
        weights = _weights(tensors, config, draft_vocab, target, embedding)
        tensors.refuse_unread(ignored=_IGNORED)
        return config, weights


def _weights(
    tensors: DraftTensors, config: ModelConfig, draft_vocab: int, target: ModelConfig, embedding: torch.Tensor
) -> HeadWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = next((name for name in LAYERS if f"{name}hidden_norm.weight" in tensors), None)
    if layer is None:
        raise UnsupportedModelError(
            f"no tensor {LAYERS[0]}hidden_norm.weight is stored: it is no EAGLE-3 head; train or download one for this "
            "model"
        )
    projections = [("q", config.q_size), ("k", config.kv_size), ("v", config.kv_size)]
    qkv = [tensors.matrix(f"{layer}self_attn.{name}_proj.weight", rows, 2 * hidden) for name, rows in projections]
    return HeadWeights(
        fc=tensors.matrix("fc.weight", hidden, HIDDEN_LAYERS * target.hidden_size),
        hidden_norm=tensors.norm(f"{layer}hidden_norm.weight", hidden),
        input_norm=tensors.norm(f"{layer}input_layernorm.weight", hidden),
        mlp_norm=tensors.norm(f"{layer}post_attention_layernorm.weight", hidden),
        final_norm=tensors.norm("norm.weight", hidden),
        qkv=torch.cat(qkv),
        o=tensors.matrix(f"{layer}self_attn.o_proj.weight", hidden, config.q_size),
        gate_up=tensors.joined((f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight"), inner, hidden),
        down=tensors.matrix(f"{layer}mlp.down_proj.weight", hidden, inner),
        lm_head=tensors.matrix("lm_head.weight", draft_vocab, hidden),
        embedding=_embedding(tensors, config, embedding),
        to_target=tensors.model_tokens("d2t", draft_vocab, target.vocab_size),
    )


def _embedding(tensors: DraftTensors, config: ModelConfig, embedding: torch.Tensor) -> torch.Tensor:
    if "embed_tokens.weight" in tensors:
        return tensors.matrix("embed_tokens.weight", config.vocab_size, config.hidden_size)
    if embedding.shape[1] != config.hidden_size:
        raise UnsupportedModelError(
            f"the head's hidden_size is {config.hidden_size}, the target's {embedding.shape[1]}, and the head brings "
            "no embedding of its own; use a head that was trained for this model"
        )
    return embedding


def save_head(folder: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a head in the layout that `read_head` reads.

    Args:
        config: the fields of `config.json`.
        tensors: by their public names.
    """
    import json

    from safetensors.torch import save_file

    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SAFETENSORS)
