"""Fused weights of the Qwen hybrids, where each stored tensor goes, and the order of rows the graph wants.

Files interleave some projections by head.  They are read as they stand; `finish` then sorts the rows in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from edgellm.errors import UnsupportedModelError
from edgellm.models.moe import MlpWeights, MoeWeights
from edgellm.models.qwen_hybrid_config import ATTENTION, QwenHybridConfig
from edgellm.models.weights import ModelWeights

if TYPE_CHECKING:
    from edgellm.models.config import ModelConfig
    from edgellm.models.families import NewTensor
    from edgellm.models.moe import MoeConfig

    Targets = dict[str, torch.Tensor]


@dataclass(slots=True)
class GatedAttentionWeights:
    """D hidden, Q = heads * head_dim, K = kv heads * head_dim.

    Attributes:
        gate_qkv: (2Q + 2K, D), rows gate, q, k, v.  gate_qkv_bias: (2Q + 2K,) or None.
        q_norm, k_norm: (head_dim,), zero-centred.
        o: (D, Q).  o_bias: (D,) or None.
    """

    gate_qkv: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    o: torch.Tensor
    gate_qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None


@dataclass(slots=True)
class DeltaNetWeights:
    """D hidden, K = key heads * key_dim, V = value heads * value_dim, H value heads, W conv width.

    Attributes:
        projection: (2K + 2V + 2H, D), rows q, k, v, z (the output's gate), b (beta), a (decay).
        conv: (2K + V, 1, W) over q, k, v.
        a_log, dt_bias: (H,) float32.
        norm: (value_dim,).
        out: (D, V).
    """

    projection: torch.Tensor
    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out: torch.Tensor


@dataclass(slots=True)
class HybridLayerWeights:
    """One layer; the norms (D,) are zero-centred."""

    mixer_norm: torch.Tensor
    mixer: GatedAttentionWeights | DeltaNetWeights
    mlp_norm: torch.Tensor
    mlp: MlpWeights | MoeWeights


@dataclass(slots=True)
class MtpWeights:
    """The multi-token prediction head; D hidden.  Embedding and output matrix are the model's.

    Attributes:
        embedding_norm, hidden_norm, final_norm: (D,), zero-centred.
        join: (D, 2D), columns of the embedding, then of the hidden row.
        layer: of attention.
    """

    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    join: torch.Tensor
    layer: HybridLayerWeights
    final_norm: torch.Tensor


def allocate(config: ModelConfig, new: NewTensor) -> tuple[ModelWeights, Targets]:
    """Empty fused weights, and for each stored name the slice it fills."""
    config = hybrid(config)
    targets: Targets = {}
    embedding = targets[f"{config.prefix}embed_tokens.weight"] = new(config.vocab_size, config.hidden_size)
    layers = []
    for idx, (kind, moe) in enumerate(zip(config.layer_kinds, config.moe_layers, strict=True)):
        store = _Store(new, f"{config.prefix}layers.{idx}.", targets)
        layers.append(_layer(config, store, kind, moe=moe, packed=config.packed_experts))
    final_norm = targets[f"{config.prefix}norm.weight"] = new(config.hidden_size)
    lm_head = embedding
    if not config.tied_embeddings:
        lm_head = targets["lm_head.weight"] = new(config.vocab_size, config.hidden_size)
    return ModelWeights(embedding, layers, final_norm, lm_head), targets


def finish(config: ModelConfig, weights: ModelWeights) -> None:
    """Sort the rows that the file interleaves.  Once, after reading."""
    config = hybrid(config)
    for layer in weights.layers:
        _sort_rows(config, layer)


def allocate_mtp(config: ModelConfig, new: NewTensor) -> tuple[MtpWeights, Targets]:
    """Empty weights of the prediction head, and for each stored name the slice it fills.

    Raises:
        UnsupportedModelError: the checkpoint has no head, or one of another form.
    """
    config = hybrid(config)
    if config.num_mtp_layers != 1 or config.mtp_own_embeddings:
        raise UnsupportedModelError(
            f"the checkpoint has {config.num_mtp_layers} multi-token prediction layers (mtp.layers.*), "
            f"mtp_use_dedicated_embeddings is {config.mtp_own_embeddings}; a head of one layer "
            "that shares the model's embeddings is supported"
        )
    for name, count in config.stated_mtp_layers:
        if count != config.num_mtp_layers:
            raise UnsupportedModelError(
                f"the checkpoint stores {config.num_mtp_layers} multi-token prediction layers (mtp.layers.*), and "
                f"{name} in config.json is {count}; check that config.json belongs to it"
            )
    targets: Targets = {}
    hidden = config.hidden_size
    store = _Store(new, "mtp.", targets)
    weights = MtpWeights(
        embedding_norm=store("pre_fc_norm_embedding.weight", hidden),
        hidden_norm=store("pre_fc_norm_hidden.weight", hidden),
        join=store("fc.weight", hidden, 2 * hidden),
        layer=_layer(
            config,
            _Store(new, "mtp.layers.0.", targets),
            ATTENTION,
            moe=config.moe is not None,
            packed=config.packed_mtp_experts,
        ),
        final_norm=store("norm.weight", hidden),
    )
    return weights, targets


def finish_mtp(config: ModelConfig, weights: MtpWeights) -> None:
    """`finish` of the prediction head."""
    _sort_rows(hybrid(config), weights.layer)


def hybrid(config: ModelConfig) -> QwenHybridConfig:
    """The config, known to be one of this family."""
    if not isinstance(config, QwenHybridConfig):
        raise UnsupportedModelError(f"{config.architecture.value} is not a Qwen hybrid; use its own family")
    return config


class _Store:
    """Makes the tensors of one part of the model and notes under which name the file has them."""

    def __init__(self, new: NewTensor, prefix: str, targets: Targets) -> None:
        self._new = new
        self._prefix = prefix
        self._targets = targets

    def under(self, part: str) -> _Store:
        return _Store(self._new, self._prefix + part, self._targets)

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor that one stored tensor fills."""
        tensor: torch.Tensor = self._new(*shape)
        self._targets[self._prefix + name] = tensor
        return tensor

    def float32(self, name: str, *shape: int) -> torch.Tensor:
        """The same, of a dtype that does not round what the file holds."""
        tensor = torch.empty_like(self._new(*shape), dtype=torch.float32)
        self._targets[self._prefix + name] = tensor
        return tensor

    def rows(self, split: dict[str, int], *width: int) -> torch.Tensor:
        """A tensor whose rows several stored ones fill, one behind the other."""
        tensor: torch.Tensor = self._new(sum(split.values()), *width)
        self.fill(split, tensor)
        return tensor

    def fill(self, split: dict[str, int], tensor: torch.Tensor) -> None:
        """Note which rows of a tensor each stored one fills."""
        start = 0
        for name, count in split.items():
            self._targets[self._prefix + name] = tensor[start : start + count]
            start += count

    def experts(self, moe: MoeConfig, hidden: int, *, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The routed experts: a stored tensor for all of them, or three for each."""
        inner = moe.expert_size
        if packed:
            return (
                self("gate_up_proj", moe.num_experts, 2 * inner, hidden),
                self("down_proj", moe.num_experts, hidden, inner),
            )
        gate_up: torch.Tensor = self._new(moe.num_experts, 2 * inner, hidden)
        down: torch.Tensor = self._new(moe.num_experts, hidden, inner)
        for expert in range(moe.num_experts):
            self.fill({f"{expert}.gate_proj.weight": inner, f"{expert}.up_proj.weight": inner}, gate_up[expert])
            self.fill({f"{expert}.down_proj.weight": hidden}, down[expert])
        return gate_up, down


def _layer(config: QwenHybridConfig, store: _Store, kind: str, *, moe: bool, packed: bool) -> HybridLayerWeights:
    mixer: GatedAttentionWeights | DeltaNetWeights
    if kind == ATTENTION:
        mixer = _attention(config, store.under("self_attn."))
    else:
        mixer = _delta_net(config, store.under("linear_attn."))
    mlp: MlpWeights | MoeWeights
    if moe and config.moe is not None:
        mlp = _moe(config.moe, config.hidden_size, store.under("mlp."), packed=packed)
    else:
        mlp = _mlp(config.hidden_size, config.intermediate_size, store.under("mlp."))
    return HybridLayerWeights(
        mixer_norm=store("input_layernorm.weight", config.hidden_size),
        mixer=mixer,
        mlp_norm=store("post_attention_layernorm.weight", config.hidden_size),
        mlp=mlp,
    )


def _attention(config: QwenHybridConfig, store: _Store) -> GatedAttentionWeights:
    split = {"q_proj": 2 * config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
    weight = {f"{name}.weight": rows for name, rows in split.items()}
    bias = {f"{name}.bias": rows for name, rows in split.items()}
    return GatedAttentionWeights(
        gate_qkv=store.rows(weight, config.hidden_size),
        q_norm=store("q_norm.weight", config.head_dim),
        k_norm=store("k_norm.weight", config.head_dim),
        o=store("o_proj.weight", config.hidden_size, config.q_size),
        gate_qkv_bias=store.rows(bias) if config.qkv_bias else None,
        o_bias=store("o_proj.bias", config.hidden_size) if config.o_bias else None,
    )


def _delta_net(config: QwenHybridConfig, store: _Store) -> DeltaNetWeights:
    delta = config.delta
    heads = delta.num_value_heads
    split = {"qkv": delta.conv_size, "z": delta.value_size, "b": heads, "a": heads}
    if config.interleaved_projections:
        split = {"qkvz": delta.conv_size + delta.value_size, "ba": 2 * heads}
    return DeltaNetWeights(
        projection=store.rows({f"in_proj_{name}.weight": rows for name, rows in split.items()}, config.hidden_size),
        conv=store("conv1d.weight", delta.conv_size, 1, delta.conv_width),
        a_log=store.float32("A_log", heads),
        dt_bias=store.float32("dt_bias", heads),
        norm=store("norm.weight", delta.value_dim),
        out=store("out_proj.weight", config.hidden_size, delta.value_size),
    )


def _mlp(hidden: int, inner: int, store: _Store) -> MlpWeights:
    return MlpWeights(
        gate_up=store.rows({"gate_proj.weight": inner, "up_proj.weight": inner}, hidden),
        down=store("down_proj.weight", hidden, inner),
    )


def _moe(moe: MoeConfig, hidden: int, store: _Store, *, packed: bool) -> MoeWeights:
    gate_up, down = store.under("experts.").experts(moe, hidden, packed=packed)
    return MoeWeights(
        router=store.rows({"gate.weight": moe.num_experts, "shared_expert_gate.weight": 1}, hidden),
        gate_up=gate_up,
        down=down,
        shared=_mlp(hidden, moe.shared_size, store.under("shared_expert.")),
    )


def _sort_rows(config: QwenHybridConfig, layer: HybridLayerWeights) -> None:
    mixer = layer.mixer
    if isinstance(mixer, GatedAttentionWeights):
        order = _gate_query_order(config)
        for fused in (mixer.gate_qkv, mixer.gate_qkv_bias):
            if fused is not None:
                _permute(fused[: len(order)], order)
    elif config.interleaved_projections:
        order = _projection_order(config)
        _permute(mixer.projection, order)


def _permute(rows: torch.Tensor, order: torch.Tensor) -> None:
    rows.copy_(rows[order.to(rows.device)])


def _gate_query_order(config: QwenHybridConfig) -> torch.Tensor:
    """Stored row of each sorted one: the file has query and gate of each head in turn, wanted are all gates first."""
    rows = torch.arange(2 * config.q_size).view(config.num_heads, 2, config.head_dim)
    return torch.cat((rows[:, 1].flatten(), rows[:, 0].flatten()))


def _projection_order(config: QwenHybridConfig) -> torch.Tensor:
    """Stored row of each sorted one: the file has q, k, v, z of each key head in turn, then b, a the same way."""
    delta = config.delta
    group = delta.num_value_heads // delta.num_key_heads
    qkvz = torch.arange(delta.conv_size + delta.value_size).view(delta.num_key_heads, -1)
    sizes = [delta.key_dim, delta.key_dim, group * delta.value_dim, group * delta.value_dim]
    parts = torch.split(qkvz, sizes, dim=1)
    b, a = (torch.arange(2 * delta.num_value_heads) + qkvz.numel()).view(delta.num_key_heads, 2, group).unbind(1)
    return torch.cat([part.flatten() for part in (*parts, b, a)])
