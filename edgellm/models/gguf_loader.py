"""`GgufSource`: a GGUF file, dequantised to float32 tensor by tensor, under the Hugging Face tensor names.

Llama files store the rows of Q and K for interleaved rope, so pair i of a head sits in rows 2i and 2i + 1; the
graph rotates halves, so the rows are put back: pair i in rows i and i + head_dim / 2.  Qwen files are not permuted.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models import config as limits
from edgellm.models.config import ModelConfig, RopeConfig, make_rope
from edgellm.models.fields import Fields, naming
from edgellm.models.gguf_file import GgufArray, GgufTensor, read_gguf_header
from edgellm.models.registry import Architecture, architecture_from_gguf
from edgellm.models.weights import TensorSpec, sample_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

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
# Yarn parameters beside factor and original length: ignoring one would give other numbers without a word.
_UNSUPPORTED_YARN = ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier")
_ROPE_FACTORS = "rope_freqs.weight"

# Of matrices; quantised ones have no float dtype of their own.
_WEIGHT_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class GgufSource:
    """One GGUF file, memory mapped.

    Raises (at construction):
        WeightFileError: the file is missing, truncated or damaged.
        UnsupportedModelError: an architecture, option or tensor type that is not supported, or metadata that is
            missing, of the wrong type or out of range.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_gguf_header(path)
        self._tensors = header.tensors
        self._fields = Fields(str(path), header.values, remedy="download the file again")
        self._data: np.ndarray[Any, np.dtype[np.uint8]] = np.memmap(path, np.uint8, mode="r")
        with naming(path):
            self._by_name = {hf_name(name): name for name in self._tensors if name != _ROPE_FACTORS}
            self.config = self._read_config()
        self._specs = {name: _spec(self._tensors[stored]) for name, stored in self._by_name.items()}

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

    def sample(self, name: str, num_bytes: int) -> bytes:
        """First, middle and last `num_bytes` of the stored tensor."""
        tensor = self._tensors[self._by_name[name]]
        return sample_file(self.path, tensor.offset, tensor.num_bytes, num_bytes)

    def _dequantise(self, stored: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        import gguf

        tensor = self._tensors[stored]
        rows = self._data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(-1, tensor.row_bytes)
        # A damaged scale may be infinite; the sampler reports what comes of it.
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.type_name])
        return np.array(values, dtype=np.float32).reshape(tensor.shape)

    def _read_config(self) -> ModelConfig:
        fields = self._fields
        architecture = architecture_from_gguf(fields.text("general.architecture"))
        prefix = architecture.value
        if fields.get(f"{prefix}.expert_count"):
            raise UnsupportedModelError(
                f"{self.path} is a mixture of experts ({prefix}.expert_count {fields.get(f'{prefix}.expert_count')}); "
                "only dense models are supported"
            )
        num_heads = fields.integer(f"{prefix}.attention.head_count", 1, limits.MAX_HEADS)
        hidden_size = fields.integer(f"{prefix}.embedding_length", 1, limits.MAX_HIDDEN)
        head_dim = fields.integer(
            f"{prefix}.attention.key_length", 1, limits.MAX_HEAD_DIM, default=hidden_size // num_heads
        )
        vocab_size = self._vocab_size()
        stored_types = {tensor.type_name for tensor in self._tensors.values() if len(tensor.shape) > 1}
        return ModelConfig(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.integer(f"{prefix}.feed_forward_length", 1, limits.MAX_INTERMEDIATE),
            num_layers=fields.integer(f"{prefix}.block_count", 1, limits.MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=fields.integer(f"{prefix}.attention.head_count_kv", 1, limits.MAX_HEADS, default=num_heads),
            head_dim=head_dim,
            max_positions=self._max_positions(prefix),
            rms_norm_eps=fields.number(f"{prefix}.attention.layer_norm_rms_epsilon", above=0, most=1),
            rope=self._read_rope(prefix, head_dim),
            tied_embeddings="lm_head.weight" not in self._by_name,
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._by_name,
            o_bias="model.layers.0.self_attn.o_proj.bias" in self._by_name,
            mlp_bias="model.layers.0.mlp.gate_proj.bias" in self._by_name,
            qk_norm="model.layers.0.self_attn.q_norm.weight" in self._by_name,
            weight_dtype=_WEIGHT_DTYPES.get(stored_types.pop(), "") if len(stored_types) == 1 else "",
            bos_token_id=fields.optional_id("tokenizer.ggml.bos_token_id", vocab_size),
            eos_token_ids=fields.token_ids("tokenizer.ggml.eos_token_id", vocab_size),
            pad_token_id=fields.optional_id("tokenizer.ggml.padding_token_id", vocab_size),
        )

    def _vocab_size(self) -> int:
        """Rows of the embedding, which may be more than the tokens but not less."""
        name = "model.embed_tokens.weight"
        if name not in self._by_name:
            raise WeightFileError(f"{self.path} has no tensor for {name!r}; the file is not a complete model")
        rows = self._tensors[self._by_name[name]].shape[0]
        tokens = self._fields.get("tokenizer.ggml.tokens")
        if not rows <= limits.MAX_VOCAB or (isinstance(tokens, GgufArray) and tokens.length > rows):
            listed = tokens.length if isinstance(tokens, GgufArray) else "unknown"
            raise WeightFileError(
                f"{self.path}: token_embd.weight has {rows} rows and tokenizer.ggml.tokens {listed} entries; a row for "
                f"each token and at most {limits.MAX_VOCAB} are needed: download the file again"
            )
        return rows

    def _max_positions(self, prefix: str) -> int:
        return self._fields.integer(f"{prefix}.context_length", 1, limits.MAX_POSITIONS)

    def _read_rope(self, prefix: str, head_dim: int) -> RopeConfig:
        fields = self._fields
        base, dimensions, scaling = (f"{prefix}.rope.{name}" for name in ("freq_base", "dimension_count", "scaling"))
        if base not in fields and dimensions not in fields:
            raise UnsupportedModelError(
                f"{self.path} has no rope: neither {base} nor {dimensions} is set. "
                "Only models with rotary positions are supported"
            )
        rotated = fields.integer(dimensions, 1, limits.MAX_HEAD_DIM, default=head_dim)
        if rotated != head_dim:
            raise UnsupportedModelError(f"{self.path} rotates {rotated} of {head_dim} dimensions; supported: all")
        kind = fields.text(f"{scaling}.type", default="none")
        ignored = [name for name in _UNSUPPORTED_YARN if f"{scaling}.{name}" in fields]
        if ignored:
            raise UnsupportedModelError(
                f"{self.path} sets {scaling}.{ignored[0]}, which decides the numbers and is not supported; "
                "use the Hugging Face folder of this model"
            )
        values = {
            # The format's documented default, which converters leave out.
            "rope_theta": fields.number(base, above=1, default=10000.0),
            "factor": fields.get(f"{scaling}.factor") or None,  # zero means none in this format
            "original_max_position_embeddings": fields.get(f"{scaling}.original_context_length"),
            "attention_factor": fields.get(f"{scaling}.attn_factor"),
        }
        rope = make_rope(
            "default" if kind == "none" else kind,
            fields.with_values(values, prefix=f"{prefix}.rope field "),
            max_positions=self._max_positions(prefix),
        )
        return dataclasses.replace(rope, freq_factors=self._freq_factors(head_dim // 2))

    def _freq_factors(self, needed: int) -> tuple[float, ...]:
        tensor = self._tensors.get(_ROPE_FACTORS)
        if tensor is None:
            return ()
        if tensor.shape != (needed,):
            raise WeightFileError(
                f"{self.path}: {_ROPE_FACTORS} is stored as {list(tensor.shape)}, [{needed}] is needed: "
                "download the file again"
            )
        factors = self._dequantise(_ROPE_FACTORS)
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise WeightFileError(
                f"{self.path}: {_ROPE_FACTORS} holds {float(factors.min())} as its least value; finite numbers above 0 "
                "are needed: download the file again"
            )
        return tuple(factors.tolist())


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


def _spec(tensor: GgufTensor) -> TensorSpec:
    return TensorSpec(tensor.shape, tensor.type_name, tensor.num_bytes)
