"""The layout of Gemma4 assistants: a Gemma4 text model whose layers all read K and V of the base.

A layer's donor is the last layer of its kind, windowed or not, in which the base has K and V of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models.config import MAX_LAYERS, config_from_hf
from edgellm.models.registry import Architecture
from edgellm_shared_kv.assistant_model import AssistantConfig, AssistantLayer, AssistantLayerWeights, AssistantWeights
from edgellm_shared_kv.layout_fields import check_matches
from edgellm_shared_kv.proposal_head import ClusterHead, ProposalHead, VocabularyHead

if TYPE_CHECKING:
    from edgellm.decoding.draft_tensors import DraftTensors
    from edgellm.models.config import ModelConfig
    from edgellm.models.families.gemma import GemmaConfig, GemmaLayer
    from edgellm.models.fields import Fields
    from edgellm.models.loader import LoadedModel

ARCHITECTURE = "Gemma4AssistantForCausalLM"
BASES = (Architecture.GEMMA4,)
MAX_CENTROIDS = 1 << 20

# Files may store what a text model has and an assistant has no use for.
IGNORED = (
    ".k_proj.weight",
    ".v_proj.weight",
    ".k_norm.weight",
    ".v_norm.weight",
    "lm_head.weight",
    "embed_tokens.weight",
    ".rotary_emb.inv_freq",
)


def read(fields: Fields, tensors: DraftTensors, base: LoadedModel) -> tuple[AssistantConfig, AssistantWeights]:
    """Raises: as `edgellm_shared_kv.checkpoint.read_assistant`."""
    target = base.config
    text = _text_config(fields.section("text_config"), target)
    config = AssistantConfig(
        layers=tuple(_layer_shape(idx, layer, text, target) for idx, layer in enumerate(text.layers)),
        num_heads=text.num_heads,
        rms_norm_eps=text.rms_norm_eps,
        attention_scale=text.attention_scale,
        # Rounded to the dtype of the embedding, as the models were trained.
        embedding_scale=float(torch.tensor(target.hidden_size**0.5, dtype=base.weights.dtype)),
        activation="gelu",
    )
    weights = _weights(fields, text, tensors, base)
    tensors.refuse_unread(ignored=IGNORED)
    return config, weights


def _text_config(text: Fields, target: ModelConfig) -> GemmaConfig:
    """The assistant's own shape, read as that of a text model whose layers all have K and V.

    A cap of its final logits, should there be one, changes no token: it keeps their order.
    """
    num_layers = text.integer("num_hidden_layers", 1, MAX_LAYERS)
    text.integer("num_kv_shared_layers", num_layers, num_layers, default=num_layers)
    check_matches(text, "vocab_size", target.vocab_size)
    text.integer("hidden_size_per_layer_input", 0, 0, default=0)
    for name in ("enable_moe_block", "use_double_wide_mlp"):
        if text.flag(name, default=False):
            raise text.refusal(name, "false")
    values = dict(text.items())
    values.update(architectures=["Gemma4ForCausalLM"], num_kv_shared_layers=0)
    return cast("GemmaConfig", config_from_hf(values, source="text_config"))


def _layer_shape(idx: int, layer: GemmaLayer, text: GemmaConfig, target: ModelConfig) -> AssistantLayer:
    windowed = layer.window > 0
    donors = [donor for donor, kv in enumerate(target.kv_layers) if (kv.window > 0) is windowed]
    kind = "windowed" if windowed else "full"
    if not donors:
        raise UnsupportedModelError(
            f"layer {idx} is {kind}, and no layer of the base is; use an assistant of this base"
        )
    donor = target.kv_layers[donors[-1]]
    if (layer.num_kv_heads, layer.head_dim) != (donor.num_kv_heads, donor.head_dim):
        raise UnsupportedModelError(
            f"layer {idx} reads {layer.num_kv_heads} kv heads of {layer.head_dim}, the base's {kind} layers have "
            f"{donor.num_kv_heads} of {donor.head_dim}; use an assistant that was trained for this model"
        )
    return AssistantLayer(
        donor=donors[-1],
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        rope=text.local_rope if windowed else text.rope,
        # The last key in front of a row is at distance 0 here, and distances up to the window itself are seen.
        window=layer.window + 1 if windowed else 0,
    )


def _weights(fields: Fields, text: GemmaConfig, tensors: DraftTensors, base: LoadedModel) -> AssistantWeights:
    hidden, outer = text.hidden_size, base.config.hidden_size
    return AssistantWeights(
        embedding=base.weights.embedding,
        pre_projection=tensors.matrix("pre_projection.weight", hidden, 2 * outer),
        layers=[_layer(tensors, f"model.layers.{idx}.", text, layer) for idx, layer in enumerate(text.layers)],
        final_norm=tensors.norm("model.norm.weight", hidden),
        post_projection=tensors.matrix("post_projection.weight", outer, hidden),
        head=_head(fields, text, tensors),
    )


def _layer(tensors: DraftTensors, prefix: str, text: GemmaConfig, layer: GemmaLayer) -> AssistantLayerWeights:
    hidden, inner, q_size = text.hidden_size, layer.intermediate_size, text.num_heads * layer.head_dim
    return AssistantLayerWeights(
        attn_norm=tensors.norm(f"{prefix}input_layernorm.weight", hidden),
        q=tensors.matrix(f"{prefix}self_attn.q_proj.weight", q_size, hidden),
        q_norm=tensors.norm(f"{prefix}self_attn.q_norm.weight", layer.head_dim),
        o=tensors.matrix(f"{prefix}self_attn.o_proj.weight", hidden, q_size),
        attn_out_norm=tensors.norm(f"{prefix}post_attention_layernorm.weight", hidden),
        mlp_norm=tensors.norm(f"{prefix}pre_feedforward_layernorm.weight", hidden),
        gate_up=tensors.joined((f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight"), inner, hidden),
        down=tensors.matrix(f"{prefix}mlp.down_proj.weight", hidden, inner),
        mlp_out_norm=tensors.norm(f"{prefix}post_feedforward_layernorm.weight", hidden),
        scale=float(tensors.matrix(f"{prefix}layer_scalar", 1)),
    )


def _head(fields: Fields, text: GemmaConfig, tensors: DraftTensors) -> ProposalHead:
    tied = fields.flag("tie_word_embeddings", default=True)
    names = ("model.embed_tokens.weight", "lm_head.weight") if tied else ("lm_head.weight",)
    stored = next((name for name in names if name in tensors), names[0])
    lm_head = tensors.matrix(stored, text.vocab_size, text.hidden_size)
    if not fields.flag("use_ordered_embeddings", default=False):
        return VocabularyHead(lm_head, torch.arange(text.vocab_size, device=lm_head.device))
    num_centroids = fields.integer("num_centroids", 1, min(MAX_CENTROIDS, text.vocab_size))
    if text.vocab_size % num_centroids:
        raise fields.refusal("num_centroids", f"a divisor of vocab_size, {text.vocab_size},")
    order = tensors.integers("masked_embedding.token_ordering", text.vocab_size)
    if not torch.equal(order.sort().values, torch.arange(text.vocab_size)):
        raise WeightFileError(
            "masked_embedding.token_ordering does not name every token once; download the assistant again"
        )
    return ClusterHead(
        lm_head=lm_head,
        centroids=tensors.matrix("masked_embedding.centroids.weight", num_centroids, text.hidden_size),
        clusters=order.view(num_centroids, -1).to(lm_head.device),
        num_nearest=fields.integer("centroid_intermediate_top_k", 1, num_centroids),
    )
