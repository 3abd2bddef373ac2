"""A device that remembers what was written where, and checks what every query would read.

It executes plans like the engine's programs do: swaps, page table entries, then the rows. Each
(group, page, offset) holds the history of the token written there, so a page that was given away too
early, a wrong prefix hit or a lost swap copy shows as soon as a row attends.
"""

from collections.abc import Callable
from hashlib import blake2b

from jaxllm.cache.page_pool import PageGroup
from jaxllm.engine.request import Sequence
from jaxllm.engine.step_plan import ScheduledRow, StepPlan

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
