"""The step on the device: one function from weights, pages, request state and one vector to tokens.

    update the request state -> embed -> layers -> last rows -> logits -> sample -> feed the tokens forward

Everything happens in one compiled program per bucket; the request state and the pages are donated.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.batch import AttentionPlan, StepBatch
from jaxllm.engine.buckets import Bucket
from jaxllm.engine.layout import StepLayout
from jaxllm.sampling.sampler import sample
from jaxllm.sampling.state import SamplingState, apply_params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RequestState:
    """What the device keeps of the running sequences, by slot; slot S is the trash slot.

    Attributes:
        last_token: the token sampled last, input of the next decode step.
        page_table: page ids by group, slot and index in the sequence.
        sampling: parameters and history of the sampler.
    """

    last_token: Int[Array, " S1"]
    page_table: Int[Array, "groups S1 P"]
    sampling: SamplingState


class StepResult(NamedTuple):
    """What a step returns to the host.

    Attributes:
        tokens: sampled token per step and row (decode rows, then prefill rows).
        chosen: per step and row, log-probability and rank (as float) of the sampled token.
        top_ids, top_logprobs: the most likely tokens; zeros unless the sampler ran in full mode.
        hidden: final hidden states of all tokens, for prompt log-probabilities; empty in decode.
    """

    tokens: Int[Array, "steps R"]
    chosen: Float[Array, "steps R 2"]
    top_ids: Int[Array, "steps R M"]
    top_logprobs: Float[Array, "steps R M"]
    hidden: Float[Array, "T D"]


def build_step(
    rebuild_model: Callable[[Any], Any],
    bucket: Bucket,
    layout: StepLayout,
    plan: AttentionPlan,
    max_logprobs: int,
) -> Callable[..., tuple[StepResult, list[Array], RequestState]]:
    """The function of a bucket: (weights, pages, state, vector) -> (result, pages, state).

    `rebuild_model` turns the flat weights into the model again while tracing; `max_logprobs` is how
    many of the most likely tokens are reported.
    """

    def step(weights, pages, state: RequestState, vector: Int[Array, " size"]):
        model = rebuild_model(weights)
        piece = layout.unpack(vector)
        state = _update_state(state, piece)
        mode = piece["sampler_mode"][0] if bucket.sampler_mode is None else bucket.sampler_mode
        if bucket.num_steps == 1:
            result, pages, state = _one_step(model, pages, state, piece, bucket, plan, mode, 0, max_logprobs)
            return (*(x[None] for x in result[:4]), result[4]), pages, state

        def body(j, carry):
            outputs, pages, state = carry
            result, pages, state = _one_step(model, pages, state, piece, bucket, plan, mode, j, max_logprobs)
            outputs = jax.tree.map(lambda all_, x: all_.at[j].set(x), outputs, tuple(result[:4]))
            return outputs, pages, state

        shapes = jax.eval_shape(lambda: _one_step(model, pages, state, piece, bucket, plan, mode, 0, max_logprobs)[0])
        outputs = tuple(jnp.zeros((bucket.num_steps, *x.shape), x.dtype) for x in shapes[:4])
        outputs, pages, state = jax.lax.fori_loop(0, bucket.num_steps, body, (outputs, pages, state))
        return (*outputs, jnp.zeros((0, 0), shapes[4].dtype)), pages, state

    def named(weights, pages, state, vector):
        result, pages, state = step(weights, pages, state, vector)
        return StepResult(*result), pages, state

    return named


def _update_state(state: RequestState, piece: dict[str, Array]) -> RequestState:
    """Apply the step's delta: new page-table entries and the parameters of new sequences."""
    table = state.page_table
    flat = table.reshape(-1).at[piece["page_updates"][:, 0]].set(piece["page_updates"][:, 1], mode="promise_in_bounds")
    sampling = state.sampling
    if "params" in piece:
        sampling = apply_params(sampling, piece["param_slots"], piece["params"])
    return replace(state, page_table=flat.reshape(table.shape), sampling=sampling)


def _one_step(
    model: Any,
    pages: list[Array],
    state: RequestState,
    piece: dict[str, Array],
    bucket: Bucket,
    plan: AttentionPlan,
    mode: int | Array,
    index: int | Array,
    max_logprobs: int,
) -> tuple[tuple[Array, ...], list[Array], RequestState]:
    """One pass over the layers; `index` counts the decode steps of the launch."""
    D, Rp, C, Q = bucket.decode_rows, bucket.prefill_rows, bucket.prefill_blocks, plan.block_tokens
    R = D + Rp
    trash_slot = state.last_token.shape[0] - 1

    slots = piece["decode_slots"]
    active = piece["decode_steps"] > index
    decode_positions = piece["decode_positions"] + jnp.where(active, index, 0)
    tokens = state.last_token.at[slots].get(mode="promise_in_bounds")
    positions = decode_positions
    rows = jnp.where(active, jnp.arange(D, dtype=jnp.int32), R)
    lengths = jnp.where(active, positions + 1, 0)
    samples = active
    hidden_index = jnp.arange(D, dtype=jnp.int32)
    block_rows = jnp.zeros((0,), jnp.int32)
    if C:
        block_rows = piece["block_rows"] + D
        inside = jnp.arange(Q, dtype=jnp.int32)[None, :]
        counts = piece["block_counts"][:, None]
        valid = inside < counts
        # Padding repeats the block's last position: a window starts at the block's lowest one.
        last = jnp.maximum(counts - 1, 0)
        prefill_positions = (piece["block_starts"][:, None] + jnp.minimum(inside, last)).reshape(-1)
        prefill_rows = jnp.where(valid, block_rows[:, None], R).reshape(-1)
        tokens = jnp.concatenate([tokens, piece["prefill_tokens"]])
        positions = jnp.concatenate([positions, prefill_positions])
        rows = jnp.concatenate([rows, prefill_rows])
        lengths = jnp.concatenate([lengths, piece["prefill_lengths"]])
        slots = jnp.concatenate([slots, piece["prefill_slots"]])
        samples = jnp.concatenate([samples, piece["prefill_samples"] > 0])
        hidden_index = jnp.concatenate([hidden_index, piece["prefill_last"] + D])

    table_slots = jnp.concatenate([slots, jnp.full((1,), trash_slot, jnp.int32)])
    tables = state.page_table[:, :, : bucket.pages].at[:, table_slots].get(mode="promise_in_bounds")
    batch = StepBatch(
        tokens=tokens,
        positions=positions,
        rows=rows,
        kv_lengths=lengths,
        block_rows=block_rows,
        page_tables=tuple(tables[g] for g in range(tables.shape[0])),
        plan=plan,
    )
    hidden, pages = model(batch, pages)
    row_hidden = hidden.at[hidden_index].get(mode="promise_in_bounds")
    logits = model.logits(row_hidden)

    # Rows that sample nothing (padding, a chunk inside a prompt) read and write the trash slot.
    sample_slots = jnp.where(samples, slots, trash_slot)
    with jax.named_scope("sample"):
        out, sampling = sample(logits, state.sampling, sample_slots, lengths, mode, max_logprobs=max_logprobs)
    last_token = state.last_token.at[sample_slots].set(out.tokens, mode="promise_in_bounds")
    chosen = jnp.stack([out.logprob, out.rank.astype(jnp.float32)], axis=-1)
    state = replace(state, last_token=last_token, sampling=sampling)
    kept_hidden = hidden if C else jnp.zeros((0, 0), hidden.dtype)
    return (out.tokens, chosen, out.top_ids, out.top_logprobs, kept_hidden), pages, state


def build_prompt_logprobs(rebuild_model: Callable[[Any], Any], num_top: int) -> Callable[..., tuple[Array, ...]]:
    """(weights, hidden [B, D], targets [B]) -> log-probability, rank, top ids and top log-probabilities."""

    def prompt_logprobs(weights, hidden: Float[Array, "B D"], targets: Int[Array, " B"]):
        logits = rebuild_model(weights).logits(hidden)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)
        rank = jnp.sum(logprobs > chosen, axis=-1, dtype=jnp.int32) + 1
        top, ids = jax.lax.top_k(logprobs, num_top)
        return chosen[:, 0], rank, ids.astype(jnp.int32), top

    return prompt_logprobs
