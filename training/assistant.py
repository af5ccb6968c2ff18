"""A shared-KV assistant: layers that have queries only and read keys and values of the target's donor layers.

All steps of a round stand at the position of the token that the round starts from, and see what lies in front of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from training.assistant_layout import D2T, config_fields, public_name
from training.eagle import Mlp, RmsNorm, check_same_vocabulary
from training.rotary import heads_of, rotary_angles, rotate

if TYPE_CHECKING:
    from training.llama import Llama
    from training.target_file import LlamaShape
    from training.unrolled import DepthMemory, Lesson

HIDDEN, INNER = 384, 1024  # with 8,192 draft tokens 7.1 M parameters, 14.1 MB in bfloat16


def donor_layers(num_layers: int) -> tuple[int, ...]:
    """For each layer of the assistant the target's layer it reads."""
    return 2 * num_layers // 3, num_layers - 1


class _Layer(nn.Module):
    def __init__(self, shape: LlamaShape, hidden: int, inner: int) -> None:
        super().__init__()
        width = shape.num_heads * shape.head_dim
        self._head_dim = shape.head_dim
        self.attention_norm = RmsNorm(hidden, shape.rms_norm_eps)
        self.query = nn.Linear(hidden, width, bias=False)
        self.out = nn.Linear(width, hidden, bias=False)
        self.mlp_norm = RmsNorm(hidden, shape.rms_norm_eps)
        self.mlp = Mlp(hidden, inner)

    def forward(
        self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, angles: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        query = heads_of(self.query(self.attention_norm(rows)), self._head_dim)
        query = rotate(query, angles).to(values.dtype)
        attended = functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)
        rows = rows + self.out(attended.transpose(1, 2).flatten(2).to(rows.dtype))
        out: torch.Tensor = rows + self.mlp(self.mlp_norm(rows))
        return out


class Assistant(nn.Module):
    """See `training.unrolled.Drafter`; a lesson's hidden rows are the target's after its final norm.

    Args:
        to_target: (V,) int64 ascending, the target's token of each draft token.
    """

    to_target: torch.Tensor

    def __init__(self, target: Llama, to_target: torch.Tensor, hidden: int = HIDDEN, inner: int = INNER) -> None:
        super().__init__()
        shape = self._shape = target.shape
        self._embedding = target.embedding
        self._size = hidden, inner
        self.donors = donor_layers(shape.num_layers)
        # Part of the state, so that a run that goes on keeps its vocabulary.
        self.register_buffer("to_target", to_target.clone().to(target.device))
        self.pre_projection = nn.Linear(2 * shape.hidden_size, hidden, bias=False)
        self.layers = nn.ModuleList([_Layer(shape, hidden, inner) for _ in self.donors])
        self.final_norm = RmsNorm(hidden, shape.rms_norm_eps)
        self.post_projection = nn.Linear(hidden, shape.hidden_size, bias=False)
        self.lm_head = nn.Linear(hidden, len(to_target), bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def first(self, lesson: Lesson) -> torch.Tensor:
        return lesson.hidden

    def advance(
        self, rows: torch.Tensor, lesson: Lesson, depth: int, memory: DepthMemory
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del memory  # it has no state of its own
        start = (torch.arange(rows.shape[1], device=rows.device) - depth).clamp(min=0)
        seen = torch.arange(rows.shape[1], device=rows.device) <= start[:, None]
        angles = rotary_angles(start + 1, self._shape.head_dim, self._shape.rope_theta)
        embedded = self._embedding[lesson.successors].to(rows.dtype)
        own = self.pre_projection(torch.cat((embedded, rows), dim=-1))
        for layer, keys, values in zip(self.layers, lesson.keys, lesson.values, strict=True):
            own = layer(own, keys, values, angles, seen)
        normed = self.final_norm(own)
        return self.post_projection(normed), self.lm_head(normed)

    def config(self) -> dict[str, Any]:
        shape = self._shape
        return config_fields(
            hidden=self._size[0],
            inner=self._size[1],
            heads=shape.num_heads,
            eps=shape.rms_norm_eps,
            donors=self.donors,
            target_hidden=shape.hidden_size,
            vocab=shape.vocab_size,
            draft=len(self.to_target),
        )

    def public_tensors(self) -> dict[str, torch.Tensor]:
        tensors = {
            public_name(name): weight.detach().to("cpu", torch.bfloat16) for name, weight in self.named_parameters()
        }
        to_target = self.to_target.cpu()
        return tensors | {D2T: to_target - torch.arange(len(to_target))}

    def load_public(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the weights of an exported assistant with the same draft vocabulary.

        Raises:
            ValueError: its vocabulary is another one.
        """
        check_same_vocabulary(tensors[D2T], self.to_target)
        held = {name: tensors[public_name(name)].float() for name, _ in self.named_parameters()}
        self.load_state_dict(held | {"to_target": self.to_target})
