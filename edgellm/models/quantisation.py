"""`Quantisation`: what `quantization_config` of a `config.json` says about the linear layers, or the refusal of it.

Formats: AutoAWQ's "gemm" packing, GPTQ of AutoGPTQ and GPTQModel (format v1 and v2), e4m3 with blocks or one scale a
matrix ("fp8", as Qwen3-FP8 and DeepSeek-V3 store it), and e4m3 of compressed-tensors ("float-quantized").
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from edgellm.errors import UnsupportedModelError
from edgellm.models.fields import show

if TYPE_CHECKING:
    from edgellm.models.fields import Fields

MAX_GROUP = 1 << 16
WHOLE_ROW = 0  # `group_columns` where a row has one scale
_FIELD = "quantization_config"
_REMEDY = "Use the unquantised checkpoint, another quantised one, or a GGUF file"


class StoredFormat(Enum):
    """How the numbers lie in the file."""

    AWQ = "awq"
    GPTQ = "gptq"
    FP8 = "fp8"

    @property
    def is_int4(self) -> bool:
        return self is not StoredFormat.FP8


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Attributes:
    group_columns: that share a scale; `WHOLE_ROW`: all.
    block_rows: that share a scale (fp8 in blocks); 1: none do.
    zero_offset: what is added to stored zeros, modulo 16.
    scale_name: of the tensor beside `weight` (fp8); stored scales are factors.
    """

    stored: StoredFormat
    group_columns: int = WHOLE_ROW
    block_rows: int = 1
    zero_offset: int = 0
    scale_name: str = ""

    def describe(self) -> str:
        """ "int4, a scale for 128 columns (awq)"."""
        kind = "int4" if self.stored.is_int4 else "fp8"
        each = f"{self.block_rows} x {self.group_columns}" if self.block_rows > 1 else f"{self.group_columns} columns"
        return f"{kind}, a scale for {'each row' if self.group_columns == WHOLE_ROW else each} ({self.stored.value})"


def read_quantisation(fields: Fields) -> Quantisation | None:
    """What a parsed `config.json` says; None where the checkpoint is not quantised.

    Raises:
        UnsupportedModelError: a method or variant that is not supported; names field, value and remedy.
    """
    if not fields.get(_FIELD):
        return None
    section = fields.section(_FIELD)
    method = section.text("quant_method", default="unknown")
    if method == "awq":
        return _awq(section)
    if method == "gptq":
        return _gptq(section)
    if method == "fp8":
        return _fp8(section)
    if method == "compressed-tensors":
        return _compressed_tensors(section)
    raise _refusal(f"(method {show(method)})", "awq, gptq, fp8 and compressed-tensors with e4m3")


def _refusal(what: str, supported: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{_FIELD} {what} is not supported; supported: {supported}. {_REMEDY}")


def _bits(section: Fields, *names: str) -> None:
    name = next((each for each in names if each in section), names[0])
    bits = section.integer(name, 1, 64)
    if bits != 4:
        raise _refusal(f"{name} {bits}", "4 bits")


def _group(section: Fields, *names: str) -> int:
    name = next((each for each in names if each in section), names[0])
    size = section.integer(name, -1, MAX_GROUP, default=128)
    if size == 0:
        raise _refusal(f"{name} 0", "a group size above 0, or -1 for whole rows")
    return WHOLE_ROW if size == -1 else size


def _awq(section: Fields) -> Quantisation:
    _bits(section, "bits", "w_bit")
    version = section.text("version", default="gemm").lower()
    if version != "gemm":
        raise _refusal(f"version {show(version)}", "gemm")
    if not section.flag("zero_point", default=True):
        raise _refusal("zero_point false", "true")
    return Quantisation(StoredFormat.AWQ, _group(section, "group_size", "q_group_size"))


def _gptq(section: Fields) -> Quantisation:
    _bits(section, "bits")
    if section.flag("desc_act", default=False):
        raise _refusal("desc_act true (columns in order of activation)", "false")
    if section.get("dynamic"):
        raise _refusal(f"dynamic {show(section.get('dynamic'))} (layers that differ)", "the same for all layers")
    if section.flag("lm_head", default=False):
        raise _refusal("lm_head true", "false")
    stored = section.text("checkpoint_format", default="gptq")
    if stored not in ("gptq", "gptq_v2"):
        raise _refusal(f"checkpoint_format {show(stored)}", "gptq, gptq_v2")
    return Quantisation(StoredFormat.GPTQ, _group(section, "group_size"), zero_offset=1 if stored == "gptq" else 0)


def _fp8(section: Fields) -> Quantisation:
    number = section.text("fmt", default="e4m3")
    if number not in ("e4m3", "float8_e4m3fn"):
        raise _refusal(f"fmt {show(number)}", "e4m3")
    block = section.get("weight_block_size")
    if block is None:
        return Quantisation(StoredFormat.FP8, scale_name="weight_scale")
    rows, columns = _block(block, "weight_block_size")
    return Quantisation(StoredFormat.FP8, columns, rows, scale_name="weight_scale_inv")


def _block(value: object, name: str) -> tuple[int, int]:
    whole = isinstance(value, list) and len(value) == 2
    if not whole or not all(type(size) is int and 0 < size <= MAX_GROUP for size in value):  # type: ignore[attr-defined]
        raise _refusal(f"{name} {show(value)}", "two sizes, rows and columns of a block")
    return value[0], value[1]  # type: ignore[index]


def _compressed_tensors(section: Fields) -> Quantisation:
    stored = section.text("format", default="unknown")
    if stored not in ("float-quantized", "naive-quantized"):
        raise _refusal(f"format {show(stored)}", "float-quantized")
    if section.get("kv_cache_scheme"):
        raise _refusal("kv_cache_scheme", "none; kv_dtype='fp8' of this program needs no scales in the file")
    groups = section.section("config_groups")
    names = [name for name, _ in groups.items()]
    if len(names) != 1:
        raise _refusal(f"config_groups {show(names)}", "one group")
    weights = groups.section(names[0]).section("weights")
    kind, bits = weights.text("type", default="unknown"), weights.integer("num_bits", 1, 64)
    if (kind, bits) != ("float", 8):
        raise _refusal(f"weights {kind} of {bits} bits", "float of 8 bits (e4m3)")
    strategy = weights.text("strategy", default="tensor")
    if strategy == "block":
        rows, columns = _block(weights.get("block_structure"), "block_structure")
        return Quantisation(StoredFormat.FP8, columns, rows, scale_name="weight_scale")
    if strategy not in ("tensor", "channel"):
        raise _refusal(f"weights strategy {show(strategy)}", "tensor, channel, block")
    return Quantisation(StoredFormat.FP8, scale_name="weight_scale")
