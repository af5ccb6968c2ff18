"""Model families: a module each, which reads a config, allocates weights and builds the graph of its architectures.

A family whose configuration needs more than `ModelConfig` has subclasses it (frozen, slotted); the same for
`ModelWeights`.  `edgellm.models.registry.FAMILIES` names the module of each architecture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from edgellm.models.config import ModelConfig
    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import DeviceFamilyGraph
    from edgellm.models.fields import Fields
    from edgellm.models.loader import LoadedModel
    from edgellm.models.registry import Architecture
    from edgellm.models.step import Graph
    from edgellm.models.weights import ModelWeights, Targets

    NewTensor = Callable[..., torch.Tensor]


class Family(Protocol):
    """What the module of a family defines."""

    IGNORED_TENSORS: tuple[str, ...]
    """Prefixes of stored tensors that may stay unread, besides those outside the layers."""

    def read_config(self, fields: Fields, architecture: Architecture) -> ModelConfig:
        """The config that a parsed `config.json` describes.

        Raises:
            UnsupportedModelError: an option is not supported, or a field is missing, of the wrong type or out of range.
        """
        ...

    def allocate(self, config: ModelConfig, new: NewTensor) -> tuple[ModelWeights, Targets]:
        """Empty fused weights, and for each stored name the slice it fills.

        Args:
            new: `new(*shape)` gives an empty tensor of the model's dtype on its device.
        """
        ...

    def finish(self, config: ModelConfig, weights: ModelWeights) -> None:
        """Called once the weights are read: puts rows that the file interleaves in the order of the graph."""
        ...

    def build_graph(self, model: LoadedModel) -> Graph:
        """The forward pass on CPU rows."""
        ...

    def build_device_graph(self, model: LoadedModel, ops: DeviceOps) -> DeviceFamilyGraph:
        """The forward pass on the device that holds the model and that `ops` compute on."""
        ...
