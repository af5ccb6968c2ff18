"""`ModelConfig`: the shape of a decoder-only checkpoint, read from `config.json` or GGUF metadata.

The JSON is read directly and no default is invented: a field that decides the numbers must be in the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models.registry import Architecture, architecture_of

if TYPE_CHECKING:
    from pathlib import Path

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the graph, the KV cache and the tokenizer need to know about a checkpoint.

    Attributes:
        max_positions: context length in tokens.
        qkv_bias, o_bias, mlp_bias: which linears carry a bias.
        qk_norm: RMS norm over each head of Q and K before rope.
        weight_dtype: name of the dtype the file holds ("float32", "bfloat16", "float16"), "" if unknown.
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
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "grouped-query attention needs equal groups"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim is {self.head_dim}; rope needs an even head_dim")

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
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightFileError(
            f"{path} is missing; a model directory holds config.json, *.safetensors and the tokenizer files"
        ) from None
    except (ValueError, OSError) as error:
        raise WeightFileError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(raw, dict):
        raise WeightFileError(f"{path} holds a {type(raw).__name__}, not a JSON object; download it again")
    return raw


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    """Turn a parsed `config.json` into a `ModelConfig`.

    Raises:
        UnsupportedModelError: the architecture or one of its options is not supported; the message names it.
    """
    architecture = architecture_of(raw)
    _refuse_unsupported_options(raw, architecture)
    num_heads = _required_int(raw, "num_attention_heads")
    hidden_size = _required_int(raw, "hidden_size")
    qwen2 = architecture is Architecture.QWEN2
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_required_int(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_required_int(raw, "intermediate_size"),
        num_layers=_required_int(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_optional_int(raw, "num_key_value_heads", num_heads),
        head_dim=_head_dim(raw, architecture, hidden_size, num_heads),
        max_positions=_required_int(raw, "max_position_embeddings"),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=_rope_from_hf(raw),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias and not qwen2,
        mlp_bias=bool(raw.get("mlp_bias", False)) and architecture is Architecture.LLAMA,
        qk_norm=architecture is Architecture.QWEN3,
        weight_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch."),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_id_tuple(raw.get("eos_token_id")),
        pad_token_id=raw.get("pad_token_id"),
    )


def _refuse_unsupported_options(raw: dict[str, Any], architecture: Architecture) -> None:
    """Options that change the numbers and that the graph does not implement."""
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"quantization_config (method {method!r}) is not supported; use the unquantised checkpoint or a GGUF file"
        )
    if raw.get("use_sliding_window") and architecture is not Architecture.LLAMA:
        raise UnsupportedModelError(
            "use_sliding_window is true; sliding-window attention is not supported for "
            f"{architecture.value}; set it to false if your prompts stay within the window"
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act is {activation!r}; supported: 'silu'")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor is {raw['partial_rotary_factor']}; supported: 1.0 (the whole head)"
        )


def _rope_from_hf(raw: dict[str, Any]) -> RopeConfig:
    """Both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters`."""
    merged: dict[str, Any] = {"rope_theta": raw.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        merged.update({name: value for name, value in (raw.get(key) or {}).items() if value is not None})
    if merged["rope_theta"] is None:
        raise UnsupportedModelError(
            "config.json has no rope: neither rope_theta nor rope_parameters.rope_theta is set. Only models with "
            'rotary positions are supported; if this one was trained with the old default, add "rope_theta": 10000.0'
        )
    kind = str(merged.get("rope_type") or merged.get("type") or "default")
    return make_rope(kind, merged, max_positions=_required_int(raw, "max_position_embeddings"))


def make_rope(kind: str, values: dict[str, Any], *, max_positions: int) -> RopeConfig:
    """Build a `RopeConfig` from the keys that `config.json` uses.

    Raises:
        UnsupportedModelError: unknown kind, or a key that the kind needs is missing or not a number.
    """
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor is {values['partial_rotary_factor']}; supported: 1.0 (the whole head)"
        )
    needed = {"linear": ("factor",), "yarn": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for name in needed.get(kind, ()):
        if name not in values:
            raise UnsupportedModelError(f"rope type {kind!r} needs {name!r}, which the config does not set")
    original = values.get("original_max_position_embeddings") or max_positions
    rope = RopeConfig(
        theta=_number(values, "rope_theta", 0.0),
        kind=kind,
        factor=_number(values, "factor", 1.0),
        original_max_positions=int(original),
        low_freq_factor=_number(values, "low_freq_factor", 1.0),
        high_freq_factor=_number(values, "high_freq_factor", 1.0),
        attention_factor=_optional_number(values, "attention_factor"),
        beta_fast=_number(values, "beta_fast", 32.0) or 32.0,
        beta_slow=_number(values, "beta_slow", 1.0) or 1.0,
        mscale=_optional_number(values, "mscale"),
        mscale_all_dim=_optional_number(values, "mscale_all_dim"),
        truncate=bool(values.get("truncate", True)),
    )
    if rope.theta <= 0 or rope.factor <= 0:
        raise UnsupportedModelError(f"rope theta {rope.theta} and factor {rope.factor} must both be positive")
    if kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise UnsupportedModelError(
            f"rope type 'llama3' has high_freq_factor {rope.high_freq_factor} <= low_freq_factor "
            f"{rope.low_freq_factor}; the high one must be larger"
        )
    return rope


def _head_dim(raw: dict[str, Any], architecture: Architecture, hidden_size: int, num_heads: int) -> int:
    # Qwen3's head_dim is independent of the hidden size; its configs always state it.
    if raw.get("head_dim") is not None:
        return _required_int(raw, "head_dim")
    if architecture is Architecture.QWEN3:
        raise UnsupportedModelError("config.json has no head_dim, which a qwen3 model needs")
    if hidden_size % num_heads:
        raise UnsupportedModelError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and head_dim is not set"
        )
    return hidden_size // num_heads


def _required_int(raw: dict[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedModelError(f"the model config has {name} = {value!r}; an integer is needed")
    return value


def _optional_int(raw: dict[str, Any], name: str, default: int) -> int:
    return default if raw.get(name) is None else _required_int(raw, name)


def _number(raw: dict[str, Any], name: str, default: float) -> float:
    value = _optional_number(raw, name)
    return default if value is None else value


def _optional_number(raw: dict[str, Any], name: str) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise UnsupportedModelError(f"the model config has {name} = {value!r}; a number is needed")
    return float(value)


def _id_tuple(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)
