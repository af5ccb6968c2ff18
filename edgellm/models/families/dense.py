"""Llama, Qwen2 and Qwen3: attention and a gated MLP in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.models.config import dense_config as read_config
from edgellm.models.llama import LlamaGraph as build_graph
from edgellm.models.weights import allocate_dense as allocate
from edgellm.models.weights import keep_order as finish

if TYPE_CHECKING:
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import DeviceFamilyGraph
    from edgellm.models.loader import LoadedModel

__all__ = ["IGNORED_TENSORS", "allocate", "build_device_graph", "build_graph", "finish", "read_config"]

IGNORED_TENSORS = ()


def build_device_graph(model: LoadedModel, ops: DeviceOps) -> DeviceFamilyGraph:
    """The forward pass on a device; see `Family`."""
    from edgellm.models.device_graph import DeviceGraph

    return DeviceGraph(model, ops)
