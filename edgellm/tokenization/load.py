"""Reading a checkpoint's tokenizer through transformers: quietly, from local files only."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.errors import WeightFileError
from edgellm.models.config import MAX_VOCAB
from edgellm.models.fields import Fields, read_json_object
from edgellm.models.gguf_file import GgufScalar
from edgellm.tokenization.gguf_metadata import read_gguf_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

# Any one of these makes a directory a tokenizer directory.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "spiece.model")
_GGUF_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def read_tokenizer(path: Path) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """The tokenizer at `path` and the end token ids its checkpoint states (tokenizer, generation config).

    Args:
        path: a Hugging Face directory, or a `.gguf` file.
    Raises:
        WeightFileError: nothing there, no tokenizer file, or a damaged one.
    """
    if path.is_dir():
        return _read_directory(path)
    if not path.exists():
        raise WeightFileError(f"tokenizer path {path} does not exist; pass a model directory or a .gguf file")
    if path.suffix.lower() != ".gguf":
        raise WeightFileError(f"{path} is neither a model directory nor a .gguf file; pass one of these")
    return _read_gguf(path)


def _read_directory(path: Path) -> tuple[PreTrainedTokenizerBase, list[int]]:
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise WeightFileError(
            f"{path} has no tokenizer file (looked for {', '.join(_TOKENIZER_FILES)}); "
            "copy tokenizer.json and tokenizer_config.json from the model's repository into it"
        )
    end_ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        end_ids += _end_ids_of(path / name)
    with _quiet():
        import transformers

        # tokenizer.json is complete by itself; the automatic class would read the model's config first.
        complete = (path / "tokenizer.json").is_file()
        loader: Any = transformers.PreTrainedTokenizerFast if complete else transformers.AutoTokenizer
        tokenizer = _load(loader, path, trust_remote_code=False)
    return tokenizer, end_ids


def _read_gguf(path: Path) -> tuple[PreTrainedTokenizerBase, list[int]]:
    values = read_gguf_values(path)
    if "tokenizer.ggml.model" not in values:
        raise WeightFileError(f"{path} contains no tokenizer (no tokenizer.ggml.model); use a file made with one")
    with _quiet():
        import transformers

        tokenizer = _load(transformers.PreTrainedTokenizerFast, path.parent, gguf_file=path.name)
        _mend_pre_tokenizer(tokenizer, values)
    fields = Fields(str(path), values, error=WeightFileError, remedy="fetch the file again")
    return tokenizer, [end_id for key in _GGUF_END_KEYS for end_id in fields.token_ids(key, MAX_VOCAB)]


def _load(loader: Any, directory: Path, **arguments: Any) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(str(directory), local_files_only=True, **arguments)
    # Damaged files surface as whatever the parser met: JSON, pickle, Rust or key errors.
    except Exception as error:
        what = directory / arguments["gguf_file"] if "gguf_file" in arguments else directory
        raise WeightFileError(
            f"the tokenizer of {what} cannot be loaded: {error}; fetch its files again, or check that this "
            "transformers version supports it"
        ) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise WeightFileError(
            f"the tokenizer of {directory} has no fast version; convert it to a tokenizer.json with transformers"
        )
    return tokenizer


def _mend_pre_tokenizer(tokenizer: Any, values: dict[str, GgufScalar]) -> None:
    """SmolLM splits every digit off before the byte-level rule; transformers' GGUF reader does not know it.

    Without it "x =  1" gets other tokens than the model was trained with (two spaces before a digit).
    """
    if values.get("tokenizer.ggml.pre") == "smollm":
        from tokenizers import pre_tokenizers

        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _end_ids_of(path: Path) -> tuple[int, ...]:
    if not path.is_file():
        return ()
    fields = Fields(str(path), read_json_object(path), error=WeightFileError, remedy="fetch it again or correct it")
    return fields.token_ids("eos_token_id", MAX_VOCAB)


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings, logs or progress bars from the libraries; their settings are as before afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging

        level = logging.get_verbosity()
        logging.set_verbosity(CRITICAL)
        try:
            yield
        finally:
            logging.set_verbosity(level)
