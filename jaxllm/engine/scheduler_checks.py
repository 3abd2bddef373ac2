"""The scheduler's invariants, checked in tests after every operation and by an idle engine. Host only."""

from collections import Counter
from collections.abc import Sequence as SequenceOf

from jaxllm.cache.page_allocator import PageAllocator
from jaxllm.engine.request import Sequence, SequenceStatus
from jaxllm.engine.step_plan import StepPlan


def check_scheduler(
    allocator: PageAllocator,
    *,
    running: SequenceOf[Sequence],
    waiting: SequenceOf[Sequence],
    swapped: SequenceOf[Sequence],
    held: SequenceOf[Sequence],
    unfinished: SequenceOf[Sequence],
    plans: SequenceOf[StepPlan],
    free_slots: SequenceOf[int],
    max_num_seqs: int,
) -> None:
    """Verify that every sequence is in one place with what belongs there, and that all pages add up.

    Raises:
        AssertionError: says which sequence or sum is wrong.
    """
    places = Counter(map(id, [*running, *waiting, *swapped, *held]))
    assert places == Counter(map(id, unfinished)), "an unfinished sequence is in no place or in two"
    allocator.check(sequence.kv for sequence in unfinished)
    slots = [-1 if sequence.slot is None else sequence.slot for sequence in running]
    assert sorted([*slots, *free_slots]) == list(range(max_num_seqs)), (
        f"slots {slots} in use and {list(free_slots)} free are not 0..{max_num_seqs - 1}"
    )
    in_flight: Counter[int] = Counter()
    for plan in plans:
        for row in plan.decode_rows:
            in_flight[id(row.sequence)] += row.num_tokens
        for row in plan.prefill_rows:
            in_flight[id(row.sequence)] += row.samples
    for sequence in unfinished:
        dispatched = in_flight[id(sequence)]
        assert sequence.num_in_flight == dispatched, f"{sequence}: plans have {dispatched} in flight"
        total = sequence.num_tokens + sequence.num_in_flight
        assert total <= sequence.max_total_tokens, f"{sequence}: {total} of {sequence.max_total_tokens} tokens"
        assert sequence.finish_reason is None, f"{sequence}: unfinished, but {sequence.finish_reason}"
    _check_running(running)
    for sequence in [*waiting, *held]:
        assert sequence.status is SequenceStatus.WAITING and sequence.slot is None, f"{sequence} in the queue"
        assert not sequence.pages and not sequence.kv.host, f"{sequence} holds pages while it waits"
        assert sequence.num_computed_tokens == 0, f"{sequence} waits with computed tokens"
    for sequence in swapped:
        assert sequence.status is SequenceStatus.SWAPPED, f"{sequence} among swapped"
        assert sequence.slot is None, f"{sequence} has a slot while swapped out"
        assert not sequence.pages, f"{sequence} holds device pages while swapped out"


def _check_running(running: SequenceOf[Sequence]) -> None:
    keys = [sequence.key for sequence in running]
    assert keys == sorted(keys), f"running sequences are out of order: {keys}"
    for sequence in running:
        assert sequence.status is SequenceStatus.RUNNING, f"{sequence} among running"
        computed, total = sequence.num_computed_tokens, sequence.num_tokens + sequence.num_in_flight
        if sequence.is_decoding:
            assert computed == total - 1, f"{sequence}: decoding, but lacks {total - computed} tokens"
        else:
            assert sequence.num_in_flight == 0, f"{sequence}: tokens in flight before its prompt is done"
            assert computed < sequence.num_tokens, f"{sequence}: nothing left to compute"
        covered = sequence.kv.num_positions
        assert computed <= covered, f"{sequence}: pages for {covered} positions only"
