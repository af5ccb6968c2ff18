"""The weights of the target as they are stored (quantised), and their values in torch alone.

A training machine may have neither a GGUF reader nor a network: `pack` writes what it needs into one file, with the
tensors' public names, and `read_target` computes the same values that the runtime computes.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"EDGETGT1"


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A Llama model with tied or own output matrix, default rope, no biases."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    max_positions: int
    eos_token_id: int


def pack(model: Path, out: Path) -> LlamaShape:
    """Write a checkpoint that edgellm reads as a target file.  Needs edgellm.

    Raises:
        ValueError: it is no plain Llama.
    """
    from edgellm.models.loader import open_checkpoint

    config, source = open_checkpoint(model)
    if config.architecture.value != "llama" or config.rope.kind != "default" or config.qkv_bias or config.qk_norm:
        raise ValueError(
            f"{model} is {config.architecture.value} with rope {config.rope.kind}; a plain Llama is needed"
        )
    shape = LlamaShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope.theta,
        tied_embeddings=config.tied_embeddings,
        max_positions=config.max_positions,
        eos_token_id=config.eos_token_ids[0] if config.eos_token_ids else 0,
    )
    stored = _gguf_tensors(model) if model.suffix == ".gguf" else {}
    if not stored:
        for name in source.specs():
            values = source.read(name).float().contiguous()
            stored[name] = ("F32", tuple(values.shape), values.numpy().tobytes())
    _write(out, shape, stored)
    return shape


def _gguf_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    from edgellm.models.gguf_file import read_gguf_header
    from edgellm.models.gguf_loader import hf_name

    data = path.read_bytes()
    return {
        hf_name(name): (tensor.type_name, tensor.shape, data[tensor.offset : tensor.offset + tensor.num_bytes])
        for name, tensor in read_gguf_header(path).tensors.items()
    }


def _write(out: Path, shape: LlamaShape, stored: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    index = {name: (kind, list(size), len(data)) for name, (kind, size, data) in stored.items()}
    # Only the files of one format interleave the rows of Q and K.
    interleaved = any(kind.startswith("Q") for kind, _, _ in stored.values())
    header = json.dumps({"shape": asdict(shape), "tensors": index, "interleaved": interleaved}).encode()
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("wb") as file:
        file.write(_MAGIC + struct.pack("<Q", len(header)) + header)
        for _, _, data in stored.values():
            file.write(data)


def read_target(path: Path) -> tuple[LlamaShape, dict[str, torch.Tensor]]:
    """The shape and the tensors by their Hugging Face names, float32.

    Raises:
        ValueError: no target file, or a stored type that is not supported.
    """
    data = bytearray(path.read_bytes())
    if data[:8] != _MAGIC:
        raise ValueError(f"{path} is no target file; write it with `prepare`")
    (size,) = struct.unpack_from("<Q", data, 8)
    header = json.loads(data[16 : 16 + size])
    shape = LlamaShape(**header["shape"])
    offset, tensors = 16 + size, {}
    for name, (kind, dimensions, num_bytes) in header["tensors"].items():
        values = dequantise(kind, torch.frombuffer(data, dtype=torch.uint8, count=num_bytes, offset=offset))
        tensors[name] = values.view(dimensions)
        offset += num_bytes
        if header["interleaved"] and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensors[name] = _unpermute(tensors[name], shape.head_dim)
    return shape, tensors


def dequantise(kind: str, stored: torch.Tensor) -> torch.Tensor:
    """(n,) float32 of (bytes,) uint8.  Blocks of 32: a half scale (and a half minimum), then the numbers.

    Raises:
        ValueError: another kind than F32, F16, Q8_0 and Q4_1.
    """
    if kind == "F32":
        return stored.clone().view(torch.float32)
    if kind == "F16":
        return stored.clone().view(torch.float16).float()
    if kind == "Q8_0":
        blocks = stored.view(-1, 34)
        return (_half(blocks[:, :2]) * blocks[:, 2:].contiguous().view(torch.int8).float()).flatten()
    if kind == "Q4_1":
        blocks = stored.view(-1, 20)
        packed = blocks[:, 4:]  # low halves are the first 16 numbers
        numbers = torch.cat((packed & 15, packed >> 4), dim=1).float()
        return (_half(blocks[:, :2]) * numbers + _half(blocks[:, 2:4])).flatten()
    raise ValueError(f"tensor type {kind} is not supported here; supported: F32, F16, Q8_0, Q4_1")


def _half(columns: torch.Tensor) -> torch.Tensor:
    return columns.contiguous().view(torch.float16).float()


def _unpermute(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows (2i, 2i + 1) of each head to rows (i, i + head_dim / 2)."""
    split = rows.view(-1, head_dim // 2, 2, rows.shape[1])
    return split.transpose(1, 2).reshape(rows.shape)
