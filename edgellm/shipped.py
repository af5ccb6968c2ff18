"""Checkpoints that plugins bring: models by name, and drafts by the target that they were trained for."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.errors import InvalidArgumentError
from edgellm.fetch import DEFAULT_MODEL, expand_home

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edgellm.decoding.options import DecoderChoice
    from edgellm.models.config import ModelConfig

FILES = ("config.json", "model.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTarget:
    """The model that a draft was trained for, as far as sizes and token ids tell.

    A fine-tune of the same sizes and vocabulary is the same target: fewer proposals may be kept there, the text is the
    same in any case.  Stored format and dtype do not matter.

    Attributes:
        name: for people.
        architecture: value of `edgellm.models.registry.Architecture`.
        rope_theta: tells generations of one model line apart that have the same sizes.
    """

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float

    @classmethod
    def of(cls, config: ModelConfig, name: str = "") -> DraftTarget:
        """The model of a config, as a target."""
        same = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
        sizes = {field: getattr(config, field) for field in same}
        return cls(name=name, architecture=config.architecture.value, rope_theta=config.rope.theta, **sizes)

    def matches(self, config: ModelConfig) -> bool:
        """Whether drafts for this target fit the model."""
        other = DraftTarget.of(config)
        names = [field.name for field in fields(self) if field.name != "name"]
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def describe(self) -> str:
        """Sizes in words."""
        return (
            f"{self.architecture}, {self.num_layers} layers of width {self.hidden_size}, {self.vocab_size} tokens, "
            f"rope {self.rope_theta:g}"
        )


DEFAULT_TARGET = DraftTarget(
    name=DEFAULT_MODEL,
    architecture="llama",
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49_152,
    rope_theta=100_000.0,
)


@dataclass(frozen=True, slots=True)
class ShippedCheckpoint:
    """One checkpoint that a plugin registered.

    Attributes:
        folder: where config.json and model.safetensors lie, if they do.
        decoder: kind of the decoder that it drafts for; None for a model of its own.
        target: of a draft.
        remedy: how to get the files where they are missing, as an imperative without a full stop.
        distribution: name and version of what brought the plugin, for messages.
    """

    name: str
    folder: Path
    decoder: str | None
    target: DraftTarget | None
    remedy: str
    plugin: str
    distribution: str = "unknown"

    @property
    def is_present(self) -> bool:
        """Whether its files are there; a source tree may be without them."""
        return all((self.folder / name).is_file() for name in FILES)

    def require(self) -> Path:
        """The folder.

        Raises:
            InvalidArgumentError: it lacks its files.
        """
        if not self.is_present:
            raise InvalidArgumentError(f"{self.missing()}; {self.remedy}")
        return self.folder

    def missing(self) -> str:
        """What is not there, in words."""
        return f"{self.name!r} of {self.distribution} lacks its files ({' and '.join(FILES)} in {self.folder})"


class CheckpointRegistrar:
    """The callback of `edgellm_register_checkpoints`; checks at the moment of registration."""

    def __init__(self, plugin: str, known: Iterable[ShippedCheckpoint] = (), *, distribution: str = "unknown") -> None:
        self._plugin = plugin
        self._distribution = distribution
        self._known = list(known)
        self.added: list[ShippedCheckpoint] = []

    def __call__(
        self,
        name: str,
        folder: str | os.PathLike[str],
        *,
        decoder: str | None = None,
        target: DraftTarget | None = None,
        remedy: str = "install the package again",
    ) -> None:
        """Register one checkpoint, whether its files are there or not.

        Args: see `ShippedCheckpoint`; `decoder` and `target` for drafts, neither for a model.
        Raises:
            InvalidArgumentError: wrong types, or the name is taken.
        """
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise InvalidArgumentError(f"checkpoint name is {name!r}; it must be a word that is no path")
        if not isinstance(folder, (str, os.PathLike)):
            raise InvalidArgumentError(f"checkpoint {name!r} has folder {folder!r}; it must be a path")
        if (decoder is None) != (target is None):
            raise InvalidArgumentError(
                f"checkpoint {name!r} has decoder {decoder!r} and target {target!r}; a draft has both, a model neither"
            )
        for other in [*self._known, *self.added]:
            if other.name == name:
                raise InvalidArgumentError(f"checkpoint {name!r} is already registered by {other.plugin!r}; rename it")
        made = ShippedCheckpoint(name, Path(folder), decoder, target, remedy, self._plugin, self._distribution)
        self.added.append(made)


def models_of(shipped: Iterable[ShippedCheckpoint]) -> dict[str, ShippedCheckpoint]:
    """Those that are models, by name."""
    return {each.name: each for each in shipped if each.decoder is None}


def drafts_for(shipped: Iterable[ShippedCheckpoint], config: ModelConfig) -> list[ShippedCheckpoint]:
    """Those that are drafts for a model, present or not."""
    return [each for each in shipped if each.target is not None and each.target.matches(config)]


def draft_folder(choice: DecoderChoice, kind: str, what: str) -> Path:
    """The folder of the draft that a decoder is to use: the caller's, else the one that a plugin brings for the model.

    Args:
        kind: of the decoder.
        what: a draft of that kind, in words with an article.
    Raises:
        InvalidArgumentError: the caller's is no folder, or none was given and none is brought.
    """
    given = None if choice.options is None else choice.options.draft
    if given is not None:
        folder = expand_home("draft", given)
        if not _is_folder(folder):
            raise InvalidArgumentError(f"draft is {str(given)!r}, which is no folder; pass that of {what}")
        return folder
    fitting = [each for each in drafts_for(choice.shipped, choice.config) if each.decoder == kind]
    for each in fitting:
        if each.is_present:
            return each.folder
    raise InvalidArgumentError(
        f"decoder {kind!r} needs {what} that was trained for this model: pass its folder, as draft= of "
        f"SpeculativeOptions or --draft of the command line; {_why_none(choice, kind, fitting)}"
    )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:  # a folder on the way that may not be searched, a name that is too long
        raise InvalidArgumentError(f"draft {str(path)!r} cannot be looked at: {error}; pass another folder") from error


def _why_none(choice: DecoderChoice, kind: str, fitting: list[ShippedCheckpoint]) -> str:
    if fitting:
        return f"{fitting[0].missing()}: {fitting[0].remedy}"
    known = [each.target for each in choice.shipped if each.decoder == kind and each.target is not None]
    names = "; ".join(f"{target.name} ({target.describe()})" for target in known) or "none"
    return f"this model is {DraftTarget.of(choice.config).describe()}; installed drafts are for: {names}"
