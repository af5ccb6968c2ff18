"""`GgufSource`: a GGUF file, dequantised to float32 tensor by tensor, under the Hugging Face tensor names.

Llama files store the rows of Q and K for interleaved rope, so pair i of a head sits in rows 2i and 2i + 1; the
graph rotates halves, so the rows are put back: pair i in rows i and i + head_dim / 2.  Qwen files are not permuted.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models.config import ModelConfig, RopeConfig, make_rope
from edgellm.models.registry import Architecture, architecture_from_gguf
from edgellm.models.weights import TensorSpec, sample_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import gguf

logger = logging.getLogger(__name__)

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
_FULL_PRECISION = ("F32", "F16", "BF16")

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


class GgufSource:
    """One GGUF file, memory mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open_reader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._check_tensors()
        self._by_name = {hf_name(name): name for name in self._tensors if name != _ROPE_FACTORS}
        self.config = self._read_config()
        self._specs = {name: self._spec(self._tensors[stored]) for name, stored in self._by_name.items()}

    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def read(self, name: str) -> torch.Tensor:
        """(rows, columns) or (rows,) float32, dequantised and un-permuted."""
        values = self._dequantise(self._by_name[name])
        if self.config.architecture is Architecture.LLAMA and ".self_attn." in name:
            if ".q_proj." in name:
                values = unpermute_rope_rows(values, self.config.num_heads)
            elif ".k_proj." in name:
                values = unpermute_rope_rows(values, self.config.num_kv_heads)
        return torch.from_numpy(values)

    def metadata(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def sample(self, name: str, num_bytes: int) -> bytes:
        """First, middle and last `num_bytes` of the stored tensor."""
        tensor = self._tensors[self._by_name[name]]
        return sample_file(self.path, int(tensor.data_offset), int(tensor.n_bytes), num_bytes)

    def _dequantise(self, stored: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        import gguf

        tensor = self._tensors[stored]
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        return values.reshape(_shape(tensor))

    def _check_tensors(self) -> None:
        size = self.path.stat().st_size
        for tensor in self._tensors.values():
            if tensor.tensor_type.name not in SUPPORTED_TYPES:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {tensor.name!r} has GGUF type {tensor.tensor_type.name}; supported: "
                    f"{', '.join(SUPPORTED_TYPES)}. Use a file quantised to one of these"
                )
            if tensor.data_offset + tensor.n_bytes > size:
                raise _damaged(
                    self.path, f"{size} bytes, tensor {tensor.name!r} ends at {tensor.data_offset + tensor.n_bytes}"
                )

    def _spec(self, tensor: gguf.ReaderTensor) -> TensorSpec:
        return TensorSpec(_shape(tensor), tensor.tensor_type.name, int(tensor.n_bytes))

    def _required(self, key: str) -> Any:
        value = self.metadata(key)
        if value is None:
            raise UnsupportedModelError(f"{self.path} has no {key!r}; the file is not a complete model")
        return value

    def _read_config(self) -> ModelConfig:
        architecture = architecture_from_gguf(str(self._required("general.architecture")))
        prefix = architecture.value
        if self.metadata(f"{prefix}.expert_count", 0):
            raise UnsupportedModelError(
                f"{self.path} is a mixture of experts ({prefix}.expert_count "
                f"{self.metadata(f'{prefix}.expert_count')}); only dense models are supported"
            )
        num_heads = int(self._required(f"{prefix}.attention.head_count"))
        hidden_size = int(self._required(f"{prefix}.embedding_length"))
        head_dim = int(self.metadata(f"{prefix}.attention.key_length", hidden_size // num_heads))
        stored_types = {tensor.tensor_type.name for tensor in self._tensors.values() if len(_shape(tensor)) > 1}
        eos = self.metadata("tokenizer.ggml.eos_token_id")
        return ModelConfig(
            architecture=architecture,
            vocab_size=_shape(self._tensors[self._stored("model.embed_tokens.weight")])[0],
            hidden_size=hidden_size,
            intermediate_size=int(self._required(f"{prefix}.feed_forward_length")),
            num_layers=int(self._required(f"{prefix}.block_count")),
            num_heads=num_heads,
            num_kv_heads=int(self.metadata(f"{prefix}.attention.head_count_kv", num_heads)),
            head_dim=head_dim,
            max_positions=int(self._required(f"{prefix}.context_length")),
            rms_norm_eps=float(self._required(f"{prefix}.attention.layer_norm_rms_epsilon")),
            rope=self._read_rope(prefix, head_dim),
            tied_embeddings="lm_head.weight" not in self._by_name,
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._by_name,
            o_bias="model.layers.0.self_attn.o_proj.bias" in self._by_name,
            mlp_bias="model.layers.0.mlp.gate_proj.bias" in self._by_name,
            qk_norm="model.layers.0.self_attn.q_norm.weight" in self._by_name,
            weight_dtype="bfloat16" if stored_types == {"BF16"} else "float32",
            bos_token_id=self.metadata("tokenizer.ggml.bos_token_id"),
            eos_token_ids=() if eos is None else (int(eos),),
            pad_token_id=self.metadata("tokenizer.ggml.padding_token_id"),
        )

    def _stored(self, name: str) -> str:
        if name not in self._by_name:
            raise WeightFileError(f"{self.path} has no tensor for {name!r}; the file is not a complete model")
        return self._by_name[name]

    def _read_rope(self, prefix: str, head_dim: int) -> RopeConfig:
        theta = self.metadata(f"{prefix}.rope.freq_base")
        rotated = self.metadata(f"{prefix}.rope.dimension_count", head_dim)
        if theta is None and self.metadata(f"{prefix}.rope.dimension_count") is None:
            raise UnsupportedModelError(
                f"{self.path} has no rope: neither {prefix}.rope.freq_base nor {prefix}.rope.dimension_count is set. "
                "Only models with rotary positions are supported"
            )
        if rotated != head_dim:
            raise UnsupportedModelError(f"{self.path} rotates {rotated} of {head_dim} dimensions; supported: all")
        kind = str(self.metadata(f"{prefix}.rope.scaling.type", "none"))
        values = {
            # The format's documented default, which converters leave out.
            "rope_theta": 10000.0 if theta is None else float(theta),
            "factor": self.metadata(f"{prefix}.rope.scaling.factor", 1.0),
            "original_max_position_embeddings": self.metadata(f"{prefix}.rope.scaling.original_context_length"),
            "attention_factor": self.metadata(f"{prefix}.rope.scaling.attn_factor"),
        }
        rope = make_rope(
            "default" if kind == "none" else kind, values, max_positions=int(self._required(f"{prefix}.context_length"))
        )
        if _ROPE_FACTORS not in self._tensors:
            return rope
        factors = tuple(self._dequantise(_ROPE_FACTORS).reshape(-1).tolist())
        if len(factors) != head_dim // 2:
            raise WeightFileError(f"{self.path}: {_ROPE_FACTORS} has {len(factors)} values, {head_dim // 2} needed")
        return RopeConfig(**{name: getattr(rope, name) for name in RopeConfig.__slots__} | {"freq_factors": factors})


def hf_name(stored: str) -> str:
    """The Hugging Face name of a GGUF tensor.

    Raises:
        UnsupportedModelError: a tensor that no supported model has.
    """
    if stored in _TOP_NAMES:
        return _TOP_NAMES[stored]
    match = _LAYER_PATTERN.fullmatch(stored)
    if match is None or match[2] not in _LAYER_NAMES:
        raise UnsupportedModelError(f"GGUF tensor {stored!r} belongs to no supported architecture")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def unpermute_rope_rows(
    values: np.ndarray[Any, np.dtype[np.float32]], num_heads: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows (2i, 2i + 1) of each head to rows (i, i + head_dim / 2).

    Args:
        values: (num_heads * head_dim, ...) float32.
    Returns:
        the same shape, a new C-contiguous array.
    """
    pairs = values.shape[0] // num_heads // 2
    split = values.reshape(num_heads, pairs, 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    # GGUF lists dimensions fastest first.
    return tuple(int(size) for size in reversed(tensor.shape))


def _open_reader(path: Path) -> gguf.GGUFReader:
    import gguf

    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise WeightFileError(f"{path} is not a GGUF file (its first bytes differ); download it again")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise _reader_error(path, size, error) from error


def _reader_error(path: Path, size: int, error: Exception) -> Exception:
    """The reader rejects an unknown type and a short file alike; tell them apart by its message."""
    if "GGMLQuantizationType" in str(error):
        return UnsupportedModelError(
            f"{path} uses a GGUF type that is not known ({error}); supported: {', '.join(SUPPORTED_TYPES)}. "
            "Use a file quantised to one of these"
        )
    return _damaged(path, f"{size} bytes, {error}")


def _damaged(path: Path, detail: str) -> WeightFileError:
    return WeightFileError(f"{path} is truncated or damaged ({detail}); download it again")
