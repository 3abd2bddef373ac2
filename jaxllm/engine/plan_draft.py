"""PlanDraft: a StepPlan in the making. Host only."""

from dataclasses import dataclass, field

from jaxllm.engine.request import Sequence
from jaxllm.engine.step_plan import PageCopy, PageUpdate


@dataclass(slots=True)
class PlanDraft:
    """What the scheduler has given away in this step so far.

    Attributes:
        left: tokens of the budget not given yet.
        blocks_left: blocks of prefill tokens not begun yet.
        num_prefills: running sequences that still compute known tokens, those just admitted included.
        decodes: sequences with a decode row.
        chunks: tokens granted to each prefill row, in order of grant.
        page_updates, new_sequences, swap_outs, swap_ins: as in StepPlan.
        admission_open: nobody had to wait for pages so far.
        is_steady: pages were not short, and nobody waits just for tokens in flight.
    """

    left: int
    blocks_left: int
    num_prefills: int
    decodes: list[Sequence] = field(default_factory=list[Sequence])
    chunks: dict[Sequence, int] = field(default_factory=dict[Sequence, int])
    page_updates: list[PageUpdate] = field(default_factory=list[PageUpdate])
    new_sequences: list[Sequence] = field(default_factory=list[Sequence])
    swap_outs: list[PageCopy] = field(default_factory=list[PageCopy])
    swap_ins: list[PageCopy] = field(default_factory=list[PageCopy])
    admission_open: bool = True
    is_steady: bool = True
