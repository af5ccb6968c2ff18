"""Shape and weights of a shared-KV assistant: layers that have queries only, and a donor layer of the base for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from edgellm.models.config import RopeConfig
    from edgellm_shared_kv.proposal_head import ProposalHead


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantLayer:
    """Where a layer attends.

    Attributes:
        donor: the base's layer whose keys and values it reads, counted among those that own some.
        num_kv_heads, head_dim: of the donor.
        rope: of the queries; that of the donor's keys.
        window: keys that a row sees, the last ones in front of it; 0 is all.
    """

    donor: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantConfig:
    """The sharing map and the numbers that all layers share.

    Attributes:
        num_heads: query heads, of each layer's `head_dim`.
        attention_scale: factor of the attention scores.
        embedding_scale: factor of the base's token embedding.
        activation: of the gated MLP; "gelu" is its tanh form.
    """

    layers: tuple[AssistantLayer, ...]
    num_heads: int
    rms_norm_eps: float
    attention_scale: float
    embedding_scale: float = 1.0
    activation: Literal["silu", "gelu"] = "silu"


@dataclass(slots=True, kw_only=True)
class AssistantLayerWeights:
    """D hidden size, Q = query heads * head_dim of the layer, F intermediate size.  Norms are float32.

    Attributes:
        attn_norm, mlp_norm: (D,), before attention and MLP.
        q: (Q, D).  o: (D, Q).  q_norm: (head_dim,) or None.
        gate_up: (2F, D), rows gate, up.  down: (D, F).
        attn_out_norm, mlp_out_norm: (D,), behind attention and MLP, or None.
        scale: factor of what leaves the layer.
    """

    attn_norm: torch.Tensor
    q: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    q_norm: torch.Tensor | None = None
    attn_out_norm: torch.Tensor | None = None
    mlp_out_norm: torch.Tensor | None = None
    scale: float = 1.0


@dataclass(slots=True, kw_only=True)
class AssistantWeights:
    """H the base's hidden size.

    Attributes:
        embedding: (vocab_size, H), the base's own.
        pre_projection: (D, 2H), columns embedding, hidden row.
        final_norm: (D,) float32.
        post_projection: (H, D), to the hidden row that the next step reads.
        head: chooses tokens from the rows behind the final norm.
    """

    embedding: torch.Tensor
    pre_projection: torch.Tensor
    layers: list[AssistantLayerWeights]
    final_norm: torch.Tensor
    post_projection: torch.Tensor
    head: ProposalHead
