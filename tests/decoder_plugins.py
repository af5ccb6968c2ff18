"""The decoders of this repository's plugins, whatever `EDGELLM_PLUGINS` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import edgellm_eagle.plugin
import edgellm_hybrid.plugin
import edgellm_lookup.decoder
import edgellm_shared_kv.plugin
from edgellm.plugins import load_plugins

if TYPE_CHECKING:
    import pytest

PLUGINS = (
    ("eagle", edgellm_eagle.plugin),
    ("hybrid", edgellm_hybrid.plugin),
    ("lookup", edgellm_lookup.decoder),
    ("shared-kv", edgellm_shared_kv.plugin),
)


def use_decoder_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `LLM` of the test finds the plugins of this tree, and no other."""
    loaded = load_plugins(extra=PLUGINS, autoload=False, strict=True)
    monkeypatch.setattr("edgellm.plugins.load_plugins", lambda: loaded)
