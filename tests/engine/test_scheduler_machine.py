"""The scheduler against a device that remembers what was written where.

The device executes plans like the engine's programs do: swaps, page table entries, then the rows.
Each (group, page, offset) holds the history of the token written there, so a page that was given
away too early, a wrong prefix hit or a lost swap copy shows as soon as a row attends. Tokens are a
function of the history, so every sequence's output is known beforehand.
"""

from collections import deque
from collections.abc import Callable
from hashlib import blake2b

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxllm.cache.page_pool import PageGroup
from jaxllm.engine.protocol import EngineRequest
from jaxllm.engine.request import Request, Sequence
from jaxllm.engine.scheduler import Scheduler
from jaxllm.engine.step_plan import ScheduledRow, StepPlan
from jaxllm.errors import RequestError
from jaxllm.sampling_params import SamplingParams

Content = tuple[int, bytes]
"""(position, digest of all tokens up to it)."""
VOCAB_SIZE = 7


def next_token(history: bytes) -> int:
    """The token this "model" samples after a history."""
    return history[0] % VOCAB_SIZE


class Oracle:
    """What a sequence's tokens and histories are, whatever the scheduler does."""

    def __init__(self, prompt: list[int], salt: str, length: int):
        self.tokens = list(prompt)
        self.histories: list[bytes] = []
        history = blake2b(salt.encode(), digest_size=8).digest()
        for position in range(length):
            if position == len(self.tokens):
                self.tokens.append(next_token(history))
            history = blake2b(history + bytes([self.tokens[position]]), digest_size=8).digest()
            self.histories.append(history)
        self.tokens.append(next_token(history))


class FakeDevice:
    """Executes plans; `oracle_of` tells what a sequence's content should be."""

    def __init__(self, groups: list[PageGroup], page_size: int, oracle_of: Callable[[Sequence], Oracle]):
        self.groups = groups
        self.page_size = page_size
        self.oracle_of = oracle_of
        self.pages: dict[tuple[int, int], dict[int, Content]] = {}
        self.host: dict[tuple[int, int], dict[int, Content]] = {}
        self.tables: dict[tuple[int, int], dict[int, int]] = {}
        self.last_tokens: dict[int, int] = {}
        self.has_params: dict[int, Sequence] = {}

    def execute(self, plan: StepPlan) -> list[list[int]]:
        """Run a plan and return the sampled tokens per row, padded to num_steps like a real result."""
        for group, page, host in plan.swap_outs:
            self.host[group, host] = dict(self.pages.get((group, page), {}))
        for group, page, host in plan.swap_ins:
            self.pages[group, page] = dict(self.host[group, host])
        for group, slot, index, page in plan.page_updates:
            assert 0 < page < self.groups[group].num_pages
            self.tables.setdefault((group, slot), {})[index] = page
        prefilled = {row.sequence for row in plan.prefill_rows}
        for sequence in plan.new_sequences:
            assert sequence in prefilled, f"{sequence} got a slot without a prefill row"
            assert sequence.slot is not None
            self.has_params[sequence.slot] = sequence
            self.last_tokens.pop(sequence.slot, None)
        slots = [row.slot for row in plan.rows]
        assert len(set(slots)) == len(slots), f"two rows in one slot: {plan}"
        if plan.num_steps > 1:
            assert not plan.prefill_rows
        results: list[list[int]] = [[] for _ in plan.rows]
        self._decode(plan, results)
        self._prefill(plan, results)
        return results

    def _decode(self, plan: StepPlan, results: list[list[int]]) -> None:
        # Like the device: all rows of a step write their KV before any of them attends.
        for step in range(plan.num_steps):
            valid = [(index, row) for index, row in enumerate(plan.decode_rows) if step < row.num_tokens]
            for _, row in valid:
                self._write(row, row.start + step, self.last_tokens[row.slot])
            for index, row in valid:
                results[index].append(self._attend(row, row.start + step))
        for index, row in enumerate(plan.decode_rows):
            results[index] += [-1] * (plan.num_steps - row.num_tokens)

    def _prefill(self, plan: StepPlan, results: list[list[int]]) -> None:
        for row in plan.prefill_rows:
            assert row.num_tokens > 0
            tokens = row.sequence.read_tokens(row.start, row.start + row.num_tokens)
            for position, token in enumerate(tokens, row.start):
                self._write(row, position, token)
        for index, row in enumerate(plan.prefill_rows, len(plan.decode_rows)):
            end = row.start + row.num_tokens
            sampled = [self._attend(row, position, samples=row.samples) for position in range(row.start, end)]
            results[index].append(sampled[-1] if row.samples else -1)

    def _write(self, row: ScheduledRow, position: int, token: int) -> None:
        assert self.has_params[row.slot] is row.sequence, f"{row}: the slot has another sequence's parameters"
        oracle = self.oracle_of(row.sequence)
        assert token == oracle.tokens[position], f"{row}: token at {position}"
        for group in range(len(self.groups)):
            page = self.tables[group, row.slot][position // self.page_size]
            offsets = self.pages.setdefault((group, page), {})
            offsets[position % self.page_size] = (position, oracle.histories[position])

    def _attend(self, row: ScheduledRow, position: int, *, samples: bool = True) -> int:
        """Check everything the query at `position` sees; returns the sampled token."""
        histories = self.oracle_of(row.sequence).histories
        for group, spec in enumerate(self.groups):
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            table = self.tables[group, row.slot]
            for seen in range(first, position + 1):
                page = table[seen // self.page_size]
                content = self.pages[group, page].get(seen % self.page_size)
                assert content == (seen, histories[seen]), (
                    f"{row}: query {position} reads {content} at position {seen} of {spec.name}, page {page}"
                )
        token = next_token(histories[position])
        if samples:
            self.last_tokens[row.slot] = token
        return token


EOS, STOP = 5, 3
MAX_MODEL_LEN = 40


def expected_output(sequence: Sequence, oracle: Oracle) -> tuple[list[int], str, int | None]:
    """Tokens, finish reason and stop reason of a sequence that nobody aborts."""
    sampling, prompt = sequence.sampling, len(sequence.prompt_tokens)
    output: list[int] = []
    while True:
        token = oracle.tokens[prompt + len(output)]
        output.append(token)
        if len(output) >= sampling.min_tokens:
            if token == EOS and not sampling.ignore_eos:
                return output, "stop", None
            if token in sampling.stop_token_ids:
                return output, "stop", token
        if prompt + len(output) >= sequence.max_total_tokens:
            return output, "length", None


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, are aborted, and steps run ahead of their results, in any order."""

    @initialize(data=st.data())
    def start(self, data):
        draw = data.draw
        page_size = draw(st.sampled_from([1, 2, 4]), "page_size")
        windows = draw(st.sampled_from([(None,), (None, 5), (3,), (None, 1, 6), (4, 9)]), "windows")
        groups = [PageGroup(f"window {window}", window, draw(st.integers(6, 24), "num_pages")) for window in windows]
        num_seqs = draw(st.integers(1, 5), "max_num_seqs")
        swap = draw(st.sampled_from([0, 6, 40]), "num_swap_pages")
        self.depth = draw(st.sampled_from([0, 1, 1, 2]), "depth")
        self.oracles: dict[Sequence, Oracle] = {}
        self.scheduler = Scheduler(
            groups,
            page_size=page_size,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs + draw(st.integers(0, 10), "more tokens"),
            max_model_len=draw(st.integers(8, MAX_MODEL_LEN), "max_model_len"),
            enable_prefix_caching=draw(st.sampled_from([True, True, False]), "caching"),
            num_decode_steps=draw(st.sampled_from([1, 1, 3]), "num_decode_steps"),
            num_swap_pages=[swap] * len(groups),
            max_prefill_rows=draw(st.integers(1, 4), "max_prefill_rows"),
            block_tokens=draw(st.integers(1, 4), "block_tokens"),
            max_prefill_blocks=draw(st.sampled_from([None, 1, 2, 4]), "max_prefill_blocks"),
        )
        self.device = FakeDevice(groups, page_size, lambda sequence: self.oracles[sequence])
        self.in_flight: deque[tuple[StepPlan, list[list[int]]]] = deque()
        self.num_requests = 0

    prompts = st.one_of(
        st.lists(st.integers(0, 1), min_size=1, max_size=24),
        st.integers(1, 24).map(lambda length: [0] * length),
    )

    @rule(
        prompt=prompts,
        n=st.sampled_from([1, 1, 1, 3]),
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        min_tokens=st.integers(0, 3),
        stops=st.sampled_from([[], [], [STOP], [EOS]]),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from([None, None, "a"]),
    )
    def add(self, prompt, n, max_tokens, min_tokens, stops, ignore_eos, prompt_logprobs, priority, salt):
        sampling = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            min_tokens=min_tokens if max_tokens is None else min(min_tokens, max_tokens),
            stop_token_ids=stops,
            ignore_eos=ignore_eos,
            prompt_logprobs=prompt_logprobs,
        )
        request = Request.from_engine_request(
            EngineRequest(
                request_id=str(self.num_requests),
                prompt_tokens=prompt,
                sampling=sampling,
                arrival_time=0.0,
                priority=priority,
                cache_salt=salt,
                eos_token_ids=[EOS],
            )
        )
        self.num_requests += 1
        total = min(self.scheduler.max_model_len, len(prompt) + (max_tokens or 1))
        if len(prompt) >= self.scheduler.max_model_len or total > self.scheduler.capacity_tokens():
            with pytest.raises(RequestError):
                self.scheduler.add(request.sequences)
            return
        oracle = Oracle(prompt, salt or "", 2 * MAX_MODEL_LEN)
        self.oracles |= dict.fromkeys(request.sequences, oracle)
        self.scheduler.add(request.sequences)

    @precondition(lambda self: self.num_requests)
    @rule(data=st.data(), index=st.sampled_from([None, None, 0, 1, 2]))
    def abort(self, data, index):
        request_id = str(data.draw(st.integers(max(0, self.num_requests - 6), self.num_requests - 1)))
        for sequence in self.scheduler.abort(request_id, index):
            assert sequence.finish_reason == "abort" and not sequence.pages

    @rule(count=st.integers(1, 8))
    def steps(self, count):
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.in_flight)
    @rule()
    def commit(self):
        plan, tokens = self.in_flight.popleft()
        rows = plan.rows
        results = self.scheduler.commit(plan, tokens)
        assert [result.sequence for result in results] == [row.sequence for row in rows]
        for result, sampled in zip(results, tokens, strict=True):
            assert result.new_tokens == sampled[: result.num_kept]
            assert not result.finished or result.sequence.is_finished
        self.scheduler.check()

    @rule()
    def reset_prefix_cache(self):
        self.scheduler.reset_prefix_cache()

    def _step(self) -> bool:
        """One step of the engine's loop; False when there was nothing to do."""
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan is not None:
            assert plan.num_tokens <= self.scheduler.max_num_batched_tokens * plan.num_steps
            assert len(plan.prefill_rows) <= self.scheduler.max_prefill_rows
            blocks = sum(-(-row.num_tokens // self.scheduler.block_tokens) for row in plan.prefill_rows)
            assert blocks <= self.scheduler.max_prefill_blocks
            self.in_flight.append((plan, self.device.execute(plan)))
        if len(self.in_flight) > (self.depth if plan is not None else 0):
            self.commit()
            return True
        return plan is not None

    @invariant()
    def sums(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self):
        """Everything ends, with the right tokens, and nothing is held any more."""
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        limit = 50 + 4 * sum(sequence.max_total_tokens for sequence in self.oracles) * (1 + self.depth)
        for _ in range(limit):
            if not scheduler.has_work():
                break
            assert self._step(), "the scheduler has work and plans nothing"
        assert not scheduler.has_work(), f"not done after {limit} steps"
        assert scheduler.pages_in_use == 0 and scheduler.kv_cache_usage == 0.0 and scheduler.swap_usage == 0.0
        for sequence, oracle in self.oracles.items():
            output, finish_reason, stop_reason = expected_output(sequence, oracle)
            if sequence.finish_reason == "abort":
                assert sequence.output_tokens == output[: len(sequence.output_tokens)]
            else:
                assert sequence.output_tokens == output
                assert (sequence.finish_reason, sequence.stop_reason) == (finish_reason, stop_reason)


@pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_scheduler_machine(examples):
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None)
    )
