"""What the package registers: the policy of drafters without KV of their own, and the shared-KV assistant decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.hookspecs import hookimpl
from edgellm_shared_kv.policy import edgellm_register_publication_policies

if TYPE_CHECKING:
    from edgellm.decoding.options import DecoderContext
    from edgellm.plugins import DecoderRegistrar
    from edgellm_shared_kv.decoder import SharedKvMtpDecoder

__all__ = ["EDGELLM_API", "edgellm_register_decoders", "edgellm_register_publication_policies"]

EDGELLM_API = ((1, 2), (1, 2))


def build_shared_kv_mtp(context: DecoderContext) -> SharedKvMtpDecoder:
    """See `edgellm_shared_kv.decoder.build`, which needs torch and is imported when a decoder is built."""
    from edgellm_shared_kv.decoder import build

    return build(context)


@hookimpl
def edgellm_register_decoders(register: DecoderRegistrar) -> None:
    register("shared-kv-mtp", build_shared_kv_mtp, "shared_kv_mtp")
