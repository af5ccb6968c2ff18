"""An EAGLE-3 head on disk: its config, its tensors by their public names, and which target tokens its vocabulary means.

The layout is that of the published heads: one decoder layer whose attention reads embedding and hidden row side by
side (`midlayer.*`), `fc` over three hidden rows of the target, and a head over a reduced vocabulary with `d2t`, the
difference between a target's token id and the draft's.  (Li et al., "EAGLE-3: Scaling up Inference Acceleration of
Large Language Models via Training-Time Test", 2025.)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models.config import ModelConfig, config_from_hf, read_config_json

if TYPE_CHECKING:
    from collections.abc import Mapping

HIDDEN_LAYERS = 3
LAYER = "midlayer."
_FILES = ("model.safetensors", "pytorch_model.bin")
_NOT_LLAMA = ("draft_vocab_size", "architectures", "model_type", "eagle_config")


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
        WeightFileError: a file is missing or damaged, or a tensor has another shape than the config says.
        UnsupportedModelError: this is no EAGLE-3 head, or one of another target.
    """
    config, draft_vocab = _read_config(folder, target)
    tensors = _Tensors(folder, _load(folder), embedding)
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = LAYER if any(name.startswith(LAYER) for name in tensors.names) else "layers.0."
    if f"{layer}hidden_norm.weight" not in tensors.names:
        raise UnsupportedModelError(
            f"{folder} has no tensor {layer}hidden_norm.weight: it is no EAGLE-3 head; train or download one "
            "for this model"
        )
    projections = [("q", config.q_size), ("k", config.kv_size), ("v", config.kv_size)]
    qkv = [tensors.get(f"{layer}self_attn.{name}_proj.weight", rows, 2 * hidden) for name, rows in projections]
    mlp = [tensors.get(f"{layer}mlp.{name}_proj.weight", inner, hidden) for name in ("gate", "up")]
    weights = HeadWeights(
        fc=tensors.get("fc.weight", hidden, HIDDEN_LAYERS * target.hidden_size),
        hidden_norm=tensors.get(f"{layer}hidden_norm.weight", hidden).float(),
        input_norm=tensors.get(f"{layer}input_layernorm.weight", hidden).float(),
        mlp_norm=tensors.get(f"{layer}post_attention_layernorm.weight", hidden).float(),
        final_norm=tensors.get("norm.weight", hidden).float(),
        qkv=torch.cat(qkv),
        o=tensors.get(f"{layer}self_attn.o_proj.weight", hidden, config.q_size),
        gate_up=torch.cat(mlp),
        down=tensors.get(f"{layer}mlp.down_proj.weight", hidden, inner),
        lm_head=tensors.get("lm_head.weight", draft_vocab, hidden),
        embedding=_embedding(tensors, config, embedding),
        to_target=_to_target(tensors, draft_vocab, target.vocab_size).to(embedding.device),
    )
    return config, weights


def _read_config(folder: Path, target: ModelConfig) -> tuple[ModelConfig, int]:
    raw = read_config_json(folder)
    stated = raw.get("draft_vocab_size")
    draft_vocab = target.vocab_size if stated is None else stated
    if isinstance(draft_vocab, bool) or not isinstance(draft_vocab, int) or not 1 <= draft_vocab <= target.vocab_size:
        raise UnsupportedModelError(
            f"{folder / 'config.json'}: draft_vocab_size is {draft_vocab!r}; it must be an integer from 1 to the "
            f"target's {target.vocab_size}"
        )
    llama = {name: value for name, value in raw.items() if name not in _NOT_LLAMA}
    llama.update(architectures=["LlamaForCausalLM"], vocab_size=target.vocab_size, num_hidden_layers=1)
    if raw.get("rope_theta") is None and not raw.get("rope_parameters"):
        llama["rope_theta"] = target.rope.theta
    config = config_from_hf(llama, source=folder / "config.json")
    return dataclasses.replace(config, max_positions=target.max_positions), draft_vocab


def _load(folder: Path) -> Mapping[str, torch.Tensor]:
    for name in _FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            if path.suffix == ".bin":
                loaded: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
                return loaded
            from safetensors.torch import load_file

            return load_file(path)
        except Exception as error:  # either library has its own errors for a damaged file
            raise WeightFileError(f"{path} cannot be read: {error}; download it again") from error
    raise WeightFileError(
        f"{folder} holds neither {' nor '.join(_FILES)}; an EAGLE-3 head is one of them and config.json"
    )


class _Tensors:
    """Tensors by name, checked for their shape, of the target's dtype and on its device."""

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor], like: torch.Tensor) -> None:
        self._folder = folder
        self._tensors = tensors
        self._like = like
        self.names = set(tensors)

    def raw(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._tensors:
            raise WeightFileError(f"{self._folder} lacks the tensor {name!r}; download the head again")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise WeightFileError(
                f"{self._folder}: tensor {name!r} is {list(tensor.shape)}, its config and the target need {list(shape)}"
                "; use a head that was trained for this model"
            )
        return tensor

    def get(self, name: str, *shape: int) -> torch.Tensor:
        return self.raw(name, *shape).to(self._like.device, self._like.dtype)


def _embedding(tensors: _Tensors, config: ModelConfig, embedding: torch.Tensor) -> torch.Tensor:
    if "embed_tokens.weight" in tensors.names:
        return tensors.get("embed_tokens.weight", config.vocab_size, config.hidden_size)
    if embedding.shape[1] != config.hidden_size:
        raise UnsupportedModelError(
            f"the head's hidden_size is {config.hidden_size}, the target's {embedding.shape[1]}, and the head brings "
            "no embedding of its own; use a head that was trained for this model"
        )
    return embedding


def _to_target(tensors: _Tensors, draft_vocab: int, vocab_size: int) -> torch.Tensor:
    own = torch.arange(draft_vocab)
    if draft_vocab == vocab_size and "d2t" not in tensors.names:
        return own
    ids = own + tensors.raw("d2t", draft_vocab).long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise WeightFileError(
            f"d2t names the target token {int(ids.max())}, the target has {vocab_size}; use a head for this model"
        )
    return ids


def save_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a head in the layout that `read_head` reads.

    Args:
        config: the fields of `config.json`.
        tensors: by their public names.
    """
    import json

    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
