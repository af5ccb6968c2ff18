"""What the package registers: the policy of drafters with pages of their own, the EAGLE-3 decoder, and a head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.hookspecs import hookimpl
from edgellm.shipped import DEFAULT_TARGET
from edgellm_eagle.policy import edgellm_register_publication_policies

if TYPE_CHECKING:
    from edgellm.decoding.options import DecoderChoice, DecoderContext
    from edgellm.plugins import DecoderRegistrar
    from edgellm.shipped import CheckpointRegistrar
    from edgellm_eagle.decoder import Eagle3Decoder

__all__ = [
    "EDGELLM_API",
    "edgellm_register_checkpoints",
    "edgellm_register_decoders",
    "edgellm_register_publication_policies",
]

EDGELLM_API = ((1, 3), (1, 3))

DRAFTS = Path(__file__).parent / "drafts"
REMEDY = "train one with `python -m training train eagle` of the source tree, and `python -m training ship eagle`"


def build_eagle3(context: DecoderContext) -> Eagle3Decoder:
    """See `edgellm_eagle.decoder.build`, which needs torch and is imported when a decoder is built."""
    from edgellm_eagle.decoder import build

    return build(context)


def fits_eagle3(choice: DecoderChoice) -> None:
    """See `edgellm_eagle.fit.check_fits`."""
    from edgellm_eagle.fit import check_fits

    check_fits(choice)


@hookimpl
def edgellm_register_decoders(register: DecoderRegistrar) -> None:
    register("eagle3", build_eagle3, "eagle", fits=fits_eagle3)


@hookimpl
def edgellm_register_checkpoints(register: CheckpointRegistrar) -> None:
    register(
        f"{DEFAULT_TARGET.name}-eagle3",
        DRAFTS / DEFAULT_TARGET.name,
        decoder="eagle",
        target=DEFAULT_TARGET,
        remedy=REMEDY,
    )
