"""PrefixCache: digests, hit rules of full and sliding groups, against a slow model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from jaxllm.cache.page_pool import TRASH_PAGE, PagePool
from jaxllm.cache.prefix_cache import DigestChain, ExtraKey, PrefixCache

PAGE = 4


def make(*windows: int | None, num_pages: int = 40) -> tuple[PrefixCache, list[PagePool]]:
    pools = [PagePool(num_pages, name=str(window)) for window in windows]
    return PrefixCache(pools, windows, PAGE), pools


def reader(tokens: list[int]):
    return lambda start, stop: tokens[start:stop]


def fill(cache, pools, tokens, keys=()) -> list[list[int]]:
    """Compute and register all full pages of a sequence."""
    count = len(tokens) // PAGE
    pages = [pool.allocate(count) for pool in pools]
    cache.register(DigestChain(keys), reader(tokens), pages, 0, count)
    return pages


def hit_pages(cache, tokens, keys=()) -> int:
    hit = cache.lookup(DigestChain(keys), reader(tokens), len(tokens) // PAGE)
    return 0 if hit is None else len(hit[0])


def test_equal_prefix_is_found():
    cache, pools = make(None)
    pages = fill(cache, pools, list(range(12)))
    hit = cache.lookup(DigestChain(), reader([*range(8), 99, 99, 99, 99]), 3)
    assert hit == [pages[0][:2]]


def test_equal_page_after_another_prefix_is_not_found():
    cache, pools = make(None)
    fill(cache, pools, [1, 1, 1, 1, 2, 2, 2, 2])
    assert hit_pages(cache, [3, 3, 3, 3, 2, 2, 2, 2]) == 0
    assert hit_pages(cache, [2, 2, 2, 2]) == 0


def test_hit_is_bounded_by_max_pages():
    cache, pools = make(None)
    tokens = list(range(12))
    fill(cache, pools, tokens)
    hit = cache.lookup(DigestChain(), reader(tokens), 2)
    assert hit is not None and len(hit[0]) == 2


def test_salt_separates_users():
    cache, pools = make(None)
    tokens = list(range(8))
    fill(cache, pools, tokens, (ExtraKey("cache_salt", "a"),))
    assert hit_pages(cache, tokens, (ExtraKey("cache_salt", "a"),)) == 2
    assert hit_pages(cache, tokens, (ExtraKey("cache_salt", "b"),)) == 0
    assert hit_pages(cache, tokens) == 0
    # Another kind of key with the same value is another key.
    assert hit_pages(cache, tokens, (ExtraKey("lora", "a"),)) == 0


def test_key_in_the_middle_leaves_earlier_pages_shared():
    cache, pools = make(None)
    tokens = list(range(12))
    fill(cache, pools, tokens, (ExtraKey("image", "cat", position=5),))
    assert hit_pages(cache, tokens, (ExtraKey("image", "dog", position=5),)) == 1
    assert hit_pages(cache, tokens, (ExtraKey("image", "cat", position=5),)) == 3


@pytest.mark.parametrize(
    "window, needed",
    [(1, 0), (2, 1), (PAGE, 1), (PAGE + 1, 1), (PAGE + 2, 2), (2 * PAGE + 1, 2), (2 * PAGE + 2, 3)],
)
def test_window_needs_only_the_last_pages(window, needed):
    tokens = list(range(20))
    for held in (needed, needed - 1):
        cache, pools = make(window)
        kept = [TRASH_PAGE] * (5 - max(0, held)) + pools[0].allocate(max(0, held))
        cache.register(DigestChain(), reader(tokens), [kept], 0, 5)
        hit = cache.lookup(DigestChain(), reader(tokens), 5)
        # With one page less there is no hit of five pages, nor, as nothing older is there, any other.
        assert hit == ([kept] if held >= needed or needed == 0 else None)


def test_window_hit_is_shortened_to_before_the_hole():
    cache, pools = make(6)
    tokens = list(range(24))
    held = pools[0].allocate(6)
    held[4] = TRASH_PAGE
    cache.register(DigestChain(), reader(tokens), [held], 0, 6)
    # A hit of 6 needs pages 4 and 5, of 5 pages 3 and 4: page 4 is missing. Of 4: pages 2 and 3.
    hit = cache.lookup(DigestChain(), reader(tokens), 6)
    assert hit == [[TRASH_PAGE, TRASH_PAGE, *held[2:4]]]


def test_joint_hit_is_the_longest_that_all_groups_have():
    cache, pools = make(None, 6)
    tokens = list(range(24))
    full, sliding = pools[0].allocate(6), pools[1].allocate(6)
    full[5] = TRASH_PAGE
    sliding[3] = TRASH_PAGE
    cache.register(DigestChain(), reader(tokens), [full, sliding], 0, 6)
    # Full allows 5; sliding refuses 5 (pages 3, 4) and 4 (2, 3), and has pages 1 and 2 for 3.
    assert cache.lookup(DigestChain(), reader(tokens), 6) == [full[:3], [TRASH_PAGE, *sliding[1:3]]]


def test_reset_forgets_also_what_running_sequences_register_later():
    cache, pools = make(None)
    tokens = list(range(12))
    chain = DigestChain()
    pages = [pools[0].allocate(3)]
    cache.register(chain, reader(tokens), pages, 0, 2)
    cache.reset()
    assert hit_pages(cache, tokens) == 0
    # Computed before the reset, perhaps with other weights: not found under the new generation.
    cache.register(chain, reader(tokens), pages, 2, 3)
    assert hit_pages(cache, tokens) == 0
    fill(cache, pools, tokens)
    assert hit_pages(cache, tokens) == 3


def test_digests_are_made_only_as_far_as_pages_match():
    cache, pools = make(None)
    fill(cache, pools, list(range(8)))
    chain = DigestChain()
    cache.lookup(chain, reader([*range(4), *range(100, 500)]), 100)
    assert len(chain.digests) == 2


class PrefixMachine(RuleBasedStateMachine):
    """Against a model that remembers each registered prefix and tries every hit length."""

    @initialize(windows=st.lists(st.sampled_from([None, 1, 3, 5, 6, 9]), min_size=1, max_size=3))
    def start(self, windows):
        self.windows = windows
        self.cache, self.pools = make(*windows, num_pages=9)
        self.held: list[list[list[int]]] = []
        self.content: list[dict[int, tuple]] = [{} for _ in windows]

    tokens = st.lists(st.integers(0, 1), min_size=0, max_size=5).map(
        lambda bits: [b for b in bits for _ in range(PAGE)]
    )
    salts = st.sampled_from(["", "x"])

    def _model_hit(self, tokens, salt) -> int:
        prefixes = [(salt, tuple(tokens[: (i + 1) * PAGE])) for i in range(len(tokens) // PAGE)]
        for count in range(len(prefixes), 0, -1):
            fits = True
            for pool, window, content in zip(self.pools, self.windows, self.content, strict=True):
                first = 0 if window is None else max(0, count * PAGE - (window - 1)) // PAGE
                known = {prefix for page, prefix in content.items() if pool._digests[page] is not None}
                fits &= all(prefix in known for prefix in prefixes[first:count])
            if fits:
                return count
        return 0

    @rule(tokens=tokens, salt=salts)
    def run(self, tokens, salt):
        """Look up, compute the rest, register, keep holding."""
        count = len(tokens) // PAGE
        keys = (ExtraKey("cache_salt", salt),) if salt else ()
        chain = DigestChain(keys)
        hit = self.cache.lookup(chain, reader(tokens), count)
        expected = self._model_hit(tokens, salt)
        assert (0 if hit is None else len(hit[0])) == expected
        pages = hit or [[] for _ in self.pools]
        for pool, group, content in zip(self.pools, pages, self.content, strict=True):
            for index, page in enumerate(group):
                if page != TRASH_PAGE:
                    assert content[page] == (salt, tuple(tokens[: (index + 1) * PAGE])), "a page of another prefix"
                    pool.acquire(page)
        if any(pool.num_available < count - expected for pool in self.pools):
            self._release(pages)
            return
        for pool, group, content in zip(self.pools, pages, self.content, strict=True):
            for index, page in enumerate(pool.allocate(count - expected), expected):
                group.append(page)
                content[page] = (salt, tuple(tokens[: (index + 1) * PAGE]))
        self.cache.register(chain, reader(tokens), pages, expected, count)
        self.held.append(pages)

    @rule(data=st.data())
    def drop(self, data):
        if self.held:
            index = data.draw(st.integers(0, len(self.held) - 1))
            self._release(self.held.pop(index))

    @rule()
    def reset(self):
        self.cache.reset()

    def _release(self, pages):
        for pool, group in zip(self.pools, pages, strict=True):
            for page in reversed(group):
                if page != TRASH_PAGE:
                    pool.release(page)

    @invariant()
    def sums(self):
        if hasattr(self, "held"):
            for index, pool in enumerate(self.pools):
                pool.check([page for pages in self.held for page in pages[index] if page != TRASH_PAGE])


@pytest.mark.parametrize("examples", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_prefix_machine(examples):
    run_state_machine_as_test(
        PrefixMachine,
        settings=settings(max_examples=examples, stateful_step_count=30, deadline=None),
    )
