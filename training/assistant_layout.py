"""Names of an assistant's file: the one place that knows the layout `edgellm_shared_kv.plain_layout` reads."""

from __future__ import annotations

from typing import Any

ARCHITECTURE = "SharedKvAssistantForCausalLM"
D2T = "d2t"  # the target's id minus the draft's
PUBLIC = {
    "pre_projection": "pre_projection",
    "post_projection": "post_projection",
    "final_norm": "norm",
    "lm_head": "lm_head",
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
    "layers": "layers",
}


def public_name(name: str) -> str:
    """The stored name of a parameter of `training.assistant.Assistant`."""
    return ".".join(PUBLIC.get(part, part) for part in name.split("."))


def config_fields(
    *,
    hidden: int,
    inner: int,
    heads: int,
    eps: float,
    donors: tuple[int, ...],
    target_hidden: int,
    vocab: int,
    draft: int,
) -> dict[str, Any]:
    """The fields of config.json.

    Args:
        donors: for each layer the target's layer whose keys and values it reads.
        target_hidden, vocab: the target's.
        draft: size of the draft vocabulary.
    """
    return {
        "architectures": [ARCHITECTURE],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "rms_norm_eps": eps,
        "hidden_act": "silu",
        "query_norm": False,
        "donor_layers": list(donors),
        "backbone_hidden_size": target_hidden,
        "vocab_size": vocab,
        "draft_vocab_size": draft,
        "torch_dtype": "bfloat16",
    }
