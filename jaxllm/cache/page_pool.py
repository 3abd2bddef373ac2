"""PagePool: who holds which page of one page group. Host only.

A page is in exactly one of three states:

    free    nobody holds it and its content is forgotten
    used    held by one or more sequences (its reference count says how many)
    cached  nobody holds it, but its content is registered under a digest and may be used again;
            the least recently used of these is evicted when no page is free

A used page may be registered too; it becomes cached, not free, when the last holder lets go.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TRASH_PAGE = 0
"""Page of every group that padding writes to. Never allocated; in a sequence's page list it marks
a page that a sliding window has left behind."""


@dataclass(frozen=True)
class PageGroup:
    """The pages of all layers with equal attention window.

    Attributes:
        name: for messages.
        window: None for full attention; else a token sees itself and the `window - 1` before it.
        num_pages: pages of the device's arrays, the trash page included.
    """

    name: str
    window: int | None
    num_pages: int

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"window of page group {self.name!r} must be at least 1, got {self.window}")
        if self.num_pages < 2:
            raise ValueError(
                f"page group {self.name!r} must have at least 2 pages (one is the trash page), got {self.num_pages}"
            )


class PagePool:
    """Free list, reference counts and the LRU of cached pages.

    Args:
        num_pages: page ids run from 0 to num_pages - 1.
        num_reserved: the first page ids, which are never allocated (1 on the device: the trash page).
        name: for messages.
    """

    def __init__(self, num_pages: int, *, num_reserved: int = 1, name: str = "pages"):
        self.name = name
        self.num_pages = num_pages
        self.num_reserved = num_reserved
        # Popped from the end: low ids first, so that small runs touch little memory.
        self._free = list(range(num_pages - 1, num_reserved - 1, -1))
        self._references = [0] * num_pages
        self._digests: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_usable(self) -> int:
        """Pages that can ever be allocated."""
        return self.num_pages - self.num_reserved

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages that some sequence holds."""
        return self.num_usable - self.num_available

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and that can still be hit."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one reference and no content.

        Raises:
            ValueError: when fewer are available; nothing is taken then.
        """
        if count > self.num_available:
            raise ValueError(f"{self.name}: {count} pages asked for, {self.num_available} are available")
        pages: list[int] = []
        for _ in range(count):
            page_id = self._free.pop() if self._free else self._evict()
            self._references[page_id] = 1
            pages.append(page_id)
        return pages

    def acquire(self, page_id: int) -> None:
        """Add a reference to a used or cached page."""
        if self._references[page_id] == 0:
            assert page_id in self._cached, f"{self.name}: page {page_id} is free, it has no content"
            del self._cached[page_id]
        self._references[page_id] += 1

    def release(self, page_id: int) -> None:
        """Drop a reference; the last one makes the page cached (when registered) or free."""
        references = self._references[page_id] - 1
        assert references >= 0, f"{self.name}: page {page_id} released more often than acquired"
        self._references[page_id] = references
        if references == 0:
            if self._digests[page_id] is None:
                self._free.append(page_id)
            else:
                self._cached[page_id] = None

    def lookup(self, digest: bytes) -> int | None:
        """The page registered under `digest`, or None."""
        return self._page_of.get(digest)

    def register(self, page_id: int, digest: bytes) -> None:
        """Let a used page be found by `digest`. The first page of equal content stays the registered one."""
        assert self._references[page_id] > 0, f"{self.name}: page {page_id} is not in use"
        if digest not in self._page_of and self._digests[page_id] is None:
            self._page_of[digest] = page_id
            self._digests[page_id] = digest

    def forget_all(self) -> None:
        """Drop every registration; cached pages become free, used ones become free later."""
        for page_id in self._page_of.values():
            self._digests[page_id] = None
        self._page_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def _evict(self) -> int:
        page_id, _ = self._cached.popitem(last=False)
        digest = self._digests[page_id]
        assert digest is not None
        del self._page_of[digest]
        self._digests[page_id] = None
        return page_id

    def check(self, holders: Mapping[int, int] | Iterable[int] = ()) -> None:
        """Verify the invariants against what the holders say they hold.

        Args:
            holders: references by page id, or the page ids held, once per reference.

        Raises:
            AssertionError: says which sum or page is wrong.
        """
        expected: dict[int, int] = {}
        if isinstance(holders, Mapping):
            expected.update(holders)  # pyright: ignore[reportUnknownArgumentType]
        else:
            for page_id in holders:
                expected[page_id] = expected.get(page_id, 0) + 1
        counted = {page: n for page, n in enumerate(self._references) if n}
        if counted != expected:
            either = sorted(counted.keys() | expected)
            wrong = [page for page in either if counted.get(page) != expected.get(page)]
            details = ", ".join(
                f"page {page}: {counted.get(page, 0)} counted, {expected.get(page, 0)} held" for page in wrong[:8]
            )
            raise AssertionError(f"{self.name}: wrong reference counts ({len(wrong)} pages): {details}")
        free, cached, used = set(self._free), set(self._cached), set(counted)
        assert len(free) == len(self._free), f"{self.name}: a page is in the free list twice"
        total = len(free) + len(cached) + len(used)
        if total != self.num_usable or len(free | cached | used) != total:
            every = set(range(self.num_reserved, self.num_pages))
            raise AssertionError(
                f"{self.name}: {len(free)} free + {len(cached)} cached + {len(used)} used "
                f"!= {self.num_usable}; "
                f"lost {sorted(every - free - cached - used)[:8]}, "
                f"in two states {sorted((free & cached) | (free & used) | (cached & used))[:8]}, "
                f"unknown {sorted((free | cached | used) - every)[:8]}"
            )
        registered = {page: digest for page, digest in enumerate(self._digests) if digest is not None}
        assert {digest: page for page, digest in registered.items()} == self._page_of, (
            f"{self.name}: digests and pages disagree: {len(registered)} pages, {len(self._page_of)} digests"
        )
        assert cached <= registered.keys(), f"{self.name}: cached pages without a digest"
        assert not free & registered.keys(), f"{self.name}: free pages with a digest"
