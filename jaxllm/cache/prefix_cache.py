"""PrefixCache: finds the pages of an equal prefix. Host only.

A full page of tokens has a digest chained over all pages before it, so equal digests mean equal
prefixes. Each page group registers its own page under the digest and has its own rule for a hit of
n pages:

    full attention    pages 0 .. n-1 must all be there
    sliding window    only the pages of the last window - 1 positions before the hit's end must be

    tokens    | page 0 | page 1 | page 2 | page 3 | next query ...
    full      |   x    |   x    |   x    |   x    |
    window 6  |        |        |  (x x) |   x    |      page size 4: positions 11 .. 15

The longest hit that all groups allow is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import Struct

from jaxllm.cache.page_pool import TRASH_PAGE, PagePool

DIGEST_BYTES = 32

ReadTokens = Callable[[int, int], Sequence[int]]
"""(start, stop) -> the token ids of these positions, all known."""


@dataclass(frozen=True)
class ExtraKey:
    """Something besides token ids that the KV of a prefix depends on.

    Attributes:
        kind: what it is, such as "cache_salt".
        value: its content.
        position: first token position it matters for; pages before it are shared all the same.
    """

    kind: str
    value: str
    position: int = 0


@dataclass(slots=True)
class DigestChain:
    """The digests of one sequence's full pages, grown as they are asked for."""

    extra_keys: tuple[ExtraKey, ...] = ()
    digests: list[bytes] = field(default_factory=list[bytes])
    generation: int = -1


class PrefixCache:
    """Digests, the joint hit of all groups, and the counters.

    Args:
        pools: one per page group.
        windows: the attention window of each group, None for full attention.
        page_size: tokens of a page.
    """

    def __init__(self, pools: Sequence[PagePool], windows: Sequence[int | None], page_size: int):
        self._full = [pool for pool, window in zip(pools, windows, strict=True) if window is None]
        # Pages of the last window - 1 positions before a page boundary.
        self._sliding = [
            (pool, -(-(window - 1) // page_size))
            for pool, window in zip(pools, windows, strict=True)
            if window is not None
        ]
        self._pools = list(pools)
        self._windows = list(windows)
        self._page_size = page_size
        self._pack = Struct(f"{page_size}q").pack
        self._generation = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def lookup(self, chain: DigestChain, read_tokens: ReadTokens, max_pages: int) -> list[list[int]] | None:
        """The longest joint hit of at most `max_pages` pages, without taking references.

        Returns:
            Per group the page ids of the hit, all of equal length, TRASH_PAGE where a sliding window
            needs none; None when there is no hit.
        """
        if chain.generation != self._generation:
            chain.digests.clear()
            chain.generation = self._generation
        num_pages = self._full_hit(chain, read_tokens, max_pages)
        num_pages = self._sliding_hit(chain, num_pages)
        if num_pages == 0:
            return None
        hit: list[list[int]] = []
        for pool, window in zip(self._pools, self._windows, strict=True):
            first = 0
            if window is not None:
                first = max(0, num_pages * self._page_size - window + 1) // self._page_size
            pages = [TRASH_PAGE] * first
            for digest in chain.digests[first:num_pages]:
                page_id = pool.lookup(digest)
                assert page_id is not None
                pages.append(page_id)
            hit.append(pages)
        return hit

    def register(
        self, chain: DigestChain, read_tokens: ReadTokens, pages: Sequence[list[int]], first: int, stop: int
    ) -> None:
        """Register the pages `first` .. `stop - 1`: full, their tokens known, their KV dispatched."""
        if chain.generation < 0:
            chain.generation = self._generation
        self._extend(chain, read_tokens, stop)
        for pool, group in zip(self._pools, pages, strict=True):
            for index in range(first, stop):
                if group[index] != TRASH_PAGE:
                    pool.register(group[index], chain.digests[index])

    def reset(self) -> None:
        """Forget everything. What running sequences computed before is not found any more, either.

        That makes it safe after a change of weights: their pages go by digests of the old generation.
        """
        self._generation += 1
        for pool in self._pools:
            pool.forget_all()

    def record(self, queried: int, hit: int) -> None:
        """Count an admitted sequence: `queried` tokens looked for, `hit` of them found."""
        self.num_queried_tokens += queried
        self.num_hit_tokens += hit

    def _full_hit(self, chain: DigestChain, read_tokens: ReadTokens, max_pages: int) -> int:
        """Pages that all full-attention groups have. Digests are made only as far as pages match."""
        if not self._full:
            self._extend(chain, read_tokens, max_pages)
            return max_pages
        digests = chain.digests
        for index in range(max_pages):
            if index == len(digests):
                self._extend(chain, read_tokens, index + 1)
            for pool in self._full:
                if pool.lookup(digests[index]) is None:
                    return index
        return max_pages

    def _sliding_hit(self, chain: DigestChain, num_pages: int) -> int:
        """Shorten a hit until every sliding group has the pages before its end."""
        position = 0
        while position < len(self._sliding):
            pool, needed = self._sliding[position]
            missing = self._last_missing(pool, chain, max(0, num_pages - needed), num_pages)
            if missing is None:
                position += 1
            else:
                # Every longer hit would need the missing page as well.
                num_pages, position = missing, 0
        return num_pages

    @staticmethod
    def _last_missing(pool: PagePool, chain: DigestChain, first: int, stop: int) -> int | None:
        for index in range(stop - 1, first - 1, -1):
            if pool.lookup(chain.digests[index]) is None:
                return index
        return None

    def _extend(self, chain: DigestChain, read_tokens: ReadTokens, num_pages: int) -> None:
        digests, size = chain.digests, self._page_size
        for index in range(len(digests), num_pages):
            start, stop = index * size, (index + 1) * size
            parent = digests[-1] if digests else self._root(chain.generation)
            page = blake2b(parent, digest_size=DIGEST_BYTES)
            page.update(self._pack(*read_tokens(start, stop)))
            for key in chain.extra_keys:
                if start <= key.position < stop:
                    page.update(repr((key.kind, key.value, key.position)).encode())
            digests.append(page.digest())

    @staticmethod
    def _root(generation: int) -> bytes:
        return blake2b(f"generation {generation}".encode(), digest_size=DIGEST_BYTES).digest()
