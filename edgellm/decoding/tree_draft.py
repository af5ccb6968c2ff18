"""`TreeDraftDecoder`: trees, or chains, from a draft model with pages of its own."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, cast

from edgellm.cache.types import DecodingKvHeadroom
from edgellm.decoding.adaptive import DraftLengths
from edgellm.decoding.draft_tree import DraftTree
from edgellm.decoding.paged_draft import PagedDraftDecoder
from edgellm.decoding.tree_passes import HostTreePasses
from edgellm.decoding.tree_sizes import TreeSizes
from edgellm.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from edgellm.decoding.base import DecoderCapabilities
    from edgellm.decoding.draft_ops import DraftExecutor
    from edgellm.decoding.draft_passes import DraftPasses
    from edgellm.decoding.draft_tree import DraftTable
    from edgellm.decoding.options import SpeculativeOptions
    from edgellm.decoding.tree_passes import HostTreeDraft, RankingHead, TreePasses
    from edgellm.decoding.verify import Proposal
    from edgellm.models.device_ops import DeviceOps
    from edgellm.runtime.batch import Executor, RaggedBatch, VerifyingExecutor
    from edgellm.runtime.executor_cuda import ExecutorLimits

TREE_DEPTH, TREE_DRAFTS = 5, 15


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The largest proposals of a round.

    Attributes:
        num_drafts: tokens in all.
        top_k: K, tokens considered behind each, and nodes of a level that the next one grows behind; 1 is a chain.
        depth: levels, at most `num_drafts`.
    """

    num_drafts: int
    top_k: int
    depth: int

    @classmethod
    def of_options(cls, options: SpeculativeOptions, num_drafts: int) -> TreeShape:
        """What the options ask for.

        Args:
            num_drafts: length of chains that the options leave open.
        """
        if options.top_k == 1:
            chain = options.num_drafts or num_drafts
            return cls(chain, 1, chain)
        tokens = options.num_drafts or TREE_DRAFTS
        return cls(tokens, options.top_k, min(options.depth or TREE_DEPTH, tokens))

    @property
    def scratch_entries(self) -> int:
        """Draft entries of the levels that something grows behind."""
        return (self.depth - 1) * self.top_k


class TreeDraftDecoder(PagedDraftDecoder):
    """A subclass builds the head and its pages, and asks for hidden rows.

    Args:
        adaptive: propose less where it does not pay.
    """

    def __init__(self, shape: TreeShape, *, adaptive: bool) -> None:
        self.shape = shape
        self._sizes = TreeSizes() if adaptive and shape.top_k > 1 else None
        lengths = self._sizes or (DraftLengths() if adaptive else None)
        super().__init__(shape.depth, lengths)
        self._levels = 0  # of the latest round's deepest table
        self._trees: TreePasses | None = None
        if shape.top_k > 1:
            passes = HostTreePasses(lambda: self.draft, shape.top_k)
            self._passes, self._trees = passes, passes

    @property
    @abstractmethod
    def draft(self) -> HostTreeDraft:
        """The draft model on the CPU; asked for once its pages are open."""

    def capabilities(self) -> DecoderCapabilities:
        return replace(super().capabilities(), trees=True)

    def required_kv_headroom(self) -> DecodingKvHeadroom:
        """Of both pools alike, since one length limit serves both."""
        extra = 1 + max(self.shape.num_drafts, self.shape.scratch_entries)
        return DecodingKvHeadroom(extra, extra)

    def attach(self, executor: Executor) -> None:
        """
        Raises:
            UnsupportedModelError: trees are asked for, and the executor verifies chains only.
        """
        if self._trees is not None and not hasattr(executor, "commit_rows"):
            raise UnsupportedModelError(
                f"top_k is {self.shape.top_k}, and {type(executor).__name__} verifies chains only; pass top_k=1"
            )
        super().attach(executor)

    def device_bytes(self, ops: DeviceOps, device: torch.device, limits: ExecutorLimits) -> int:
        from edgellm.decoding.draft_memory import launching_nothing, tree_bytes

        of_entries, shape = super().device_bytes(ops, device, limits), self.shape
        if self._trees is None:
            return of_entries
        head = cast("RankingHead", self._head(launching_nothing(ops)))
        return of_entries + tree_bytes(head, device, limits.num_slots, shape.top_k, shape.depth)

    def _device_passes(self, executor: DraftExecutor) -> DraftPasses:
        if self._trees is None:
            return super()._device_passes(executor)
        from edgellm.decoding.device_trees import DeviceTreePasses

        head, pages = self.device_parts(executor.ops)
        passes = DeviceTreePasses(cast("RankingHead", head), pages, executor, self.shape.top_k, self.shape.depth)
        self._trees = passes
        return passes

    def propose(
        self, executor: VerifyingExecutor, batch: RaggedBatch, rows: Sequence[int], limits: Sequence[int]
    ) -> Sequence[Proposal]:
        if self._trees is None:
            return super().propose(executor, batch, rows, limits)
        started = perf_counter()
        wanted = self._ready(batch, rows, limits)
        trees: dict[int, DraftTree] = {}
        self._levels = max(wanted.values(), default=0)
        if wanted:
            tables = self._trees.tables(list(wanted), self._drafted(wanted), list(wanted.values()), self._table())
            spent = perf_counter() - started
            counts = self._counts(list(wanted), tables, len(rows), batch.num_tokens - len(rows), spent)
            trees = {slot: table.best(count) for slot, table, count in zip(wanted, tables, counts, strict=True)}
        return [trees.get(slot, []) for slot in batch.state_index[rows].tolist()]

    def drafted_depth(self, proposals: Sequence[Proposal]) -> int:
        return super().drafted_depth(proposals) if self._trees is None else self._levels

    def _counts(
        self, slots: Sequence[int], tables: Sequence[DraftTable], num_rows: int, other_rows: int, spent: float
    ) -> list[int]:
        """Nodes of each table that are proposed."""
        most = self.shape.num_drafts
        if self._sizes is None:
            return [min(most, len(table.scores) - 1) for table in tables]
        chances = [table.chances() for table in tables]
        return self._sizes.counts(slots, chances, most, num_rows=num_rows, other_rows=other_rows, spent=spent)

    def _learn(
        self,
        wide: RaggedBatch,
        proposals: Sequence[Proposal],
        committed: Sequence[int],
        decoding: Sequence[int],
        seconds: tuple[float, float],
    ) -> None:
        super()._learn(wide, proposals, committed, decoding, seconds)
        if self._sizes is None:
            return
        for row in decoding:
            proposal = proposals[row]
            if isinstance(proposal, DraftTree):
                self._sizes.observe_tree(int(wide.state_index[row]), proposal.chances, committed[row] - 1)
