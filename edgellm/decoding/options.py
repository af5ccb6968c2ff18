"""`SpeculativeOptions`: which decoder speculates, from which draft; and what a decoder is told when it is built."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.argument_check import check_flag
from edgellm.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

    from edgellm.models.loader import LoadedModel

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
            brings; `edgellm plugins` lists them.
        draft: folder of the draft model's checkpoint; None where the decoder needs none, or finds its own.
        num_drafts: most tokens proposed in a round; None is the decoder's own default.
        top_k: 1 proposes chains.  More propose trees, where the decoder can: so many tokens are considered behind each,
            and the likeliest `num_drafts` of all are proposed.
        depth: longest way through a tree; None is the decoder's own default.
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
        if self.draft is not None and not isinstance(self.draft, (str, os.PathLike)):
            raise InvalidArgumentError(f"draft is a {type(self.draft).__name__}; pass a path or None")
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
        return SpeculativeOptions(decoder=NAMES.get(value, value))
    raise InvalidArgumentError(
        f"speculative is a {type(value).__name__}; pass the kind of a decoder, edgellm.SpeculativeOptions(...) or None"
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
    """

    options: SpeculativeOptions | None
    model: LoadedModel
    device: torch.device
    page_size: int
    max_batch_size: int
    max_model_len: int
