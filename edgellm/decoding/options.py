"""`SpeculativeOptions`: which decoder speculates, from which draft; and what a decoder is told when it is built."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.argument_check import check_flag
from edgellm.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from edgellm.models.config import ModelConfig
    from edgellm.models.loader import LoadedModel
    from edgellm.shipped import ShippedCheckpoint

MAX_DRAFTS = 15  # with the token before them a row of 16, which attention runs token by token
MAX_TREE_DRAFTS = 127  # with the token before them 128 rows, four words of a mask
MAX_TOP_K = 8
NAMES = {"lookup": "prompt_lookup"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeOptions:
    """Speculative decoding: several tokens are proposed cheaply, and the model checks them in one step.

    The text is the one that plain decoding gives, greedy or sampled; only the speed differs.

    Attributes:
        decoder: kind of a registered decoder: "prompt_lookup", "eagle", "mtp", "shared_kv_mtp", or one that a plugin
            brings; `edgellm plugins` lists the kinds beside the decoders' names.
        draft: folder of the draft model's checkpoint; None where the decoder needs none, or finds its own: the model's,
            or one that a plugin brings for this model.
        num_drafts: most tokens proposed in a round, up to 15 in a chain and 127 in a tree; None is the decoder's own
            default: 4 for chains of "eagle" and "shared_kv_mtp", 3 for "mtp", 7 for "prompt_lookup", 15 for trees.
        top_k: 1 proposes chains.  More propose trees, where the decoder can: so many tokens are considered behind each,
            and the likeliest `num_drafts` of all are proposed; there are `tree_nodes(top_k, depth)`.
        depth: longest way through a tree, 1 to 15; None is the decoder's own default, 5 for "eagle".
        adaptive: propose less, down to nothing, for requests whose proposals are not accepted.
    """

    decoder: str
    draft: str | os.PathLike[str] | None = None
    num_drafts: int | None = None
    adaptive: bool = True
    top_k: int = 1
    depth: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.decoder, str) or not self.decoder:
            raise InvalidArgumentError(f"decoder is {self.decoder!r}; pass the kind of a decoder, 'prompt_lookup' say")
        object.__setattr__(self, "decoder", NAMES.get(self.decoder, self.decoder))
        _check_draft(self.draft)
        check_flag("adaptive", self.adaptive)
        _check_count("top_k", self.top_k, MAX_TOP_K)
        if self.num_drafts is not None:
            _check_count("num_drafts", self.num_drafts, MAX_DRAFTS if self.top_k == 1 else MAX_TREE_DRAFTS)
        if self.depth is not None:
            _check_count("depth", self.depth, MAX_DRAFTS)
            if self.top_k == 1:
                raise InvalidArgumentError(
                    f"depth is {self.depth} and top_k 1, which proposes chains; pass num_drafts for their length, or a "
                    "larger top_k for trees"
                )


def tree_nodes(top_k: int, depth: int) -> int:
    """Tokens that a tree considers: `top_k` on its first level, on others `top_k` behind each of the `top_k` best."""
    return top_k + (depth - 1) * top_k * top_k


def _check_draft(draft: object) -> None:
    if draft is None:
        return
    path = os.fspath(draft) if isinstance(draft, (str, os.PathLike)) else None
    if not isinstance(path, str):
        raise InvalidArgumentError(f"draft is a {type(draft).__name__}; pass a path or None")
    if not path:
        raise InvalidArgumentError("draft is '', which would mean the current folder; pass a draft's folder or None")


def _check_count(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentError(f"{name} is {value!r}; pass an integer")
    if not 1 <= value <= most:
        raise InvalidArgumentError(f"{name} is {value}; it must be from 1 to {most}")


def speculative_options(value: SpeculativeOptions | str | None) -> SpeculativeOptions | None:
    """The options that `speculative=` means: a kind alone stands for its defaults.

    Raises:
        InvalidArgumentError: it is something else.
    """
    if value is None or isinstance(value, SpeculativeOptions):
        return value
    if isinstance(value, str):
        return SpeculativeOptions(decoder=value)
    raise InvalidArgumentError(
        f"speculative is a {type(value).__name__}; pass the kind of a decoder, edgellm.SpeculativeOptions(...) or None"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderChoice:
    """What is known of a deployment before its weights are read: enough to refuse a decoder that does not fit.

    Attributes:
        options: None for a decoder that was not asked to speculate.
        config: of the target.
        path: of the target's checkpoint.
        shipped: see `DecoderContext`.
    """

    options: SpeculativeOptions | None
    config: ModelConfig
    path: Path
    shipped: tuple[ShippedCheckpoint, ...] = ()

    def require_no_draft(self, why: str) -> None:
        """
        Raises:
            InvalidArgumentError: a draft was given; `why` it is not wanted.
        """
        if self.options is not None and self.options.draft is not None:
            raise InvalidArgumentError(f"draft is {str(self.options.draft)!r}; {why}, leave it out")

    def require_chains(self) -> None:
        """
        Raises:
            InvalidArgumentError: trees are asked for.
        """
        if self.options is not None and self.options.top_k > 1:
            raise InvalidArgumentError(
                f"top_k is {self.options.top_k}, and decoder {self.options.decoder!r} proposes chains; pass top_k=1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderContext:
    """What a decoder's factory may ask for: everything that is known before memory is divided.

    Attributes:
        options: None for a decoder that was not asked to speculate.
        model: the target; its weights may be shared (embedding, head), never changed.
        device: where the target is.
        page_size: tokens a page, of base and draft alike.
        max_batch_size: resident slots.
        max_model_len: most tokens of one sequence.
        shipped: checkpoints that plugins bring; `edgellm.shipped.draft_folder` looks among them.
    """

    options: SpeculativeOptions | None
    model: LoadedModel
    device: torch.device
    page_size: int
    max_batch_size: int
    max_model_len: int
    shipped: tuple[ShippedCheckpoint, ...] = ()

    @property
    def choice(self) -> DecoderChoice:
        """The part of it that was known before the weights were read."""
        return DecoderChoice(options=self.options, config=self.model.config, path=self.model.path, shipped=self.shipped)
