"""Qwen3-Next and Qwen3.5 text: gated delta nets with gated attention between, dense MLPs or experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.models.qwen_hybrid import QwenHybridGraph as build_graph
from edgellm.models.qwen_hybrid_config import read_config
from edgellm.models.qwen_hybrid_weights import allocate, finish

if TYPE_CHECKING:
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import DeviceFamilyGraph
    from edgellm.models.loader import LoadedModel

__all__ = ["IGNORED_TENSORS", "allocate", "build_device_graph", "build_graph", "finish", "read_config"]

# The prediction head is loaded on its own; images have no way in.
IGNORED_TENSORS = ("mtp.", "model.visual.")


def build_device_graph(model: LoadedModel, ops: DeviceOps) -> DeviceFamilyGraph:
    """The forward pass on a device; see `edgellm.models.families.Family`."""
    from edgellm.models.device_qwen_hybrid import DeviceQwenHybridGraph

    return DeviceQwenHybridGraph(model, ops)
