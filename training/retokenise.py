"""Generated text in the hybrid model's tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from training.small_tokenizer import TURN_START, read_backend
from training.token_file import TokenFile

if TYPE_CHECKING:
    from pathlib import Path

# The target's template puts a system message of its own in front; the small model has none.
_SYSTEM = re.compile(re.escape(TURN_START) + r"system\n.*?<\|im_end\|>\n", re.DOTALL)
_SLICE = 4096


def retokenise(file: TokenFile, target_tokenizer: Path, small_tokenizer: Path) -> TokenFile:
    """The same sequences, prompts apart from what was generated.

    Args:
        target_tokenizer, small_tokenizer: folders with tokenizer.json.
    """
    old, new = read_backend(target_tokenizer), read_backend(small_tokenizer)
    rows: list[list[int]] = []
    lens: list[int] = []
    for start in range(0, len(file), _SLICE):
        indices = range(start, min(start + _SLICE, len(file)))
        prompts = [file[index][: file.prompt_lens[index]].tolist() for index in indices]
        tails = [file[index][file.prompt_lens[index] :].tolist() for index in indices]
        texts = [old.decode_batch(part, skip_special_tokens=False) for part in (prompts, tails)]
        heads = new.encode_batch([_SYSTEM.sub("", text, count=1) for text in texts[0]])
        for head, tail in zip(heads, new.encode_batch(texts[1]), strict=True):
            rows.append(head.ids + tail.ids)
            lens.append(len(head.ids))
    return TokenFile.of(rows, lens)
