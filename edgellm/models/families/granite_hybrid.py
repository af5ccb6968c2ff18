"""Granite 4 (GraniteMoeHybrid): layers of Mamba-2 mixers and of attention, MLPs with or without experts beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.errors import UnsupportedModelError
from edgellm.kernels.cpu.causal_conv import MAX_WIDTH
from edgellm.kernels.cpu.mamba2 import MAX_STATE_DIM
from edgellm.models.config import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    ModelConfig,
    RopeConfig,
    StatePiece,
    rope_from_hf,
)
from edgellm.models.families.mamba2 import refuse_unsupported_mixer, step_limits
from edgellm.models.fields import show
from edgellm.models.granite_hybrid import AttentionWeights, ExpertWeights, GraniteLayerWeights
from edgellm.models.granite_hybrid import GraniteHybridGraph as build_graph
from edgellm.models.mamba2_mixer import MixerShape, allocate_mixer
from edgellm.models.moe import MAX_EXPERTS
from edgellm.models.weights import ModelWeights
from edgellm.models.weights import keep_order as finish

if TYPE_CHECKING:
    import torch

    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import DeviceFamilyGraph
    from edgellm.models.families import NewTensor
    from edgellm.models.fields import Fields
    from edgellm.models.loader import LoadedModel
    from edgellm.models.registry import Architecture

__all__ = [
    "IGNORED_TENSORS",
    "GraniteHybridConfig",
    "allocate",
    "build_device_graph",
    "build_graph",
    "finish",
    "read_config",
]

IGNORED_TENSORS = ()

# What files call the kind of a layer, and whether it is attention.
LAYER_TYPES = {"mamba": False, "linear_attention": False, "attention": True, "full_attention": True}

# Whether positions are rotated; files without the field have no positions either.
POSITION_TYPES = {"": False, "nope": False, "rope": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteHybridConfig(ModelConfig):
    """`intermediate_size` is that of an expert; attention heads are those of the attention layers.

    Attributes:
        attends: of each layer, whether it is attention rather than a mixer.
        mixer: sizes of the mixers; None where every layer is attention.
        shared_size: inner size of the MLP that every token passes.
        num_experts, experts_per_token: 0 in models without experts.
        rotary: whether queries and keys are rotated.
        embedding_multiplier, residual_multiplier: scale embeddings, and what a branch adds to the residual stream.
        attention_multiplier: scales attention scores, in place of a root of head_dim.
        logits_scaling: divides logits.
    """

    attends: tuple[bool, ...]
    mixer: MixerShape | None
    shared_size: int
    num_experts: int
    experts_per_token: int
    rotary: bool
    embedding_multiplier: float
    residual_multiplier: float
    attention_multiplier: float
    logits_scaling: float

    @property
    def num_kv_layers(self) -> int:
        return sum(self.attends)

    @property
    def attention_scale(self) -> float:
        return self.attention_multiplier

    @property
    def linear_widths(self) -> tuple[tuple[str, int], ...]:
        widths = [("hidden_size", self.hidden_size), ("shared_intermediate_size", self.shared_size)]
        if any(self.attends):
            widths.append(("num_heads * head_dim", self.q_size))
        if self.mixer is not None:
            widths.append(("inner size of the mixers", self.mixer.inner_size))
        return tuple(widths)

    @property
    def expert_widths(self) -> tuple[tuple[str, int], ...]:
        if not self.num_experts:
            return ()
        return (("hidden_size", self.hidden_size), ("intermediate_size", self.intermediate_size))

    @property
    def recurrent_pieces(self) -> tuple[StatePiece, ...]:
        if self.mixer is None:
            return ()
        layers = (layer for layer, attends in enumerate(self.attends) if not attends)
        return tuple(piece for layer in layers for piece in self.mixer.pieces(layer))

    def mixer_shape(self) -> MixerShape:
        """`mixer` of a model that has some."""
        if self.mixer is None:
            raise UnsupportedModelError("every layer of the model is attention; there is no mixer")
        return self.mixer


def read_config(fields: Fields, architecture: Architecture) -> GraniteHybridConfig:
    """See `edgellm.models.families.Family`."""
    _refuse_unsupported_options(fields)
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB)
    hidden_size = fields.integer("hidden_size", 1, MAX_HIDDEN)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    num_experts = fields.integer("num_local_experts", 0, MAX_EXPERTS)
    attends = _layer_kinds(fields, num_layers)
    rotary = _rotates(fields)
    dtype = fields.text("dtype", default="") or fields.text("torch_dtype", default="")
    return GraniteHybridConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_INTERMEDIATE),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", 1, MAX_HEADS, default=num_heads),
        head_dim=_head_dim(fields, hidden_size, num_heads),
        max_positions=fields.integer("max_position_embeddings", 1, MAX_POSITIONS),
        rms_norm_eps=fields.number("rms_norm_eps", above=0, most=1, default=1e-6),
        rope=rope_from_hf(fields) if rotary else RopeConfig(theta=1.0),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        qkv_bias=fields.flag("attention_bias", default=False),
        o_bias=fields.flag("attention_bias", default=False),
        weight_dtype=dtype.removeprefix("torch."),
        bos_token_id=fields.optional_id("bos_token_id", vocab_size),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        pad_token_id=fields.optional_id("pad_token_id", vocab_size),
        attends=attends,
        mixer=None if all(attends) else _mixer_shape(fields, hidden_size),
        shared_size=fields.integer("shared_intermediate_size", 1, MAX_INTERMEDIATE),
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", 1, num_experts) if num_experts else 0,
        rotary=rotary,
        embedding_multiplier=fields.number("embedding_multiplier", above=0),
        residual_multiplier=fields.number("residual_multiplier", above=0),
        attention_multiplier=fields.number("attention_multiplier", above=0),
        logits_scaling=fields.number("logits_scaling", above=0),
    )


def _refuse_unsupported_options(fields: Fields) -> None:
    """Options that change the numbers and that the graph does not implement."""
    refuse_unsupported_mixer(fields)
    norm = fields.text("normalization_function", default="rmsnorm")
    if norm != "rmsnorm":
        raise UnsupportedModelError(f"normalization_function is {show(norm)}; supported: 'rmsnorm'")


def _layer_kinds(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    name = "layers_block_type" if "layer_types" not in fields and "layers_block_type" in fields else "layer_types"
    types = fields.texts(name)
    unknown = [kind for kind in types if kind not in LAYER_TYPES]
    if unknown:
        raise UnsupportedModelError(f"{name} names {show(unknown[0])}; supported: {', '.join(LAYER_TYPES)}")
    if len(types) != num_layers:
        raise UnsupportedModelError(
            f"{name} has {len(types)} entries and num_hidden_layers is {num_layers}; check that config.json belongs to "
            "the model"
        )
    return tuple(LAYER_TYPES[kind] for kind in types)


def _rotates(fields: Fields) -> bool:
    kind = fields.text("position_embedding_type", default="")
    if kind not in POSITION_TYPES:
        raise UnsupportedModelError(f"position_embedding_type is {show(kind)}; supported: 'rope', 'nope' or none")
    return POSITION_TYPES[kind]


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if "head_dim" in fields:
        return fields.integer("head_dim", 1, MAX_HEAD_DIM)
    if hidden_size % num_heads:
        raise UnsupportedModelError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and head_dim is not set"
        )
    return hidden_size // num_heads


def _mixer_shape(fields: Fields, hidden_size: int) -> MixerShape:
    num_heads = fields.integer("mamba_n_heads", 1, MAX_HEADS)
    inner_size = fields.integer("mamba_expand", 1, MAX_HIDDEN) * hidden_size
    if fields.get("mamba_d_head") == "auto":
        head_dim = inner_size // num_heads
    else:
        head_dim = fields.integer("mamba_d_head", 1, MAX_HIDDEN)
    if num_heads * head_dim != inner_size:
        raise UnsupportedModelError(
            f"mamba_n_heads {num_heads} times mamba_d_head {head_dim} is not mamba_expand times hidden_size, "
            f"{inner_size}; check that config.json belongs to the model"
        )
    return MixerShape(
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=fields.integer("mamba_d_state", 1, MAX_STATE_DIM),
        num_groups=fields.integer("mamba_n_groups", 1, MAX_HEADS),
        conv_kernel=fields.integer("mamba_d_conv", 2, MAX_WIDTH),
        projection_bias=fields.flag("mamba_proj_bias", default=False),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        norm_eps=fields.number("rms_norm_eps", above=0, most=1, default=1e-6),
        step_limits=step_limits(fields),
    )


def allocate(config: GraniteHybridConfig, new: NewTensor) -> tuple[ModelWeights, dict[str, torch.Tensor]]:
    """See `edgellm.models.families.Family`."""
    targets: dict[str, torch.Tensor] = {}
    embedding = targets["model.embed_tokens.weight"] = new(config.vocab_size, config.hidden_size)
    layers = [_allocate_layer(config, idx, new, targets) for idx in range(config.num_layers)]
    final_norm = targets["model.norm.weight"] = new(config.hidden_size)
    lm_head = embedding
    if not config.tied_embeddings:
        lm_head = targets["lm_head.weight"] = new(config.vocab_size, config.hidden_size)
    return ModelWeights(embedding, layers, final_norm, lm_head), targets


def _allocate_layer(
    config: GraniteHybridConfig, idx: int, new: NewTensor, targets: dict[str, torch.Tensor]
) -> GraniteLayerWeights:
    hidden, shared = config.hidden_size, config.shared_size
    prefix = f"model.layers.{idx}."
    layer = GraniteLayerWeights(
        norm=new(hidden), mlp_norm=new(hidden), gate_up=new(2 * shared, hidden), down=new(hidden, shared)
    )
    targets[prefix + "input_layernorm.weight"] = layer.norm
    targets[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm
    targets[prefix + "shared_mlp.input_linear.weight"] = layer.gate_up
    targets[prefix + "shared_mlp.output_linear.weight"] = layer.down
    if config.attends[idx]:
        layer.attention = _allocate_attention(config, new, prefix + "self_attn.", targets)
    else:
        layer.mixer = allocate_mixer(config.mixer_shape(), new, prefix + "mamba.", targets)
    if config.num_experts:
        layer.experts = _allocate_experts(config, new, prefix + "block_sparse_moe.", targets)
    return layer


def _allocate_attention(
    config: GraniteHybridConfig, new: NewTensor, prefix: str, targets: dict[str, torch.Tensor]
) -> AttentionWeights:
    rows = config.q_size + 2 * config.kv_size
    weights = AttentionWeights(
        qkv=new(rows, config.hidden_size),
        o=new(config.hidden_size, config.q_size),
        qkv_bias=new(rows) if config.qkv_bias else None,
        o_bias=new(config.hidden_size) if config.o_bias else None,
    )
    targets[prefix + "o_proj.weight"] = weights.o
    if weights.o_bias is not None:
        targets[prefix + "o_proj.bias"] = weights.o_bias
    start = 0
    for name, count in (("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size)):
        targets[f"{prefix}{name}.weight"] = weights.qkv[start : start + count]
        if weights.qkv_bias is not None:
            targets[f"{prefix}{name}.bias"] = weights.qkv_bias[start : start + count]
        start += count
    return weights


def _allocate_experts(
    config: GraniteHybridConfig, new: NewTensor, prefix: str, targets: dict[str, torch.Tensor]
) -> ExpertWeights:
    experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
    weights = ExpertWeights(
        router=new(experts, hidden), gate_up=new(experts, 2 * inner, hidden), down=new(experts, hidden, inner)
    )
    targets[prefix + "router.layer.weight"] = weights.router
    targets[prefix + "input_linear.weight"] = weights.gate_up
    targets[prefix + "output_linear.weight"] = weights.down
    return weights


def build_device_graph(model: LoadedModel, ops: DeviceOps) -> DeviceFamilyGraph:
    """The forward pass on a device; see `edgellm.models.families.Family`."""
    from edgellm.models.device_granite_hybrid import DeviceGraniteHybridGraph

    return DeviceGraniteHybridGraph(model, ops)
