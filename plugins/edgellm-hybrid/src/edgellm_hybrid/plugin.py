"""What the package registers: the policies of hybrid models, and the decoder over their multi-token prediction head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.hookspecs import hookimpl
from edgellm_hybrid.policy import edgellm_register_publication_policies

if TYPE_CHECKING:
    from edgellm.decoding.options import DecoderContext
    from edgellm.plugins import DecoderRegistrar
    from edgellm_hybrid.decoder import HybridMtpDecoder

__all__ = ["EDGELLM_API", "edgellm_register_decoders", "edgellm_register_publication_policies"]

EDGELLM_API = ((1, 2), (1, 2))


def build_hybrid_mtp(context: DecoderContext) -> HybridMtpDecoder:
    """See `edgellm_hybrid.decoder.build`, which needs torch and is imported when a decoder is built."""
    from edgellm_hybrid.decoder import build

    return build(context)


@hookimpl
def edgellm_register_decoders(register: DecoderRegistrar) -> None:
    register("hybrid-mtp", build_hybrid_mtp, "mtp")
