"""PageAllocator: growing, windows, hits and swapping of one sequence's pages."""

import pytest

from jaxllm.cache.page_allocator import PageAllocator, SequencePages
from jaxllm.cache.page_pool import TRASH_PAGE, PageGroup

PAGE = 4


def make(*windows: int | None, num_pages: int = 11, swap: int = 0, caching: bool = True) -> PageAllocator:
    return PageAllocator(
        [PageGroup(f"window {window}", window, num_pages) for window in windows],
        page_size=PAGE,
        enable_prefix_caching=caching,
        num_swap_pages=[swap] * len(windows),
    )


def read_tokens(start: int, stop: int) -> list[int]:
    return list(range(start, stop))


def test_growing_gives_all_groups_pages_of_equal_number():
    allocator, pages = make(None, 6), SequencePages()
    new = allocator.grow(pages, 5)
    assert [(group, index) for group, index, _ in new] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert pages.num_positions == 8
    assert [(group, index) for group, index, _ in allocator.grow(pages, 9)] == [(0, 2), (1, 2)]
    allocator.check([pages])


def test_fit_counts_the_room_in_the_last_page():
    allocator, pages = make(None, num_pages=4), SequencePages()
    allocator.grow(pages, 5)
    assert allocator.fit(pages, 5, 100) == 7
    assert allocator.fit(pages, 5, 2) == 2


def test_window_releases_only_what_no_later_query_sees():
    allocator, pages = make(None, 6), SequencePages()
    allocator.grow(pages, 16)
    # A query at 9 sees 4 .. 9: page 0 is done; one at 8 still sees position 3.
    allocator.leave_behind(pages, 8)
    assert TRASH_PAGE not in pages.groups[1]
    allocator.leave_behind(pages, 9)
    assert pages.groups[1][0] == TRASH_PAGE and TRASH_PAGE not in pages.groups[1][1:]
    assert TRASH_PAGE not in pages.groups[0]
    allocator.check([pages])


def test_window_pages_of_confirmed_tokens_are_cached_when_left_behind():
    allocator, pages = make(6), SequencePages()
    allocator.grow(pages, 16)
    allocator.register(pages, read_tokens, 10)
    allocator.leave_behind(pages, 16)
    # Positions 11 .. are live, so pages 0 and 1 went, both registered.
    assert allocator.pools[0].num_cached == 2
    allocator.check([pages])


def test_hit_never_covers_the_last_token():
    allocator, first = make(None), SequencePages()
    allocator.grow(first, 8)
    allocator.register(first, read_tokens, 8)
    exact, longer = SequencePages(), SequencePages()
    allocator.take_hit(exact, read_tokens, 8)
    allocator.take_hit(longer, read_tokens, 9)
    assert exact.num_positions == 4 and longer.num_positions == 8
    allocator.check([first, exact, longer])
    for pages in (first, exact, longer):
        allocator.release(pages)
    allocator.check([])


def test_end_of_a_prefix_is_evicted_before_its_beginning():
    allocator, pages = make(None, num_pages=4), SequencePages()
    allocator.grow(pages, 12)
    allocator.register(pages, read_tokens, 12)
    allocator.release(pages)
    other = SequencePages()
    allocator.grow(other, 1)
    again = SequencePages()
    allocator.take_hit(again, read_tokens, 13)
    assert again.num_positions == 8


def test_swapping_moves_live_pages_and_brings_them_back_in_place():
    allocator, pages = make(None, 6, swap=10), SequencePages()
    allocator.grow(pages, 16)
    allocator.leave_behind(pages, 13)
    before = [list(held) for held in pages.groups]
    outs = allocator.swap_out(pages)
    assert outs is not None
    assert [(group, page) for group, page, _ in outs] == [
        (group, page) for group, held in enumerate(before) for page in held if page != TRASH_PAGE
    ]
    assert pages.groups == [] and allocator.pools[0].num_used == 0
    allocator.check([pages])
    blocker = SequencePages()
    allocator.grow(blocker, 1)
    new, ins = allocator.swap_in(pages)
    assert [(group, page) for group, _, page in new] == [(group, page) for group, page, _ in ins]
    assert [host for _, _, host in ins] == [host for _, _, host in outs]
    assert [[page == TRASH_PAGE for page in held] for held in pages.groups] == [
        [page == TRASH_PAGE for page in held] for held in before
    ]
    assert allocator.host_pools[0].num_used == 0
    allocator.check([pages, blocker])


def test_swapping_without_room_does_nothing():
    allocator, pages = make(None, 6, swap=3), SequencePages()
    allocator.grow(pages, 16)
    assert allocator.swap_out(pages) is None
    assert pages.num_positions == 16
    allocator.check([pages])


@pytest.mark.parametrize(
    "windows, num_pages, capacity",
    [
        ((None,), 5, 16),
        ((None, 6), 5, 16),
        # A window of 6 needs at most 3 pages of 4 at a time: the length is unbounded.
        ((6,), 4, 1 << 60),
        ((6,), 3, 8),
        ((None, 40), 9, 32),
    ],
)
def test_capacity(windows, num_pages, capacity):
    assert make(*windows, num_pages=num_pages).capacity_tokens() == capacity


def test_groups_and_swap_sizes_must_match():
    groups = [PageGroup("full", None, 4)]
    with pytest.raises(ValueError, match="each of 1 page groups"):
        PageAllocator(groups, page_size=4, enable_prefix_caching=True, num_swap_pages=[1, 2])
    with pytest.raises(ValueError, match="at least one page group"):
        PageAllocator([], page_size=4, enable_prefix_caching=True)


def test_without_caching_nothing_is_registered():
    allocator, pages = make(None, caching=False), SequencePages()
    allocator.grow(pages, 8)
    allocator.register(pages, read_tokens, 8)
    allocator.release(pages)
    assert allocator.pools[0].num_cached == 0
    assert allocator.take_hit(SequencePages(), read_tokens, 9) == []
