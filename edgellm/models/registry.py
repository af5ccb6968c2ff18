"""The architectures that are supported, and the refusal of all others by name."""

from __future__ import annotations

import importlib
from enum import Enum
from typing import TYPE_CHECKING, cast

from edgellm.errors import UnsupportedModelError

if TYPE_CHECKING:
    from edgellm.models.families import Family


class Architecture(Enum):
    """The value is the `model_type` of `config.json` and the `general.architecture` of GGUF."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    QWEN3_NEXT = "qwen3_next"
    QWEN3_5 = "qwen3_5"
    QWEN3_5_MOE = "qwen3_5_moe"
    MAMBA2 = "mamba2"
    GRANITE_HYBRID = "granitemoehybrid"
    GEMMA3 = "gemma3_text"
    GEMMA4 = "gemma4_text"


# Module of `edgellm.models.families` that reads and builds an architecture.
FAMILIES = {
    Architecture.LLAMA: "dense",
    Architecture.QWEN2: "dense",
    Architecture.QWEN3: "dense",
    Architecture.QWEN3_NEXT: "qwen_hybrid",
    Architecture.QWEN3_5: "qwen_hybrid",
    Architecture.QWEN3_5_MOE: "qwen_hybrid",
    Architecture.MAMBA2: "mamba2",
    Architecture.GRANITE_HYBRID: "granite_hybrid",
    Architecture.GEMMA3: "gemma",
    Architecture.GEMMA4: "gemma",
}

GGUF_ARCHITECTURES = (Architecture.LLAMA, Architecture.QWEN2, Architecture.QWEN3)

CAUSAL_LM_CLASSES = {
    "LlamaForCausalLM": Architecture.LLAMA,
    "Qwen2ForCausalLM": Architecture.QWEN2,
    "Qwen3ForCausalLM": Architecture.QWEN3,
    "Qwen3NextForCausalLM": Architecture.QWEN3_NEXT,
    "Qwen3_5ForCausalLM": Architecture.QWEN3_5,
    "Qwen3_5ForConditionalGeneration": Architecture.QWEN3_5,
    "Qwen3_5MoeForCausalLM": Architecture.QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": Architecture.QWEN3_5_MOE,
    "Mamba2ForCausalLM": Architecture.MAMBA2,
    "GraniteMoeHybridForCausalLM": Architecture.GRANITE_HYBRID,
    "Gemma3ForCausalLM": Architecture.GEMMA3,
    "Gemma3ForConditionalGeneration": Architecture.GEMMA3,
    "Gemma4ForCausalLM": Architecture.GEMMA4,
    "Gemma4ForConditionalGeneration": Architecture.GEMMA4,
}


def supported_text() -> str:
    """The supported list as error messages show it."""
    return ", ".join(f"{name} ({arch.value})" for name, arch in CAUSAL_LM_CLASSES.items())


def architecture_of(classes: list[str], model_type: str) -> Architecture:
    """The architecture that `architectures` and `model_type` of a `config.json` name.

    The class name decides where it is given: a `model_type` alone does not tell a language model from, say, a
    classifier of the same family.

    Raises:
        UnsupportedModelError: not one of `CAUSAL_LM_CLASSES`.
    """
    for name in classes:
        if name in CAUSAL_LM_CLASSES:
            return CAUSAL_LM_CLASSES[name]
    if not classes and model_type in {arch.value for arch in Architecture}:
        return Architecture(model_type)
    named = ", ".join(classes) or "no architecture"
    raise UnsupportedModelError(
        f"{named} (model_type {model_type!r}) is not supported; supported: {supported_text()}. "
        "Use a checkpoint of one of these"
    )


def architecture_from_gguf(name: str) -> Architecture:
    """The architecture that `general.architecture` names.

    Raises:
        UnsupportedModelError: not a supported one.
    """
    try:
        return next(arch for arch in GGUF_ARCHITECTURES if arch.value == name)
    except StopIteration:
        known = ", ".join(arch.value for arch in GGUF_ARCHITECTURES)
        raise UnsupportedModelError(
            f"GGUF architecture {name!r} is not supported; supported: {known}. Use a GGUF file of one of these"
        ) from None


def family_of(architecture: Architecture) -> Family:
    """The module that knows the architecture's config, weights and graph; imported on first use."""
    return cast("Family", importlib.import_module(f"edgellm.models.families.{FAMILIES[architecture]}"))
