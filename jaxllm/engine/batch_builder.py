"""StepPlan -> the step's int32 vector, in numpy until the last line."""

from collections.abc import Sequence as SequenceOf

import numpy as np

from jaxllm.engine.buckets import Bucket
from jaxllm.engine.layout import StepLayout
from jaxllm.engine.step_plan import ScheduledRow, StepPlan

SequenceParams = tuple[int, np.ndarray]


def bucket_need(plan: StepPlan, *, block_tokens: int, page_size: int, sampler_mode: int) -> Bucket:
    """The smallest bucket the plan could run in: what a compiled one must fit."""
    rows = (*plan.decode_rows, *plan.prefill_rows)
    longest = max(row.start + row.num_tokens for row in rows)
    return Bucket(
        prefill_blocks=sum(-(-row.num_tokens // block_tokens) for row in plan.prefill_rows),
        decode_rows=len(plan.decode_rows),
        prefill_rows=len(plan.prefill_rows),
        num_steps=plan.num_steps,
        pages=-(-longest // page_size),
        sampler_mode=sampler_mode,
    )


def build_vector(
    plan: StepPlan,
    layout: StepLayout,
    *,
    block_tokens: int,
    trash_slot: int,
    trash_index: int,
    sampler_mode: int,
    page_updates: SequenceOf[tuple[int, int]],
    params: SequenceOf[SequenceParams],
) -> np.ndarray:
    """Fill the vector of a bucket.

    Args:
        plan: the step; its rows fit the bucket.
        layout: of the bucket.
        block_tokens: tokens of a prefill block.
        trash_slot: slot of padding rows.
        trash_index: entry of the flat page table that belongs to the trash slot.
        sampler_mode: read where the bucket chooses the branch on the device.
        page_updates: (index into the flat page table, page id).
        params: (slot, packed parameters) of the sequences new on the device.
    """
    vector = padding_vector(layout, trash_slot=trash_slot, trash_index=trash_index)
    piece = layout.unpack(vector)
    piece["sampler_mode"][0] = sampler_mode
    count = len(plan.decode_rows)
    if count:
        piece["decode_slots"][:count] = [row.slot for row in plan.decode_rows]
        piece["decode_positions"][:count] = [row.start for row in plan.decode_rows]
        piece["decode_steps"][:count] = [row.num_tokens for row in plan.decode_rows]
    if page_updates:
        piece["page_updates"][: len(page_updates)] = page_updates
    if "prefill_slots" in piece:
        _fill_prefill(piece, plan.prefill_rows, block_tokens=block_tokens)
        for i, (slot, words) in enumerate(params):
            piece["param_slots"][i] = slot
            piece["params"][i] = words
    return vector


def padding_vector(layout: StepLayout, *, trash_slot: int, trash_index: int) -> np.ndarray:
    """A vector of nothing but padding: it computes on the trash slot and the trash page."""
    vector = layout.empty()
    piece = layout.unpack(vector)
    piece["decode_slots"][:] = trash_slot
    # An unused update sets entry 0 of the trash slot to the trash page, which it is already.
    piece["page_updates"][:, 0] = trash_index
    if "prefill_slots" in piece:
        piece["prefill_slots"][:] = trash_slot
        piece["param_slots"][:] = trash_slot
        piece["block_rows"][:] = len(piece["prefill_slots"])  # row R: its page table is all trash
    return vector


def _fill_prefill(piece: dict[str, np.ndarray], rows: SequenceOf[ScheduledRow], *, block_tokens: int) -> None:
    block = 0
    for i, row in enumerate(rows):
        count = -(-row.num_tokens // block_tokens)
        first = block * block_tokens
        piece["prefill_slots"][i] = row.slot
        piece["prefill_lengths"][i] = row.start + row.num_tokens
        piece["prefill_last"][i] = first + row.num_tokens - 1
        piece["prefill_samples"][i] = row.samples
        blocks = slice(block, block + count)
        piece["block_rows"][blocks] = i
        piece["block_starts"][blocks] = np.arange(row.start, row.start + row.num_tokens, block_tokens)
        piece["block_counts"][blocks] = block_tokens
        piece["block_counts"][block + count - 1] = row.num_tokens - (count - 1) * block_tokens
        piece["prefill_tokens"][first : first + row.num_tokens] = row.sequence.read_tokens(
            row.start, row.start + row.num_tokens
        )
        block += count
