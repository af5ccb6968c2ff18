"""`SamplingState`: what one resident remembers between choosing tokens."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np

from edgellm.errors import InvalidArgumentError
from edgellm.sampling.penalties import TokenCounter, needs_output_counts, needs_repetition
from edgellm.sampling.philox import DrawPurpose, uniform
from edgellm.tokenization.token_ids import check_token_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from edgellm.sampling.guidance import Guide
    from edgellm.sampling.params import SamplingParams

_SEED_BITS = 64


class SamplingState:
    """Parameters, position and token counts of one sequence.

    Owned by the session's resident; the sampler only reads it.  Not thread-safe.  Memory is O(1) unless a
    penalty is on, then O(vocab).

    Attributes:
        params: the request's settings.
        vocab_size: width of the logits rows this state is sampled from.
        seed: 64-bit; `params.seed`, or a fresh one.
        position: absolute index of the token about to be chosen; starts at the prompt's length.
        num_output: tokens recorded so far.
        seen, output: token counts of prompt + output, and of the output; None where no penalty needs them.
        guide: where the text is in the form that was asked for; None without one.
    """

    __slots__ = (
        "_bias_ids",
        "_bias_values",
        "_min_tokens_ids",
        "_plain",
        "_untouched",
        "guide",
        "num_output",
        "output",
        "params",
        "position",
        "seed",
        "seen",
        "vocab_size",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.int32],
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        *,
        guide: Guide | None = None,
    ) -> None:
        """Start at the end of the prompt.

        Args:
            eos_token_ids: the model's end tokens; ids beyond the vocabulary cannot be generated and are
                left out.
            guide: for `params.structured`, at its beginning; owned from here on.
        Raises:
            InvalidArgumentError: an id in `logit_bias` or `stop_token_ids` (or, when a repetition penalty is
                on, in the prompt) is outside the vocabulary; or a form is asked for and no guide given.
        """
        check_token_ids("logit_bias", params.logit_bias, vocab_size)
        check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        if params.structured is not None and guide is None:
            raise InvalidArgumentError(
                "structured is set and nothing here follows its grammar; pass the guide that Guidance.start gives"
            )
        self.params = params
        self.guide = guide
        self.vocab_size = vocab_size
        self.seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed
        self.position = len(prompt_token_ids)
        self.num_output = 0
        self.seen: TokenCounter | None = None
        self.output: TokenCounter | None = None
        if needs_repetition(params):
            self.seen = TokenCounter(vocab_size)
            self.seen.add_prompt(prompt_token_ids)
        if needs_output_counts(params):
            self.output = TokenCounter(vocab_size)
        self._bias_ids = np.array(list(params.logit_bias.keys()), dtype=np.int64)
        self._bias_values = np.array(list(params.logit_bias.values()), dtype=np.float64)
        self._min_tokens_ids = _min_tokens_ids(params, eos_token_ids, vocab_size)
        untouched = self.seen is None and self.output is None and not params.logit_bias and guide is None
        self._untouched = untouched and params.logprobs is None
        self._plain = params.greedy and self._untouched

    @property
    def plain_greedy(self) -> bool:
        """True when the next token is the argmax of the raw logits and nothing else was asked for."""
        return self._plain and not self.end_tokens_masked

    @property
    def follows_position(self) -> bool:
        """True when nothing but logits and position decides the next tokens, whatever tokens come before them."""
        return self._untouched and not self.end_tokens_masked

    @property
    def end_tokens_masked(self) -> bool:
        """True while `min_tokens` still forbids some token."""
        return self.num_output < self.params.min_tokens and len(self._min_tokens_ids) > 0

    @property
    def masked_ids(self) -> npt.NDArray[np.int64]:
        """(n,) int64, the ids `min_tokens` forbids: stop token ids, and end tokens unless they are ignored."""
        return self._min_tokens_ids

    @property
    def bias(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """((n,) int64 ids, (n,) float64 biases)."""
        return self._bias_ids, self._bias_values

    def record(self, token_id: int) -> None:
        """Take note of a chosen token: counts, grammar, position and number of outputs advance.  O(1).

        Raises:
            InvalidArgumentError: the id is outside the vocabulary.  Nothing was changed.
        """
        if not 0 <= token_id < self.vocab_size:
            check_token_ids("record", (token_id,), self.vocab_size)
        if self.seen is not None:
            self.seen.add(token_id)
        if self.output is not None:
            self.output.add(token_id)
        if self.guide is not None:
            self.guide.record(token_id)
        self.position += 1
        self.num_output += 1

    def uniform(self, purpose: DrawPurpose = DrawPurpose.TOKEN, *, offset: int = 0) -> float:
        """The random number of [0, 1) for the token at `position + offset`.  Pure: asking twice gives it twice."""
        return uniform(self.seed, self.position + offset, purpose)

    def ahead(self, count: int) -> list[SamplingState]:
        """This state and those of the `count` places behind it, where it `follows_position`; to be read only."""
        if self._plain:  # position does not matter either
            return [self] * (count + 1)
        states = [self]
        for offset in range(1, count + 1):
            other = self.clone()
            other.position += offset
            other.num_output += offset
            states.append(other)
        return states

    def clone(self) -> SamplingState:
        """An independent copy with the same seed: both continue identically until they record differently."""
        other = SamplingState.__new__(SamplingState)
        for name in SamplingState.__slots__:
            setattr(other, name, getattr(self, name))
        other.seen = None if self.seen is None else self.seen.clone()
        other.output = None if self.output is None else self.output.clone()
        other.guide = None if self.guide is None else self.guide.clone()
        return other


def _min_tokens_ids(params: SamplingParams, eos_token_ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.int64]:
    if params.min_tokens == 0:
        return np.empty(0, np.int64)
    ids = set(params.stop_token_ids)
    if not params.ignore_eos:
        ids.update(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
    return np.array(sorted(ids), dtype=np.int64)
