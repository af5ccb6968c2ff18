"""Gemma3 and Gemma4 text models: their configs.

Layers alternate between attention over a sliding window and over everything, each kind with its own rope, and in Gemma4
with its own head size.  Gemma4's last layers may own no K and V and read those of an earlier layer of their kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.errors import UnsupportedModelError
from edgellm.models.config import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    KVLayer,
    ModelConfig,
    RopeConfig,
    make_rope,
)
from edgellm.models.families.gemma_weights import allocate
from edgellm.models.fields import show
from edgellm.models.gemma import GemmaGraph as build_graph
from edgellm.models.moe import MAX_EXPERTS
from edgellm.models.registry import Architecture
from edgellm.models.weights import keep_order as finish

if TYPE_CHECKING:
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import DeviceFamilyGraph
    from edgellm.models.fields import Fields
    from edgellm.models.loader import LoadedModel

__all__ = [
    "IGNORED_TENSORS",
    "GemmaConfig",
    "GemmaExperts",
    "GemmaLayer",
    "allocate",
    "build_device_graph",
    "build_graph",
    "finish",
    "read_config",
]

# What the text model does without, in either order of the names.
IGNORED_TENSORS = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
)

SLIDING, FULL = "sliding_attention", "full_attention"
ACTIVATION = "gelu_pytorch_tanh"

# What `Gemma3TextConfig` means where a nested `text_config` leaves a field out, as published checkpoints do.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "hidden_activation": ACTIVATION,
}
_GEMMA3_PATTERN = 6  # every so manieth layer sees everything
_GEMMA3_THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}

# Of a model with towers: fields beside `text_config` that speak of the text model.
_OUTER_FIELDS = (
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "quantization_config",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaLayer:
    """What differs between the layers of a model.

    Attributes:
        window: tokens that a row sees, itself included; 0 is all.
        kv_layer: the K and V it reads, counted among the layers that own some.
        owns_kv: it writes them as well; otherwise an earlier layer does.
        value_from_key: V is the key projection before norm and rope; the layer has no value projection.
    """

    window: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    kv_layer: int
    owns_kv: bool = True
    value_from_key: bool = False

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaExperts:
    """Experts beside the MLP of every layer; `expert_size` is the inner size of one."""

    num_experts: int
    experts_per_token: int
    expert_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(ModelConfig):
    """`head_dim` and `num_kv_heads` are those of the sliding layers, `rope` is that of the others.

    Attributes:
        layers: one for each layer.
        local_rope: of the sliding layers.
        query_scale: factor of the attention scores.
        norm_offset: added to the stored weights of every norm.
        value_norm: V is normed over each head, without a weight.
        layer_scale: the layers store a factor of what leaves them.
        final_softcap: c of c tanh(logits / c), or None.
        per_layer_size: width of the embedding that each layer adds for the token at hand; 0 is none.
        experts: None where the layers have an MLP alone.
        stored_prefix: what the file puts before "embed_tokens.weight" and "layers.0.".
        stored_head: the file's name of the output projection, where that is not the embedding.
    """

    layers: tuple[GemmaLayer, ...]
    local_rope: RopeConfig
    query_scale: float
    norm_offset: float = 0.0
    value_norm: bool = False
    layer_scale: bool = False
    final_softcap: float | None = None
    per_layer_size: int = 0
    experts: GemmaExperts | None = None
    stored_prefix: str
    stored_head: str

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        for idx, layer in enumerate(self.layers):
            if self.num_heads % layer.num_kv_heads or layer.head_dim % 2:
                raise UnsupportedModelError(
                    f"layer {idx} has {layer.num_kv_heads} kv heads of {layer.head_dim} for {self.num_heads} query "
                    "heads; equal groups of heads and an even head_dim are needed"
                )

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(
            KVLayer(layer.num_kv_heads, layer.head_dim, layer.window) for layer in self.layers if layer.owns_kv
        )

    @property
    def num_kv_layers(self) -> int:
        return sum(layer.owns_kv for layer in self.layers)

    @property
    def attention_scale(self) -> float:
        return self.query_scale

    @property
    def linear_widths(self) -> tuple[tuple[str, int], ...]:
        widths = [("hidden_size", self.hidden_size)]
        for layer in self.layers:
            widths.append(("intermediate_size", layer.intermediate_size))
            widths.append(("num_heads * head_dim", self.num_heads * layer.head_dim))
        if self.per_layer_size:
            widths.append(("hidden_size_per_layer_input", self.per_layer_size))
        return tuple(dict.fromkeys(widths))

    @property
    def expert_widths(self) -> tuple[tuple[str, int], ...]:
        if self.experts is None:
            return ()
        return (("hidden_size", self.hidden_size), ("moe_intermediate_size", self.experts.expert_size))

    @property
    def unread_tensors(self) -> tuple[str, ...]:
        """Published files store projections of the layers that use the K and V of another."""
        names = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
        layers = [idx for idx, layer in enumerate(self.layers) if not layer.owns_kv]
        return tuple(f"{self.stored_prefix}layers.{idx}.self_attn.{name}" for idx in layers for name in names)


def read_config(fields: Fields, architecture: Architecture) -> GemmaConfig:
    """The config of the text model, which is the whole file or its `text_config`.

    Raises:
        UnsupportedModelError: an option is not supported, or a field is missing, of the wrong type or out of range.
    """
    text = _text_fields(fields, architecture)
    _refuse_unsupported_options(text, architecture)
    gemma3 = architecture is Architecture.GEMMA3
    kinds = _layer_kinds(text, architecture)
    shared = 0 if gemma3 else text.integer("num_kv_shared_layers", 0, MAX_LAYERS, default=0)
    layers = _layers(text, kinds, shared=shared)
    vocab_size = text.integer("vocab_size", 1, MAX_VOCAB)
    prefix, head = _stored_names(fields, architecture)
    dtype = text.text("dtype", default="") or text.text("torch_dtype", default="")
    return GemmaConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size", 1, MAX_HIDDEN),
        intermediate_size=text.integer("intermediate_size", 1, MAX_INTERMEDIATE),
        num_layers=len(layers),
        num_heads=text.integer("num_attention_heads", 1, MAX_HEADS),
        num_kv_heads=text.integer("num_key_value_heads", 1, MAX_HEADS),
        head_dim=text.integer("head_dim", 1, MAX_HEAD_DIM),
        max_positions=text.integer("max_position_embeddings", 1, MAX_POSITIONS),
        rms_norm_eps=text.number("rms_norm_eps", above=0, most=1, default=1e-6),
        rope=_rope(text, FULL if FULL in kinds else SLIDING, kinds, layers, architecture),
        local_rope=_rope(text, SLIDING if SLIDING in kinds else FULL, kinds, layers, architecture),
        tied_embeddings=text.flag("tie_word_embeddings", default=True),
        weight_dtype=dtype.removeprefix("torch."),
        bos_token_id=text.optional_id("bos_token_id", vocab_size),
        eos_token_ids=text.token_ids("eos_token_id", vocab_size),
        pad_token_id=text.optional_id("pad_token_id", vocab_size),
        layers=layers,
        query_scale=text.number("query_pre_attn_scalar", above=0) ** -0.5 if gemma3 else 1.0,
        norm_offset=1.0 if gemma3 else 0.0,
        value_norm=not gemma3,
        layer_scale=not gemma3,
        final_softcap=text.optional_number("final_logit_softcapping", above=0),
        per_layer_size=0 if gemma3 else _per_layer_size(text, vocab_size),
        experts=None if gemma3 else _experts(text),
        stored_prefix=prefix,
        stored_head=head,
    )


def _stored_names(fields: Fields, architecture: Architecture) -> tuple[str, str]:
    """Prefix of the text model's tensors, and the name of its output projection.

    Models with towers put the text model below another one.
    """
    if "text_config" not in fields:
        return "model.", "lm_head.weight"
    if architecture is Architecture.GEMMA3:
        return "language_model.model.", "language_model.lm_head.weight"
    return "model.language_model.", "lm_head.weight"


def _text_fields(fields: Fields, architecture: Architecture) -> Fields:
    """The fields of the text model, with those that stand beside a nested one."""
    if "text_config" not in fields:
        return fields
    values = _GEMMA3_DEFAULTS.copy() if architecture is Architecture.GEMMA3 else {}
    values.update(fields.section("text_config").items())
    values.update({name: fields.get(name) for name in _OUTER_FIELDS if name in fields})
    return fields.with_values(values, prefix="text_config.")


def _refuse_unsupported_options(text: Fields, architecture: Architecture) -> None:
    """Options that change the numbers and that the graph does not implement."""
    if text.get("quantization_config"):
        method = text.section("quantization_config").get("quant_method") or "unknown"
        raise UnsupportedModelError(
            f"quantization_config (method {show(method)}) is not supported; use the unquantised checkpoint"
        )
    activation = text.text("hidden_activation")
    if activation != ACTIVATION:
        raise UnsupportedModelError(f"hidden_activation is {show(activation)}; supported: {ACTIVATION!r}")
    if text.flag("attention_bias", default=False):
        raise UnsupportedModelError(
            f"attention_bias is true; biases of the attention projections are not supported for {architecture.value}"
        )
    if text.get("attn_logit_softcapping") is not None:
        raise UnsupportedModelError(
            f"attn_logit_softcapping is {show(text.get('attn_logit_softcapping'))}; capped attention scores are not "
            f"supported for {architecture.value}, whose published models leave it null"
        )
    # "vision" concerns the tokens of pictures alone.
    bidirectional = text.get("use_bidirectional_attention")
    if bidirectional not in (None, False, "vision"):
        raise UnsupportedModelError(
            f"use_bidirectional_attention is {show(bidirectional)}; text models attend to what stands before a token"
        )


def _layer_kinds(text: Fields, architecture: Architecture) -> list[str]:
    """`SLIDING` or `FULL` for each layer."""
    count = text.integer("num_hidden_layers", 1, MAX_LAYERS)
    kinds = text.texts("layer_types")
    if not kinds and architecture is Architecture.GEMMA3:
        name = "sliding_window_pattern" if "sliding_window_pattern" in text else "_sliding_window_pattern"
        pattern = text.integer(name, 1, MAX_LAYERS, default=_GEMMA3_PATTERN)
        return [SLIDING if (idx + 1) % pattern else FULL for idx in range(count)]
    if len(kinds) != count or not set(kinds) <= {SLIDING, FULL}:
        raise text.refusal("layer_types", f"a list of {count} kinds, each {SLIDING!r} or {FULL!r},")
    if architecture is Architecture.GEMMA4 and kinds[-1] != FULL:
        raise text.refusal("layer_types", f"{FULL!r} as the last kind")
    return kinds


def _layers(text: Fields, kinds: list[str], *, shared: int) -> tuple[GemmaLayer, ...]:
    """Shape of each layer; the last `shared` of them read the K and V of the last earlier one of their kind."""
    window = text.integer("sliding_window", 1, MAX_POSITIONS) if SLIDING in kinds else 0
    inner = text.integer("intermediate_size", 1, MAX_INTERMEDIATE)
    wide = text.flag("use_double_wide_mlp", default=False)
    key_is_value = text.flag("attention_k_eq_v", default=False)
    first_shared = len(kinds) - shared
    if first_shared < 1 or set(kinds[:first_shared]) != set(kinds):
        raise text.refusal(
            "num_kv_shared_layers", "a number that leaves each kind of layer one with K and V of its own"
        )
    layers: list[GemmaLayer] = []
    for idx, kind in enumerate(kinds):
        owns = idx < first_shared
        source = idx if owns else max(earlier for earlier in range(first_shared) if kinds[earlier] == kind)
        num_kv_heads, head_dim = _heads(text, idx, kind)
        if not owns and (num_kv_heads, head_dim) != (layers[source].num_kv_heads, layers[source].head_dim):
            raise UnsupportedModelError(
                f"layer {idx} has {num_kv_heads} kv heads of {head_dim}, but reads K and V of layer {source}, "
                f"which has {layers[source].num_kv_heads} of {layers[source].head_dim}; check per_layer_config"
            )
        layers.append(
            GemmaLayer(
                window=window if kind == SLIDING else 0,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                intermediate_size=inner * 2 if wide and not owns else inner,
                kv_layer=source,
                owns_kv=owns,
                value_from_key=key_is_value and kind == FULL,
            )
        )
    return tuple(layers)


def _heads(text: Fields, idx: int, kind: str) -> tuple[int, int]:
    """KV heads and head size of a layer, in the two spellings of Gemma4: by kind, or by layer."""
    num_kv_heads = text.integer("num_key_value_heads", 1, MAX_HEADS)
    head_dim = text.integer("head_dim", 1, MAX_HEAD_DIM)
    if "per_layer_config" in text:
        layer = text.section("per_layer_config").section(str(idx))
        for name, _ in layer.items():
            if name not in ("num_key_value_heads", "head_dim"):
                raise layer.refusal(name, "none (only num_key_value_heads and head_dim may differ between layers)")
        num_kv_heads = layer.integer("num_key_value_heads", 1, MAX_HEADS, default=num_kv_heads)
        return num_kv_heads, layer.integer("head_dim", 1, MAX_HEAD_DIM, default=head_dim)
    if kind == SLIDING or "global_head_dim" not in text:
        return num_kv_heads, head_dim
    if text.flag("attention_k_eq_v", default=False):
        num_kv_heads = text.integer("num_global_key_value_heads", 1, MAX_HEADS, default=num_kv_heads)
    return num_kv_heads, text.integer("global_head_dim", 1, MAX_HEAD_DIM)


def _experts(text: Fields) -> GemmaExperts | None:
    if not text.flag("enable_moe_block", default=False):
        return None
    num_experts = text.integer("num_experts", 1, MAX_EXPERTS)
    return GemmaExperts(
        num_experts=num_experts,
        experts_per_token=text.integer("top_k_experts", 1, num_experts),
        expert_size=text.integer("moe_intermediate_size", 1, MAX_INTERMEDIATE),
    )


def _per_layer_size(text: Fields, vocab_size: int) -> int:
    """Width of the per-layer embeddings, whose table must have a row for every token."""
    size = text.integer("hidden_size_per_layer_input", 0, MAX_HIDDEN, default=0)
    if size and text.integer("vocab_size_per_layer_input", 1, MAX_VOCAB) != vocab_size:
        raise text.refusal("vocab_size_per_layer_input", f"vocab_size, {vocab_size},")
    return size


def _rope(
    text: Fields, kind: str, kinds: list[str], layers: tuple[GemmaLayer, ...], architecture: Architecture
) -> RopeConfig:
    """Rope of one kind of layer."""
    head_dims = {layer.head_dim for layer, other in zip(layers, kinds, strict=True) if other == kind}
    if len(head_dims) > 1:
        raise UnsupportedModelError(
            f"layers of kind {kind} have heads of {sorted(head_dims)}; one size for each kind is supported"
        )
    rope = text.with_values(_rope_values(text, kind, architecture), prefix=f"rope of {kind} layers, field ")
    max_positions = text.integer("max_position_embeddings", 1, MAX_POSITIONS)
    name = rope.text("rope_type", default="") or rope.text("type", default="default")
    if name != "proportional" or architecture is not Architecture.GEMMA4:
        return make_rope(name, rope, max_positions=max_positions)
    return _proportional(rope, head_dims.pop())


def _rope_values(text: Fields, kind: str, architecture: Architecture) -> dict[str, object]:
    """`rope_parameters` by kind, or Gemma3's older fields, whose scaling is that of the full layers."""
    if "rope_parameters" in text or architecture is Architecture.GEMMA4:
        values = dict(text.section("rope_parameters").section(kind).items())
    else:
        values = dict(text.section("rope_scaling").items()) if kind == FULL else {}
        values["rope_theta"] = text.get("rope_theta" if kind == FULL else "rope_local_base_freq")
    if values.get("rope_theta") is None and architecture is Architecture.GEMMA3:
        values["rope_theta"] = _GEMMA3_THETA[kind]
    return values


def _proportional(rope: Fields, head_dim: int) -> RopeConfig:
    """Only the first pairs of a head turn, at the frequencies they have in the whole head; the others stand still."""
    pairs = head_dim // 2
    turning = int(rope.number("partial_rotary_factor", above=0, most=1, default=1.0) * head_dim // 2)
    return RopeConfig(
        theta=rope.number("rope_theta", above=1),
        kind="linear",
        factor=rope.number("factor", above=0, most=MAX_POSITIONS, default=1.0),
        freq_factors=(1.0,) * turning + (math.inf,) * (pairs - turning),
    )


def build_device_graph(model: LoadedModel, ops: DeviceOps) -> DeviceFamilyGraph:
    """The forward pass on a device; see `edgellm.models.families.Family`."""
    from edgellm.models.device_gemma import DeviceGemmaGraph

    return DeviceGemmaGraph(model, ops)
