"""Weights of Gemma3 and Gemma4 text models: fused tensors, and the stored names that fill them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from edgellm.models.weights import ModelWeights

if TYPE_CHECKING:
    import torch

    from edgellm.models.config import ModelConfig
    from edgellm.models.families import NewTensor
    from edgellm.models.families.gemma import GemmaConfig, GemmaExperts, GemmaLayer


@dataclass(slots=True)
class GemmaExpertWeights:
    """The experts beside the MLP of a layer; E experts, D hidden, F inner size of an expert.

    Attributes:
        router: (E, D).  router_scale: (D,), of the normed rows that it sees.
        expert_scale: (E,), of the weights of the chosen.
        gate_up: (E, 2F, D), rows gate, up.  down: (E, D, F).
        norm, out_norm: (D,), before and behind the experts.  mlp_norm: (D,), behind the MLP beside them.
    """

    router: torch.Tensor
    router_scale: torch.Tensor
    expert_scale: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm: torch.Tensor
    out_norm: torch.Tensor
    mlp_norm: torch.Tensor


@dataclass(slots=True)
class GemmaLayerWeights:
    """One decoder layer; D hidden, Q = heads * head_dim, K = kv heads * head_dim, F intermediate, P per-layer width.

    Attributes:
        attn_norm, mlp_norm: (D,), before attention and MLP.
        attn_out_norm, mlp_out_norm: (D,), behind them.
        qkv: rows q, k, v: (Q + 2K, D); without v where V is taken from the key projection, q alone where K and V are
            another layer's.
        q_norm, k_norm: (head_dim,); k_norm is None where K is another layer's.
        o: (D, Q).
        gate_up: (2F, D), rows gate, up.
        down: (D, F).
        scale: (1,) factor of what leaves the layer, or None.
        token_gate: (P, D), token_out: (D, P), token_norm: (D,), of the per-layer embedding; or None.
        experts: beside the MLP, or None.
    """

    attn_norm: torch.Tensor
    attn_out_norm: torch.Tensor
    mlp_norm: torch.Tensor
    mlp_out_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor | None
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    scale: torch.Tensor | None = None
    token_gate: torch.Tensor | None = None
    token_out: torch.Tensor | None = None
    token_norm: torch.Tensor | None = None
    experts: GemmaExpertWeights | None = None


@dataclass(slots=True)
class PerLayerWeights:
    """The embedding that every layer adds for the token at hand; L layers, P per-layer width.

    Attributes:
        embedding: (vocab_size, L * P).
        projection: (L * P, D), of the token's embedding.
        norm: (P,), of each layer's part of the projection.
    """

    embedding: torch.Tensor
    projection: torch.Tensor
    norm: torch.Tensor


@dataclass(slots=True)
class GemmaWeights(ModelWeights):
    """All tensors of a model, one dtype."""

    per_layer: PerLayerWeights | None = None


def allocate(config: ModelConfig, new: NewTensor) -> tuple[GemmaWeights, dict[str, torch.Tensor]]:
    """Empty fused weights, and for each stored name the slice it fills."""
    config = cast("GemmaConfig", config)
    targets: dict[str, torch.Tensor] = {}
    prefix = config.stored_prefix
    embedding = targets[f"{prefix}embed_tokens.weight"] = new(config.vocab_size, config.hidden_size)
    layers = [
        _allocate_layer(config, layer, new, f"{prefix}layers.{idx}.", targets)
        for idx, layer in enumerate(config.layers)
    ]
    final_norm = targets[f"{prefix}norm.weight"] = new(config.hidden_size)
    lm_head = embedding
    if not config.tied_embeddings:
        lm_head = targets[config.stored_head] = new(config.vocab_size, config.hidden_size)
    per_layer = _allocate_per_layer(config, new, targets) if config.per_layer_size else None
    return GemmaWeights(embedding, layers, final_norm, lm_head, per_layer), targets


def _allocate_per_layer(config: GemmaConfig, new: NewTensor, targets: dict[str, torch.Tensor]) -> PerLayerWeights:
    width = config.num_layers * config.per_layer_size
    weights = PerLayerWeights(
        embedding=new(config.vocab_size, width),
        projection=new(width, config.hidden_size),
        norm=new(config.per_layer_size),
    )
    targets[f"{config.stored_prefix}embed_tokens_per_layer.weight"] = weights.embedding
    targets[f"{config.stored_prefix}per_layer_model_projection.weight"] = weights.projection
    targets[f"{config.stored_prefix}per_layer_projection_norm.weight"] = weights.norm
    return weights


def _allocate_layer(
    config: GemmaConfig, layer: GemmaLayer, new: NewTensor, prefix: str, targets: dict[str, torch.Tensor]
) -> GemmaLayerWeights:
    hidden, inner, per_layer = config.hidden_size, layer.intermediate_size, config.per_layer_size
    qkv_split = _qkv_split(config, layer)
    weights = GemmaLayerWeights(
        attn_norm=new(hidden),
        attn_out_norm=new(hidden),
        mlp_norm=new(hidden),
        mlp_out_norm=new(hidden),
        qkv=new(sum(qkv_split.values()), hidden),
        q_norm=new(layer.head_dim),
        k_norm=new(layer.head_dim) if layer.owns_kv else None,
        o=new(hidden, config.num_heads * layer.head_dim),
        gate_up=new(2 * inner, hidden),
        down=new(hidden, inner),
        scale=new(1) if config.layer_scale else None,
        token_gate=new(per_layer, hidden) if per_layer else None,
        token_out=new(hidden, per_layer) if per_layer else None,
        token_norm=new(hidden) if per_layer else None,
        experts=_allocate_experts(config, config.experts, new, prefix, targets) if config.experts else None,
    )
    stored = {
        "input_layernorm.weight": weights.attn_norm,
        "post_attention_layernorm.weight": weights.attn_out_norm,
        "pre_feedforward_layernorm.weight": weights.mlp_norm,
        "post_feedforward_layernorm.weight": weights.mlp_out_norm,
        "self_attn.q_norm.weight": weights.q_norm,
        "self_attn.k_norm.weight": weights.k_norm,
        "self_attn.o_proj.weight": weights.o,
        "mlp.down_proj.weight": weights.down,
        "layer_scalar": weights.scale,
        "per_layer_input_gate.weight": weights.token_gate,
        "per_layer_projection.weight": weights.token_out,
        "post_per_layer_input_norm.weight": weights.token_norm,
    }
    targets.update({prefix + name: tensor for name, tensor in stored.items() if tensor is not None})
    _assign_split(targets, f"{prefix}self_attn.", qkv_split, weights.qkv)
    _assign_split(targets, f"{prefix}mlp.", {"gate_proj": inner, "up_proj": inner}, weights.gate_up)
    return weights


def _allocate_experts(
    config: GemmaConfig, experts: GemmaExperts, new: NewTensor, prefix: str, targets: dict[str, torch.Tensor]
) -> GemmaExpertWeights:
    hidden, count, inner = config.hidden_size, experts.num_experts, experts.expert_size
    weights = GemmaExpertWeights(
        router=new(count, hidden),
        router_scale=new(hidden),
        expert_scale=new(count),
        gate_up=new(count, 2 * inner, hidden),
        down=new(count, hidden, inner),
        norm=new(hidden),
        out_norm=new(hidden),
        mlp_norm=new(hidden),
    )
    stored = {
        "router.proj.weight": weights.router,
        "router.scale": weights.router_scale,
        "router.per_expert_scale": weights.expert_scale,
        "experts.gate_up_proj": weights.gate_up,
        "experts.down_proj": weights.down,
        "pre_feedforward_layernorm_2.weight": weights.norm,
        "post_feedforward_layernorm_2.weight": weights.out_norm,
        "post_feedforward_layernorm_1.weight": weights.mlp_norm,
    }
    targets.update({prefix + name: tensor for name, tensor in stored.items()})
    return weights


def _qkv_split(config: GemmaConfig, layer: GemmaLayer) -> dict[str, int]:
    """Rows of each stored projection in the fused one."""
    split = {"q_proj": config.num_heads * layer.head_dim}
    if layer.owns_kv:
        split["k_proj"] = layer.kv_size
        if not layer.value_from_key:
            split["v_proj"] = layer.kv_size
    return split


def _assign_split(targets: dict[str, torch.Tensor], prefix: str, split: dict[str, int], weight: torch.Tensor) -> None:
    start = 0
    for name, rows in split.items():
        targets[f"{prefix}{name}.weight"] = weight[start : start + rows]
        start += rows
