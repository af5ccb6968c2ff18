"""Qwen3-Next and Qwen3.5 text: gated delta nets with gated attention between, dense MLPs or experts."""

from __future__ import annotations

from edgellm.models.qwen_hybrid import QwenHybridGraph as build_graph
from edgellm.models.qwen_hybrid_config import read_config
from edgellm.models.qwen_hybrid_weights import allocate, finish

__all__ = ["IGNORED_TENSORS", "allocate", "build_graph", "finish", "read_config"]

# The prediction head is loaded on its own; images have no way in.
IGNORED_TENSORS = ("mtp.", "model.visual.")
