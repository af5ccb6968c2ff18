"""The project's own assistant layout, for Llama-like bases: pre-norm layers with queries only, and a list of donors.

The README of the package documents it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models.config import MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE
from edgellm.models.fields import show
from edgellm.models.registry import Architecture
from edgellm_shared_kv.assistant_model import AssistantConfig, AssistantLayer, AssistantLayerWeights, AssistantWeights
from edgellm_shared_kv.layout_fields import check_matches
from edgellm_shared_kv.proposal_head import VocabularyHead

if TYPE_CHECKING:
    from edgellm.models.config import ModelConfig
    from edgellm.models.fields import Fields
    from edgellm.models.loader import LoadedModel
    from edgellm_shared_kv.stored_tensors import StoredTensors

ARCHITECTURE = "SharedKvAssistantForCausalLM"
BASES = (Architecture.LLAMA, Architecture.QWEN2, Architecture.QWEN3)
MAX_DONORS = 64
IGNORED = ("t2d",)  # the inverse of d2t, which training scripts keep


def read(fields: Fields, tensors: StoredTensors, base: LoadedModel) -> tuple[AssistantConfig, AssistantWeights]:
    """Raises: as `edgellm_shared_kv.checkpoint.read_assistant`."""
    target = base.config
    if target.architecture not in BASES:
        raise UnsupportedModelError(
            f"{ARCHITECTURE} reads the pages of {', '.join(base.value for base in BASES)}; the model is "
            f"{target.architecture.value}"
        )
    check_matches(fields, "backbone_hidden_size", target.hidden_size)
    check_matches(fields, "vocab_size", target.vocab_size)
    activation = fields.text("hidden_act", default="silu")
    if activation != "silu":
        raise fields.refusal("hidden_act", "'silu'")
    config = AssistantConfig(
        layers=_layers(fields, target),
        num_heads=_num_heads(fields, target),
        rms_norm_eps=fields.number("rms_norm_eps", above=0, most=1),
        attention_scale=target.attention_scale,
    )
    weights = _weights(fields, tensors, base, config)
    tensors.refuse_unread(ignored=IGNORED)
    return config, weights


def _layers(fields: Fields, target: ModelConfig) -> tuple[AssistantLayer, ...]:
    donors = fields.get("donor_layers")
    known = range(target.num_layers)
    if (
        not isinstance(donors, list)
        or not 1 <= len(donors) <= MAX_DONORS
        or not all(isinstance(donor, int) and not isinstance(donor, bool) and donor in known for donor in donors)
    ):
        raise fields.refusal(
            "donor_layers", f"a list of 1 to {MAX_DONORS} layers of the base, from 0 to {target.num_layers - 1},"
        )
    return tuple(
        AssistantLayer(donor=donor, num_kv_heads=target.num_kv_heads, head_dim=target.head_dim, rope=target.rope)
        for donor in donors
    )


def _num_heads(fields: Fields, target: ModelConfig) -> int:
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    if num_heads % target.num_kv_heads:
        raise fields.refusal("num_attention_heads", f"a multiple of the base's {target.num_kv_heads} kv heads")
    return num_heads


def _weights(fields: Fields, tensors: StoredTensors, base: LoadedModel, config: AssistantConfig) -> AssistantWeights:
    hidden, outer = fields.integer("hidden_size", 1, MAX_HIDDEN), base.config.hidden_size
    inner = fields.integer("intermediate_size", 1, MAX_INTERMEDIATE)
    query_norm = fields.flag("query_norm", default=False)
    return AssistantWeights(
        embedding=base.weights.embedding,
        pre_projection=tensors.matrix("pre_projection.weight", hidden, 2 * outer),
        layers=[
            _layer(tensors, f"layers.{idx}.", hidden, inner, config, query_norm=query_norm)
            for idx in range(len(config.layers))
        ],
        final_norm=tensors.norm("norm.weight", hidden),
        post_projection=tensors.matrix("post_projection.weight", outer, hidden),
        head=_head(fields, tensors, hidden, base.config.vocab_size),
    )


def _layer(
    tensors: StoredTensors, prefix: str, hidden: int, inner: int, config: AssistantConfig, *, query_norm: bool
) -> AssistantLayerWeights:
    head_dim = config.layers[0].head_dim
    q_size = config.num_heads * head_dim
    return AssistantLayerWeights(
        attn_norm=tensors.norm(f"{prefix}input_layernorm.weight", hidden),
        q=tensors.matrix(f"{prefix}self_attn.q_proj.weight", q_size, hidden),
        q_norm=tensors.norm(f"{prefix}self_attn.q_norm.weight", head_dim) if query_norm else None,
        o=tensors.matrix(f"{prefix}self_attn.o_proj.weight", hidden, q_size),
        mlp_norm=tensors.norm(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=tensors.joined((f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight"), inner, hidden),
        down=tensors.matrix(f"{prefix}mlp.down_proj.weight", hidden, inner),
    )


def _head(fields: Fields, tensors: StoredTensors, hidden: int, vocab_size: int) -> VocabularyHead:
    size = fields.integer("draft_vocab_size", 1, vocab_size, default=vocab_size)
    to_base = torch.arange(size)
    if size < vocab_size or "d2t" in tensors:
        to_base += tensors.token_ids("d2t", size)
        wrong = to_base[(to_base < 0) | (to_base >= vocab_size)]
        if len(wrong):
            raise WeightFileError(
                f"d2t names the base's token {show(int(wrong[0]))}, the base has {vocab_size}; use an assistant that "
                "was trained for this model"
            )
    lm_head = tensors.matrix("lm_head.weight", size, hidden)
    return VocabularyHead(lm_head, to_base.to(lm_head.device))
