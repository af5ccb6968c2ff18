"""Quantised checkpoints written number by number, as the public formats say, beside the same weights in float32."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_model import write_tiny_llama

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
IN_ORDER = tuple(range(8))

Stored = dict[str, torch.Tensor]
Quantise = Callable[[str, torch.Tensor], tuple[Stored, torch.Tensor]]


def words(numbers: torch.Tensor, order: tuple[int, ...] = IN_ORDER) -> torch.Tensor:
    """(..., 8 n) of 0 to 15 to (..., n) int32; bits 4 * i hold number `order[i]` of eight."""
    eights = numbers.long().unflatten(-1, (-1, 8))
    whole = sum(eights[..., column] << 4 * place for place, column in enumerate(order))
    assert isinstance(whole, torch.Tensor)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()


def rounded(weight: torch.Tensor, group: int, *, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers (N, K), scales (N, groups) float16 and zeros (N, groups) of a weight."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
    if symmetric:
        scales = (torch.maximum(high / 7, -low / 8)).half()
        zeros = torch.full_like(scales, 8).long()
    else:
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15).long()
    numbers = (grouped / scales.float()[..., None]).round() + zeros[..., None]
    return numbers.clamp(0, 15).long().flatten(1), scales, zeros


def expanded(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """What the numbers stand for, in float32, where every product is exact."""
    group = numbers.shape[1] // scales.shape[1]
    differences = numbers.unflatten(1, (-1, group)) - zeros[..., None]
    return (differences.float() * scales.float()[..., None]).flatten(1)


def awq(group: int) -> Quantise:
    def quantise(prefix: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        numbers, scales, zeros = rounded(weight, group, symmetric=False)
        stored = {
            f"{prefix}qweight": words(numbers.T.contiguous(), AWQ_ORDER),
            f"{prefix}qzeros": words(zeros.T.contiguous(), AWQ_ORDER),
            f"{prefix}scales": scales.T.contiguous(),
        }
        return stored, expanded(numbers, scales, zeros)

    return quantise


def gptq(group: int, *, symmetric: bool = False, version: int = 1) -> Quantise:
    def quantise(prefix: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        size = weight.shape[1] if group == -1 else group
        numbers, scales, zeros = rounded(weight, size, symmetric=symmetric)
        stored_zeros = (zeros - 1) % 16 if version == 1 else zeros
        stored = {
            f"{prefix}qweight": words(numbers).T.contiguous(),
            f"{prefix}qzeros": words(stored_zeros.T.contiguous()),
            f"{prefix}scales": scales.T.contiguous(),
            f"{prefix}g_idx": (torch.arange(weight.shape[1]) // size).int(),
        }
        return stored, expanded(numbers, scales, zeros)

    return quantise


def fp8(block: tuple[int, int] | None, scale_name: str, *, by_row: bool = False) -> Quantise:
    """`block` None: one scale a matrix, or a row."""

    def quantise(prefix: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        rows, columns = weight.shape
        high, wide = block or ((1 if by_row else rows), columns)
        scales = torch.empty(-(-rows // high), -(-columns // wide))
        values, result = torch.empty_like(weight), torch.empty_like(weight)
        for top in range(0, rows, high):
            for left in range(0, columns, wide):
                part = weight[top : top + high, left : left + wide]
                scale = scales[top // high, left // wide] = (part.abs().max() / 448).bfloat16().float()
                numbers = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
                values[top : top + high, left : left + wide] = numbers
                result[top : top + high, left : left + wide] = numbers * scale
        if block is None and not by_row:
            scales = scales.reshape(())
        stored = {f"{prefix}weight": values.to(torch.float8_e4m3fn), f"{prefix}{scale_name}": scales}
        return stored, result

    return quantise


COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}

# What `quantization_config` says, and how the tensors are written.
FORMATS: dict[str, tuple[dict[str, Any], Quantise]] = {
    "awq": (AWQ, awq(64)),
    "gptq": (GPTQ, gptq(64)),
    "gptq symmetric": (GPTQ | {"sym": True}, gptq(64, symmetric=True)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(64, version=2)),
    "gptq whole rows": (GPTQ | {"group_size": -1}, gptq(-1)),
    "fp8 blocks": (FP8 | {"weight_block_size": [32, 64]}, fp8((32, 64), "weight_scale_inv")),
    "fp8 odd blocks": (FP8 | {"weight_block_size": [48, 128]}, fp8((48, 128), "weight_scale_inv")),
    "fp8 matrix": (FP8, fp8(None, "weight_scale")),
    "compressed rows": (COMPRESSED, fp8(None, "weight_scale", by_row=True)),
}


def linear_prefixes(tensors: Stored) -> Iterator[str]:
    return (name.removesuffix("weight") for name in tensors if name.endswith("_proj.weight"))


def write_quantised(folder: Path, quantization_config: dict[str, Any], quantise: Quantise, **changes: Any) -> Path:
    """A tiny Llama in "quantised", and the same numbers in float32 in "plain", both below `folder`; returns it."""
    values: dict[str, Any] = {"intermediate_size": 128, "attention_bias": True} | changes
    for name in ("quantised", "plain"):
        (folder / name).mkdir(parents=True)
        write_tiny_llama(folder / name, **values)
    plain = load_file(folder / "plain" / "model.safetensors")
    stored = dict(plain)
    torch.manual_seed(5)
    for name, tensor in plain.items():
        if name.endswith(".bias"):
            tensor.normal_(std=0.2)
    for prefix in list(linear_prefixes(plain)):
        parts, plain[f"{prefix}weight"] = quantise(prefix, stored.pop(f"{prefix}weight"))
        stored.update(parts)
    save_file(plain, folder / "plain" / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "quantised" / "model.safetensors", {"format": "pt"})
    path = folder / "quantised" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization_config}))
    return folder
