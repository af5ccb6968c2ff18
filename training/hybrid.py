"""A small Qwen3.5 text model: gated delta nets, every fourth layer gated attention, and a multi-token prediction head.

Parameter names are those of the public checkpoints, so a state dict is the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from training.delta_rule import gated_delta
from training.eagle import Mlp, RmsNorm
from training.rotary import heads_of, rotary_angles, rotate
from training.small_tokenizer import END_OF_TEXT, TURN_END, read_backend, special_id

if TYPE_CHECKING:
    from pathlib import Path

    from training.unrolled import DepthMemory, Lesson

_ATTENTION_EVERY = 4


@dataclass(frozen=True, slots=True)
class HybridShape:
    """7.5 M parameters as it stands, 15 MB in bfloat16."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_key_heads: int = 4
    num_value_heads: int = 4
    key_dim: int = 64
    value_dim: int = 64
    conv_width: int = 4
    rope_theta: float = 100_000.0
    partial_rotary: float = 0.5
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048
    bos_token_id: int = 0
    eos_token_id: int = 0

    @classmethod
    def of_tokenizer(cls, folder: Path) -> HybridShape:
        """For the tokenizer of a folder.

        Raises:
            ValueError: it lacks a special token.
        """
        backend = read_backend(folder)
        return cls(
            vocab_size=backend.get_vocab_size(),
            bos_token_id=special_id(backend, END_OF_TEXT),
            eos_token_id=special_id(backend, TURN_END),
        )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary)

    def is_attention(self, layer: int) -> bool:
        return layer % _ATTENTION_EVERY == _ATTENTION_EVERY - 1


class CentredNorm(nn.Module):
    """RMS norm whose stored weight is the factor minus one."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self._eps = eps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(rows.float(), rows.shape[-1:], 1.0 + self.weight, self._eps).to(rows.dtype)


class DeltaNet(nn.Module):
    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self._shape = shape
        keys, values = shape.num_key_heads * shape.key_dim, shape.num_value_heads * shape.value_dim
        self._split = [keys, keys, values]
        self.in_proj_qkv = nn.Linear(shape.hidden_size, sum(self._split), bias=False)
        self.in_proj_z = nn.Linear(shape.hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden_size, shape.num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden_size, shape.num_value_heads, bias=False)
        self.conv1d = nn.Conv1d(
            sum(self._split), sum(self._split), shape.conv_width, groups=sum(self._split), bias=False
        )
        self.A_log = nn.Parameter(torch.empty(shape.num_value_heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(_step_bias(shape.num_value_heads))
        self.norm = RmsNorm(shape.value_dim, shape.rms_norm_eps)
        self.out_proj = nn.Linear(values, shape.hidden_size, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        mixed = functional.pad(self.in_proj_qkv(rows).transpose(1, 2), (shape.conv_width - 1, 0))
        mixed = functional.silu(self.conv1d(mixed)).transpose(1, 2)
        query, key, value = torch.split(mixed, self._split, dim=-1)
        group = shape.num_value_heads // shape.num_key_heads
        query, key = (heads_of(part, shape.key_dim).repeat_interleave(group, dim=1) for part in (query, key))
        decay = -self.A_log.exp() * functional.softplus(self.in_proj_a(rows).float() + self.dt_bias)
        beta = self.in_proj_b(rows).float().sigmoid()
        with torch.autocast(rows.device.type, enabled=False):
            recalled = gated_delta(query, key, heads_of(value, shape.value_dim), decay.mT, beta.mT)
        recalled = self.norm(recalled.transpose(1, 2).to(rows.dtype)).flatten(2)
        out: torch.Tensor = self.out_proj(recalled * functional.silu(self.in_proj_z(rows)))
        return out


class GatedAttention(nn.Module):
    """Queries and gates alternate head by head in `q_proj`."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self._shape = shape
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, 2 * width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = CentredNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = CentredNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, rows: torch.Tensor, memory: DepthMemory | None) -> torch.Tensor:
        shape = self._shape
        angles = rotary_angles(torch.arange(rows.shape[1], device=rows.device), shape.rotary_dim, shape.rope_theta)
        query, gate = heads_of(self.q_proj(rows), 2 * shape.head_dim).chunk(2, dim=-1)
        query = rotate(self.q_norm(query), angles)
        key = rotate(self.k_norm(heads_of(self.k_proj(rows), shape.head_dim)), angles)
        value = heads_of(self.v_proj(rows), shape.head_dim)
        if memory is not None:
            attended = memory.attend(query, key, value)
        else:
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: torch.Tensor = self.o_proj((attended * gate.sigmoid()).transpose(1, 2).flatten(2))
        return out


class HybridLayer(nn.Module):
    def __init__(self, shape: HybridShape, *, attention: bool) -> None:
        super().__init__()
        self.input_layernorm = CentredNorm(shape.hidden_size, shape.rms_norm_eps)
        if attention:
            self.self_attn = GatedAttention(shape)
        else:
            self.linear_attn = DeltaNet(shape)
        self.post_attention_layernorm = CentredNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size)

    def forward(self, rows: torch.Tensor, memory: DepthMemory | None = None) -> torch.Tensor:
        normed = self.input_layernorm(rows)
        attention = getattr(self, "self_attn", None)
        rows = rows + (self.linear_attn(normed) if attention is None else attention(normed, memory))
        out: torch.Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return out


class _Trunk(nn.Module):
    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            [HybridLayer(shape, attention=shape.is_attention(layer)) for layer in range(shape.num_layers)]
        )
        self.norm = CentredNorm(shape.hidden_size, shape.rms_norm_eps)


class _MtpLayers(nn.Module):
    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = CentredNorm(shape.hidden_size, shape.rms_norm_eps)
        self.pre_fc_norm_hidden = CentredNorm(shape.hidden_size, shape.rms_norm_eps)
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([HybridLayer(shape, attention=True)])
        self.norm = CentredNorm(shape.hidden_size, shape.rms_norm_eps)


class Hybrid(nn.Module):
    """The model and its head; as a `training.unrolled.Drafter` it is the head.  Output matrix and embedding are one."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Trunk(shape)
        self.mtp = _MtpLayers(shape)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        deep = 0.02 / (2 * shape.num_layers) ** 0.5  # what is added to the stream, by all layers together
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=deep)

    @property
    def to_target(self) -> torch.Tensor:
        return torch.arange(self.shape.vocab_size, device=self.model.embed_tokens.weight.device)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, T, D) after the final norm, of (B, T) tokens."""
        rows = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            rows = layer(rows)
        out: torch.Tensor = self.model.norm(rows)
        return out

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        return functional.linear(normed, self.model.embed_tokens.weight)

    def first(self, lesson: Lesson) -> torch.Tensor:
        return lesson.hidden

    def advance(
        self, rows: torch.Tensor, lesson: Lesson, depth: int, memory: DepthMemory
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The head moves with the model, the model's embedding does not move with the head."""
        head, table = self.mtp, self.model.embed_tokens.weight.detach()
        embedded = head.pre_fc_norm_embedding(functional.embedding(lesson.successors, table).to(rows.dtype))
        joined = head.fc(torch.cat((embedded, head.pre_fc_norm_hidden(rows)), dim=-1))
        own = head.norm(head.layers[0](joined, memory))
        return own, functional.linear(own, table)

    def config(self) -> dict[str, Any]:
        shape = self.shape
        kinds = ["full_attention" if shape.is_attention(i) else "linear_attention" for i in range(shape.num_layers)]
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "layer_types": kinds,
            "linear_num_key_heads": shape.num_key_heads,
            "linear_num_value_heads": shape.num_value_heads,
            "linear_key_head_dim": shape.key_dim,
            "linear_value_head_dim": shape.value_dim,
            "linear_conv_kernel_dim": shape.conv_width,
            "max_position_embeddings": shape.max_positions,
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": shape.rope_theta,
                "partial_rotary_factor": shape.partial_rotary,
            },
            "tie_word_embeddings": True,
            "mtp_num_hidden_layers": 1,
            "bos_token_id": shape.bos_token_id,
            "eos_token_id": shape.eos_token_id,
            "dtype": "bfloat16",
        }

    def public_tensors(self) -> dict[str, torch.Tensor]:
        """By public names: bfloat16, and what decides the decay in float32."""
        exact = ("A_log", "dt_bias")
        return {
            name: tensor.detach().to("cpu", torch.float32 if name.endswith(exact) else torch.bfloat16)
            for name, tensor in self.state_dict().items()
        }

    def load_public(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the weights of an exported model."""
        self.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def _step_bias(count: int) -> torch.Tensor:
    """Biases whose softplus is between 0.001 and 0.1, evenly in the logarithm (Gu and Dao, "Mamba", 2023, 3.6)."""
    low, high = torch.tensor([0.001, 0.1]).log()
    steps = (low + (high - low) * torch.rand(count)).exp()
    out: torch.Tensor = steps + torch.log(-torch.expm1(-steps))
    return out
