"""Small tokenizers made on the spot, in the two families that checkpoints use."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["the cat sat on the mat", "caf\u00e9 na\u00efve \u00fcber", "\u732b\u306f\u732b \U0001f600\U0001f63a the the"]


def byte_level(folder: Path, *, chat_template: str | None = TEMPLATE, nested_decoder: bool = False) -> Path:
    """A GPT-2 style tokenizer directory: all 256 bytes, some merges, special and plain added tokens.

    Args:
        nested_decoder: wrap the decoder, so that it is no longer recognised as a plain byte-level one.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.Sequence([decoders.ByteLevel()]) if nested_decoder else decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(CORPUS * 20, trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("<a \u732b>", special=False)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=chat_template)
    wrapped.save_pretrained(folder)
    return folder


def byte_fallback(folder: Path, *, stripped_spaces: int = 1) -> Path:
    """A SentencePiece style tokenizer directory (Llama 2): spaces as U+2581, unknown characters as byte tokens.

    Args:
        stripped_spaces: leading spaces that decoding takes off.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        "\u2581",
        "H",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "\u00e9",
        "el",
        "\u2581w",
        "Hel",
        "lo",
        "Hello",
        "\u2581\u2581",
    ]
    merges = [("e", "l"), ("\u2581", "w"), ("H", "el"), ("l", "o"), ("Hel", "lo"), ("\u2581", "\u2581")]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", stripped_spaces, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>").save_pretrained(folder)
    return folder
