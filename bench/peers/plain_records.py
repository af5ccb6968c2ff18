"""Plain-Python models of what the floor lacks: records that can be evicted one by one, and paired base and draft pages.

Dicts and lists, a 64-bit hash that is trusted; they count and compare nothing else.
"""

from __future__ import annotations

from array import array

from bench.peers.ref_python import Ref


class PlainRecords:
    """A tree of blocks with a record at each endpoint; evicting one takes the blocks that only it kept."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}
        self.uses: dict[int, int] = {}  # children and records of a block
        self.ends: dict[int, int] = {}
        self.free_pages = 0

    def publish(self, record: int, hashes: list[int]) -> None:
        above = 0
        for name in hashes:
            if name not in self.parent:
                self.parent[name], self.uses[name] = above, 0
                if above:
                    self.uses[above] += 1
            above = name
        self.uses[above] += 1
        self.ends[record] = above

    def evict(self, record: int) -> None:
        name = self.ends.pop(record)
        self.uses[name] -= 1
        while name and not self.uses[name]:
            above = self.parent.pop(name)
            del self.uses[name]
            self.free_pages += 1
            if above:
                self.uses[above] -= 1
            name = above


class PlainPairs(Ref):
    """The floor with a draft page beside each base page; the last `future` tokens of a match are computed again."""

    def __init__(self, num_pages: int, page_size: int, future: int) -> None:
        super().__init__(num_pages, page_size, 0)
        self.future = future
        self.draft_free = list(range(num_pages))
        self.draft_of: list[int | None] = [None] * num_pages

    def admit(self, key: int, toks: array[int], reply_len: int) -> int:
        hashes, page = self.chain_hash(toks), self.page
        known = 0
        while known < len(hashes) and hashes[known] in self.map:
            known += 1
        known = min(known, (len(toks) - 1) // page)
        held = []
        for name in hashes[:known]:
            place = self.map[name]
            if self.refs[place] == 0:
                self.lru.pop(place)
            self.refs[place] += 1
            held.append(place)
        total = -(-len(toks) // page)
        if total - len(held) > len(self.free) + len(self.lru):
            for place in held:
                self._drop(place)
            return -1
        for i in range(len(held), total):
            place = self._take()
            if self.draft_of[place] is None:
                self.draft_of[place] = self.draft_free.pop()
            held.append(place)
            if i < len(hashes):
                self._publish(hashes[i], place)
        self.live[key] = [len(toks), held, list(toks[len(toks) // page * page :]), hashes[-1] if hashes else 0]
        return max(known * page - self.future, 0) // page * page
