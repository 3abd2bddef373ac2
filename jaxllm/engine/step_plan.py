"""StepPlan: everything one step does, decided by the scheduler. Host only."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.engine.request import Sequence

PageUpdate = tuple[int, int, int, int]
"""(group index, slot, page index in the sequence, page id): a new entry of a device page table."""
PageCopy = tuple[int, int, int]
"""(group index, device page id, host page id)."""


class ScheduledRow(NamedTuple):
    """One row of a step.

    Attributes:
        sequence: whose tokens they are; it may have finished by the time the results come.
        slot: the sequence's slot when the plan was made.
        start: position of the first token.
        num_tokens: tokens computed: the chunk of a prefill row, the valid steps of a decode row.
        samples: the row samples (a decode row one token per step, a prefill row one token).
    """

    sequence: Sequence
    slot: int
    start: int
    num_tokens: int
    samples: bool

    def __repr__(self) -> str:
        mark = "*" if self.samples else ""
        name = f"{self.sequence.request_id}[{self.sequence.index}]"
        return f"{name}@{self.slot}:{self.start}+{self.num_tokens}{mark}"


@dataclass(frozen=True)
class StepPlan:
    """One launch. The device does, in this order: swap_outs, swap_ins, page_updates, the rows.

    Attributes:
        decode_rows: their token is the device's last one of that slot.
        prefill_rows: their tokens are known on the host: `sequence.read_tokens(start, start + num_tokens)`.
        num_steps: decode steps of this launch; more than 1 only without prefill rows.
        page_updates: new page table entries since the last plan. Entries of pages that a sliding
            window left behind, and of a slot's previous owner, stay as they are: nobody reads them.
        new_sequences: sequences that received a slot; each has a prefill row in this plan.
        swap_outs: pages to copy to the host, before anything of this plan overwrites them.
        swap_ins: pages to copy from the host.
    """

    decode_rows: tuple[ScheduledRow, ...]
    prefill_rows: tuple[ScheduledRow, ...]
    num_steps: int
    page_updates: list[PageUpdate]
    new_sequences: list[Sequence]
    swap_outs: list[PageCopy]
    swap_ins: list[PageCopy]

    @property
    def rows(self) -> tuple[ScheduledRow, ...]:
        """All rows in the order of the results: decode rows, then prefill rows."""
        return self.decode_rows + self.prefill_rows

    @property
    def num_tokens(self) -> int:
        """Tokens computed over all rows and steps."""
        return sum(row.num_tokens for row in self.rows)

    def __repr__(self) -> str:
        parts = [f"decode {list(self.decode_rows)}", f"prefill {list(self.prefill_rows)}"]
        if self.num_steps > 1:
            parts.insert(0, f"{self.num_steps} steps")
        for name in ("page_updates", "swap_outs", "swap_ins"):
            if getattr(self, name):
                parts.append(f"{name} {getattr(self, name)}")
        return f"StepPlan({', '.join(parts)})"


class RowResult(NamedTuple):
    """What became of a row at commit.

    Attributes:
        sequence: the row's sequence.
        new_tokens: sampled tokens that were kept, the stop token included.
        num_kept: their number; what was sampled beyond is dropped.
        finished: the sequence finished with this row (its finish_reason says why).
    """

    sequence: Sequence
    new_tokens: list[int]
    num_kept: int
    finished: bool
