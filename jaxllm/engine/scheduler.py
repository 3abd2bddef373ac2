"""Scheduler: which tokens of which sequences the next step computes. Host only.

There are no prefill and decode phases. A step is filled under one token budget in this order:

    1. decode rows        every running sequence whose last token is on the device, one token each
    2. the oldest prefill at least half of what is left
    3. swapped sequences  come back before anything new is admitted
    4. other prefills     running and waiting ones, small before large
    5. the oldest prefill takes what nobody wanted

The device runs behind: a plan is made before the tokens of earlier plans are known. Lengths are known
ahead, so no row goes past its limit; EOS and stop tokens are seen at commit, and rows that were
already planned beyond them are dropped at their own commit. Pages and slots are given away at once
all the same: launches run in order, so whoever gets a page writes to it after the last launch that
used it. For the same reason a plan must be dispatched before abort() or schedule() is called again.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from jaxllm.cache.page_allocator import NewPage, PageAllocator
from jaxllm.cache.page_pool import PageGroup
from jaxllm.engine.held_siblings import HeldSiblings
from jaxllm.engine.plan_draft import PlanDraft
from jaxllm.engine.request import Sequence, SequenceStatus
from jaxllm.engine.scheduler_checks import check_scheduler
from jaxllm.engine.step_plan import RowResult, ScheduledRow, StepPlan
from jaxllm.engine.waiting_queue import KEY, WaitingQueue
from jaxllm.errors import RequestError

__all__ = ["RowResult", "ScheduledRow", "Scheduler", "StepPlan"]

WATERMARK = 0.01
"""Fraction of each group's pages that admission leaves to the running rows."""


class Scheduler:
    """Plans steps and takes in their results.

    Args:
        groups: the model's page groups.
        page_size: tokens of a page.
        max_num_seqs: slots.
        max_num_batched_tokens: token budget of a step; at least max_num_seqs.
        max_model_len: most tokens of a sequence, prompt and output.
        enable_prefix_caching: reuse pages of equal prefixes.
        num_decode_steps: steps of one launch when only decode rows run and nobody could be admitted.
        num_swap_pages: host pages per group; None: preempted sequences are recomputed.
        max_prefill_rows: most prefill rows of a step.
        block_tokens: prefill rows are computed in whole blocks of so many tokens.
        max_prefill_blocks: most blocks of a step; None: the budget alone decides.
        clock: monotonic seconds.

    Attributes:
        num_preemptions: sequences that lost their pages, swapped or not.
    """

    def __init__(
        self,
        groups: SequenceOf[PageGroup],
        *,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        num_decode_steps: int = 1,
        num_swap_pages: SequenceOf[int] | None = None,
        max_prefill_rows: int = 8,
        block_tokens: int = 1,
        max_prefill_blocks: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs ({max_num_seqs})"
            )
        for name, value in (("max_num_seqs", max_num_seqs), ("num_decode_steps", num_decode_steps),
                            ("max_prefill_rows", max_prefill_rows)):  # fmt: skip
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.allocator = PageAllocator(
            groups,
            page_size=page_size,
            enable_prefix_caching=enable_prefix_caching,
            num_swap_pages=num_swap_pages,
        )
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.num_decode_steps = num_decode_steps
        self.max_prefill_rows = max_prefill_rows
        self.block_tokens = block_tokens
        self.max_prefill_blocks = max_num_batched_tokens if max_prefill_blocks is None else max_prefill_blocks
        self.num_preemptions = 0
        self._clock = clock
        self._watermarks = [int(pool.num_usable * WATERMARK) + 1 for pool in self.allocator.pools]
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._num_arrivals = 0
        # Sorted by key: the oldest first, the next victim last.
        self._running: list[Sequence] = []
        self._swapped: list[Sequence] = []
        self._waiting = WaitingQueue(max(1, max_num_batched_tokens // 2), max_model_len)
        self._held = HeldSiblings()
        self._unfinished: dict[str, list[Sequence]] = {}
        self._plans: deque[StepPlan] = deque()

    # ---------------------------------------------------------------- what the engine asks

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences not admitted yet or preempted without swap."""
        return len(self._waiting) + len(self._held)

    @property
    def num_swapped(self) -> int:
        return len(self._swapped)

    @property
    def pages_in_use(self) -> int:
        """Pages that sequences hold, over all groups."""
        return sum(pool.num_used for pool in self.allocator.pools)

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of the pages held by sequences, in the group where it is highest."""
        return max(pool.num_used / pool.num_usable for pool in self.allocator.pools)

    @property
    def swap_usage(self) -> float:
        """Fraction of the host pages in use, in the group where it is highest."""
        return max((pool.num_used / pool.num_usable for pool in self.allocator.host_pools if pool.num_usable),
                   default=0.0)  # fmt: skip

    @property
    def prefix_cache_queries(self) -> int:
        """Tokens looked for in the prefix cache."""
        return self.allocator.prefix_cache.num_queried_tokens if self.allocator.prefix_cache else 0

    @property
    def prefix_cache_hits(self) -> int:
        """Tokens found in the prefix cache."""
        return self.allocator.prefix_cache.num_hit_tokens if self.allocator.prefix_cache else 0

    def has_work(self) -> bool:
        """Whether a sequence is unfinished or a plan uncommitted."""
        return bool(self._unfinished or self._plans)

    def capacity_tokens(self) -> int:
        """The longest sequence, prompt and output, whose pages fit when it runs alone."""
        return self.allocator.capacity_tokens()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; running sequences go on. False when there is no cache."""
        if self.allocator.prefix_cache is None:
            return False
        self.allocator.prefix_cache.reset()
        return True

    def check(self) -> None:
        """Verify every invariant; AssertionError says which one is broken."""
        check_scheduler(
            self.allocator,
            running=self._running,
            waiting=list(self._waiting),
            swapped=self._swapped,
            held=list(self._held),
            unfinished=[sequence for group in self._unfinished.values() for sequence in group],
            plans=list(self._plans),
            free_slots=self._free_slots,
            max_num_seqs=self.max_num_seqs,
        )

    # ---------------------------------------------------------------- sequences come and go

    def add(self, sequences: SequenceOf[Sequence]) -> None:
        """Queue the sequences of a request. They share the work on their prompt.

        Raises:
            RequestError: a prompt that is empty or too long, or a sequence that could never fit into
                the KV cache; nothing is queued then.
        """
        for sequence in sequences:
            siblings = self._unfinished.get(sequence.request_id, ())
            if any(other.index == sequence.index for other in siblings):
                raise RequestError(
                    f"request_id {sequence.request_id!r} is in use by an unfinished request", "request_id"
                )
            sequence.limit_length(self.max_model_len, self.capacity_tokens())
        if len({(sequence.request_id, sequence.index) for sequence in sequences}) < len(sequences):
            raise ValueError(f"sequences of one request must differ in index, got {list(sequences)}")
        now = self._clock()
        for sequence in sequences:
            sequence.arrival = self._num_arrivals
            self._num_arrivals += 1
            sequence.queued_time = now
            self._unfinished.setdefault(sequence.request_id, []).append(sequence)
        if self.allocator.prefix_cache is not None:
            sequences = self._held.hold(sequences, longer_than=self.page_size)
        for sequence in sequences:
            self._waiting.add(sequence)

    def abort(self, request_id: str, index: int | None = None) -> list[Sequence]:
        """End all sequences of a request, or the one with this index; tokens in flight are dropped.

        Returns:
            The sequences ended; none when the request is unknown or has finished.
        """
        ended = [s for s in self._unfinished.get(request_id, ()) if index is None or s.index == index]
        # Followers first: else the end of their leader would queue them.
        for sequence in reversed(ended):
            sequence.finish_reason = "abort"
            self._finish(sequence)
        return ended

    def _finish(self, sequence: Sequence) -> None:
        """Take a sequence out of wherever it is and give back what it holds."""
        if sequence.status is SequenceStatus.RUNNING:
            self._leave_running(sequence)
        elif sequence.status is SequenceStatus.SWAPPED:
            self._swapped.remove(sequence)
        elif not self._held.remove(sequence):
            self._waiting.remove(sequence)
        self.allocator.release(sequence.kv)
        sequence.status = SequenceStatus.FINISHED
        siblings = self._unfinished[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._unfinished[sequence.request_id]
        self._queue_siblings(sequence)

    def _leave_running(self, sequence: Sequence) -> None:
        """Take the slot from a running sequence; its full pages stay in the prefix cache."""
        self._register(sequence)
        self._running.remove(sequence)
        assert sequence.slot is not None
        self._free_slots.append(sequence.slot)
        sequence.slot = None
        sequence.is_decoding = False

    def _queue_siblings(self, leader: Sequence) -> None:
        """Queue those who waited for the leader's prompt, if that is cached now or the leader has ended."""
        if self._held:
            for sequence in self._held.release(leader):
                self._waiting.add(sequence)

    # ---------------------------------------------------------------- one step

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when nothing can run before an earlier plan is committed."""
        num_decodes = sum(sequence.is_decoding for sequence in self._running)
        draft = PlanDraft(
            self.max_num_batched_tokens - num_decodes,
            self.max_prefill_blocks,
            num_prefills=len(self._running) - num_decodes,
        )
        self._schedule_running(draft)
        # Pages were short: whatever came in now would be the next to go.
        draft.admission_open = draft.is_steady
        self._resume_swapped(draft)
        self._schedule_prefills(draft)
        if not draft.decodes and not draft.chunks:
            assert not draft.swap_outs and not draft.swap_ins
            return None
        num_steps = self._choose_num_steps(draft)
        decode_rows = tuple(self._decode_row(sequence, num_steps, draft) for sequence in draft.decodes)
        prefill_rows = tuple(self._prefill_row(sequence, chunk) for sequence, chunk in draft.chunks.items())
        plan = StepPlan(
            decode_rows, prefill_rows, num_steps, draft.page_updates,
            draft.new_sequences, draft.swap_outs, draft.swap_ins,
        )  # fmt: skip
        self._plans.append(plan)
        return plan

    def _schedule_running(self, draft: PlanDraft) -> None:
        """Decode rows, and the oldest running prefill with half of the budget, in order of service.

        Only these may preempt, and only younger ones, which have not had their turn here: so the
        oldest sequence always gets on, and no row that was given is taken back.
        """
        running = self._running
        index = 0
        has_prefill = False
        while index < len(running):
            sequence = running[index]
            index += 1
            start = sequence.num_computed_tokens
            if sequence.is_decoding:
                if start + 1 >= sequence.max_total_tokens:
                    continue  # its last token is in flight
                if start < sequence.kv.num_positions or self._reserve(sequence, 1, draft, preempt=True):
                    draft.decodes.append(sequence)
            elif not has_prefill:
                has_prefill = True
                need = sequence.num_tokens - start
                self._grant(sequence, min(need, draft.left - draft.left // 2), draft, preempt=True)

    def _resume_swapped(self, draft: PlanDraft) -> None:
        """Bring back swapped sequences, in order; while one cannot come nothing new is admitted."""
        while self._swapped:
            sequence = self._swapped[0]
            need = sequence.num_tokens - sequence.num_computed_tokens
            if sequence.num_in_flight:
                draft.is_steady = False
            ready = not sequence.num_in_flight and self._has_room(draft)
            if not ready or not self._fits(sequence, swapped=True):
                draft.admission_open = False
                return
            del self._swapped[0]
            new, copies = self.allocator.swap_in(sequence.kv)
            draft.swap_ins += copies
            self._enter_running(sequence, new, draft)
            self._grant(sequence, min(need, draft.left), draft)

    def _schedule_prefills(self, draft: PlanDraft) -> None:
        """Share the rest of the budget: the head of the line first, then small before large."""
        running = [s for s in self._running if not s.is_decoding and s not in draft.chunks]
        if not draft.num_prefills and not self._waiting:
            return
        self._admit_head(draft)
        # A class of large prompts has one at a time, so that the others' shares do not shrink to nothing.
        occupied = {self._waiting.size_class(s.num_tokens - s.num_computed_tokens - draft.chunks.get(s, 0))
                    for s in self._running if not s.is_decoding}  # fmt: skip
        for size_class in range(self._waiting.num_classes):
            for sequence in running:
                need = sequence.num_tokens - sequence.num_computed_tokens
                if self._waiting.size_class(need) == size_class and draft.left:
                    self._grant(sequence, min(need, draft.left), draft)
            while size_class == 0 or size_class not in occupied:
                sequence = self._waiting.first(size_class)
                # The last row is kept for a short prompt.
                if sequence is None or not self._has_room(draft, spare_rows=1 if size_class else 0):
                    break
                if not self._admit(sequence, draft.left, draft):
                    break
                occupied.add(self._waiting.size_class(sequence.num_tokens - sequence.num_computed_tokens))
        for sequence, chunk in list(draft.chunks.items()):
            if not draft.left:
                break
            need = sequence.num_tokens - sequence.num_computed_tokens - chunk
            if need:
                self._grant(sequence, min(need, draft.left), draft)

    def _admit_head(self, draft: PlanDraft) -> None:
        """Admit the waiting sequence that is older than every running prefill, with half of what is left."""
        sequence = self._waiting.first_of(range(self._waiting.num_classes))
        if sequence is None or not self._has_room(draft):
            return
        if any(not other.is_decoding and other.key < sequence.key for other in self._running):
            return
        self._admit(sequence, draft.left - draft.left // 2, draft)

    def _admit(self, sequence: Sequence, share: int, draft: PlanDraft) -> bool:
        """Give a waiting sequence a slot, its prefix-cache hit and pages for at most `share` tokens.

        Closes admission for this step when it has to wait: nobody passes it by.
        """
        if sequence.num_in_flight:
            draft.admission_open = draft.is_steady = False
            return False
        kv, num_tokens = sequence.kv, sequence.num_tokens
        hit: list[NewPage] = []
        if not sequence.skip_prefix_cache_read:
            hit = self.allocator.take_hit(kv, sequence.read_tokens, num_tokens)
        if not self._fits(sequence):
            self.allocator.release(kv)
            draft.admission_open = False
            return False
        self._waiting.remove(sequence)
        sequence.num_computed_tokens = kv.num_positions
        self._enter_running(sequence, hit, draft)
        if not sequence.scheduled_time:
            sequence.scheduled_time = self._clock()
            sequence.num_cached_tokens = kv.num_positions
            if self.allocator.prefix_cache is not None and not sequence.skip_prefix_cache_read:
                self.allocator.prefix_cache.record(num_tokens, kv.num_positions)
        self._grant(sequence, min(num_tokens - kv.num_positions, share), draft)
        return True

    def _has_room(self, draft: PlanDraft, spare_rows: int = 0) -> bool:
        """Whether this step can take one more new prefill row, with `spare_rows` left over."""
        limit = max(1, self.max_prefill_rows - spare_rows)
        left = draft.left and draft.blocks_left
        return bool(draft.admission_open and left and self._free_slots and draft.num_prefills < limit)

    def _fits(self, sequence: Sequence, *, swapped: bool = False) -> bool:
        """Whether the pages for all known tokens are there, after what running prefills still need."""
        if not self._running:
            return True
        chunk = self.max_num_batched_tokens
        reserves = list(self._watermarks)
        for other in self._running:
            if not other.is_decoding:
                for group in range(len(reserves)):
                    reserves[group] += self.allocator.need(other.kv, group, other.num_tokens, chunk)
        return self.allocator.fits_whole(sequence.kv, sequence.num_tokens, chunk, reserves, swapped=swapped)

    def _enter_running(self, sequence: Sequence, new: Iterable[NewPage], draft: PlanDraft) -> None:
        slot = self._free_slots.pop()
        sequence.slot = slot
        sequence.status = SequenceStatus.RUNNING
        index = len(self._running)
        while index and self._running[index - 1].key > sequence.key:
            index -= 1
        self._running.insert(index, sequence)
        draft.new_sequences.append(sequence)
        draft.num_prefills += 1
        draft.page_updates += [(group, slot, page_index, page_id) for group, page_index, page_id in new]

    def _grant(self, sequence: Sequence, share: int, draft: PlanDraft, *, preempt: bool = False) -> None:
        """Add up to `share` tokens, as far as pages and blocks go, to a prefill row."""
        before = draft.chunks.get(sequence, 0)
        blocks = -(-before // self.block_tokens)
        share = min(share, (blocks + draft.blocks_left) * self.block_tokens - before)
        if share <= 0:
            return
        granted = self._reserve(sequence, before + share, draft, preempt=preempt) - before
        if granted > 0:
            draft.chunks[sequence] = before + granted
            draft.left -= granted
            draft.blocks_left -= -(-(before + granted) // self.block_tokens) - blocks

    def _reserve(self, sequence: Sequence, wanted: int, draft: PlanDraft, *, preempt: bool = False) -> int:
        """Get pages for the next `wanted` tokens, or as many as fit.

        With `preempt` younger sequences give up theirs until at least one token fits.
        """
        kv, start = sequence.kv, sequence.num_computed_tokens
        if start + wanted <= kv.num_positions:
            return wanted
        allocator = self.allocator
        if allocator.has_windows:
            self._register(sequence)
            allocator.leave_behind(kv, start)
        fitting = allocator.fit(kv, start, wanted)
        while fitting == 0 and preempt and self._running[-1] is not sequence:
            self._preempt(self._running[-1], draft)
            fitting = allocator.fit(kv, start, wanted)
        if fitting < wanted:
            draft.is_steady = False
        if start + fitting > kv.num_positions:
            slot = sequence.slot
            assert slot is not None
            draft.page_updates += [
                (group, slot, page_index, page_id) for group, page_index, page_id in allocator.grow(kv, start + fitting)
            ]
        return fitting

    def _preempt(self, sequence: Sequence, draft: PlanDraft) -> None:
        """Take the pages and the slot of a running sequence: to the host if it has room, else dropped.

        Tokens in flight are appended when they come; until then the sequence cannot be resumed.
        """
        self.num_preemptions += 1
        self._leave_running(sequence)
        if self.allocator.has_windows:
            self.allocator.leave_behind(sequence.kv, sequence.num_computed_tokens)
        copies = self.allocator.swap_out(sequence.kv)
        if copies is not None:
            draft.swap_outs += copies
            sequence.status = SequenceStatus.SWAPPED
            self._swapped.append(sequence)
            self._swapped.sort(key=KEY)
        else:
            self.allocator.release(sequence.kv)
            sequence.num_computed_tokens = 0
            sequence.status = SequenceStatus.WAITING
            self._waiting.add(sequence)

    def _choose_num_steps(self, draft: PlanDraft) -> int:
        """Several decode steps in one launch when the rows are steady and nobody could join them."""
        steps = self.num_decode_steps
        if steps == 1 or draft.chunks or not draft.is_steady:
            return 1
        if self._free_slots and draft.admission_open and (self._waiting or self._held):
            return 1
        lengths = [min(steps, s.max_total_tokens - 1 - s.num_computed_tokens) for s in draft.decodes]
        if sum(length == steps for length in lengths) * 2 < len(lengths):
            return 1
        size = self.page_size
        needed = sum(
            max(0, -(-(s.num_computed_tokens + length - s.kv.num_positions) // size))
            for s, length in zip(draft.decodes, lengths, strict=True)
        )
        available = min(pool.num_available for pool in self.allocator.pools)
        return steps if needed <= available else 1

    def _decode_row(self, sequence: Sequence, num_steps: int, draft: PlanDraft) -> ScheduledRow:
        start, slot = sequence.num_computed_tokens, sequence.slot
        assert slot is not None
        length = 1
        if num_steps > 1:
            length = min(num_steps, sequence.max_total_tokens - 1 - start)
            reserved = self._reserve(sequence, length, draft)
            assert reserved == length
        sequence.num_computed_tokens = start + length
        sequence.num_in_flight += length
        return ScheduledRow(sequence, slot, start, length, True)

    def _prefill_row(self, sequence: Sequence, chunk: int) -> ScheduledRow:
        start, slot = sequence.num_computed_tokens, sequence.slot
        assert slot is not None
        samples = start + chunk == sequence.num_tokens
        sequence.num_computed_tokens = start + chunk
        if samples:
            sequence.num_in_flight += 1
            sequence.is_decoding = True
        return ScheduledRow(sequence, slot, start, chunk, samples)

    # ---------------------------------------------------------------- results

    def commit(self, plan: StepPlan, tokens: SequenceOf[SequenceOf[int]]) -> list[RowResult]:
        """Take in the sampled tokens of the oldest uncommitted plan.

        Args:
            plan: as schedule() returned it.
            tokens: per row, in the order of `plan.rows`, its sampled tokens: at least as many as the
                row samples; more are ignored. Rows that do not sample are not looked at.

        Returns:
            One result per row, in that order.
        """
        if not self._plans or self._plans[0] is not plan:
            raise ValueError("plans must be committed once each, in the order in which they were made")
        rows = plan.rows
        if len(tokens) != len(rows):
            raise ValueError(f"the plan has {len(rows)} rows, got tokens of {len(tokens)}")
        self._plans.popleft()
        now = self._clock()
        num_decodes = len(plan.decode_rows)
        results: list[RowResult] = []
        for index, (row, sampled) in enumerate(zip(rows, tokens, strict=True)):
            count = (row.num_tokens if index < num_decodes else 1) if row.samples else 0
            if len(sampled) < count:
                raise ValueError(f"row {row} samples {count} tokens, got {len(sampled)}")
            results.append(self._commit_row(row.sequence, sampled[:count], now))
        return results

    def _commit_row(self, sequence: Sequence, sampled: SequenceOf[int], now: float) -> RowResult:
        sequence.num_in_flight -= len(sampled)
        if sequence.is_finished:
            return RowResult(sequence, [], 0, False)
        kept = sequence.append(sampled)
        if kept:
            sequence.last_token_time = now
            if not sequence.first_token_time:
                sequence.first_token_time = now
        finished = sequence.finish_reason is not None
        if finished:
            self._finish(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self._register(sequence)
            self._queue_siblings(sequence)
        return RowResult(sequence, list(sampled[:kept]), kept, finished)

    def _register(self, sequence: Sequence) -> None:
        """Let the prefix cache have the full pages whose tokens are confirmed and whose KV is dispatched."""
        computed = min(sequence.num_computed_tokens, sequence.num_tokens)
        if computed - sequence.kv.num_registered * self.page_size >= self.page_size:
            self.allocator.register(sequence.kv, sequence.read_tokens, computed)
