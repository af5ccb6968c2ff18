"""`DraftTree`: proposals that branch; and `DraftTable`, from which the best of them are chosen (K18).

A draft's K most likely tokens behind each node of a level are candidates; the K candidates with the best scores are the
next level's nodes; in the end the best of all candidates are proposed.  A score is the sum of log-probabilities on the
way from the root, so no node has a better one than its parent, and the best n always hang together.  (Li et al.,
"EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", 2024, section 4.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from edgellm.runtime.tree_rows import WORD_BITS, words_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from edgellm.runtime.batch import RaggedBatch

    Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Proposals behind one token, which is node 0; they are nodes 1 to n, each behind its parent.

    Attributes:
        token_ids: (n,) of nodes 1 to n.
        parents: (n,) node in front of each, of a lower number.
        chances: (n,) the draft's probability of the way to each, which no child has more of than its parent.
    """

    token_ids: list[int]
    parents: list[int]
    chances: list[float]

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(len(self.parents)))

    @property
    def depth(self) -> int:
        """Proposals on the longest way."""
        return max(self.depths())

    def depths(self) -> list[int]:
        """(n + 1,) proposals on the way to each node, itself included; 0 for node 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def child(self, node: int, token_id: int) -> int | None:
        """The node behind `node` that proposes this token."""
        for number, parent in enumerate(self.parents):
            if parent == node and self.token_ids[number] == token_id:
                return number + 1
        return None

    def mask(self, words: int) -> Int32Array:
        """(n + 1, words) int32; see `pack_mask`."""
        seen = [1]
        for node, parent in enumerate(self.parents, start=1):
            seen.append(seen[parent] | 1 << node)
        return pack_mask(seen, words)


@dataclass(slots=True)
class DraftTable:
    """The candidates of one sequence, level by level.

    Attributes:
        token_ids, scores, parents: of every entry.  Entry 0 is the root: the token that all of them follow.
        frontier: entries of the last level that the next level grows behind, best first.
        level_start: first entry of that level.
    """

    top_k: int
    token_ids: list[int] = field(default_factory=lambda: [-1])
    scores: list[float] = field(default_factory=lambda: [0.0])
    parents: list[int] = field(default_factory=lambda: [-1])
    frontier: list[int] = field(default_factory=lambda: [0])
    level_start: int = 0

    def grow(self, token_ids: npt.NDArray[np.int64], log_probs: npt.NDArray[np.float32]) -> None:
        """One level more.

        Args:
            token_ids, log_probs: (len(frontier), K), what the draft says comes behind each entry of the frontier.
        """
        first = len(self.scores)
        above = np.array([self.scores[entry] for entry in self.frontier], np.float64)
        scores: npt.NDArray[np.float64] = (above[:, None] + log_probs.astype(np.float64)).ravel()
        self.scores += scores.tolist()
        self.token_ids += token_ids.ravel().tolist()
        self.parents += np.repeat(self.frontier, log_probs.shape[1]).tolist()
        self.frontier = (first + _best(scores, self.top_k)).tolist()
        self.level_start = first

    def go_on_behind(self, places: npt.NDArray[np.int32]) -> None:
        """Which entries of the last level, counted from its first, the next one grows behind: where a device chose."""
        self.frontier = (self.level_start + places).tolist()

    def ranked(self) -> npt.NDArray[np.int64]:
        """Entries but the root, best first; of equal ones the earlier, so that the first n always hang together."""
        return 1 + _best(np.array(self.scores[1:]), len(self.scores) - 1)

    def chances(self) -> npt.NDArray[np.float64]:
        """The draft's probability of the way to each entry of `ranked`."""
        scores: npt.NDArray[np.float64] = np.exp(np.array(self.scores)[self.ranked()])
        return scores

    def best(self, count: int) -> DraftTree:
        """The `count` best entries, in the table's order."""
        entries: list[int] = np.sort(self.ranked()[:count]).tolist()
        node_of = {entry: node for node, entry in enumerate([0, *entries])}
        return DraftTree(
            token_ids=[self.token_ids[entry] for entry in entries],
            parents=[node_of[self.parents[entry]] for entry in entries],
            chances=np.exp([self.scores[entry] for entry in entries]).tolist(),
        )


def _best(scores: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Places of the best scores, best first; a score that is no number is the worst."""
    return np.argsort(-scores, kind="stable")[:count]


def depth_of(proposal: Sequence[int] | DraftTree) -> int:
    """Tokens on the longest way of a chain or tree."""
    return proposal.depth if isinstance(proposal, DraftTree) else len(proposal)


def mark_trees(wide: RaggedBatch, proposals: Sequence[Sequence[int] | DraftTree]) -> RaggedBatch:
    """The batch with positions and masks of its trees; the batch itself where none branches.

    Args:
        wide: each row's proposals stand behind the one token that it runs anyway.
        proposals: (N,) of the rows.
    """
    trees = [(row, tree) for row, tree in enumerate(proposals) if isinstance(tree, DraftTree) and not tree.is_chain]
    if not trees:
        return wide
    positions, words = wide.positions.copy(), words_for(1 + max(len(tree) for _, tree in trees))
    mask = np.zeros((wide.num_tokens, words), np.int32)
    for row, tree in trees:
        rows = slice(int(wide.query_start[row]), int(wide.query_start[row + 1]))
        mask[rows] = tree.mask(words)
        positions[rows] = wide.past_len[row] + np.array(tree.depths(), np.int32)
    return replace(wide, positions=positions, tree_mask=mask)


def pack_mask(seen: Sequence[int], words: int) -> Int32Array:
    """(N, words) int32 rows of bits: bit j of row i is set in bit j % 32 of word j // 32.

    Args:
        seen: one whole number for each row, its bits those that are set.
    """
    packed = b"".join(row.to_bytes(words * WORD_BITS // 8, "little") for row in seen)
    return np.frombuffer(packed, "<i4").reshape(len(seen), words).astype(np.int32)
