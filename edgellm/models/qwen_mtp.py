"""The multi-token prediction head of the Qwen hybrids on CPU rows: from a hidden row and the token after it to the
token after that.

Layout of the stored head: `mtp.fc` joins the two, `mtp.layers.0` is an attention layer, `mtp.norm` its final norm.
Embedding and output matrix are the model's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from edgellm.kernels.cpu.elementwise import rms_norm
from edgellm.kernels.cpu.linear import linear
from edgellm.models.loader import open_checkpoint
from edgellm.models.qwen_hybrid import HybridLayer, hybrid_buffers
from edgellm.models.qwen_hybrid_config import ATTENTION
from edgellm.models.qwen_hybrid_weights import allocate_mtp, finish_mtp, hybrid
from edgellm.models.rope import RotaryAngles
from edgellm.models.weights import fill

if TYPE_CHECKING:
    from edgellm.models.loader import LoadedModel
    from edgellm.models.qwen_hybrid_weights import MtpWeights
    from edgellm.models.step import StepState


class MtpHead:
    """Forward pass of the head.  Owns its scratch, so one pass at a time.

    Args:
        model: whose embedding and output matrix it shares; borrowed.
    Attributes:
        config: of a model of the head's one attention layer; its pages and steps are built with it.
    """

    def __init__(self, model: LoadedModel, weights: MtpWeights) -> None:
        config = hybrid(model.config)
        experts = (config.moe is not None,)
        self.config = config = dataclasses.replace(config, num_layers=1, layer_kinds=(ATTENTION,), moe_layers=experts)
        self.dtype = model.weights.dtype
        self._embedding = model.weights.embedding
        self._lm_head = model.weights.lm_head
        self._embedding_norm = 1.0 + weights.embedding_norm.float()
        self._hidden_norm = 1.0 + weights.hidden_norm.float()
        self._final_norm = 1.0 + weights.final_norm.float()
        self._join = weights.join
        self._layer = HybridLayer(config, weights.layer, layer=0, kv_layer=0)
        self._angles = RotaryAngles(config.rope, config.rotary_dim)
        self._buffers = hybrid_buffers(config, model.weights.dtype)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        step: StepState,
        logits_index: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass; K and V go to layer 0 of the step's pages.

        Args:
            token_ids: (T,) int32 or int64, the token that follows each hidden row's.
            positions: (T,) of the tokens the hidden rows belong to.
            hidden: (T, D), the model's rows after its final norm, or rows that the head returned.
            logits_index: (L,) int64, rows whose logits are wanted; None is all.
        Returns:
            logits (L, vocab_size) float32, and hidden rows (T, D) after the head's final norm.  New tensors.
        """
        buffers, eps = self._buffers, self.config.rms_norm_eps
        buffers.resize(len(token_ids))
        stream = buffers["stream"]
        joined = self._joined(token_ids, hidden, buffers["normed"])
        # Above the skinny limit `linear` may return memory of its own.
        stream.copy_(linear(joined, self._join, stream))
        self._layer.run(stream, self._angles(positions), step, buffers)
        rows = torch.empty_like(stream)
        rms_norm(stream, self._final_norm, eps, rows)
        wanted = rows if logits_index is None else rows[logits_index]
        logits = torch.empty((len(wanted), self.config.vocab_size), dtype=torch.float32)
        return (linear(wanted, self._lm_head, logits) if len(wanted) else logits), rows

    def _joined(self, token_ids: torch.Tensor, hidden: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """(T, 2D): the normed embedding, then the normed hidden row."""
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        joined = hidden.new_empty((len(token_ids), 2 * size))
        rms_norm(self._embedding.index_select(0, token_ids), self._embedding_norm, eps, normed)
        joined[:, :size] = normed
        rms_norm(hidden, self._hidden_norm, eps, normed)
        joined[:, size:] = normed
        return joined


def load_mtp(model: LoadedModel) -> MtpHead:
    """Read the head from the model's own checkpoint.

    Raises:
        UnsupportedModelError: the checkpoint has no head, or one of another form.
        WeightFileError: a tensor is missing or has another shape than the config says.
    """
    _, source = open_checkpoint(model.path)
    like = model.weights.embedding

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    with torch.inference_mode():
        weights, targets = allocate_mtp(model.config, new)
        fill(targets, source, like.device)
        finish_mtp(model.config, weights)
        return MtpHead(model, weights)
