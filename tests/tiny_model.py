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
