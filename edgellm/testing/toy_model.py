"""The integer toy model of every flavour, in plain Python: what a sequence's state and text must be.

Attention keeps one 64-bit value per token, in pages.  Recurrent layers keep one running value and a conv window of
the last four inputs, in a resident slot; hybrids have both, and the value of a token depends on the recurrent
state, so a wrong restore spreads into pages.  The next token depends on all of it.

The draft model keeps one value per token as well; the entry at position t depends on the hidden row at t and on the
token at t + 1, so an entry that was computed with another successor differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from edgellm.testing.toy import MASK64, MIX_A, ROOT_STATE, mix_token, next_token_of_fold

if TYPE_CHECKING:
    from edgellm.cache.types import ContextCacheDeploymentProfile

CONV_WINDOW = 4
HIDDEN_WIDTH = 2
TOY_VOCAB = 50_021  # a prime: two states agree on the next token by chance once in 50,021

_DRAFT_ROOT = 0x452821E638D01377
_INPUT = 0x13198A2E03707344
_HIDDEN = 0xA4093822299F31D0

HiddenRow = tuple[int, int]


class RecurrentState(NamedTuple):
    """State of the recurrent layers after some tokens; zeros before the first."""

    value: int = 0
    window: tuple[int, int, int, int] = (0, 0, 0, 0)

    def after(self, token_id: int, position: int) -> RecurrentState:
        """The state one token later; depends on the running value and on every place of the window."""
        new = mix_token(token_id, position, _INPUT)
        value = mix_token(0, position, self.value ^ fold_values((*self.window, new)))
        return RecurrentState(value, (self.window[1], self.window[2], self.window[3], new))

    def folded(self) -> int:
        return mix_token(1, 0, self.value ^ fold_values(self.window))


def fold_value(value: int, place: int) -> int:
    """What one value adds to a fold (by xor); depends on its place."""
    return ((value ^ (value >> 29)) * ((place * 2 + 1) * MIX_A & MASK64)) & MASK64


def fold_values(values: Sequence[int]) -> int:
    folded = 0
    for place, value in enumerate(values):
        folded ^= fold_value(value, place)
    return folded


def draft_entry(hidden: HiddenRow, successor: int, position: int, parent: int | None) -> int:
    """The draft model's state at `position`, from the hidden row there and the token that follows."""
    before = _DRAFT_ROOT if parent is None else parent
    return mix_token(successor, position, before ^ fold_values(hidden))


@dataclass(frozen=True, slots=True)
class ToyModel:
    """Which kinds of state the model has, and whether a draft entry depends on the token after its own."""

    has_attention: bool = True
    has_recurrent: bool = False
    vocab_size: int = TOY_VOCAB
    draft_looks_ahead: bool = True

    @classmethod
    def of(cls, profile: ContextCacheDeploymentProfile, vocab_size: int = TOY_VOCAB) -> ToyModel:
        contract = profile.spec_reuse_contract
        looks_ahead = contract is None or contract.future_dependency_tokens > 0
        return cls(profile.has_attention, profile.uses_checkpoint_reuse, vocab_size, looks_ahead)

    def successor(self, tokens: Sequence[int], position: int) -> int:
        """What the draft entry at `position` depends on beside its hidden row and the entry before."""
        return tokens[position + 1] if self.draft_looks_ahead else 0

    def num_drafts(self, num_tokens: int) -> int:
        """How many draft entries are determined by that many tokens."""
        return num_tokens - 1 if self.draft_looks_ahead and num_tokens else num_tokens

    def token_value(self, token_id: int, position: int, parent: int | None, recurrent: RecurrentState | None) -> int:
        """The KV value of one token; `recurrent` is the state after it."""
        before = ROOT_STATE if parent is None else parent
        return mix_token(token_id, position, before if recurrent is None else before ^ recurrent.folded())

    def hidden(self, value: int | None, recurrent: RecurrentState | None) -> HiddenRow:
        """The base model's last hidden row at a token."""
        return (
            mix_token(2, 0, _HIDDEN ^ (value or 0)),
            mix_token(3, 0, _HIDDEN ^ (0 if recurrent is None else recurrent.folded())),
        )

    def next_token(self, fold: int, recurrent: RecurrentState | None) -> int:
        """The token after a state: `fold` of all KV values, and the recurrent state."""
        if recurrent is None:
            return next_token_of_fold(fold, self.vocab_size)
        return next_token_of_fold(mix_token(4, 0, fold ^ recurrent.folded()), self.vocab_size)


class SoloRun:
    """A sequence computed alone, token by token, without pages, slots or chunks: the cold twin.

    Attributes:
        tokens: everything appended so far.
        values: KV value of each token (kept for pure recurrent models too; they do not use it).
        recurrents: recurrent state after 0, 1, 2 ... tokens.
        hiddens: hidden row of each token.
        drafts: draft entry of each token; where they look ahead, the last token has none yet.
    """

    def __init__(self, model: ToyModel, tokens: Sequence[int] = ()) -> None:
        self.model = model
        self.tokens: list[int] = []
        self.values: list[int] = []
        self.recurrents: list[RecurrentState] = [RecurrentState()]
        self.hiddens: list[HiddenRow] = []
        self.drafts: list[int] = []
        self._fold = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token_id: int) -> None:
        model, position = self.model, len(self.tokens)
        self.recurrents.append(
            self.recurrents[-1].after(token_id, position) if model.has_recurrent else RecurrentState()
        )
        recurrent = self._recurrent()
        value = model.token_value(token_id, position, self.values[-1] if self.values else None, recurrent)
        self.values.append(value)
        if model.has_attention:
            self._fold ^= fold_value(value, position)
        self.hiddens.append(model.hidden(value if model.has_attention else None, recurrent))
        self.tokens.append(token_id)
        for place in range(len(self.drafts), model.num_drafts(len(self.tokens))):
            parent = self.drafts[-1] if self.drafts else None
            self.drafts.append(draft_entry(self.hiddens[place], model.successor(self.tokens, place), place, parent))

    def extend(self, tokens: Sequence[int]) -> None:
        for token_id in tokens:
            self.append(int(token_id))

    def next_token(self) -> int:
        return self.model.next_token(self._fold, self._recurrent())

    def copy(self) -> SoloRun:
        """An independent continuation point.  Cost: O(tokens)."""
        twin = SoloRun(self.model)
        twin.tokens, twin.values = list(self.tokens), list(self.values)
        twin.recurrents, twin.hiddens, twin.drafts = list(self.recurrents), list(self.hiddens), list(self.drafts)
        twin._fold = self._fold
        return twin

    def continuation(self, num_tokens: int) -> list[int]:
        """The greedy text of `num_tokens` tokens from here; the run itself stays where it is."""
        twin = self.copy()
        for _ in range(num_tokens):
            twin.append(twin.next_token())
        return twin.tokens[len(self.tokens) :]

    def _recurrent(self) -> RecurrentState | None:
        return self.recurrents[-1] if self.model.has_recurrent else None


def solo_run(prompt: Sequence[int], num_tokens: int, model: ToyModel | None = None) -> list[int]:
    """The `num_tokens` tokens that must follow `prompt`, speculation and cache or not."""
    return SoloRun(model or ToyModel(), prompt).continuation(num_tokens)
