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
        adaptive: propose less, down to nothing, for requests whose proposals are not accepted.
    """

    decoder: str
    draft: str | os.PathLike[str] | None = None
    num_drafts: int | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.decoder, str) or not self.decoder:
            raise InvalidArgumentError(f"decoder is {self.decoder!r}; pass the kind of a decoder, 'prompt_lookup' say")
        if self.draft is not None and not isinstance(self.draft, (str, os.PathLike)):
            raise InvalidArgumentError(f"draft is a {type(self.draft).__name__}; pass a path or None")
        drafts = self.num_drafts
        if drafts is not None and (isinstance(drafts, bool) or not isinstance(drafts, int)):
            raise InvalidArgumentError(f"num_drafts is {drafts!r}; pass an integer or None")
        if drafts is not None and not 1 <= drafts <= MAX_DRAFTS:
            raise InvalidArgumentError(f"num_drafts is {drafts}; it must be from 1 to {MAX_DRAFTS}")
        check_flag("adaptive", self.adaptive)


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
