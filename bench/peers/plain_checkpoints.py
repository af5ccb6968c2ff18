"""A plain-Python model of the hybrid flavour: a tree of blocks, checkpoints that own snapshot slots, who goes first.

Independent of the compiled core: dicts, lists, and a 64-bit hash that is trusted (no token compare on a hit, as in the
floor).  It counts; no page or state has bytes.  The replay compares its hits with the manager's, token for token, and
two rules that the manager cannot switch off can be switched off here.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

from bench.checkpoint_rules import Prompt, Rules
from edgellm.cache.types import CheckpointKind

VICTIM_STEPS = (
    64  # blocks of the eviction order that are looked at for a checkpoint with a partial slot, as in the core
)


class Block:
    """A published page.  `pins`: sequences that hold it; `children`: blocks that follow it."""

    __slots__ = ("checkpoints", "children", "key", "parent", "pins")

    def __init__(self, key: int, parent: Block | None) -> None:
        self.key, self.parent = key, parent
        self.pins = self.children = 0
        self.checkpoints: list[Checkpoint] = []


class Checkpoint:
    """State after `length` tokens, at the block that ends at or before it; `tail`: the tokens beyond that block."""

    __slots__ = ("block", "kind", "length", "owner", "tail")

    def __init__(self, block: Block, length: int, tail: bytes, kind: CheckpointKind, owner: int) -> None:
        self.block, self.length, self.tail, self.kind, self.owner = block, length, tail, kind, owner


@dataclass(slots=True)
class Sequence:
    tokens: array[int]
    prompt: Prompt
    blocks: list[Block]  # held, first block first
    own_pages: int  # leased and not published
    hashes: list[int]
    places: tuple[int, ...]


class PlainCheckpointCache:
    """See the module.  Sizes are those of the manager's pools."""

    def __init__(self, pages: int, snapshots: int, partials: int, page_size: int, rules: Rules) -> None:
        self.page, self.rules = page_size, rules
        self.free_pages, self.free_snapshots, self.free_partials = pages, snapshots, partials
        self.root = Block(0, None)
        self.root.pins = 1
        self.map: dict[int, Block] = {}
        self.lru: OrderedDict[Block, None] = OrderedDict()
        self.recent: OrderedDict[Checkpoint, None] = OrderedDict()
        self.superseded: OrderedDict[Checkpoint, None] = OrderedDict()
        self.live: dict[int, Sequence] = {}

    # Lookup

    def _hash(self, above: int, tokens: array[int]) -> int:
        return hash((above, tokens.tobytes()))

    def _walk(self, tokens: array[int]) -> tuple[list[int], list[Block]]:
        hashes: list[int] = []
        blocks: list[Block] = []
        above = 0
        for start in range(0, len(tokens) - self.page + 1, self.page):
            above = self._hash(above, tokens[start : start + self.page])
            hashes.append(above)
            if len(blocks) == len(hashes) - 1 and above in self.map:
                blocks.append(self.map[above])
        return hashes, blocks

    def _usable(self, tokens: array[int], blocks: list[Block]) -> Checkpoint | None:
        """The longest checkpoint on the path that leaves a token to compute."""
        for depth in range(len(blocks), -1, -1):
            best = None
            for checkpoint in (blocks[depth - 1] if depth else self.root).checkpoints:
                tail = tokens[depth * self.page : checkpoint.length].tobytes()
                if checkpoint.length < len(tokens) and checkpoint.tail == tail:
                    best = checkpoint if best is None or checkpoint.length > best.length else best
            if best is not None:
                return best
        return None

    # Pages

    def _pin(self, block: Block) -> None:
        if block.pins == 0:
            del self.lru[block]
        block.pins += 1

    def _unpin(self, block: Block) -> None:
        block.pins -= 1
        if block.pins == 0:
            self.lru[block] = None
            if self.rules.trim:
                self._trim(block)

    def _trim(self, block: Block | None) -> None:
        """Blocks that serve nobody leave, upwards."""
        while block is not None and not (block.pins or block.children or block.checkpoints):
            self._remove(block)
            block = block.parent

    def _remove(self, block: Block) -> None:
        del self.lru[block], self.map[block.key]
        assert block.parent is not None
        block.parent.children -= 1
        self.free_pages += 1

    def _take_pages(self, count: int) -> None:
        while self.free_pages < count:
            block = next(iter(self.lru))
            assert not block.children
            for checkpoint in list(block.checkpoints):
                self._forget(checkpoint)
            self._remove(block)
            if self.rules.trim:
                self._trim(block.parent)
        self.free_pages -= count

    # Checkpoints

    def _forget(self, checkpoint: Checkpoint) -> None:
        checkpoint.block.checkpoints.remove(checkpoint)
        self.recent.pop(checkpoint, None)
        self.superseded.pop(checkpoint, None)
        self.free_snapshots += 1
        self.free_partials += checkpoint.length % self.page != 0

    def evict_checkpoint(self, *, partial: bool = False) -> bool:
        """Free one snapshot (with its partial slot where `partial`): superseded first, then the stalest leaf's."""
        victim = self._victim(partial)
        if victim is None:
            return False
        self._forget(victim)
        if self.rules.trim:
            self._trim(victim.block)
        return True

    def _victim(self, partial: bool) -> Checkpoint | None:

        def fits(one: Checkpoint) -> bool:
            return not partial or one.length % self.page != 0

        for checkpoint in self.superseded:
            if fits(checkpoint):
                return checkpoint
        if self.rules.leaf_victims:
            for block in islice(self.lru, VICTIM_STEPS):
                found = [] if block.children else [one for one in block.checkpoints if fits(one)]
                if found:
                    return found[0]
        return next((one for one in self.recent if fits(one)), None)

    def _checkpoint(self, key: int, length: int, kind: CheckpointKind) -> None:
        """Place one on the path of a live sequence; nothing happens when no slot can be had."""
        sequence = self.live[key]
        depth, into = divmod(length, self.page)
        needs_partial = into > 0 and self.free_partials < 1  # a victim that has one has both
        if (needs_partial or self.free_snapshots < 1) and not self.evict_checkpoint(partial=needs_partial):
            return
        block = sequence.blocks[depth - 1] if depth else self.root
        tail = sequence.tokens[depth * self.page : length].tobytes()
        for other in block.checkpoints:
            if other.length == length and other.tail == tail:
                self._refresh(other)
                return
        self.free_snapshots -= 1
        self.free_partials -= into > 0
        checkpoint = Checkpoint(block, length, tail, kind, key)
        block.checkpoints.append(checkpoint)
        self.recent[checkpoint] = None
        if self.rules.supersede:
            keep = self.rules.wanted(sequence.places, sequence.prompt)
            self._supersede_above(checkpoint, sequence, keep)

    def _refresh(self, checkpoint: Checkpoint) -> None:
        self.superseded.pop(checkpoint, None)
        self.recent.pop(checkpoint, None)
        self.recent[checkpoint] = None

    def _supersede_above(self, new: Checkpoint, sequence: Sequence, keep: tuple[int, ...]) -> None:
        """Mark what the new checkpoint makes less useful: shallower, on its path, and nobody has parted there."""
        block: Block | None = new.block
        depth = new.length // self.page
        while block is not None:
            for other in block.checkpoints if block.children <= 1 else ():
                on_path = other.tail == sequence.tokens[depth * self.page : other.length].tobytes()
                if on_path and other in self.recent and self._is_superseded(other, new, keep):
                    del self.recent[other]
                    self.superseded[other] = None
            block, depth = block.parent, depth - 1

    @staticmethod
    def _is_superseded(other: Checkpoint, new: Checkpoint, keep: tuple[int, ...]) -> bool:
        if other.length >= new.length or other.kind not in (CheckpointKind.TAIL, CheckpointKind.LADDER):
            return False
        foreign = other.owner != new.owner or other.kind == new.kind == CheckpointKind.TAIL
        return foreign and other.length not in keep

    # The peers' interface

    def admit(self, key: int, prompt: array[int], boundaries: tuple[int, ...] = ()) -> int:
        hashes, known = self._walk(prompt)
        hit = self._usable(prompt, known)
        reuse = hit.length if hit is not None else 0
        shared = known[: reuse // self.page]
        for block in shared:
            self._pin(block)
        wanted = -(-len(prompt) // self.page) - len(shared)
        if wanted > self.free_pages + len(self.lru):
            for block in reversed(shared):
                self._unpin(block)
            return -1
        if hit is not None:
            self._refresh(hit)
        self._take_pages(wanted)
        about = Prompt(len(prompt), reuse, len(known) * self.page, boundaries, self.page)
        places = self.rules.places(about)
        sequence = self.live[key] = Sequence(array("i", prompt), about, list(shared), wanted, hashes, places)
        for _ in range(len(shared), len(hashes)):
            self._publish_next(sequence)
        for length in places:
            if length > reuse:
                self._checkpoint(key, length, self.rules.kind_of(length, about))
        return reuse

    def _publish_next(self, sequence: Sequence) -> None:
        """Index the sequence's next full block, or take the block over that says the same and free the own page."""
        depth = len(sequence.blocks)
        parent = sequence.blocks[-1] if depth else self.root
        name = sequence.hashes[depth]
        block = self.map.get(name)
        sequence.own_pages -= 1
        if block is not None:
            self._pin(block)
            self.free_pages += 1
        else:
            block = self.map[name] = Block(name, parent)
            block.pins = 1
            parent.children += 1
        sequence.blocks.append(block)

    def grow(self, keys: list[int], tokens: list[int]) -> None:
        """The appended token's state is written in the next step, so blocks are published one token late."""
        page = self.page
        for key, token in zip(keys, tokens, strict=True):
            sequence = self.live[key]
            length = len(sequence.tokens)
            if length % page == 0:
                if not self.free_pages and not self.lru:
                    raise MemoryError(f"no page for sequence {key}")
                self._take_pages(1)
                sequence.own_pages += 1
                if len(sequence.hashes) < length // page:
                    above = sequence.hashes[-1] if sequence.hashes else 0
                    sequence.hashes.append(self._hash(above, sequence.tokens[length - page :]))
                    self._publish_next(sequence)
            sequence.tokens.append(token)

    def release(self, key: int) -> None:
        sequence = self.live[key]
        end = len(sequence.tokens) - 1
        if self.rules.wants_reply_end(end, sequence.places, sequence.prompt):
            self._checkpoint(key, end, CheckpointKind.TAIL)
        del self.live[key]
        self.free_pages += sequence.own_pages
        for block in reversed(sequence.blocks):
            self._unpin(block)
