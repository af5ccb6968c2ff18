"""The EAGLE-3 head: one decoder layer over embedding and hidden row side by side, a reduced draft vocabulary.

Parameter names are the public ones, so a state dict is the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from training.rotary import heads_of, rotary_angles, rotate

if TYPE_CHECKING:
    from training.llama import Llama
    from training.target_file import LlamaShape
    from training.unrolled import DepthMemory, Lesson

DRAFT_VOCAB = 8192  # 9.8 M parameters for SmolLM2-135M, 19.6 MB in bfloat16


def tapped_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers in front of which the head reads the target's hidden rows, as in the plugin."""
    return 2, num_layers // 2, num_layers - 3


class RmsNorm(nn.Module):
    """Plain RMS norm; the weight is of what the file holds."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(rows.float(), rows.shape[-1:], self.weight, self._eps).to(rows.dtype)


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return out


class _Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self._shape = shape
        wide = 2 * shape.hidden_size
        self.q_proj = nn.Linear(wide, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(wide, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(wide, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, rows: torch.Tensor, angles: torch.Tensor, memory: DepthMemory) -> torch.Tensor:
        heads = [heads_of(part(rows), self._shape.head_dim) for part in (self.q_proj, self.k_proj, self.v_proj)]
        attended = memory.attend(rotate(heads[0], angles), rotate(heads[1], angles), heads[2])
        out: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class _Layer(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size)

    def forward(
        self, rows: torch.Tensor, embedded: torch.Tensor, angles: torch.Tensor, memory: DepthMemory
    ) -> torch.Tensor:
        joined = torch.cat((self.input_layernorm(embedded), self.hidden_norm(rows)), dim=-1)
        rows = rows + self.self_attn(joined, angles, memory)
        out: torch.Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return out


class EagleHead(nn.Module):
    """A head for a target; see `training.unrolled.Drafter`.  Embedding is the target's, which is not trained.

    Args:
        to_target: (V,) int64 ascending, the target's token of each draft token.
    """

    to_target: torch.Tensor

    def __init__(self, target: Llama, to_target: torch.Tensor) -> None:
        super().__init__()
        shape = self._shape = target.shape
        self._embedding = target.embedding
        # Part of the state, so that a run that goes on keeps its vocabulary.
        self.register_buffer("to_target", to_target.clone().to(target.device))
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, len(to_target), bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        with torch.no_grad():  # the target's own rows are a far better start than noise
            self.lm_head.weight.copy_(target.lm_head[self.to_target])
            self.norm.weight.copy_(target.final_norm)

    def first(self, lesson: Lesson) -> torch.Tensor:
        out: torch.Tensor = self.fc(lesson.hidden)
        return out

    def advance(
        self, rows: torch.Tensor, lesson: Lesson, depth: int, memory: DepthMemory
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(rows.shape[1], device=rows.device)
        angles = rotary_angles(positions, self._shape.head_dim, self._shape.rope_theta)
        own = self.midlayer(rows, self._embedding[lesson.successors].to(rows.dtype), angles, memory)
        return own, self.lm_head(self.norm(own))

    def config(self) -> dict[str, Any]:
        """The fields of its config.json."""
        shape = self._shape
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": shape.max_positions,
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_theta": shape.rope_theta,
            "vocab_size": shape.vocab_size,
            "draft_vocab_size": len(self.to_target),
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }

    def public_tensors(self) -> dict[str, torch.Tensor]:
        """By public names: bfloat16 matrices, and `d2t`, the target's id minus the draft's."""
        tensors = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in self.named_parameters()}
        to_target = self.to_target.cpu()
        return tensors | {"d2t": to_target - torch.arange(len(to_target))}

    def load_public(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the weights of an exported head with the same draft vocabulary.

        Raises:
            ValueError: its vocabulary is another one.
        """
        check_same_vocabulary(tensors["d2t"], self.to_target)
        held = {name: tensor.float() for name, tensor in tensors.items() if name != "d2t"}
        self.load_state_dict(held | {"to_target": self.to_target})


def check_same_vocabulary(d2t: torch.Tensor, to_target: torch.Tensor) -> None:
    """
    Raises:
        ValueError: `d2t` means other tokens.
    """
    ids = d2t + torch.arange(len(d2t))
    if not torch.equal(ids, to_target.cpu()):
        raise ValueError("the exported draft has another draft vocabulary than the generated text gives; start anew")
