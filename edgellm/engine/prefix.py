"""`prefix_key`: which requests are likely to share a prefix, without tokenising them."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from edgellm.cache.types import ContextCacheLookupPolicy
from edgellm.foreign import call_foreign

if TYPE_CHECKING:
    from edgellm.request import LLMGenerationRequest

Start: TypeAlias = str | tuple[int, ...] | tuple[str, str]
PrefixKey: TypeAlias = tuple[str, str | None, Start]

KEY_CHARACTERS = 256
"""How much of a text two requests must have in common to count as neighbours."""

KEY_TOKENS = 64
"""The same for prompts that are tokens."""


def prefix_key(request: LLMGenerationRequest) -> PrefixKey | None:
    """A key that is equal for requests that begin alike.  Pure, cheap, never raises.

    It is made of the salt and of the first characters (of the messages with their roles, or of the prompt) or token
    ids.  Only a hint: a wrong one costs an order of admission, never an answer.

    Returns:
        None where sharing is not wanted (cache bypassed), too short to matter, or malformed.  Else made of exact `str`
        and `int` alone, whatever the request holds, so that it can be hashed and compared.
    """
    if request.lookup_policy is ContextCacheLookupPolicy.BYPASS:
        return None
    keys: list[PrefixKey | None] = []
    malformed = call_foreign(lambda: keys.append(_key(request)))  # admission refuses such prompts, with a message
    return None if malformed is not None else keys[0]


def _key(request: LLMGenerationRequest) -> PrefixKey | None:
    salt = None if request.cache_salt is None else _plain_text(request.cache_salt)
    kind, start = _start(request)
    return None if start is None else (kind, salt, start)


def _start(request: LLMGenerationRequest) -> tuple[str, Start | None]:
    if request.prompt_token_ids is not None:
        ids = tuple(int(token) for token in islice(iter(request.prompt_token_ids), KEY_TOKENS))
        return "ids", ids if len(ids) == KEY_TOKENS else None
    if request.messages is not None:
        start = _enough(_conversation(request))
        # Template arguments first, because a template writes them there too (tools, say).
        return "messages", None if start is None else (repr(sorted(request.chat_template_kwargs.items())), start)
    return "prompt", _enough("" if request.prompt is None else _plain_text(request.prompt, KEY_CHARACTERS))


def _conversation(request: LLMGenerationRequest) -> str:
    """The beginning of the conversation: at least `KEY_CHARACTERS` where it has so many."""
    text = ""
    for message in () if request.messages is None else request.messages:
        content = message.get("content")
        start = _plain_text(content, KEY_CHARACTERS) if isinstance(content, str) else repr(content)
        text += f"\x1f{message.get('role')}\x1e{start}"
        if len(text) >= KEY_CHARACTERS:
            break
    return text


def _plain_text(text: Any, length: int | None = None) -> str:
    """The first `length` characters as an exact `str`, also of a subclass; raises TypeError for what is no text."""
    return str.__getitem__(text, slice(length))


def _enough(text: str) -> str | None:
    return text[:KEY_CHARACTERS] if len(text) >= KEY_CHARACTERS else None
