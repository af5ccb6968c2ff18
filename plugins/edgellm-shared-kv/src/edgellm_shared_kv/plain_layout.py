"""The project's own assistant layout, for Llama-like bases: pre-norm layers with queries only, and a list of donors.

The README of the package documents it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.models.config import MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE
from edgellm.models.registry import Architecture
from edgellm_shared_kv.assistant_model import AssistantConfig, AssistantLayer, AssistantLayerWeights, AssistantWeights
from edgellm_shared_kv.layout_fields import check_matches, check_rope
from edgellm_shared_kv.proposal_head import VocabularyHead

if TYPE_CHECKING:
    from edgellm.decoding.draft_tensors import DraftTensors
    from edgellm.models.config import ModelConfig
    from edgellm.models.fields import Fields
    from edgellm.models.loader import LoadedModel

ARCHITECTURE = "SharedKvAssistantForCausalLM"
BASES = (Architecture.LLAMA, Architecture.QWEN2, Architecture.QWEN3)
MAX_DONORS = 64
OFF = ("attention_bias", "mlp_bias", "use_sliding_window")
IGNORED = ("t2d",)  # the inverse of d2t, which training scripts keep


def read(fields: Fields, tensors: DraftTensors, base: LoadedModel) -> tuple[AssistantConfig, AssistantWeights]:
    """Raises: as `edgellm_shared_kv.checkpoint.read_assistant`."""
    target = base.config
    check_matches(fields, "vocab_size", target.vocab_size)
    activation = fields.text("hidden_act", default="silu")
    if activation != "silu":
        raise fields.refusal("hidden_act", "'silu'")
    layers = _layers(fields, target)
    _check_stated(fields, target, len(layers))
    config = AssistantConfig(
        layers=layers,
        num_heads=_num_heads(fields, target),
        rms_norm_eps=fields.number("rms_norm_eps", above=0, most=1),
        attention_scale=target.attention_scale,
    )
    weights = _weights(fields, tensors, base, config)
    tensors.refuse_unread(ignored=IGNORED)
    return config, weights


def _layers(fields: Fields, target: ModelConfig) -> tuple[AssistantLayer, ...]:
    donors = fields.get("donor_layers")
    known = range(target.num_layers)
    if (
        not isinstance(donors, list)
        or not 1 <= len(donors) <= MAX_DONORS
        or not all(isinstance(donor, int) and not isinstance(donor, bool) and donor in known for donor in donors)
    ):
        raise fields.refusal(
            "donor_layers", f"a list of 1 to {MAX_DONORS} layers of the base, from 0 to {target.num_layers - 1},"
        )
    return tuple(
        AssistantLayer(donor=donor, num_kv_heads=target.num_kv_heads, head_dim=target.head_dim, rope=target.rope)
        for donor in donors
    )


def _check_stated(fields: Fields, target: ModelConfig, num_layers: int) -> None:
    """Fields that the layout does without, where a config has them nevertheless: they must say what is done."""
    for name, value in (("head_dim", target.head_dim), ("num_key_value_heads", target.num_kv_heads)):
        if name in fields:
            check_matches(fields, name, value)
    if fields.get("num_hidden_layers") not in (None, num_layers):
        raise fields.refusal("num_hidden_layers", f"{num_layers}, one for each of donor_layers,")
    for name in OFF:
        if fields.flag(name, default=False):
            raise fields.refusal(name, "false")
    check_rope(fields, target)


def _num_heads(fields: Fields, target: ModelConfig) -> int:
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    if num_heads % target.num_kv_heads:
        raise fields.refusal("num_attention_heads", f"a multiple of the base's {target.num_kv_heads} kv heads")
    return num_heads


def _weights(fields: Fields, tensors: DraftTensors, base: LoadedModel, config: AssistantConfig) -> AssistantWeights:
    hidden, outer = fields.integer("hidden_size", 1, MAX_HIDDEN), base.config.hidden_size
    inner = fields.integer("intermediate_size", 1, MAX_INTERMEDIATE)
    query_norm = fields.flag("query_norm", default=False)
    return AssistantWeights(
        embedding=base.weights.embedding,
        pre_projection=tensors.matrix("pre_projection.weight", hidden, 2 * outer),
        layers=[
            _layer(tensors, f"layers.{idx}.", hidden, inner, config, query_norm=query_norm)
            for idx in range(len(config.layers))
        ],
        final_norm=tensors.norm("norm.weight", hidden),
        post_projection=tensors.matrix("post_projection.weight", outer, hidden),
        head=_head(fields, tensors, hidden, base.config.vocab_size),
    )


def _layer(
    tensors: DraftTensors, prefix: str, hidden: int, inner: int, config: AssistantConfig, *, query_norm: bool
) -> AssistantLayerWeights:
    head_dim = config.layers[0].head_dim
    q_size = config.num_heads * head_dim
    return AssistantLayerWeights(
        attn_norm=tensors.norm(f"{prefix}input_layernorm.weight", hidden),
        q=tensors.matrix(f"{prefix}self_attn.q_proj.weight", q_size, hidden),
        q_norm=tensors.norm(f"{prefix}self_attn.q_norm.weight", head_dim) if query_norm else None,
        o=tensors.matrix(f"{prefix}self_attn.o_proj.weight", hidden, q_size),
        mlp_norm=tensors.norm(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=tensors.joined((f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight"), inner, hidden),
        down=tensors.matrix(f"{prefix}mlp.down_proj.weight", hidden, inner),
    )


def _head(fields: Fields, tensors: DraftTensors, hidden: int, vocab_size: int) -> VocabularyHead:
    size = fields.integer("draft_vocab_size", 1, vocab_size, default=vocab_size)
    to_base = tensors.model_tokens("d2t", size, vocab_size)
    return VocabularyHead(tensors.matrix("lm_head.weight", size, hidden), to_base)
