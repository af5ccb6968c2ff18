"""Draft index: which draft page describes which block of the tree, produced by which lineage.

Draft K/V is not a function of the tokens alone: it depends on how it was produced.  So a block may have several draft
nodes, and each follows exactly one draft node of the block in front.  Its ancestors are the whole path of one
lineage; nothing is ever stitched together from two.

Draft nodes that no lease holds stand in an eviction order by class, as in the block index: leaves in front.
"""

cimport cython
from libc.stdint cimport int32_t

from edgellm._core.lru cimport (
    CLASS_EXPIRED,
    CLASS_LOW,
    NUM_CLASSES,
    lru_append,
    lru_class,
    lru_clear,
    lru_front,
    lru_init,
    lru_links_agree,
    lru_listed,
    lru_next,
    lru_unlink,
)
from edgellm._core.types cimport node_id_t, page_id_t, token_t

from edgellm.cache.types import RetentionPriority
from edgellm.errors import ContractViolation, InvalidArgumentError, InvariantError

_NO_SUCCESSOR = NO_SUCCESSOR


@cython.final
cdef class DraftIndex:
    """Draft nodes by block and by page.  Single writer; not thread safe; never touches pools or the block index.

    Args:
        capacity: pages in the draft pool; also the most draft nodes there can be.
        base_capacity: pages in the base pool.
    """

    def __cinit__(self, capacity, base_capacity):
        if not 0 <= capacity < 2**30 or not 0 <= base_capacity < 2**30:
            raise InvalidArgumentError(
                f"capacity {capacity} and base capacity {base_capacity} must be 0 or more pages")
        self.core.capacity = capacity
        self.core.base_capacity = base_capacity
        self._nodes.resize(self.core.capacity)
        self._links.resize(<size_t>self.core.capacity + NUM_CLASSES)
        self._heads.resize(self.core.base_capacity)
        self.core.nodes = self._nodes.data()
        self.core.heads = self._heads.data()
        lru_init(&self.core.lru, self._links.data(), self.core.capacity)
        self.clear()

    cdef void clear(self) noexcept nogil:
        """Forget every draft node."""
        cdef int32_t i
        for i in range(self.core.capacity):
            self.core.nodes[i].base = -1
            self.core.nodes[i].child_count = 0
        for i in range(self.core.base_capacity):
            self.core.heads[i] = NO_DRAFT
        lru_clear(&self.core.lru)
        self.core.size = 0

    cdef page_id_t find(self, node_id_t base, page_id_t parent, token_t successor) noexcept nogil:
        """The draft node of `base` that follows `parent` and was followed by `successor`, or NO_DRAFT."""
        cdef page_id_t draft = self.core.heads[base]
        cdef draft_t* entry
        cdef int32_t seen = 0
        while draft != NO_DRAFT and seen < MAX_LINEAGES:
            entry = &self.core.nodes[draft]
            if entry.parent == parent and entry.successor == successor:
                return draft
            draft = entry.older
            seen += 1
        return NO_DRAFT

    cdef void path_into(self, page_id_t draft, Py_ssize_t length, page_id_t* out) noexcept nogil:
        """The draft nodes from the first block down to `draft`; `length` is the depth of its base node."""
        while length > 0:
            length -= 1
            out[length] = draft
            draft = self.core.nodes[draft].parent

    # Moves that cannot fail

    cdef void add(
        self, page_id_t draft, node_id_t base, page_id_t parent, token_t successor, int32_t token_count
    ) noexcept nogil:
        """Make a draft page the newest draft node of `base`; unlisted, of the lowest priority."""
        cdef draft_t* entry = &self.core.nodes[draft]
        entry.base = base
        entry.parent = parent
        entry.child_count = 0
        entry.successor = successor
        entry.token_count = token_count
        entry.priority = 0
        entry.newer = NO_DRAFT
        entry.older = self.core.heads[base]
        if entry.older != NO_DRAFT:
            self.core.nodes[entry.older].newer = draft
        self.core.heads[base] = draft
        if parent != NO_DRAFT:
            self.core.nodes[parent].child_count += 1
        self.core.size += 1

    cdef void remove(self, page_id_t draft) noexcept nogil:
        """Forget an unlisted draft node that nothing follows."""
        cdef draft_t* entry = &self.core.nodes[draft]
        if entry.older != NO_DRAFT:
            self.core.nodes[entry.older].newer = entry.newer
        if entry.newer != NO_DRAFT:
            self.core.nodes[entry.newer].older = entry.older
        else:
            self.core.heads[entry.base] = entry.older
        if entry.parent != NO_DRAFT:
            self.core.nodes[entry.parent].child_count -= 1
        entry.base = -1
        self.core.size -= 1

    cdef void list_draft(self, page_id_t draft, bint expired) noexcept nogil:
        """Nobody holds the draft node any more.  `expired`: its base node is in the EXPIRED class."""
        lru_append(&self.core.lru, draft, CLASS_EXPIRED if expired else CLASS_LOW + self.core.nodes[draft].priority)

    cdef void unlist_draft(self, page_id_t draft) noexcept nogil:
        lru_unlink(&self.core.lru, draft)

    cdef void expire_at(self, node_id_t base) noexcept nogil:
        """The base node expired: its draft nodes that nobody holds go with it."""
        cdef page_id_t draft = self.core.heads[base]
        while draft != NO_DRAFT:
            if lru_listed(&self.core.lru, draft) and lru_class(&self.core.lru, draft) != CLASS_EXPIRED:
                lru_unlink(&self.core.lru, draft)
                lru_append(&self.core.lru, draft, CLASS_EXPIRED)
            draft = self.core.nodes[draft].older

    # Python interface

    cdef page_id_t _checked(self, object draft) except -1:
        if not isinstance(draft, int) or not 0 <= draft < self.core.capacity:
            raise InvalidArgumentError(f"draft page {draft!r} is not an integer from 0 to {self.core.capacity - 1}")
        return draft

    cdef page_id_t _checked_node(self, object draft) except -1:
        cdef page_id_t page = self._checked(draft)
        if not self.is_draft(page):
            raise InvalidArgumentError(f"draft page {draft} describes no block; it was evicted or never published")
        return page

    cdef node_id_t _checked_base(self, object base) except -1:
        if not isinstance(base, int) or not 0 <= base < self.core.base_capacity:
            raise InvalidArgumentError(f"base page {base!r} is not an integer from 0 to {self.core.base_capacity - 1}")
        return base

    cdef int _check_mutable(self) except -1:
        if self.sealed:
            raise ContractViolation("this index belongs to a manager, which alone may change it; read it only")
        return 0

    @property
    def capacity(self):
        return self.core.capacity

    @property
    def size(self):
        """Draft nodes."""
        return self.core.size

    @property
    def lru_size(self):
        """Draft nodes that no lease holds: what eviction can take."""
        return self.core.lru.size

    @property
    def class_sizes(self):
        """Evictable draft nodes by class: expired, superseded, low, normal, high priority."""
        return tuple(self.core.lru.sizes[i] for i in range(NUM_CLASSES))

    def __len__(self):
        return self.core.size

    def __contains__(self, draft):
        return bool(self.is_draft(self._checked(draft)))

    def insert(self, draft, base, *, token_count, parent=None, successor=_NO_SUCCESSOR):
        """Make a draft page the newest draft node of a base node; held until `unpin_draft`.

        Args:
            draft: draft page.
            base: base page whose tokens it describes.
            token_count: tokens it holds, 1 or more.
            parent: draft page of the block in front, by the same producer; None for a first block.
            successor: token that followed the block, -1 when unknown.
        Raises:
            InvalidArgumentError: a page out of range, a draft page in use, an unknown parent or the same base as its
                parent, no token, or a lineage that this base node has already.  Nothing was changed.
        """
        self._check_mutable()
        cdef page_id_t page = self._checked(draft)
        cdef node_id_t node = self._checked_base(base)
        cdef page_id_t before = NO_DRAFT if parent is None else self._checked_node(parent)
        if self.is_draft(page):
            raise InvalidArgumentError(f"draft page {draft} describes another block; erase it first")
        if before != NO_DRAFT and self.core.nodes[before].base == node:
            raise InvalidArgumentError(f"draft page {parent} describes block {base} as well; it cannot be in front")
        if token_count < 1 or successor < NO_SUCCESSOR:
            raise InvalidArgumentError(f"token count {token_count} must be 1 or more, successor {successor} -1 or more")
        if self.find(node, before, successor) != NO_DRAFT:
            raise InvalidArgumentError(
                f"block {base} has draft page {self.find(node, before, successor)} for that lineage; adopt it")
        self.add(page, node, before, successor, token_count)

    def erase(self, draft):
        """Forget a draft node; a page that is none is left alone.

        Raises:
            InvalidArgumentError: other draft nodes follow it.  Erase those first.
        """
        self._check_mutable()
        cdef page_id_t page = self._checked(draft)
        if not self.is_draft(page):
            return
        if self.core.nodes[page].child_count:
            raise InvalidArgumentError(
                f"{self.core.nodes[page].child_count} draft nodes follow draft page {draft}; erase them first")
        if self.is_listed(page):
            self.unlist_draft(page)
        self.remove(page)

    def pin_draft(self, draft):
        """Somebody holds an evictable draft node.  Raises InvalidArgumentError when it is not evictable."""
        self._check_mutable()
        cdef page_id_t page = self._checked_node(draft)
        if not self.is_listed(page):
            raise InvalidArgumentError(f"draft page {draft} is not evictable; unpin it first")
        self.unlist_draft(page)

    def unpin_draft(self, draft, *, priority=RetentionPriority.NORMAL, expired=False):
        """Nobody holds a draft node any more.  Raises InvalidArgumentError when it is evictable already."""
        self._check_mutable()
        cdef page_id_t page = self._checked_node(draft)
        if self.is_listed(page):
            raise InvalidArgumentError(f"draft page {draft} is evictable; pin it first")
        self.raise_priority(page, RetentionPriority(priority))
        self.list_draft(page, expired)

    def expire_base(self, base):
        """The base node expired: its draft nodes that nobody holds go before all others."""
        self._check_mutable()
        self.expire_at(self._checked_base(base))

    def base_of(self, draft):
        """Base page it describes, or None for a page that is no draft node."""
        cdef page_id_t page = self._checked(draft)
        return self.core.nodes[page].base if self.is_draft(page) else None

    def parent_of(self, draft):
        """Draft page of the block in front, or None for a first block or an unknown page."""
        cdef page_id_t page = self._checked(draft)
        return self.core.nodes[page].parent if self.is_draft(page) and self.core.nodes[page].parent >= 0 else None

    def child_count(self, draft):
        """Draft nodes that follow it."""
        return self.core.nodes[self._checked_node(draft)].child_count

    def successor_of(self, draft):
        """Token that followed the block when it was published, or None when unknown."""
        cdef page_id_t page = self._checked_node(draft)
        return None if self.core.nodes[page].successor == NO_SUCCESSOR else self.core.nodes[page].successor

    def token_count_of(self, draft):
        return self.core.nodes[self._checked_node(draft)].token_count

    def priority_of(self, draft):
        """`RetentionPriority`."""
        return RetentionPriority(self.core.nodes[self._checked_node(draft)].priority)

    def class_of(self, draft):
        """Class of an evictable draft node (0 expired, 2 low, 3 normal, 4 high), or None for a held one."""
        cdef page_id_t page = self._checked_node(draft)
        return lru_class(&self.core.lru, page) if self.is_listed(page) else None

    def drafts_of(self, base):
        """Draft pages that describe a base page, newest first (a new list)."""
        cdef page_id_t draft = self.newest_at(self._checked_base(base))
        out = []
        while draft != NO_DRAFT:
            out.append(draft)
            draft = self.core.nodes[draft].older
        return out

    def find_draft(self, base, *, parent=None, successor=_NO_SUCCESSOR):
        """Draft page of exactly this lineage, or None."""
        cdef page_id_t before = NO_DRAFT if parent is None else self._checked_node(parent)
        cdef page_id_t draft = self.find(self._checked_base(base), before, successor)
        return None if draft == NO_DRAFT else draft

    def path_of(self, draft):
        """Draft pages from the first block down to this one, all of one lineage; empty for an unknown page."""
        cdef page_id_t page = self._checked(draft)
        path = []
        while page != NO_DRAFT and self.is_draft(page):
            path.append(page)
            page = self.core.nodes[page].parent
        return path[::-1]

    def eviction_order(self):
        """Draft pages that no lease holds, next victim first, lowest class first (a new list)."""
        cdef page_id_t draft = lru_front(&self.core.lru)
        order = []
        while draft >= 0:
            order.append(draft)
            draft = lru_next(&self.core.lru, draft)
        return order

    # Recount

    def check_invariants(self):
        """Recount draft nodes, lists, child counts and eviction order.

        Raises:
            InvariantError: they do not describe the same nodes.
        Cost: O(capacity + base capacity).
        """
        nodes = [d for d in range(self.core.capacity) if self.is_draft(d)]
        if len(nodes) != self.core.size:
            raise InvariantError(f"draft nodes {nodes}, but a size of {self.core.size}")
        listed = []
        for base in range(self.core.base_capacity):
            listed += self._checked_list(base)
        if sorted(listed) != nodes:
            raise InvariantError(f"draft nodes {nodes}, but the lists of base nodes hold {sorted(listed)}")
        self._check_links(nodes)
        self._check_lru(nodes)

    def _checked_list(self, base):
        """The draft nodes of one base node, links and lineages checked."""
        drafts = self.drafts_of(base)
        lineages = set()
        for i, draft in enumerate(drafts):
            entry = self.core.nodes[<page_id_t>draft]
            if entry.base != base or entry.newer != (drafts[i - 1] if i else NO_DRAFT):
                raise InvariantError(f"draft node {draft} is in the list of block {base}, but not linked there")
            # Without a known successor two nodes may differ all the same.
            lineages.add((entry.parent, entry.successor if entry.successor != NO_SUCCESSOR else -1 - i))
        if len(drafts) <= MAX_LINEAGES and len(lineages) != len(drafts):
            raise InvariantError(f"draft nodes {drafts} of block {base} repeat a lineage")
        return drafts

    def _check_links(self, nodes):
        """Parents are draft nodes of other blocks, without a cycle, and count their children."""
        children = dict.fromkeys(nodes, 0)
        for draft in nodes:
            entry = self.core.nodes[<page_id_t>draft]
            if entry.token_count < 1 or entry.successor < NO_SUCCESSOR:
                raise InvariantError(
                    f"draft node {draft} has {entry.token_count} tokens and successor {entry.successor}")
            if entry.parent == NO_DRAFT:
                continue
            if entry.parent not in children or self.core.nodes[entry.parent].base == entry.base:
                raise InvariantError(f"draft node {draft} follows {entry.parent}, which is no node of another block")
            children[entry.parent] += 1
        for draft, count in children.items():
            if self.core.nodes[<page_id_t>draft].child_count != count:
                raise InvariantError(
                    f"draft node {draft} counts {self.core.nodes[<page_id_t>draft].child_count} children, not {count}")
        self._check_cycles(nodes)

    def _check_cycles(self, nodes):
        """Every draft node leads up to one without a parent."""
        cdef page_id_t page
        ends = set()        # nodes known to do so
        for draft in nodes:
            path = []
            page = draft
            while page != NO_DRAFT and page not in ends:
                if len(path) > self.core.size:
                    raise InvariantError(f"draft node {draft} is its own ancestor")
                path.append(page)
                page = self.core.nodes[page].parent
            ends.update(path)

    def _check_lru(self, nodes):
        """Evictable draft nodes stand once each, classes in order, every child in front of its parent."""
        if not lru_links_agree(&self.core.lru):
            raise InvariantError("the eviction order of draft nodes does not lead back the way it leads on")
        order = self.eviction_order()
        place = {d: i for i, d in enumerate(order)}
        if len(place) != len(order) or len(order) != self.core.lru.size or not place.keys() <= set(nodes):
            raise InvariantError(f"eviction order {order} is not a set of {self.core.lru.size} draft nodes")
        classes = [self.class_of(d) for d in order]
        if None in classes or classes != sorted(classes) or tuple(map(classes.count, range(NUM_CLASSES))) != (
                self.class_sizes):
            raise InvariantError(f"eviction order {order} has classes {classes}, counted {self.class_sizes}")
        for d, cls in zip(order, classes):
            if cls not in (CLASS_EXPIRED, CLASS_LOW + self.core.nodes[<page_id_t>d].priority):
                raise InvariantError(f"draft node {d} has class {cls}, which is not that of its priority")
        for d in range(self.core.capacity):
            if self.is_listed(d) != (d in place):
                raise InvariantError(f"draft page {d} is marked as evictable {self.is_listed(d)}, wrongly")
        for draft in nodes:
            parent = self.core.nodes[<page_id_t>draft].parent
            if parent in place and (draft not in place or place[draft] > place[parent]):
                raise InvariantError(f"draft node {parent} may be evicted before {draft}, which follows it")
