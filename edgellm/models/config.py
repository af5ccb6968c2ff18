"""`ModelConfig`: the shape of a decoder-only checkpoint, read from `config.json` or GGUF metadata.

The JSON is read directly and no default is invented: a field that decides the numbers must be in the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgellm.cache.types import BaseStateKind
from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models.fields import Fields, naming, read_json_object, show
from edgellm.models.quantisation import read_quantisation
from edgellm.models.registry import Architecture, architecture_of, family_of

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from typing_extensions import Self

    from edgellm.models.quantisation import Quantisation

ROPE_KINDS = ("default", "linear", "llama3", "yarn")

# Far above every known model of these families: beyond them a field is damaged, not large.
MAX_VOCAB = 1 << 22
MAX_HIDDEN = 1 << 17
MAX_INTERMEDIATE = 1 << 20
MAX_LAYERS = 1 << 10
MAX_HEADS = 1 << 12
MAX_HEAD_DIM = 512  # the attention kernels take no more
MAX_POSITIONS = 1 << 24  # float32 rope angles count positions exactly up to here


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the frequencies.
        kind: one of `ROPE_KINDS`.
        factor: context extension factor of the scaled kinds.
        original_max_positions: context length before extension (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3 only.
        attention_factor, beta_fast, beta_slow, mscale, mscale_all_dim, truncate: yarn only.
        freq_factors: (head_dim / 2,) divisors of the frequencies, as some GGUF files store them; empty is none.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StatePiece:
    """One tensor of recurrent state that a sequence has in one layer.

    Attributes:
        layer: of the model.
        name: "state" or "conv".
        shape: of one sequence's part.
        dtype: "float32" or the name of another torch dtype.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class KVLayer:
    """The keys and values of a layer.

    Attributes:
        window: tokens that a row sees, itself included; 0 is all.
    """

    num_kv_heads: int
    head_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the graph, the KV cache and the tokenizer need to know about a checkpoint.

    Attributes:
        max_positions: context length in tokens.
        qkv_bias, o_bias, mlp_bias: which linears carry a bias.
        qk_norm: RMS norm over each head of Q and K before rope.
        weight_dtype: name of the dtype the file holds ("float32", "bfloat16", "float16"), "" if unknown.
        quantisation: of the linear layers inside decoder layers; None where they are stored in `weight_dtype`.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    weight_dtype: str = ""
    quantisation: Quantisation | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise UnsupportedModelError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.head_dim > MAX_HEAD_DIM:
            raise UnsupportedModelError(f"head_dim is {self.head_dim}; at most {MAX_HEAD_DIM} is supported")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "grouped-query attention needs equal groups"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim is {self.head_dim}; rope needs an even head_dim")

    def settled(self, stored: Collection[str]) -> Self:
        """The config with what only the names of the stored tensors tell, such as one of several known layouts.

        Args:
            stored: names of all tensors of the checkpoint.
        """
        return self

    @property
    def num_kv_layers(self) -> int:
        """Layers that own K and V."""
        return self.num_layers

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        """Each layer that owns K and V, in order."""
        return (KVLayer(self.num_kv_heads, self.head_dim),) * self.num_kv_layers

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores."""
        return float(self.head_dim**-0.5)

    @property
    def linear_widths(self) -> tuple[tuple[str, int], ...]:
        """Name and elements of every kind of row that a linear layer reads."""
        return (
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_heads * head_dim", self.q_size),
        )

    @property
    def expert_widths(self) -> tuple[tuple[str, int], ...]:
        """The same of experts; empty where the model has none."""
        return ()

    @property
    def unread_tensors(self) -> tuple[str, ...]:
        """Prefixes of stored tensors that this model has no use for."""
        return ()

    @property
    def recurrent_pieces(self) -> tuple[StatePiece, ...]:
        """Recurrent and conv state of every recurrent layer; empty for attention models."""
        return ()

    @property
    def base_state_kind(self) -> BaseStateKind:
        """Which kinds of state a sequence keeps."""
        if not self.recurrent_pieces:
            return BaseStateKind.ATTENTION_ONLY
        return BaseStateKind.HYBRID if self.num_kv_layers else BaseStateKind.PURE_RECURRENT

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


def read_config_json(directory: Path) -> dict[str, Any]:
    """The parsed `config.json` of a Hugging Face directory.

    Raises:
        WeightFileError: the file is missing or is not a JSON object.
    """
    path = directory / "config.json"
    if not path.exists():
        raise WeightFileError(
            f"{path} is missing; a model directory holds config.json, *.safetensors and the tokenizer files"
        )
    return read_json_object(path)


def config_from_hf(raw: dict[str, Any], *, source: Path | str = "config.json") -> ModelConfig:
    """Turn a parsed `config.json` into a `ModelConfig`.

    Args:
        source: the file, for error messages.
    Raises:
        UnsupportedModelError: the architecture or one of its options is not supported, or a field is missing,
            of the wrong type or out of range; the message names file, field and value.
    """
    with naming(source):
        fields = Fields(str(source), raw)
        architecture = architecture_of(fields.texts("architectures"), fields.text("model_type", default=""))
        return family_of(architecture).read_config(fields, architecture)


def dense_config(fields: Fields, architecture: Architecture) -> ModelConfig:
    """The config of Llama, Qwen2 and Qwen3."""
    _refuse_unsupported_options(fields, architecture)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    hidden_size = fields.integer("hidden_size", 1, MAX_HIDDEN)
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB)
    qwen2 = architecture is Architecture.QWEN2
    attention_bias = fields.flag("attention_bias", default=False)
    dtype = fields.text("dtype", default="") or fields.text("torch_dtype", default="")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_INTERMEDIATE),
        num_layers=fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", 1, MAX_HEADS, default=num_heads),
        head_dim=_head_dim(fields, architecture, hidden_size, num_heads),
        max_positions=fields.integer("max_position_embeddings", 1, MAX_POSITIONS),
        rms_norm_eps=fields.number("rms_norm_eps", above=0, most=1, default=1e-6),
        rope=rope_from_hf(fields),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias and not qwen2,
        mlp_bias=fields.flag("mlp_bias", default=False) and architecture is Architecture.LLAMA,
        qk_norm=architecture is Architecture.QWEN3,
        weight_dtype=dtype.removeprefix("torch."),
        quantisation=read_quantisation(fields),
        bos_token_id=fields.optional_id("bos_token_id", vocab_size),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        pad_token_id=fields.optional_id("pad_token_id", vocab_size),
    )


def _refuse_unsupported_options(fields: Fields, architecture: Architecture) -> None:
    """Options that change the numbers and that the graph does not implement."""
    if fields.flag("use_sliding_window", default=False) and architecture is not Architecture.LLAMA:
        raise UnsupportedModelError(
            "use_sliding_window is true; sliding-window attention is not supported for "
            f"{architecture.value}; set it to false if your prompts stay within the window"
        )
    activation = fields.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act is {show(activation)}; supported: 'silu'")
    _refuse_partial_rope(fields)


def _refuse_partial_rope(fields: Fields) -> None:
    if fields.number("partial_rotary_factor", above=0, default=1.0) != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor is {fields.get('partial_rotary_factor')}; supported: 1.0 (the whole head)"
        )


def rope_from_hf(fields: Fields) -> RopeConfig:
    """Both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters`."""
    values = {"rope_theta": fields.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        values.update(fields.section(name).items())
    rope = fields.with_values(values, prefix="rope field ")
    if "rope_theta" not in rope:
        raise UnsupportedModelError(
            "config.json has no rope: neither rope_theta nor rope_parameters.rope_theta is set. Only models with "
            'rotary positions are supported; if this one was trained with the old default, add "rope_theta": 10000.0'
        )
    kind = rope.text("rope_type", default="") or rope.text("type", default="default")
    return make_rope(kind, rope, max_positions=fields.integer("max_position_embeddings", 1, MAX_POSITIONS))


def make_rope(kind: str, fields: Fields, *, max_positions: int) -> RopeConfig:
    """Build a `RopeConfig` from the keys that `config.json` uses.

    Raises:
        UnsupportedModelError: unknown kind, or a key that the kind needs is missing or not a number in range.
    """
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(f"rope type {show(kind)} is not supported; supported: {', '.join(ROPE_KINDS)}")
    _refuse_partial_rope(fields)
    needed = {"linear": ("factor",), "yarn": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for name in needed.get(kind, ()):
        if name not in fields:
            raise UnsupportedModelError(f"rope type {kind!r} needs {name!r}, which the config does not set")
    rope = RopeConfig(
        # Yarn divides by its logarithm, and no rope has a base of one or less.
        theta=fields.number("rope_theta", above=1),
        kind=kind,
        factor=fields.number("factor", above=0, most=MAX_POSITIONS, default=1.0),
        original_max_positions=fields.integer(
            "original_max_position_embeddings", 1, MAX_POSITIONS, default=max_positions
        ),
        low_freq_factor=fields.number("low_freq_factor", above=0, default=1.0),
        high_freq_factor=fields.number("high_freq_factor", above=0, default=1.0),
        attention_factor=fields.optional_number("attention_factor", above=0),
        beta_fast=_number_unless_zero(fields, "beta_fast") or 32.0,
        beta_slow=_number_unless_zero(fields, "beta_slow") or 1.0,
        mscale=_number_unless_zero(fields, "mscale"),
        mscale_all_dim=_number_unless_zero(fields, "mscale_all_dim"),
        truncate=fields.flag("truncate", default=True),
    )
    if kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise UnsupportedModelError(
            f"rope type 'llama3' has high_freq_factor {rope.high_freq_factor} <= low_freq_factor "
            f"{rope.low_freq_factor}; the high one must be larger"
        )
    return rope


def _number_unless_zero(fields: Fields, name: str) -> float | None:
    """None for zero: some checkpoints write it for "not set"."""
    return None if fields.get(name) == 0 else fields.optional_number(name, above=0)


def _head_dim(fields: Fields, architecture: Architecture, hidden_size: int, num_heads: int) -> int:
    # Qwen3's head_dim is independent of the hidden size; its configs always state it.
    if "head_dim" in fields:
        return fields.integer("head_dim", 1, MAX_HEAD_DIM)
    if architecture is Architecture.QWEN3:
        raise UnsupportedModelError("config.json has no head_dim, which a qwen3 model needs")
    if hidden_size % num_heads:
        raise UnsupportedModelError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and head_dim is not set"
        )
    return hidden_size // num_heads
