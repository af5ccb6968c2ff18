"""`QwenHybridConfig`: Qwen3-Next and Qwen3.5 text models, which mix gated delta nets with gated attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgellm.errors import UnsupportedModelError
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
    make_rope,
)
from edgellm.models.fields import show
from edgellm.models.moe import MAX_EXPERTS, MoeConfig
from edgellm.models.registry import Architecture

if TYPE_CHECKING:
    from collections.abc import Collection

    from typing_extensions import Self

    from edgellm.models.fields import Fields

DELTA = "linear_attention"
ATTENTION = "full_attention"
# Of the stored names: a language model alone, and one beside a vision model.
PREFIXES = ("model.", "model.language_model.")
MTP_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
MAX_CONV_WIDTH = 8  # the kernel takes no more


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """Shape of the gated delta nets.

    Attributes:
        num_key_heads, num_value_heads: value head h reads the query and key of head h // (value heads / key heads).
        key_dim, value_dim: of one head.
        conv_width: inputs that the causal convolution sees, the newest included.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: query, key, value."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenHybridConfig(ModelConfig):
    """A Qwen hybrid.  `qkv_bias` says the same of the attention gate.

    Attributes:
        layer_kinds: `DELTA` or `ATTENTION`, for each layer.
        moe_layers: of each layer, whether experts stand in place of its MLP.
        rotary_dim: leading elements of each query and key head that are rotated.
        moe: None for a model of dense layers.
        prefix: of the names of stored tensors.
        packed_experts, packed_mtp_experts: the experts of a layer are stored as one tensor.
        num_mtp_layers: layers of the multi-token prediction head that the checkpoint stores.
        mtp_own_embeddings: the head has an embedding of its own.
        stated_mtp_layers: fields of `config.json` that say how many layers it has, and what they say.
    """

    layer_kinds: tuple[str, ...]
    moe_layers: tuple[bool, ...]
    rotary_dim: int
    delta: DeltaNetConfig
    moe: MoeConfig | None = None
    prefix: str = "model."
    packed_experts: bool = False
    packed_mtp_experts: bool = False
    num_mtp_layers: int = 0
    mtp_own_embeddings: bool = False
    stated_mtp_layers: tuple[tuple[str, int], ...] = ()

    def settled(self, stored: Collection[str]) -> Self:
        """Prefix, packed experts, and whether there is a prediction head."""
        prefix = next((name for name in PREFIXES if f"{name}embed_tokens.weight" in stored), self.prefix)
        packed = ".mlp.experts.gate_up_proj"
        return dataclasses.replace(
            self,
            prefix=prefix,
            packed_experts=any(name.startswith(prefix) and name.endswith(packed) for name in stored),
            packed_mtp_experts=any(name.startswith("mtp.") and name.endswith(packed) for name in stored),
            num_mtp_layers=len({name.split(".")[2] for name in stored if name.startswith("mtp.layers.")}),
        )

    @property
    def num_kv_layers(self) -> int:
        return self.layer_kinds.count(ATTENTION)

    @property
    def linear_widths(self) -> tuple[tuple[str, int], ...]:
        widths = [
            ("hidden_size", self.hidden_size),
            ("num_heads * head_dim", self.q_size),
            ("linear_num_value_heads * linear_value_head_dim", self.delta.value_size),
        ]
        if not all(self.moe_layers):
            widths.append(("intermediate_size", self.intermediate_size))
        if self.moe is not None:
            widths.append(("shared_expert_intermediate_size", self.moe.shared_size))
        return tuple(widths)

    @property
    def expert_widths(self) -> tuple[tuple[str, int], ...]:
        if self.moe is None:
            return ()
        return (("hidden_size", self.hidden_size), ("moe_intermediate_size", self.moe.expert_size))

    @property
    def recurrent_pieces(self) -> tuple[StatePiece, ...]:
        delta = self.delta
        conv = (delta.conv_size, delta.conv_width - 1)
        state = (delta.num_value_heads, delta.key_dim, delta.value_dim)
        return tuple(
            piece
            for layer, kind in enumerate(self.layer_kinds)
            if kind == DELTA
            for piece in (StatePiece(layer, "conv", conv), StatePiece(layer, "state", state))
        )

    @property
    def interleaved_projections(self) -> bool:
        """Whether the file stores the delta nets' projections as two matrices whose rows alternate by key head."""
        return self.architecture is Architecture.QWEN3_NEXT


def read_config(fields: Fields, architecture: Architecture) -> QwenHybridConfig:
    """The config of a Qwen hybrid; the text part where the checkpoint has others.

    Raises:
        UnsupportedModelError: an option is not supported, or a field is missing, of the wrong type or out of range.
    """
    nested = "text_config" in fields
    text = fields.section("text_config") if nested else fields
    for part in (fields, text):
        _refuse_unsupported_options(part)
    num_layers = text.integer("num_hidden_layers", 1, MAX_LAYERS)
    num_heads = text.integer("num_attention_heads", 1, MAX_HEADS)
    vocab_size = text.integer("vocab_size", 1, MAX_VOCAB)
    head_dim = text.integer("head_dim", 2, MAX_HEAD_DIM)
    rope, rotary_dim = _rope(text, head_dim)
    moe = _moe(text, architecture)
    bias = text.flag("attention_bias", default=False)
    return QwenHybridConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size", 1, MAX_HIDDEN),
        intermediate_size=_intermediate_size(text, moe),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=text.integer("num_key_value_heads", 1, MAX_HEADS),
        head_dim=head_dim,
        max_positions=text.integer("max_position_embeddings", 1, MAX_POSITIONS),
        rms_norm_eps=text.number("rms_norm_eps", above=0, most=1, default=1e-6),
        rope=rope,
        tied_embeddings=_outer(fields, text, "tie_word_embeddings").flag("tie_word_embeddings", default=False),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        weight_dtype=_weight_dtype(fields, text),
        bos_token_id=_outer(text, fields, "bos_token_id").optional_id("bos_token_id", vocab_size),
        eos_token_ids=_outer(text, fields, "eos_token_id").token_ids("eos_token_id", vocab_size),
        pad_token_id=_outer(text, fields, "pad_token_id").optional_id("pad_token_id", vocab_size),
        layer_kinds=_layer_kinds(text, num_layers),
        moe_layers=_moe_layers(text, moe, num_layers),
        rotary_dim=rotary_dim,
        delta=_delta(text),
        moe=moe,
        prefix=PREFIXES[nested],
        mtp_own_embeddings=text.flag("mtp_use_dedicated_embeddings", default=False),
        stated_mtp_layers=tuple((name, text.integer(name, 0, MAX_LAYERS)) for name in MTP_LAYERS if name in text),
    )


def _outer(first: Fields, second: Fields, name: str) -> Fields:
    """The one of two levels of the config that states a field; the first where both do."""
    return first if name in first else second


def _weight_dtype(fields: Fields, text: Fields) -> str:
    for part in (text, fields):
        for name in ("dtype", "torch_dtype"):
            if name in part:
                return part.text(name).removeprefix("torch.")
    return ""


def _refuse_unsupported_options(fields: Fields) -> None:
    if fields.get("quantization_config"):
        method = fields.section("quantization_config").get("quant_method") or "unknown"
        raise UnsupportedModelError(
            f"quantization_config (method {show(method)}) is not supported; use the unquantised checkpoint"
        )
    supported: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish"),
        "output_gate_type": ("silu", "swish"),
        "attn_output_gate": (True,),
        "use_sliding_window": (False,),
    }
    for name, values in supported.items():
        if name in fields and fields.get(name) not in values:
            raise UnsupportedModelError(
                f"{name} is {show(fields.get(name))}; supported: {', '.join(map(repr, values))}: use a model with that"
            )


def _intermediate_size(fields: Fields, moe: MoeConfig | None) -> int:
    """A model whose layers all have experts need not state it."""
    default = None if moe is None else moe.expert_size
    return fields.integer("intermediate_size", 1, MAX_INTERMEDIATE, default=default)


def _layer_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    if "layer_types" not in fields:
        interval = fields.integer("full_attention_interval", 1, MAX_LAYERS)
        return tuple(DELTA if (layer + 1) % interval else ATTENTION for layer in range(num_layers))
    kinds = tuple(fields.texts("layer_types"))
    if len(kinds) != num_layers or not set(kinds) <= {DELTA, ATTENTION}:
        raise fields.refusal("layer_types", f"a list of {num_layers} names, each {DELTA!r} or {ATTENTION!r},")
    return kinds


def _delta(fields: Fields) -> DeltaNetConfig:
    delta = DeltaNetConfig(
        num_key_heads=fields.integer("linear_num_key_heads", 1, MAX_HEADS),
        num_value_heads=fields.integer("linear_num_value_heads", 1, MAX_HEADS),
        key_dim=fields.integer("linear_key_head_dim", 1, MAX_HEAD_DIM),
        value_dim=fields.integer("linear_value_head_dim", 1, MAX_HEAD_DIM),
        conv_width=fields.integer("linear_conv_kernel_dim", 2, MAX_CONV_WIDTH),
    )
    if delta.num_value_heads % delta.num_key_heads:
        raise UnsupportedModelError(
            f"linear_num_value_heads {delta.num_value_heads} is not a multiple of linear_num_key_heads "
            f"{delta.num_key_heads}; every key head must serve equally many value heads"
        )
    return delta


def _moe(fields: Fields, architecture: Architecture) -> MoeConfig | None:
    if architecture is Architecture.QWEN3_5:
        return None
    num_experts = fields.integer("num_experts", 0, MAX_EXPERTS)
    if not num_experts:
        return None
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", 1, num_experts),
        expert_size=fields.integer("moe_intermediate_size", 1, MAX_INTERMEDIATE),
        shared_size=fields.integer("shared_expert_intermediate_size", 1, MAX_INTERMEDIATE),
        # The later models have no such field: their routers always normalise.
        normalise=architecture is Architecture.QWEN3_5_MOE or fields.flag("norm_topk_prob", default=True),
    )


def _moe_layers(fields: Fields, moe: MoeConfig | None, num_layers: int) -> tuple[bool, ...]:
    if moe is None:
        return (False,) * num_layers
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, default=1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in dense):
        raise fields.refusal("mlp_only_layers", f"a list of layers from 0 to {num_layers - 1}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def _rope(fields: Fields, head_dim: int) -> tuple[RopeConfig, int]:
    """The rope, and how many leading elements of a head it rotates.

    The sections of a rope over image positions change nothing for text, whose three positions are equal.
    """
    names = ("rope_theta", "partial_rotary_factor")
    values = {name: fields.get(name) for name in names}
    for section in ("rope_scaling", "rope_parameters"):
        values.update(fields.section(section).items())
    rope = fields.with_values(values, prefix="rope field ")
    factor = rope.number("partial_rotary_factor", above=0, most=1)
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise UnsupportedModelError(
            f"partial_rotary_factor {factor} of head_dim {head_dim} rotates {rotary_dim} elements; "
            "an even number of at least 2 is needed"
        )
    kind = rope.text("rope_type", default="") or rope.text("type", default="default")
    if kind == "mrope":
        kind = "default"
    del values["partial_rotary_factor"]
    rope = fields.with_values(values, prefix="rope field ")
    positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    return make_rope(kind, rope, max_positions=positions), rotary_dim
