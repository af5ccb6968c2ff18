"""Engines over random weights of published shapes: no checkpoint, no download, weights drawn on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from edgellm import Engine
from edgellm.assembly import LoadOptions, connect
from edgellm.models.config import ModelConfig, RopeConfig
from edgellm.models.loader import LoadedModel
from edgellm.models.quantisation import Quantisation, StoredFormat
from edgellm.models.registry import Architecture
from edgellm.runtime.placement import place
from edgellm.testing.random_model import random_model
from edgellm.testing.toy_tokenizer import ToyTokenizer

VOCAB = 151_936
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_layers": 28, "num_heads": 16, "tied": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_layers": 36, "num_heads": 32, "tied": False},
    # For a dry run without a GPU.
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_layers": 6, "num_heads": 16, "tied": True},
}
QUANTISED = {
    "": None,
    "int4": Quantisation(StoredFormat.AWQ, 128),
    "fp8": Quantisation(StoredFormat.FP8, 128, 128, scale_name="weight_scale_inv"),
}


def qwen3_config(name: str) -> ModelConfig:
    """The shape of a Qwen3 of that size; "8B-int4" and "8B-fp8" have packed linear layers."""
    size, _, quantised = name.partition("-")
    shape = dict(SHAPES[size])
    tied = shape.pop("tied")
    return ModelConfig(
        architecture=Architecture.QWEN3,
        vocab_size=VOCAB if size != "tiny" else 512,
        num_kv_heads=8,
        head_dim=128 if size != "tiny" else 8,
        max_positions=40_960,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        tied_embeddings=tied,
        qk_norm=True,
        weight_dtype="bfloat16",
        quantisation=QUANTISED[quantised],
        **shape,
    )


@dataclass(slots=True)
class RandomEngine:
    """An engine, the model under it, and bytes of weights that one decoded token reads."""

    engine: Engine
    model: LoadedModel

    @property
    def read_bytes(self) -> int:
        """All weights once; a tied embedding is read as the head, an untied one hardly at all."""
        weights = self.model.weights
        untied = weights.embedding.data_ptr() != weights.lm_head.data_ptr()
        return weights.num_bytes() - (weights.embedding.nbytes if untied else 0)


def make_engine(name: str, **options: Any) -> RandomEngine:
    """An engine of the named shape.

    Args:
        options: of `Engine`; the device is "cuda" unless they say otherwise.
    """
    choice = LoadOptions("random " + name, **({"device": "cuda", "dtype": "bfloat16"} | options))
    placement = place(choice.device, choice.placement_options())
    config = qwen3_config(name)
    dtype, packed = getattr(torch, choice.dtype), config.quantisation is not None and choice.device != "cpu"
    model = random_model(config, dtype=dtype, device="cpu" if choice.device == "cpu" else "cuda", packed=packed)
    parts = connect(choice, placement, model, ToyTokenizer(config.vocab_size))
    return RandomEngine(Engine.from_parts(parts), model)
