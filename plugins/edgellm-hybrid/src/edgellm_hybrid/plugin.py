"""What the package registers: the policies of hybrid models, the decoder over their prediction head, and a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.hookspecs import hookimpl
from edgellm_hybrid.policy import edgellm_register_publication_policies

if TYPE_CHECKING:
    from edgellm.decoding.options import DecoderChoice, DecoderContext
    from edgellm.plugins import DecoderRegistrar
    from edgellm.shipped import CheckpointRegistrar
    from edgellm_hybrid.decoder import HybridMtpDecoder

__all__ = [
    "EDGELLM_API",
    "edgellm_register_checkpoints",
    "edgellm_register_decoders",
    "edgellm_register_publication_policies",
]

EDGELLM_API = ((1, 3), (1, 3))

MODEL, FOLDER = "edgellm-hybrid-7m", Path(__file__).parent / "model"
REMEDY = "train it with `python -m training train hybrid` of the source tree, and `python -m training ship hybrid`"


def build_hybrid_mtp(context: DecoderContext) -> HybridMtpDecoder:
    """See `edgellm_hybrid.decoder.build`, which needs torch and is imported when a decoder is built."""
    from edgellm_hybrid.decoder import build

    return build(context)


def fits_hybrid_mtp(choice: DecoderChoice) -> None:
    """See `edgellm_hybrid.decoder.check_fits`."""
    from edgellm_hybrid.decoder import check_fits

    check_fits(choice)


@hookimpl
def edgellm_register_decoders(register: DecoderRegistrar) -> None:
    register("hybrid-mtp", build_hybrid_mtp, "mtp", fits=fits_hybrid_mtp)


@hookimpl
def edgellm_register_checkpoints(register: CheckpointRegistrar) -> None:
    register(MODEL, FOLDER, remedy=REMEDY)
