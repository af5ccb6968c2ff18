"""Chains: widening a batch, verifying proposals, and what a step reports about them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from edgellm.decoding.adaptive import DraftLengths
from edgellm.decoding.base import DecodingSeat, DecodingStrategy
from edgellm.decoding.chain import ChainDecoder, KeptRow, widen
from edgellm.decoding.verify import verify_runs
from edgellm.errors import BrokenInvariantError
from edgellm.runtime.batch import RaggedBatch, StateResources, VerifyForward, resources_of
from edgellm.sampling.params import SamplingParams
from edgellm.sampling.sampler import Sampler, SamplingState

VOCAB = 12


def batch_of(*rows: tuple[int, int, list[int], bool]) -> RaggedBatch:
    """Rows are (slot, past, tokens, selected)."""
    lengths = [len(tokens) for _, _, tokens, _ in rows]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    selected = [row for row, (_, _, _, wanted) in enumerate(rows) if wanted]
    return RaggedBatch(
        token_ids=np.array([token for _, _, tokens, _ in rows for token in tokens], np.int32),
        positions=np.array([past + i for _, past, tokens, _ in rows for i in range(len(tokens))], np.int32),
        query_start=starts,
        query_len=np.array(lengths, np.int32),
        past_len=np.array([past for _, past, _, _ in rows], np.int32),
        state_index=np.array([slot for slot, _, _, _ in rows], np.int32),
        page_rows=np.zeros((4, 1), np.int32),
        logits_index=np.array([starts[row + 1] - 1 for row in selected], np.int64),
        logits_to_seq=np.array(selected, np.int32),
    )


def test_widen_puts_proposals_behind_their_rows_and_selects_each_of_them() -> None:
    batch = batch_of((2, 0, [1, 2, 3], False), (3, 4, [5, 6], True), (0, 9, [7], True), (1, 5, [8], True))
    wide = widen(batch, [[], [], [10, 11], []])
    assert wide.token_ids.tolist() == [1, 2, 3, 5, 6, 7, 10, 11, 8]
    assert wide.positions.tolist() == [0, 1, 2, 4, 5, 9, 10, 11, 5]
    assert wide.query_start.tolist() == [0, 3, 5, 8, 9]
    assert wide.query_len.tolist() == [3, 2, 3, 1]
    assert wide.logits_index.tolist() == [4, 5, 6, 7, 8]
    assert wide.logits_to_seq.tolist() == [1, 2, 2, 2, 3]
    assert wide.past_len.tolist() == [0, 4, 9, 5]
    assert (wide.logits_index.dtype, wide.logits_to_seq.dtype, wide.token_ids.dtype) == (np.int64, np.int32, np.int32)
    assert batch.token_ids.tolist() == [1, 2, 3, 5, 6, 7, 8]


def test_widen_without_proposals_is_the_batch_itself() -> None:
    batch = batch_of((0, 3, [7], True))
    assert widen(batch, [[]]) is batch


def logits_for(*choices: int) -> torch.Tensor:
    """Row i prefers `choices[i]`; -1 is a row of NaN."""
    rows = torch.zeros((len(choices), VOCAB))
    for row, token in enumerate(choices):
        if token < 0:
            rows[row] = float("nan")
        else:
            rows[row, token] = 9.0
    return rows


def state(position: int = 3, **params: Any) -> SamplingState:
    return SamplingState(SamplingParams(**{"temperature": 0.0, **params}), [1] * position, VOCAB)


@pytest.mark.parametrize("params", [{}, {"repetition_penalty": 1.0001}], ids=["plain", "position by position"])
@pytest.mark.parametrize(
    ("choices", "chain", "expected"),
    [
        ((4,), [], [4]),
        ((4, 5, 6), [4, 5], [4, 5, 6]),
        ((4, 5, 6), [4, 7], [4, 5]),
        ((4, 5, 6), [9, 5], [4]),
        ((4, -1, 6), [4, 5], [4]),
        ((4, 5, -1), [4, 5], [4, 5]),
    ],
)
def test_a_run_is_what_agrees_and_one_token_more(
    params: dict[str, Any], choices: tuple[int, ...], chain: list[int], expected: list[int]
) -> None:
    one = state(**params)
    (run,) = verify_runs(logits_for(*choices), [chain], Sampler(), [one])
    assert (run.token_ids, run.error) == (expected, "")
    assert (one.position, one.num_output) == (3, 0)  # nothing is recorded


def test_a_first_position_without_a_choice_is_the_error_of_its_row_alone() -> None:
    runs = verify_runs(logits_for(-1, 4, 5, 6), [[3], [5]], Sampler(), [state(), state()])
    assert runs[0].token_ids == []
    assert "NaN" in runs[0].error
    assert runs[1].token_ids == [5, 6]


def test_sampled_chains_draw_what_plain_decoding_draws_at_each_position() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((4, VOCAB), generator=generator)
    params: dict[str, Any] = {"temperature": 1.3, "seed": 11, "presence_penalty": 0.4, "logprobs": 2}
    plain, wanted, logprobs = state(**params), [], []
    for row in range(4):
        chosen = Sampler().sample(logits[row : row + 1], [plain])
        wanted.append(chosen.token_ids[0])
        logprobs.append(chosen.logprobs[0])
        plain.record(wanted[-1])
    (run,) = verify_runs(logits, [wanted[:3]], Sampler(), [state(**params)])
    assert (run.token_ids, run.logprobs) == (wanted, logprobs)
    wrong = [wanted[0], (wanted[1] + 1) % VOCAB, wanted[2]]
    (run,) = verify_runs(logits, [wrong], Sampler(), [state(**params)])
    assert (run.token_ids, run.logprobs) == (wanted[:2], logprobs[:2])


class Counting(ChainDecoder):
    """Proposes the numbers that follow, as many as it may."""

    name = "counting"

    def __init__(self, lengths: DraftLengths | None = None) -> None:
        super().__init__(3, lengths)
        self.limits: list[int] = []
        self.kept: list[KeptRow] = []

    def propose(self, executor: Any, batch: RaggedBatch, rows: Any, limits: Any) -> list[list[int]]:
        self.limits = list(limits)
        return [
            [int(batch.token_ids[batch.query_start[row]]) + 1 + step for step in range(limit)]
            for row, limit in zip(rows, limits, strict=True)
        ]

    def absorb(self, executor: Any, row: KeptRow) -> None:
        self.kept.append(row)


class Successor:
    """The next token is the next number, but for 8: that goes on with 2."""

    def __init__(self) -> None:
        self.rewound: list[tuple[int, int]] = []

    def forward_verify(self, batch: RaggedBatch) -> VerifyForward:
        tokens = batch.token_ids[batch.logits_index]
        return VerifyForward(logits_for(*(2 if token == 8 else (int(token) + 1) % VOCAB for token in tokens)))

    def rewind(self, state_index: Any, kept: Any) -> None:
        self.rewound += zip(state_index, kept, strict=True)


def seated(decoder: ChainDecoder, *slots: int) -> None:
    for slot in slots:
        decoder.seat(None, DecodingSeat(slot, slot + 1, np.arange(4, dtype=np.int32), 0))  # type: ignore[arg-type]


def test_a_step_of_chunks_and_decode_rows() -> None:
    decoder, executor = Counting(), Successor()
    seated(decoder, 0, 1, 2, 3)
    batch = batch_of((3, 0, [4, 5], False), (2, 2, [6, 7], True), (0, 4, [3], True), (1, 6, [6], True))
    batch.max_drafts = np.array([0, 0, 1, 9], np.int32)
    tokens = decoder.run_step(executor, batch, Sampler(), [state(), state(), state()])  # type: ignore[arg-type]
    assert decoder.limits == [1, 3]
    assert tokens.token_ids == [[8], [4, 5], [7, 8, 2]]
    assert tokens.committed == [2, 2, 2, 3]
    assert tokens.proposed == [0, 0, 1, 3]
    assert executor.rewound == [(1, 3)]  # 6, 7 and 8 stay, the proposal 9 goes
    assert [(row.slot, row.past, row.inputs.tolist(), row.token_ids) for row in decoder.kept] == [
        (3, 0, [4, 5], []),
        (2, 2, [6, 7], [8]),
        (0, 4, [3, 4], [4, 5]),
        (1, 6, [6, 7, 8], [7, 8, 2]),
    ]


class Clock:
    """Goes on when a test says so."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


class Listening(DraftLengths):
    """Remembers what it was told of rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[tuple[int, float]] = []

    def observe_round(self, tokens: int, seconds: float) -> None:
        self.rounds.append((tokens, seconds))
        super().observe_round(tokens, seconds)


def test_rounds_are_measured_from_end_to_end_unless_they_or_those_before_have_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, lengths = Clock(), Listening()
    monkeypatch.setattr("edgellm.decoding.chain.perf_counter", clock)
    decoder, executor = Counting(lengths), Successor()
    seated(decoder, 0, 1)
    decodes, mixed = batch_of((0, 4, [3], True), (1, 6, [8], True)), batch_of((0, 4, [3], True), (1, 0, [4, 5], False))
    for batch, rows in ((decodes, 2), (decodes, 2), (mixed, 1), (decodes, 2), (decodes, 2)):
        decoder.run_step(executor, batch, Sampler(), [state() for _ in range(rows)])  # type: ignore[arg-type]
        clock.now += 0.5
    seconds = [spent for _, spent in lengths.rounds]
    assert seconds == [0.0, 0.5, 0.0, 0.0, 0.5]
    assert lengths.rounds[0][0] == 5  # 4 to 7 behind 3, 2 behind 8


def test_a_slot_nobody_seated_is_a_broken_invariant() -> None:
    decoder = Counting()
    seated(decoder, 0, 1)
    decoder.unseat([1])
    with pytest.raises(BrokenInvariantError, match="slot 1 runs and was never seated"):
        decoder.run_step(Successor(), batch_of((1, 4, [3], True)), Sampler(), [state()])  # type: ignore[arg-type]


def test_headroom_is_what_a_round_may_address() -> None:
    decoder = Counting()
    headroom = decoder.required_kv_headroom()
    assert (headroom.base_extra_tokens, headroom.draft_extra_tokens) == (4, 0)


def test_a_decoder_that_keeps_nothing_needs_no_hook() -> None:
    class Plain(DecodingStrategy):
        name = "plain"

        def run_step(self, executor: Any, batch: Any, sampler: Any, rows: Any) -> Any: ...

    plain = Plain()
    seated(plain, 0)  # type: ignore[arg-type]
    plain.unseat([0])
    plain.settle(None, [0], [1])  # type: ignore[arg-type]
    assert (plain.common_state_length(0), plain.boundary_hidden(0)) == (None, None)
    with pytest.raises(BrokenInvariantError, match="'plain'"):
        plain.new_hidden_row()


def test_an_executor_that_says_nothing_holds_base_state_alone() -> None:
    assert resources_of(object()) == StateResources()
