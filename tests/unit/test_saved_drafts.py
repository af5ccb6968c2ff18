"""Folders of drafts are written where text or a path says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from edgellm_eagle.checkpoint import save_head
from edgellm_shared_kv.stored_tensors import save_assistant


@pytest.mark.parametrize("save", [save_head, save_assistant])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_is_text_or_a_path(save: Callable[..., None], kind: Callable[[Path], Any], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "draft"
    save(kind(folder), {"hidden_size": 2}, {"norm.weight": torch.ones(2, 2).T})
    assert json.loads((folder / "config.json").read_text()) == {"hidden_size": 2}
    assert torch.equal(load_file(folder / "model.safetensors")["norm.weight"], torch.ones(2, 2))


@pytest.mark.parametrize("save", [save_head, save_assistant])
def test_a_leading_tilde_is_the_home(
    save: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save("~/draft", {}, {"norm.weight": torch.ones(2)})
    assert (tmp_path / "draft" / "model.safetensors").is_file()
