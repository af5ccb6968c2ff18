"""What the package registers: the policy of drafters without KV of their own, the decoder of assistants, and one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.hookspecs import hookimpl
from edgellm.shipped import DEFAULT_TARGET
from edgellm_shared_kv.policy import edgellm_register_publication_policies

if TYPE_CHECKING:
    from edgellm.decoding.options import DecoderChoice, DecoderContext
    from edgellm.plugins import DecoderRegistrar
    from edgellm.shipped import CheckpointRegistrar
    from edgellm_shared_kv.decoder import SharedKvMtpDecoder

__all__ = [
    "EDGELLM_API",
    "edgellm_register_checkpoints",
    "edgellm_register_decoders",
    "edgellm_register_publication_policies",
]

EDGELLM_API = ((1, 3), (1, 3))

DRAFTS = Path(__file__).parent / "drafts"
REMEDY = (
    "train one with `python -m training train assistant` of the source tree, and `python -m training ship assistant`"
)


def build_shared_kv_mtp(context: DecoderContext) -> SharedKvMtpDecoder:
    """See `edgellm_shared_kv.decoder.build`, which needs torch and is imported when a decoder is built."""
    from edgellm_shared_kv.decoder import build

    return build(context)


def fits_shared_kv_mtp(choice: DecoderChoice) -> None:
    """See `edgellm_shared_kv.fit.check_fits`."""
    from edgellm_shared_kv.fit import check_fits

    check_fits(choice)


@hookimpl
def edgellm_register_decoders(register: DecoderRegistrar) -> None:
    register("shared-kv-mtp", build_shared_kv_mtp, "shared_kv_mtp", fits=fits_shared_kv_mtp)


@hookimpl
def edgellm_register_checkpoints(register: CheckpointRegistrar) -> None:
    register(
        f"{DEFAULT_TARGET.name}-assistant",
        DRAFTS / DEFAULT_TARGET.name,
        decoder="shared_kv_mtp",
        target=DEFAULT_TARGET,
        remedy=REMEDY,
    )
