"""Llama, Qwen2 and Qwen3: attention and a gated MLP in every layer."""

from __future__ import annotations

from edgellm.models.config import dense_config as read_config
from edgellm.models.llama import LlamaGraph as build_graph
from edgellm.models.weights import allocate_dense as allocate
from edgellm.models.weights import keep_order as finish

__all__ = ["IGNORED_TENSORS", "allocate", "build_graph", "finish", "read_config"]

IGNORED_TENSORS = ()
