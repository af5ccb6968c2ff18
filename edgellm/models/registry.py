"""The architectures that are supported, and the refusal of all others by name."""

from __future__ import annotations

from enum import Enum

from edgellm.errors import UnsupportedModelError


class Architecture(Enum):
    """The value is the `model_type` of `config.json` and the `general.architecture` of GGUF."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


CAUSAL_LM_CLASSES = {
    "LlamaForCausalLM": Architecture.LLAMA,
    "Qwen2ForCausalLM": Architecture.QWEN2,
    "Qwen3ForCausalLM": Architecture.QWEN3,
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
        return Architecture(name)
    except ValueError:
        known = ", ".join(arch.value for arch in Architecture)
        raise UnsupportedModelError(
            f"GGUF architecture {name!r} is not supported; supported: {known}. Use a GGUF file of one of these"
        ) from None
