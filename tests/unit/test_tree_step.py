"""Trees in a step: the walk that verifies them, and what becomes of the rows that were kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from edgellm.decoding.base import DecodingSeat
from edgellm.decoding.chain import ChainDecoder, KeptRow
from edgellm.decoding.draft_tree import DraftTree
from edgellm.decoding.verify import verify_runs
from edgellm.runtime.batch import RaggedBatch, VerifyForward
from edgellm.sampling.params import SamplingParams
from edgellm.sampling.sampler import Sampler, SamplingState

VOCAB = 12
#          0
#        /   \
#       1:4   2:5
#      /  \     \
#    3:6  4:7   5:6
#     |
#    6:8
TREE = DraftTree([4, 5, 6, 7, 6, 8], [0, 0, 1, 1, 2, 3], [0.6, 0.4, 0.3, 0.3, 0.2, 0.1])


def state(position: int = 3, **params: Any) -> SamplingState:
    return SamplingState(SamplingParams(**{"temperature": 0.0, **params}), [1] * position, VOCAB)


def logits_for(*choices: int) -> torch.Tensor:
    """Row i prefers `choices[i]`; -1 is a row of NaN."""
    rows = torch.zeros((len(choices), VOCAB))
    for row, token in enumerate(choices):
        rows[row] = float("nan") if token < 0 else 9.0 * torch.eye(VOCAB)[token]
    return rows


@pytest.mark.parametrize("params", [{}, {"repetition_penalty": 1.0001}], ids=["plain", "node by node"])
@pytest.mark.parametrize(
    ("choices", "tokens", "nodes"),
    [
        ((9, 0, 0, 0, 0, 0, 0), [9], [0]),
        ((4, 9, 0, 0, 0, 0, 0), [4, 9], [0, 1]),
        ((4, 7, 0, 0, 2, 0, 0), [4, 7, 2], [0, 1, 4]),
        ((4, 6, 0, 8, 0, 0, 3), [4, 6, 8, 3], [0, 1, 3, 6]),
        ((5, 0, 6, 0, 0, 8, 0), [5, 6, 8], [0, 2, 5]),  # 8 stands behind the other 6
        ((5, 0, -1, 0, 0, 0, 0), [5], [0]),
    ],
)
def test_a_run_goes_down_the_tree_and_one_token_further(
    params: dict[str, Any], choices: tuple[int, ...], tokens: list[int], nodes: list[int]
) -> None:
    one = state(**params)
    (run,) = verify_runs(logits_for(*choices), [TREE], Sampler(), [one])
    assert (run.token_ids, run.nodes, run.error) == (tokens, nodes, "")
    assert (one.position, one.num_output) == (3, 0)  # nothing is recorded


def random_tree(rng: np.random.Generator, size: int) -> DraftTree:
    """Children of one node propose different tokens."""
    parents, tokens = [], []
    for node in range(size):
        parents.append(int(rng.integers(0, node + 1)))
        taken = {token for token, parent in zip(tokens, parents[:-1], strict=True) if parent == parents[-1]}
        tokens.append(int(rng.choice([token for token in range(VOCAB) if token not in taken])))
    return DraftTree(tokens, parents, [1.0] * size)


@pytest.mark.parametrize("seed", range(20))
def test_sampled_trees_draw_what_plain_decoding_draws_at_each_node(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 9)
    logits = torch.from_numpy(rng.normal(size=(10, VOCAB)).astype(np.float32))
    params: dict[str, Any] = {"temperature": 1.3, "seed": seed, "presence_penalty": 0.4, "logprobs": 2}
    plain, node, wanted, logprobs = state(**params), 0, [], []
    while node is not None:
        chosen = Sampler().sample(logits[node : node + 1], [plain])
        wanted.append(chosen.token_ids[0])
        logprobs.append(chosen.logprobs[0])
        plain.record(wanted[-1])
        node = tree.child(node, wanted[-1])  # type: ignore[assignment]
    (run,) = verify_runs(logits, [tree], Sampler(), [state(**params)])
    assert (run.token_ids, run.logprobs) == (wanted, logprobs)


@pytest.mark.parametrize(
    "tree",
    [
        DraftTree([0, 1, 0, 1], [0, 0, 1, 1], [1.0] * 4),  # both tokens behind both
        DraftTree([1, 1], [0, 1], [1.0] * 2),  # the likelier, alone
        DraftTree([0, 0], [0, 1], [1.0] * 2),  # the rarer, alone
    ],
)
def test_two_tokens_have_the_target_s_distribution(tree: DraftTree) -> None:
    """Pairs of tokens of a two-token vocabulary against the product of their probabilities: chi-square of 3 degrees."""
    rare, draws = 0.3, 4000
    row = torch.tensor([np.log(rare), np.log(1 - rare)], dtype=torch.float32)
    logits, counts = row.repeat(1 + len(tree), 1), np.zeros((2, 2))
    for seed in range(draws):
        one = SamplingState(SamplingParams(temperature=1.0, seed=seed), [1], 2)
        (run,) = verify_runs(logits, [tree], Sampler(), [one])
        tokens = list(run.token_ids)
        while len(tokens) < 2:  # plain decoding goes on
            for token in tokens[one.num_output :]:
                one.record(token)
            tokens += Sampler().sample(row[None], [one]).token_ids
        counts[tokens[0], tokens[1]] += 1
    expected = draws * np.outer([rare, 1 - rare], [rare, 1 - rare])
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # one in a thousand is above


# ---- a step ---------------------------------------------------------------------------------------------


class Scripted(ChainDecoder):
    """Proposes what it is given, by slot."""

    name = "scripted"

    def __init__(self, proposals: dict[int, Any]) -> None:
        super().__init__(8)
        self._proposals = proposals
        self.kept: list[KeptRow] = []

    def propose(self, executor: Any, batch: RaggedBatch, rows: Any, limits: Any) -> list[Any]:
        return [self._proposals[int(batch.state_index[row])] for row in rows]

    def absorb(self, executor: Any, row: KeptRow) -> None:
        self.kept.append(row)


class Adder:
    """The next token is the next number; hidden rows are the numbers of the rows.  Fails behind token 9."""

    def __init__(self) -> None:
        self.batch: Any = None
        self.committed: list[tuple[int, int, list[int]]] = []

    def forward_verify(self, batch: RaggedBatch) -> VerifyForward:
        self.batch = batch
        chosen = [-1 if token == 9 else int(token) + 1 for token in batch.token_ids[batch.logits_index]]
        return VerifyForward(logits_for(*chosen), torch.arange(batch.num_tokens, dtype=torch.float32)[:, None])

    def rewind(self, state_index: Any, kept: Any) -> None: ...

    def commit_rows(self, state_index: Any, past: Any, rows: Any) -> None:
        self.committed += zip(state_index, past, rows, strict=True)


def batch_of(*rows: tuple[int, int, list[int]]) -> RaggedBatch:
    """Rows are (slot, past, tokens), all selected."""
    lengths = np.array([len(tokens) for _, _, tokens in rows], np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return RaggedBatch(
        token_ids=np.array([token for _, _, tokens in rows for token in tokens], np.int32),
        positions=np.array([past + i for _, past, tokens in rows for i in range(len(tokens))], np.int32),
        query_start=starts,
        query_len=lengths,
        past_len=np.array([past for _, past, _ in rows], np.int32),
        state_index=np.array([slot for slot, _, _ in rows], np.int32),
        page_rows=np.zeros((5, 1), np.int32),
        logits_index=(starts[1:] - 1).astype(np.int64),
        logits_to_seq=np.arange(len(rows), dtype=np.int32),
    )


def test_a_step_of_chunks_chains_and_trees() -> None:
    forked = DraftTree([7, 4, 5, 9, 6], [0, 0, 2, 2, 3], [1.0] * 5)
    straight = DraftTree([4, 5], [0, 1], [1.0] * 2)
    decoder, executor = Scripted({0: forked, 1: [4, 9], 3: straight, 4: forked}), Adder()
    for slot in range(5):
        decoder.seat(None, DecodingSeat(slot, slot + 1, np.arange(4, dtype=np.int32), 0))  # type: ignore[arg-type]
    batch = batch_of((2, 2, [1, 2]), (0, 10, [3]), (1, 5, [3]), (3, 4, [3]), (4, 6, [9]))
    tokens = decoder.run_step(executor, batch, Sampler(), [state()] * 5)  # type: ignore[arg-type]

    assert tokens.token_ids == [[3], [4, 5, 6, 7], [4, 5], [4, 5, 6], []]
    assert list(tokens.errors) == [4]
    assert tokens.committed == [2, 4, 2, 3, 1]
    assert tokens.proposed == [0, 5, 2, 2, 5]
    assert executor.committed == [(0, 10, [0, 2, 3, 5])]
    assert executor.batch.positions.tolist() == [2, 3, 10, 11, 11, 12, 12, 13, 5, 6, 7, 4, 5, 6, 6, 7, 7, 8, 8, 9]
    assert executor.batch.tree_mask[:, 0].tolist() == [
        *[0, 0],
        *[1, 3, 5, 13, 21, 45],
        *[0, 0, 0, 0, 0, 0],
        *[1, 3, 5, 13, 21, 45],
    ]
    kept = {row.slot: row for row in decoder.kept}
    assert kept[0].inputs.tolist() == [3, 4, 5, 6]
    assert [row.inputs.tolist() for row in decoder.kept] == [[1, 2], [3, 4, 5, 6], [3, 4], [3, 4, 5], [9]]
    assert [row.hidden.flatten().tolist() for row in decoder.kept if row.hidden is not None] == [
        [0, 1],
        [2, 4, 5, 7],
        [8, 9],
        [11, 12, 13],
        [14],
    ]


def test_batches_without_a_fork_have_no_mask() -> None:
    decoder, executor = Scripted({0: DraftTree([4], [0], [1.0])}), Adder()
    decoder.seat(None, DecodingSeat(0, 1, np.arange(4, dtype=np.int32), 0))  # type: ignore[arg-type]
    decoder.run_step(executor, batch_of((0, 10, [3])), Sampler(), [state()])  # type: ignore[arg-type]
    assert executor.batch.tree_mask is None
