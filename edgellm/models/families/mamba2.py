"""Mamba-2: a mixer in every layer and nothing else, so no attention, no KV pages and no stated context length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgellm.errors import UnsupportedModelError
from edgellm.kernels.cpu.causal_conv import MAX_WIDTH
from edgellm.kernels.cpu.mamba2 import MAX_STATE_DIM
from edgellm.models.config import (
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    ModelConfig,
    RopeConfig,
    StatePiece,
)
from edgellm.models.fields import show
from edgellm.models.mamba2 import Mamba2Graph as build_graph
from edgellm.models.mamba2 import Mamba2LayerWeights
from edgellm.models.mamba2_mixer import MixerShape, allocate_mixer
from edgellm.models.weights import ModelWeights
from edgellm.models.weights import keep_order as finish

if TYPE_CHECKING:
    import torch

    from edgellm.models.device_ops import DeviceOps
    from edgellm.models.device_step import DeviceFamilyGraph
    from edgellm.models.families import NewTensor
    from edgellm.models.fields import Fields
    from edgellm.models.loader import LoadedModel
    from edgellm.models.registry import Architecture

__all__ = [
    "IGNORED_TENSORS",
    "Mamba2Config",
    "allocate",
    "build_device_graph",
    "build_graph",
    "finish",
    "read_config",
    "refuse_unsupported_mixer",
    "step_limits",
]

IGNORED_TENSORS = ()

DEFAULT_CONTEXT = 1 << 17
"""Tokens a sequence may reach where the config states no length: state does not grow, what counts its blocks does."""

MAX_STEP = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(ModelConfig):
    """Attributes:
    mixer: sizes of every layer.
    float_residual: the residual stream is float32 whatever the model's dtype.
    """

    mixer: MixerShape
    float_residual: bool

    @property
    def num_kv_layers(self) -> int:
        return 0

    @property
    def linear_widths(self) -> tuple[tuple[str, int], ...]:
        return (("hidden_size", self.hidden_size), ("inner size of the mixers", self.mixer.inner_size))

    @property
    def recurrent_pieces(self) -> tuple[StatePiece, ...]:
        return tuple(piece for layer in range(self.num_layers) for piece in self.mixer.pieces(layer))


def read_config(fields: Fields, architecture: Architecture) -> Mamba2Config:
    """See `edgellm.models.families.Family`."""
    refuse_unsupported_mixer(fields)
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB)
    mixer = _mixer_shape(fields)
    dtype = fields.text("dtype", default="") or fields.text("torch_dtype", default="")
    return Mamba2Config(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=mixer.hidden_size,
        intermediate_size=mixer.inner_size,
        num_layers=fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        # Sizes of attention, of which there is none: the least that the checks of a config take.
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        max_positions=fields.integer("max_position_embeddings", 1, MAX_POSITIONS, default=DEFAULT_CONTEXT),
        rms_norm_eps=mixer.norm_eps,
        rope=RopeConfig(theta=1.0),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        weight_dtype=dtype.removeprefix("torch."),
        bos_token_id=fields.optional_id("bos_token_id", vocab_size),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        pad_token_id=fields.optional_id("pad_token_id", vocab_size),
        mixer=mixer,
        float_residual=fields.flag("residual_in_fp32", default=True),
    )


def refuse_unsupported_mixer(fields: Fields) -> None:
    """Refuse options that change the numbers and that no graph with a Mamba-2 mixer implements.

    Raises:
        UnsupportedModelError: names the option.
    """
    if fields.get("quantization_config"):
        method = fields.section("quantization_config").get("quant_method") or "unknown"
        raise UnsupportedModelError(
            f"quantization_config (method {show(method)}) is not supported; use the unquantised checkpoint"
        )
    activation = fields.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act is {show(activation)}; supported: 'silu'")
    if not fields.flag("rms_norm", default=True):
        raise UnsupportedModelError("rms_norm is false; a mixer without its gated norm is not supported")


def _mixer_shape(fields: Fields) -> MixerShape:
    hidden_size = fields.integer("hidden_size", 1, MAX_HIDDEN)
    shape = MixerShape(
        hidden_size=hidden_size,
        num_heads=fields.integer("num_heads", 1, MAX_HEADS),
        head_dim=fields.integer("head_dim", 1, MAX_HIDDEN),
        state_size=fields.integer("state_size", 1, MAX_STATE_DIM),
        num_groups=fields.integer("n_groups", 1, MAX_HEADS),
        conv_kernel=fields.integer("conv_kernel", 2, MAX_WIDTH),
        projection_bias=fields.flag("use_bias", default=False),
        conv_bias=fields.flag("use_conv_bias", default=True),
        norm_eps=fields.number("layer_norm_epsilon", above=0, most=1, default=1e-5),
        step_limits=step_limits(fields),
    )
    expand = fields.number("expand", above=0, most=MAX_HIDDEN, default=2)
    if shape.inner_size != int(expand * hidden_size):
        raise UnsupportedModelError(
            f"num_heads {shape.num_heads} times head_dim {shape.head_dim} is not expand {expand:g} times hidden_size "
            f"{hidden_size}; check that config.json belongs to the model"
        )
    return shape


def step_limits(fields: Fields) -> tuple[float, float]:
    """`time_step_limit`, [least, greatest] time step; infinity may be JSON's `Infinity` or {"__float__": "Infinity"}.

    Raises:
        UnsupportedModelError: it is something else.
    """
    value = fields.get("time_step_limit")
    if value is None:
        return 0.0, math.inf
    limits = [_number(item) for item in value] if isinstance(value, list) else []
    if len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
        raise fields.refusal("time_step_limit", "a list of the least and the greatest time step")
    return limits[0], limits[1]


def _number(item: Any) -> float:
    """NaN for anything that is no number of a time step: it is neither smaller nor greater than any other."""
    if isinstance(item, dict) and item == {"__float__": "Infinity"}:
        return math.inf
    is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
    # An integer may be too large to be a float: compared before it is converted.
    return float(item) if is_number and (item <= MAX_STEP or item == math.inf) else math.nan


def allocate(config: Mamba2Config, new: NewTensor) -> tuple[ModelWeights, dict[str, torch.Tensor]]:
    """See `edgellm.models.families.Family`."""
    targets: dict[str, torch.Tensor] = {}
    embedding = targets["backbone.embeddings.weight"] = new(config.vocab_size, config.hidden_size)
    layers = []
    for idx in range(config.num_layers):
        prefix = f"backbone.layers.{idx}."
        norm = targets[prefix + "norm.weight"] = new(config.hidden_size)
        layers.append(Mamba2LayerWeights(norm, allocate_mixer(config.mixer, new, prefix + "mixer.", targets)))
    final_norm = targets["backbone.norm_f.weight"] = new(config.hidden_size)
    lm_head = embedding
    if not config.tied_embeddings:
        lm_head = targets["lm_head.weight"] = new(config.vocab_size, config.hidden_size)
    return ModelWeights(embedding, layers, final_norm, lm_head), targets


def build_device_graph(model: LoadedModel, ops: DeviceOps) -> DeviceFamilyGraph:
    """The forward pass on a device; see `edgellm.models.families.Family`."""
    from edgellm.models.device_mamba2 import DeviceMamba2Graph

    return DeviceMamba2Graph(model, ops)
