"""Random bytes changed in the files of a tiny checkpoint: it loads and computes, or an error of edgellm says why."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import damaged_checkpoints as damaged
import pytest
from tiny_model import write_byte_tokenizer

from edgellm.tokenization.tokenizer import load_tokenizer


def outcomes(path: Path, attempt: Callable[[], None], *, end: int, cases: int, named: str) -> Counter[str]:
    """Damage `path` in [0, end) `cases` times; every refusal must name the checkpoint."""
    blob = path.read_bytes()
    found: Counter[str] = Counter()
    for case in range(cases):
        path.write_bytes(damaged.flipped(blob, 0, end, random.Random(case)))
        try:
            refusal = damaged.refusal(attempt)
        except BaseException as error:
            raise AssertionError(f"case {case}: {type(error).__name__}: {error}") from error
        assert refusal is None or named in str(refusal), f"case {case}: {refusal}"
        found["loaded" if refusal is None else type(refusal).__name__] += 1
    path.write_bytes(blob)
    return found


def test_safetensors_header(tmp_path: Path) -> None:
    folder = damaged.write_safetensors(tmp_path / "m")
    path = folder / "model.safetensors"
    end = damaged.safetensors_header_bytes(path.read_bytes())
    found = outcomes(path, lambda: damaged.load_and_run(folder), end=end, cases=400, named=str(folder))
    assert found["WeightFileError"] > 250


def test_config(tmp_path: Path) -> None:
    folder = damaged.write_safetensors(tmp_path / "m")
    path = folder / "config.json"
    end = path.stat().st_size
    found = outcomes(path, lambda: damaged.load_and_run(folder), end=end, cases=400, named=str(folder))
    assert found["loaded"] > 10
    assert found["WeightFileError"] > 100
    assert found["UnsupportedModelError"] > 30


def test_index(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    damaged.write_sharded(folder)
    path = folder / "model.safetensors.index.json"
    found = outcomes(path, lambda: damaged.load_and_run(folder), end=path.stat().st_size, cases=150, named=str(folder))
    assert found["WeightFileError"] > 100


def test_gguf_header(tmp_path: Path) -> None:
    path = damaged.write_gguf(tmp_path / "m.gguf")
    end = path.read_bytes().index(b"output.weight") + 60
    found = outcomes(path, lambda: damaged.load_and_run(path), end=end, cases=400, named=str(path))
    assert found["loaded"] > 20  # names of tokens, for one
    assert found["WeightFileError"] > 100
    assert found["UnsupportedModelError"] > 20


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_tokenizer_files(tmp_path: Path, name: str) -> None:
    original = tmp_path / "original"
    write_byte_tokenizer(original)
    (original / "generation_config.json").write_text('{"eos_token_id": [0, 5], "do_sample": false}')
    folder = shutil.copytree(original, tmp_path / "m")

    def attempt() -> None:
        tokenizer = load_tokenizer(folder)
        assert isinstance(tokenizer.decode(tokenizer.encode("hello")), str)
        assert all(isinstance(end_id, int) and end_id >= 0 for end_id in tokenizer.eos_token_ids)

    end = (folder / name).stat().st_size
    found = outcomes(folder / name, attempt, end=end, cases=60, named=str(folder))
    assert found["WeightFileError"] > 10
