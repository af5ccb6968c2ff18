# The plain-Python floor of the host benches (edgellm, Apache-2.0); carried as it is, style rules aside.
# ruff: noqa: B905
"""A plain-Python page cache, the floor of the host benches.

Chained 64-bit hashes over raw token bytes, a dict from hash to page, an LRU of pages that
nobody holds.  No token compare on a hit, no validation, one group, no hybrid state: what a
compiled core has to beat besides the peers.
"""

from array import array
from collections import OrderedDict, deque


class Ref:
    def __init__(self, num_pages, page, max_len):
        self.page = page
        self.free = deque(range(num_pages))
        self.map, self.lru, self.live = {}, OrderedDict(), {}
        self.hash_of, self.refs = [None] * num_pages, [0] * num_pages

    def native(self, toks):
        return toks

    def native_token(self, t):
        return t

    def chain_hash(self, toks):
        h, p, out = 0, self.page, []
        for i in range(len(toks) // p):
            h = hash((h, toks[i * p : (i + 1) * p].tobytes()))
            out.append(h)
        return out

    def _take(self):
        if self.free:
            b = self.free.popleft()
        else:
            b, _ = self.lru.popitem(last=False)
            self.map.pop(self.hash_of[b], None)
            self.hash_of[b] = None
        self.refs[b] = 1
        return b

    def _publish(self, h, b):
        if h not in self.map:
            self.map[h] = b
            self.hash_of[b] = h

    def admit(self, key, toks, reply_len):
        hashes, p, n = self.chain_hash(toks), self.page, len(toks)
        pages = -(-n // p)
        held = []
        for h in hashes[: (n - 1) // p]:
            b = self.map.get(h)
            if b is None:
                break
            if self.refs[b] == 0:
                self.lru.pop(b)
            self.refs[b] += 1
            held.append(b)
        if pages - len(held) > len(self.free) + len(self.lru):
            for b in held:
                self._drop(b)
            return -1
        cached = len(held) * p
        for i in range(len(held), pages):
            b = self._take()
            held.append(b)
            if i < len(hashes):
                self._publish(hashes[i], b)
        self.live[key] = [n, held, list(toks[n // p * p :]), hashes[-1] if hashes else 0]
        return cached

    def grow(self, keys, tokens):
        p = self.page
        for k, t in zip(keys, tokens):
            q = self.live[k]
            if q[0] % p == 0:
                q[1].append(self._take())
            q[0] += 1
            q[2].append(t)
            if len(q[2]) == p:
                q[3] = hash((q[3], array("i", q[2]).tobytes()))
                q[2] = []
                self._publish(q[3], q[1][-1])

    def _drop(self, b):
        self.refs[b] -= 1
        if self.refs[b] == 0:
            if self.hash_of[b] is None:
                self.free.append(b)
            else:
                self.lru[b] = None

    def release(self, key):
        for b in reversed(self.live.pop(key)[1]):
            self._drop(b)
