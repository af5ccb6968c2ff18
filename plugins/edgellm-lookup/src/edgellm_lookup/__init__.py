"""Prompt-lookup decoding; see `edgellm_lookup.decoder`."""

from edgellm_lookup.decoder import PromptLookupDecoder
from edgellm_lookup.ngram_index import NgramIndex

__all__ = ["NgramIndex", "PromptLookupDecoder"]
