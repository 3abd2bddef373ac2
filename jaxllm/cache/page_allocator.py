"""PageAllocator: the pages of sequences over all page groups. Host only.

A sequence has one page list per group, all of equal length: position p lies in page p // page_size.
Pages that a sliding window has left behind are TRASH_PAGE in the list of their group.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxllm.cache.page_pool import TRASH_PAGE, PageGroup, PagePool
from jaxllm.cache.prefix_cache import DigestChain, ExtraKey, PrefixCache, ReadTokens

NewPage = tuple[int, int, int]
"""(group index, page index in the sequence, page id)."""
PageCopy = tuple[int, int, int]
"""(group index, device page id, host page id)."""


@dataclass(slots=True, eq=False)
class SequencePages:
    """What one sequence holds.

    Attributes:
        groups: page ids per group, on the device; empty while the sequence waits or is swapped out.
        host: (page index, host page id) pairs per group; empty unless swapped out.
        num_swapped: length of the page lists that were swapped out.
        first_live: per group the first page index that is not left behind by the window.
        num_positions: positions that the pages cover.
        num_registered: leading pages that were given to the prefix cache.
        chain: digests of the leading pages.
    """

    groups: list[list[int]] = field(default_factory=list[list[int]])
    host: list[list[tuple[int, int]]] = field(default_factory=list[list[tuple[int, int]]])
    num_swapped: int = 0
    first_live: list[int] = field(default_factory=list[int])
    num_positions: int = 0
    num_registered: int = 0
    chain: DigestChain = field(default_factory=DigestChain)

    @classmethod
    def with_keys(cls, extra_keys: Iterable[ExtraKey]) -> "SequencePages":
        return cls(chain=DigestChain(tuple(extra_keys)))


class PageAllocator:
    """Device pools, host pools and the prefix cache of all groups.

    Args:
        groups: the page groups, in the order of the device's page tables.
        page_size: tokens of a page.
        enable_prefix_caching: register and look up pages of equal prefixes.
        num_swap_pages: host pages per group; None or zeros switch swapping off.
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        *,
        page_size: int,
        enable_prefix_caching: bool,
        num_swap_pages: Sequence[int] | None = None,
    ):
        if not groups:
            raise ValueError("a model needs at least one page group, got none")
        if num_swap_pages is not None and len(num_swap_pages) != len(groups):
            raise ValueError(
                f"num_swap_pages must have one number for each of {len(groups)} page groups, got {list(num_swap_pages)}"
            )
        self.groups = tuple(groups)
        self.page_size = page_size
        self.pools = [PagePool(group.num_pages, name=group.name) for group in groups]
        host_sizes = num_swap_pages or [0] * len(groups)
        self.host_pools = [
            PagePool(size, num_reserved=0, name=f"{group.name} (host)")
            for group, size in zip(groups, host_sizes, strict=True)
        ]
        self.windows = [group.window for group in groups]
        self.has_windows = any(window is not None for window in self.windows)
        self.prefix_cache: PrefixCache | None = None
        if enable_prefix_caching:
            self.prefix_cache = PrefixCache(self.pools, self.windows, page_size)

    def capacity_tokens(self) -> int:
        """The longest sequence that fits when it has all pages to itself."""
        limits: list[int] = []
        for pool, window in zip(self.pools, self.windows, strict=True):
            # A window of any alignment and the token after it: then pages can be passed on for ever.
            if window is None or pool.num_usable < self._window_pages(window, 1):
                limits.append(pool.num_usable * self.page_size)
        return min(limits, default=1 << 60)

    def fit(self, pages: SequencePages, start: int, wanted: int) -> int:
        """How many of `wanted` positions from `start` on the pages, with those available, can cover."""
        available = min(pool.num_available for pool in self.pools)
        return max(0, min(wanted, pages.num_positions + available * self.page_size - start))

    def fits_whole(self, pages: SequencePages, end: int, chunk: int, reserves: Sequence[int], *, swapped: bool) -> bool:
        """Whether positions up to `end` fit, computed in chunks, with `reserves` pages per group left over.

        `swapped`: the pages are swapped out, so their device pages count as well.
        """
        for index, pool in enumerate(self.pools):
            need = self.need(pages, index, end, chunk)
            if swapped:
                need += len(pages.host[index])
            if need + reserves[index] > pool.num_available:
                return False
        return True

    def need(self, pages: SequencePages, group: int, end: int, chunk: int) -> int:
        """Pages of a group that a sequence still has to get to reach position `end` in chunks of `chunk`."""
        length = max(len(pages.groups[group]) if pages.groups else 0, pages.num_swapped)
        need = max(0, -(-end // self.page_size) - length)
        window = self.windows[group]
        # Pages behind the window come back while the prompt is computed.
        return need if window is None else min(need, self._window_pages(window, chunk))

    def grow(self, pages: SequencePages, num_positions: int) -> list[NewPage]:
        """Give the sequence pages for its first `num_positions` positions; they must be available."""
        if not pages.groups:
            pages.groups = [[] for _ in self.pools]
            pages.first_live = [0] * len(self.pools)
        new: list[NewPage] = []
        length = -(-num_positions // self.page_size)
        for group, (pool, held) in enumerate(zip(self.pools, pages.groups, strict=True)):
            first = len(held)
            held += pool.allocate(length - first)
            new += [(group, index, held[index]) for index in range(first, length)]
        pages.num_positions = length * self.page_size
        return new

    def leave_behind(self, pages: SequencePages, position: int) -> None:
        """Release the pages that no query from `position` on can see any more."""
        for group, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            if window is None or not pages.groups:
                continue
            held = pages.groups[group]
            stop = min(max(0, position - window + 1) // self.page_size, len(held))
            for index in range(pages.first_live[group], stop):
                pool.release(held[index])
                held[index] = TRASH_PAGE
            pages.first_live[group] = max(pages.first_live[group], stop)

    def release(self, pages: SequencePages) -> None:
        """Give back everything, on the device and on the host."""
        for pool, held in zip(self.pools, pages.groups, strict=False):
            # Last page first: the end of a prefix is evicted before its beginning.
            for page_id in reversed(held):
                if page_id != TRASH_PAGE:
                    pool.release(page_id)
        for pool, entries in zip(self.host_pools, pages.host, strict=False):
            for _, page_id in entries:
                pool.release(page_id)
        pages.groups, pages.host, pages.first_live = [], [], []
        pages.num_positions = pages.num_registered = pages.num_swapped = 0

    def register(self, pages: SequencePages, read_tokens: ReadTokens, num_tokens: int) -> None:
        """Register the full pages of the first `num_tokens` tokens, which are confirmed and computed."""
        if self.prefix_cache is None or not pages.groups:
            return
        stop = num_tokens // self.page_size
        if stop > pages.num_registered:
            self.prefix_cache.register(pages.chain, read_tokens, pages.groups, pages.num_registered, stop)
            pages.num_registered = stop

    def take_hit(self, pages: SequencePages, read_tokens: ReadTokens, num_tokens: int) -> list[NewPage]:
        """Start a sequence with the longest cached prefix of its first `num_tokens` tokens.

        The hit ends before the last token: at least one has to be computed. The pages are held from
        now on; `release` undoes it.
        """
        if self.prefix_cache is None:
            return []
        hit = self.prefix_cache.lookup(pages.chain, read_tokens, (num_tokens - 1) // self.page_size)
        if hit is None:
            return []
        pages.groups = hit
        pages.first_live = [0] * len(hit)
        new: list[NewPage] = []
        for group, held in enumerate(hit):
            pages.first_live[group] = first = held.count(TRASH_PAGE)
            for index in range(first, len(held)):
                self.pools[group].acquire(held[index])
                new.append((group, index, held[index]))
        pages.num_registered = len(hit[0])
        pages.num_positions = len(hit[0]) * self.page_size
        return new

    def swap_out(self, pages: SequencePages) -> list[PageCopy] | None:
        """Move all live pages to the host; None, and nothing done, when the host has no room."""
        live = [len(held) - first for held, first in zip(pages.groups, pages.first_live, strict=True)]
        if any(pool.num_available < count for pool, count in zip(self.host_pools, live, strict=True)):
            return None
        copies: list[PageCopy] = []
        host: list[list[tuple[int, int]]] = []
        for group, held in enumerate(pages.groups):
            first = pages.first_live[group]
            entries = list(enumerate(self.host_pools[group].allocate(live[group]), first))
            copies += [(group, held[index], page_id) for index, page_id in entries]
            host.append(entries)
        num_swapped, num_registered = len(pages.groups[0]), pages.num_registered
        self.release(pages)
        pages.host, pages.num_swapped, pages.num_registered = host, num_swapped, num_registered
        return copies

    def swap_in(self, pages: SequencePages) -> tuple[list[NewPage], list[PageCopy]]:
        """Bring a sequence back: new device pages, which must be available, and the copies to make."""
        new: list[NewPage] = []
        copies: list[PageCopy] = []
        groups: list[list[int]] = []
        for group, entries in enumerate(pages.host):
            held = [TRASH_PAGE] * (pages.num_swapped - len(entries))
            for (index, host_page), page_id in zip(entries, self.pools[group].allocate(len(entries)), strict=True):
                held.append(page_id)
                new.append((group, index, page_id))
                copies.append((group, page_id, host_page))
                self.host_pools[group].release(host_page)
            groups.append(held)
        pages.first_live = [len(held) - len(e) for held, e in zip(groups, pages.host, strict=True)]
        pages.groups, pages.host = groups, []
        pages.num_positions = pages.num_swapped * self.page_size
        pages.num_swapped = 0
        return new, copies

    def check(self, holders: Iterable[SequencePages]) -> None:
        """Verify all pools against the sequences that hold pages; AssertionError explains a mismatch."""
        device: list[list[int]] = [[] for _ in self.pools]
        host: list[list[int]] = [[] for _ in self.pools]
        for pages in holders:
            lengths = {len(held) for held in pages.groups}
            assert len(lengths) <= 1, f"page lists of one sequence differ in length: {lengths}"
            for group, held in enumerate(pages.groups):
                live = [page_id for page_id in held if page_id != TRASH_PAGE]
                first = pages.first_live[group]
                assert held[first:] == live, f"{self.groups[group].name}: a hole in the live pages {held}"
                device[group] += live
            for group, entries in enumerate(pages.host):
                host[group] += [page_id for _, page_id in entries]
        for pool, held in zip(self.pools + self.host_pools, device + host, strict=True):
            pool.check(held)

    def _window_pages(self, window: int, chunk: int) -> int:
        """Pages that `chunk` queries of a sliding window see, at the worst alignment."""
        return -(-(window - 1 + chunk - 1) // self.page_size) + 1
