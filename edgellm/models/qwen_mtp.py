"""The multi-token prediction head of the Qwen hybrids as a function of rows: from a hidden row and the token after it
to the token after that.

Layout of the stored head: `mtp.fc` joins the two, `mtp.layers.0` is an attention layer, `mtp.norm` its final norm.
Embedding and output matrix are the model's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models.fields import naming
from edgellm.models.loader import open_checkpoint
from edgellm.models.moe import MoeWeights
from edgellm.models.qwen_hybrid_config import ATTENTION
from edgellm.models.qwen_hybrid_weights import GatedAttentionWeights, allocate_mtp, finish_mtp, hybrid
from edgellm.models.weights import fill

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from edgellm.decoding.draft_model import DraftStep
    from edgellm.decoding.draft_ops import DraftOps
    from edgellm.models.loader import LoadedModel
    from edgellm.models.qwen_hybrid_config import QwenHybridConfig
    from edgellm.models.qwen_hybrid_weights import HybridLayerWeights, MtpWeights

PREFIX = "mtp."  # of the names of the head's stored tensors


class MtpHead:
    """See `edgellm.decoding.draft_model.DraftHead`.

    Args:
        model: whose embedding and output matrix it shares; borrowed.
        ops: of the device that the weights are on.
    Attributes:
        config: of a model of the head's one attention layer; its pages and steps are built with it.
    """

    def __init__(self, model: LoadedModel, weights: MtpWeights, ops: DraftOps) -> None:
        self.config = config = mtp_config(model)
        self.dtype = model.weights.dtype
        self.hidden_width = self.width = config.hidden_size
        self._ops = ops
        self._embedding = model.weights.embedding
        self._lm_head = model.weights.lm_head
        self._embedding_norm = 1.0 + weights.embedding_norm.float()
        self._hidden_norm = 1.0 + weights.hidden_norm.float()
        self._final_norm = 1.0 + weights.final_norm.float()
        self._join = weights.join
        self._attention = _GatedAttention(config, weights.layer, ops)
        self._mlp_norm = 1.0 + weights.layer.mlp_norm.float()
        self._mlp = _mlp(config, weights.layer, ops)

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        step: DraftStep,
        ends: torch.Tensor | None,
        *,
        projected: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftHead.forward`; its own hidden rows are of the model's kind, so `projected` changes nothing."""
        rows = self.rows(token_ids, hidden, step, ends)
        return self.logits(rows).argmax(dim=1), rows

    def rows(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, step: DraftStep, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(N, D) hidden rows after the head's final norm, those of `ends` or all; K and V go to layer 0 of the step.

        Args:
            hidden: (T, D), the model's rows after its final norm, or rows that the head returned.
        """
        embedded = self._norm(self._ops.embed(token_ids, self._embedding), self._embedding_norm)
        joined = torch.cat((embedded, self._norm(hidden, self._hidden_norm)), dim=1)
        stream = self._attention.run(self._ops.linear(joined, self._join), step, ends)
        stream = self._mlp(self._norm(stream, self._mlp_norm), stream)
        return self._norm(stream, self._final_norm)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """(N, vocab_size) float32, of rows that `rows` returned."""
        return self._ops.linear(rows, self._lm_head, dtype=torch.float32)

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(rows, weight, self.config.rms_norm_eps)


class _GatedAttention:
    """The attention of the head's layer: as `edgellm.models.gated_attention`, over `DraftOps`."""

    def __init__(self, config: QwenHybridConfig, weights: HybridLayerWeights, ops: DraftOps) -> None:
        mixer = weights.mixer
        if not isinstance(mixer, GatedAttentionWeights):
            raise UnsupportedModelError("the multi-token prediction head has no attention layer; use another decoder")
        self._config = config
        self._ops = ops
        self._input_norm = 1.0 + weights.mixer_norm.float()
        self._gate, self._qkv = mixer.gate_qkv[: config.q_size], mixer.gate_qkv[config.q_size :]
        bias = mixer.gate_qkv_bias
        self._gate_bias = None if bias is None else bias[: config.q_size]
        self._qkv_bias = None if bias is None else bias[config.q_size :]
        self._o, self._o_bias = mixer.o, mixer.o_bias
        self._query_norm = 1.0 + mixer.q_norm.float()
        self._key_norm = 1.0 + mixer.k_norm.float()
        self._angles = ops.rotary(config.rope, config.rotary_dim)

    def run(self, stream: torch.Tensor, step: DraftStep, ends: torch.Tensor | None) -> torch.Tensor:
        """(N, D) the stream with what attention makes of it, at rows `ends` or all."""
        ops = self._ops
        normed = ops.rms_norm(stream, self._input_norm, self._config.rms_norm_eps)
        qkv = ops.linear(normed, self._qkv, self._qkv_bias)
        attended = stream.new_empty((len(stream), self._config.q_size))
        step.attend(
            0, qkv, self._angles(step.positions), attended, query_norm=self._query_norm, key_norm=self._key_norm
        )
        if ends is not None:  # nobody reads what the other rows come to
            stream, normed, attended = (rows.index_select(0, ends) for rows in (stream, normed, attended))
        ops.gate_(attended, ops.linear(normed, self._gate, self._gate_bias))
        return ops.linear(attended, self._o, self._o_bias, residual=stream)


def _mlp(
    config: QwenHybridConfig, weights: HybridLayerWeights, ops: DraftOps
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """From normed rows and the stream to the stream behind the layer's MLP or experts."""
    mlp = weights.mlp
    if not isinstance(mlp, MoeWeights):
        return lambda normed, stream: ops.linear(ops.gated(normed, mlp.gate_up), mlp.down, residual=stream)
    if config.moe is None:
        raise UnsupportedModelError("the multi-token prediction head has experts, and config.json says nothing of them")
    return ops.experts(config.moe, mlp)


def mtp_config(model: LoadedModel) -> QwenHybridConfig:
    """The config of a model of the head's one attention layer."""
    config = hybrid(model.config)
    return dataclasses.replace(config, num_layers=1, layer_kinds=(ATTENTION,), moe_layers=(config.moe is not None,))


def load_mtp(model: LoadedModel) -> MtpWeights:
    """Read the head from the model's own checkpoint, in the dtype and on the device of the model.

    Raises:
        UnsupportedModelError: the checkpoint has no head, or one of another form.
        WeightFileError: a tensor is missing, has another shape than the config says, or is not one of a head.
    """
    like = model.weights.embedding

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    with torch.inference_mode(), naming(model.path):
        _, source = open_checkpoint(model.path)
        weights, targets = allocate_mtp(model.config, new)
        _refuse_unread(targets, source.specs())
        fill(targets, source, like.device)
        finish_mtp(model.config, weights)
        return weights


def _refuse_unread(targets: Collection[str], stored: Iterable[str]) -> None:
    """
    Raises:
        WeightFileError: the checkpoint has a tensor of a head that this one is without.
    """
    left = sorted(name for name in stored if name.startswith(PREFIX) and name not in targets)
    unread = [name for name in left if not name.endswith(".rotary_emb.inv_freq")]
    if unread:
        raise WeightFileError(
            f"the checkpoint stores {unread[0]!r} (and {len(unread) - 1} more such tensors), which its multi-token "
            "prediction head does not have: it shares the model's embedding and output matrix; use another decoder"
        )
