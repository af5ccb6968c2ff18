"""A simulated machine for `DraftLengths`: what rounds with and without proposals take is given, no clock is read."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgellm.decoding.adaptive import DraftLengths

Acceptance = Callable[[int, int], float]  # of a slot, in a round


@dataclass
class SimulatedDecoder:
    """Rounds as `ChainDecoder` runs them where every row decodes.

    Attributes:
        acceptance: share of its proposals that a slot keeps.
        cost: seconds of a round with proposals; one without takes 1, or 1.5 where it did not run ahead.
        noise: share by which seconds vary.
        hidden: share of the cost that the model of `DraftLengths` sees neither in proposing nor in the step.
        length: of all proposals, for a decoder that never asks; None asks.
        churn: rounds after which another slot begins a new sequence; 0 never.
        drift: by how much each round makes all later ones slower, as a share.
        tokens, seconds: sums so far.
        proposed_in: rounds with proposals.
        dropped: steps that ran ahead and were not used.
    """

    residents: int
    acceptance: Acceptance
    cost: float
    noise: float = 0.0
    seed: int = 0
    most: int = 4
    hidden: float = 0.4
    length: int | None = None
    churn: int = 0
    drift: float = 0.0
    lengths: DraftLengths = field(default_factory=DraftLengths)
    tokens: int = 0
    seconds: float = 0.0
    proposed_in: list[int] = field(default_factory=list)
    dropped: int = 0

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._ahead = False
        self._round = 0
        for slot in range(self.residents):
            self.lengths.seat(slot)

    @property
    def speed(self) -> float:
        """Tokens a second of one resident; of rounds without proposals 1."""
        return self.tokens / self.seconds / self.residents

    def run(self, rounds: int) -> SimulatedDecoder:
        for _ in range(rounds):
            self._one()
        return self

    def _one(self) -> None:
        if self.churn and self._round % self.churn == 0:
            slot = self._round // self.churn % self.residents
            self.lengths.unseat(slot)
            self.lengths.seat(slot)
        slots, most = list(range(self.residents)), [self.most] * self.residents
        rests = self.length is None and self.lengths.rest(slots, most)
        chosen = self._lengths(slots, most, rests)
        seconds, tokens = self._seconds(any(chosen)), self._tokens(chosen)
        if self.length is None:
            self._ahead = not any(chosen) and self.lengths.stay_idle(slots, most)
            if not rests:
                self._learn(chosen, tokens, seconds)
            self.lengths.observe_round(sum(tokens), seconds)
        if any(chosen):
            self.proposed_in.append(self._round)
        self.tokens, self.seconds, self._round = self.tokens + sum(tokens), self.seconds + seconds, self._round + 1

    def _lengths(self, slots: list[int], most: list[int], rests: bool) -> list[int]:
        if self.length is not None:
            return [self.length] * self.residents
        return [0] * self.residents if rests else self.lengths.limits(slots, most)

    def _seconds(self, proposes: bool) -> float:
        self.dropped += proposes and self._ahead
        plain = 1.0 if self._ahead or not self._round else 1.5
        seconds = self.cost + self._ahead if proposes else plain
        return seconds * (1.0 + self._chance.uniform(-self.noise, self.noise)) * (1.0 + self.drift * self._round)

    def _tokens(self, chosen: Sequence[int]) -> list[int]:
        return [1 + self._kept(slot, number) for slot, number in enumerate(chosen)]

    def _kept(self, slot: int, number: int) -> int:
        kept, share = 0, self.acceptance(slot, self._round)
        while kept < number and self._chance.random() < share:
            kept += 1
        return kept

    def _learn(self, chosen: Sequence[int], tokens: Sequence[int], seconds: float) -> None:
        for slot, (number, kept) in enumerate(zip(chosen, tokens, strict=True)):
            self.lengths.observe(slot, number, kept - 1)
        seen = seconds * (1.0 - self.hidden) if any(chosen) else seconds
        drafting = 0.25 * seen if any(chosen) else 0.0
        self.lengths.observe_proposing(max(chosen), drafting)
        self.lengths.times.observe(self.residents + sum(chosen), seen - drafting)


def best_of_all_lengths(decoder: SimulatedDecoder, rounds: int) -> float:
    """Speed of the same machine that always proposes as many tokens as is best."""
    given = (decoder.residents, decoder.acceptance, decoder.cost, decoder.noise, decoder.seed, decoder.most)
    return max(SimulatedDecoder(*given, length=length).run(rounds).speed for length in range(1, decoder.most + 1))
