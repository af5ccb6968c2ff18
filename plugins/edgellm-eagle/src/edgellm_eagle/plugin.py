"""What the package registers: the policy of drafters with pages of their own, and the EAGLE-3 decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.hookspecs import hookimpl
from edgellm_eagle.policy import edgellm_register_publication_policies

if TYPE_CHECKING:
    from edgellm.decoding.options import DecoderContext
    from edgellm.plugins import DecoderRegistrar
    from edgellm_eagle.decoder import Eagle3Decoder

__all__ = ["EDGELLM_API", "edgellm_register_decoders", "edgellm_register_publication_policies"]

EDGELLM_API = ((1, 2), (1, 2))


def build_eagle3(context: DecoderContext) -> Eagle3Decoder:
    """See `edgellm_eagle.decoder.build`, which needs torch and is imported when a decoder is built."""
    from edgellm_eagle.decoder import build

    return build(context)


@hookimpl
def edgellm_register_decoders(register: DecoderRegistrar) -> None:
    register("eagle3", build_eagle3, "eagle")
