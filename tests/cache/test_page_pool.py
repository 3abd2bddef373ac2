"""PagePool: states of a page, eviction order, and what check() finds."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from jaxllm.cache.page_pool import PageGroup, PagePool


def test_trash_page_is_never_allocated():
    pool = PagePool(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert pool.num_available == 0 and pool.num_used == 3


def test_allocating_too_much_takes_nothing():
    pool = PagePool(4, name="full")
    with pytest.raises(ValueError, match="full: 4 pages asked for, 3 are available"):
        pool.allocate(4)
    assert pool.num_available == 3
    pool.check()


def test_released_page_is_free_unless_registered():
    pool = PagePool(3)
    first, second = pool.allocate(2)
    pool.register(first, b"a")
    pool.release(first)
    pool.release(second)
    assert pool.num_cached == 1 and pool.lookup(b"a") == first
    # The free one goes first: what may still be hit is kept as long as possible.
    assert pool.allocate(1) == [second]


def test_least_recently_used_page_is_evicted_first():
    pool = PagePool(4)
    pages = pool.allocate(3)
    for page, digest in zip(pages, (b"a", b"b", b"c"), strict=True):
        pool.register(page, digest)
        pool.release(page)
    pool.acquire(pages[0])
    pool.release(pages[0])
    assert pool.allocate(1) == [pages[1]]
    assert pool.lookup(b"b") is None and pool.lookup(b"a") == pages[0]


def test_shared_page_is_used_until_the_last_holder_lets_go():
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.register(page, b"a")
    pool.acquire(page)
    pool.release(page)
    pool.check({page: 1})
    pool.release(page)
    assert pool.num_cached == 1
    pool.acquire(page)
    assert pool.num_cached == 0
    pool.check([page])


def test_equal_content_registers_once():
    pool = PagePool(3)
    first, second = pool.allocate(2)
    pool.register(first, b"a")
    pool.register(second, b"a")
    pool.release(second)
    assert pool.lookup(b"a") == first and pool.num_cached == 0
    pool.check([first])


def test_forgetting_frees_cached_pages_and_keeps_used_ones():
    pool = PagePool(4)
    held, dropped = pool.allocate(2)
    pool.register(held, b"a")
    pool.register(dropped, b"b")
    pool.release(dropped)
    pool.forget_all()
    assert pool.lookup(b"a") is None and pool.lookup(b"b") is None
    pool.check([held])
    pool.release(held)
    assert pool.num_cached == 0 and pool.num_available == 3


def test_pool_without_reserved_pages_starts_at_zero():
    assert sorted(PagePool(2, num_reserved=0).allocate(2)) == [0, 1]


def test_check_names_the_page_with_the_wrong_count():
    pool = PagePool(4, name="full")
    (page,) = pool.allocate(1)
    with pytest.raises(AssertionError, match=f"full: wrong reference counts .*page {page}: 1 counted, 2 held"):
        pool.check([page, page])


def test_check_names_the_lost_page():
    pool = PagePool(4, name="full")
    pool.allocate(1)
    lost = pool._free.pop()
    with pytest.raises(AssertionError, match=rf"1 free \+ 0 cached \+ 1 used != 3; lost \[{lost}\]"):
        pool.check([1])


def test_double_release_is_caught():
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.release(page)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(page)


@pytest.mark.parametrize("window, num_pages, message", [(0, 4, "window"), (None, 1, "at least 2 pages")])
def test_impossible_groups_are_refused(window, num_pages, message):
    with pytest.raises(ValueError, match=message):
        PageGroup("g", window, num_pages)


class PoolMachine(RuleBasedStateMachine):
    """Against a model: who holds what, and the cached pages in order of their last use."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(7)
        self.held: list[int] = []
        self.digests: dict[int, bytes] = {}
        self.cached: list[int] = []

    @rule(count=st.integers(0, 8))
    def allocate(self, count):
        available = 6 - len(set(self.held))
        if count > available:
            with pytest.raises(ValueError, match="are available"):
                self.pool.allocate(count)
            return
        num_free = available - len(self.cached)
        evicted = self.cached[: max(0, count - num_free)]
        pages = self.pool.allocate(count)
        assert set(pages) >= set(evicted) and len(set(pages)) == count
        assert not set(pages) & set(self.held)
        for page in evicted:
            self.cached.remove(page)
            del self.digests[page]
        assert not set(pages) & set(self.cached)
        self.held += pages

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        page = data.draw(st.sampled_from(self.held))
        self.held.remove(page)
        self.pool.release(page)
        if page not in self.held and page in self.digests:
            self.cached.append(page)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def register(self, data, digest):
        page = data.draw(st.sampled_from(self.held))
        self.pool.register(page, digest)
        if page not in self.digests and digest not in self.digests.values():
            self.digests[page] = digest

    @rule(digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def hit(self, digest):
        page = self.pool.lookup(digest)
        assert page == next((p for p, d in self.digests.items() if d == digest), None)
        if page is not None:
            self.pool.acquire(page)
            self.held.append(page)
            if page in self.cached:
                self.cached.remove(page)

    @rule()
    def forget(self):
        self.pool.forget_all()
        self.digests.clear()
        self.cached.clear()

    @invariant()
    def sums(self):
        self.pool.check(self.held)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_used == len(set(self.held))


@pytest.mark.parametrize("examples", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_pool_machine(examples):
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(max_examples=examples, stateful_step_count=30, deadline=None),
    )
