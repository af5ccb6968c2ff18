"""A tiny random checkpoint in Hugging Face layout, made on the spot: real files, real loader, no download."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

END_TOKEN = "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def write_tiny_llama(folder: Path, *, seed: int = 7, **changes: Any) -> Path:
    """A two-layer Llama whose tokenizer has one token a byte, plus the end token (id 0), 257 in all.

    Args:
        changes: fields of `LlamaConfig` to set otherwise.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab_size = write_byte_tokenizer(folder)
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": 0,
        "bos_token_id": 0,
        "tie_word_embeddings": False,
        # Wide initial weights: a random model with the usual ones repeats a single token.
        "initializer_range": 0.2,
        **changes,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**values)).save_pretrained(folder)
    return folder


def write_byte_tokenizer(folder: Path) -> int:
    """Write tokenizer files; returns the vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([END_TOKEN, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_TOKEN)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return len(vocab)


def write_tiny_qwen_hybrid(folder: Path, *, seed: int = 11, mtp: bool = True, **changes: Any) -> Path:
    """A four-layer Qwen3.5 (three gated delta nets, one attention layer) over the same byte tokenizer.

    Args:
        mtp: add a random multi-token prediction head, stored as public checkpoints store it.
        changes: fields of `Qwen3_5TextConfig` to set otherwise.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    values: dict[str, Any] = {
        "vocab_size": write_byte_tokenizer(folder),
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "eos_token_id": 0,
        "bos_token_id": 0,
        **changes,
    }
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**values))
    model.save_pretrained(folder)
    if not mtp:
        return folder
    hidden, path = values["hidden_size"], folder / "model.safetensors"
    tensors = load_file(path)
    attention = values["layer_types"].index("full_attention")
    shapes = {
        f"mtp.layers.0.{name.partition(f'layers.{attention}.')[2]}": tensor.shape
        for name, tensor in tensors.items()
        if f".layers.{attention}." in name
    }
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    shapes |= {f"mtp.{name}.weight": torch.Size((hidden,)) for name in norms}
    shapes["mtp.fc.weight"] = torch.Size((hidden, 2 * hidden))
    save_file({**tensors, **{name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}}, path)
    return folder
