"""Whether decoder, plugins and model go together: found from the model's config, before any of its weights is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.cache.deployment import SPEC_REUSE_CONTRACTS, check_support
from edgellm.cache.types import ContextCacheDeploymentProfile
from edgellm.decoding.options import DecoderChoice, SpeculativeOptions
from edgellm.models.fields import naming
from edgellm.plugin_guard import check_fits

if TYPE_CHECKING:
    from pathlib import Path

    from edgellm.plugins import Plugins

PLAIN = "vanilla"


def check_decoder(path: Path, speculative: SpeculativeOptions | None, plugins: Plugins) -> None:
    """Refuse what the loaded model would refuse.

    Args:
        path: of the model's checkpoint; its headers are read.
    Raises:
        UnsupportedModelError: the model is not supported, or the decoder does not go with it or with its kind of state.
        WeightFileError: a file is missing or damaged.
        InvalidArgumentError: the decoder needs another draft or other options.
        PluginError: nobody registered the decoder, or a policy that serves it with this model.
    """
    from edgellm.models.loader import open_checkpoint

    kind = decoder_kind(speculative)
    with naming(path):
        config, _ = open_checkpoint(path)
        if kind in SPEC_REUSE_CONTRACTS:  # a kind that only a plugin knows is its plugin's to judge
            check_support(config.base_state_kind, kind)
    choice = DecoderChoice(options=speculative, config=config, path=path, shipped=tuple(plugins.shipped))
    check_fits(plugins.choose_decoder(kind), choice)  # names the draft's folder where the fault is there
    plugins.require_policies(ContextCacheDeploymentProfile(config.base_state_kind, SPEC_REUSE_CONTRACTS.get(kind)))


def decoder_kind(speculative: SpeculativeOptions | None) -> str:
    """The kind of the decoder that options ask for."""
    return PLAIN if speculative is None else speculative.decoder
