"""The target in plain torch: a pass over whole sequences with taps, and steps over a key-value cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from training.rotary import heads_of, rotary_angles, rotate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from training.target_file import LlamaShape


@dataclass(slots=True)
class Taps:
    """What a pass over (B, T) tokens gives.

    Attributes:
        layers: (B, T, D) residual stream in front of each layer asked for.
        normed: (B, T, D) after the final norm.
        keys, values: (B, kv heads, T, head_dim) of each donor layer, keys rotated.
    """

    layers: list[torch.Tensor] = field(default_factory=list)
    normed: torch.Tensor | None = None
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


class Llama:
    """Frozen weights of one dtype on one device.

    Args:
        tensors: by their Hugging Face names.
    """

    def __init__(
        self, shape: LlamaShape, tensors: Mapping[str, torch.Tensor], *, device: str, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        self._tensors = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
        self.embedding = self._tensors["model.embed_tokens.weight"]
        self.final_norm = self._tensors["model.norm.weight"]
        self.lm_head = self.embedding if shape.tied_embeddings else self._tensors["lm_head.weight"]

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @torch.no_grad()
    def run(self, tokens: torch.Tensor, taps: Sequence[int] = (), donors: Sequence[int] = ()) -> Taps:
        """One causal pass over (B, T) int64 tokens, each row from position 0 on."""
        out, streams = Taps(), []
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        angles = rotary_angles(positions, self.shape.head_dim, self.shape.rope_theta)
        stream = self.embedding[tokens]
        for layer in range(self.shape.num_layers):
            streams.append(stream)
            query, key, value = self._qkv(layer, stream, angles)
            if layer in donors:
                out.keys.append(key)
                out.values.append(value)
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            stream = self._finish(layer, stream, attended)
        out.layers = [streams[layer] for layer in taps]
        out.normed = self._norm(stream, "model.norm")
        return out

    @torch.no_grad()
    def extend(self, tokens: torch.Tensor, cache: KeyValues, visible: torch.Tensor) -> torch.Tensor:
        """Logits of the last token of each row, float32.

        Args:
            tokens: (B, t), the same number for every row, behind what the cache holds.
            visible: (B, 1, t or 1, capacity) bool, cache rows that each token sees.
        Effects: the cache grows by t.
        """
        start, end = cache.length, cache.length + tokens.shape[1]
        positions = (torch.arange(start, end, device=tokens.device) - cache.padding[:, None]).clamp(min=0)
        angles = rotary_angles(positions, self.shape.head_dim, self.shape.rope_theta)[:, :, None]
        stream = self.embedding[tokens]
        for layer in range(self.shape.num_layers):
            query, key, value = self._qkv(layer, stream, angles)
            cache.keys[layer][:, :, start:end] = key
            cache.values[layer][:, :, start:end] = value
            attended = _grouped_attention(query, cache.keys[layer], cache.values[layer], visible)
            stream = self._finish(layer, stream, attended)
        cache.length = end
        return self.logits(self._norm(stream[:, -1], "model.norm")).float()

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        return normed @ self.lm_head.T

    def new_cache(self, rows: int, capacity: int, padding: torch.Tensor) -> KeyValues:
        shape = (self.shape.num_layers, rows, self.shape.num_kv_heads, capacity, self.shape.head_dim)
        return KeyValues(self.embedding.new_zeros(shape), self.embedding.new_zeros(shape), padding)

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(rows, rows.shape[-1:], self._tensors[f"{name}.weight"], self.shape.rms_norm_eps)

    def _linear(self, rows: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        return rows @ self._tensors[f"model.layers.{layer}.{name}.weight"].T

    def _qkv(self, layer: int, stream: torch.Tensor, angles: torch.Tensor) -> list[torch.Tensor]:
        normed = self._norm(stream, f"model.layers.{layer}.input_layernorm")
        parts = []
        for name in "qkv":
            rows = self._linear(normed, layer, f"self_attn.{name}_proj")
            rows = heads_of(rows, self.shape.head_dim)
            parts.append(rows if name == "v" else rotate(rows, angles))
        return parts

    def _finish(self, layer: int, stream: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        stream = stream + self._linear(attended.transpose(1, 2).flatten(2), layer, "self_attn.o_proj")
        normed = self._norm(stream, f"model.layers.{layer}.post_attention_layernorm")
        gate = functional.silu(self._linear(normed, layer, "mlp.gate_proj"))
        return stream + self._linear(gate * self._linear(normed, layer, "mlp.up_proj"), layer, "mlp.down_proj")


@dataclass(slots=True)
class KeyValues:
    """A cache of equal length for all rows, which are padded in front.

    Attributes:
        keys, values: (layers, B, kv heads, capacity, head_dim).
        padding: (B,) int64, leading cache rows of each sequence that mean nothing.
    """

    keys: torch.Tensor
    values: torch.Tensor
    padding: torch.Tensor
    length: int = 0


def _grouped_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """For one token a row, the query heads of a key head stand as rows: no key is copied."""
    if query.shape[2] > 1:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible, enable_gqa=True)
    rows, heads, _, width = query.shape
    grouped = query.view(rows, keys.shape[1], heads // keys.shape[1], width)
    mask = visible.expand(rows, keys.shape[1], grouped.shape[2], -1)
    attended = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return attended.reshape(rows, heads, 1, width)
