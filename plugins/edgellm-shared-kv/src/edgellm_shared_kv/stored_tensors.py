"""Writes an assistant's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.decoding.draft_tensors import SAFETENSORS

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import torch


def save_assistant(
    folder: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write an assistant's folder.

    Args:
        config: the fields of `config.json`.
        tensors: by their stored names.
    """
    from safetensors.torch import save_file

    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SAFETENSORS)
