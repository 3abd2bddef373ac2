"""Logits -> tokens, on the device and exact.

    log-probabilities of the raw logits -> mask, min_tokens, bias, bad words -> penalties
    -> temperature -> min_p -> top_k -> top_p -> noise -> argmax

The noise of a token depends on (seed, position, token id) alone: neither on the row, nor on the
batch, nor on the rank of the token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxllm.sampling.state import (
    FULL,
    GREEDY,
    IN_PROMPT,
    SAMPLED,
    USES_BAD_WORDS,
    USES_BIAS,
    USES_COUNTS,
    USES_MASK,
    SamplingState,
)

__all__ = ["FULL", "GREEDY", "SAMPLED", "SampleOutput", "sample"]

_MINUS_INF = -jnp.inf
_MOST = float(jnp.finfo(jnp.float32).max)


class SampleOutput(NamedTuple):
    """Per row: the sampled token; in FULL mode its log-probability and rank (1 is the most likely), and
    the most likely tokens; zeros in the other modes."""

    tokens: Int[Array, " R"]
    logprob: Float[Array, " R"]
    rank: Int[Array, " R"]
    top_ids: Int[Array, "R M"]
    top_logprobs: Float[Array, "R M"]


class _Rows(NamedTuple):
    """The state of the step's rows."""

    floats: Float[Array, "R 6"]
    top_k: Int[Array, " R"]
    seed: UInt[Array, "R 2"]
    flags: Int[Array, " R"]

    def column(self, index: int) -> Float[Array, "R 1"]:
        return self.floats[:, index : index + 1]


def sample(
    logits: Float[Array, "R V"],
    state: SamplingState,
    slots: Int[Array, " R"],
    positions: Int[Array, " R"],
    mode: int | Int[Array, ""],
    *,
    max_logprobs: int,
) -> tuple[SampleOutput, SamplingState]:
    """Sample one token per row and note it in the history of slots that need one.

    Args:
        logits: raw logits.
        state: by slot.
        slots: of the rows; rows that sample nothing name the trash slot.
        positions: the position that the sampled token will have.
        mode: GREEDY, SAMPLED or FULL; a traced scalar chooses the branch on the device.
        max_logprobs: most likely tokens to report.
    """

    def take(array: Array) -> Array:
        return array.at[slots].get(mode="promise_in_bounds")

    rows = _Rows(take(state.floats), take(state.top_k), take(state.seed), take(state.flags))

    def greedy() -> SampleOutput:
        return _without_logprobs(jnp.argmax(logits, axis=-1).astype(jnp.int32), max_logprobs)

    def sampled() -> SampleOutput:
        return _without_logprobs(_draw(logits, rows, positions), max_logprobs)

    def full() -> SampleOutput:
        shaped = _restrict(logits, state, slots, positions, rows.flags)
        shaped = jax.lax.cond(
            jnp.any(rows.flags & USES_COUNTS != 0),
            lambda x: _penalise(x, take(state.counts), rows),
            lambda x: x,
            shaped,
        )
        return _with_logprobs(logits, _draw(shaped, rows, positions), max_logprobs)

    branches = (greedy, sampled, full)
    output = branches[mode]() if isinstance(mode, int) else jax.lax.switch(mode, branches)
    return output, _note(state, slots, rows.flags, output.tokens)


def _without_logprobs(tokens: Int[Array, " R"], max_logprobs: int) -> SampleOutput:
    zeros = jnp.zeros((tokens.shape[0], max_logprobs), jnp.float32)
    return SampleOutput(
        tokens, jnp.zeros_like(tokens, jnp.float32), jnp.zeros_like(tokens), zeros.astype(jnp.int32), zeros
    )


def _with_logprobs(logits: Float[Array, "R V"], tokens: Int[Array, " R"], max_logprobs: int) -> SampleOutput:
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1, mode="promise_in_bounds")
    rank = jnp.sum(logprobs > chosen, axis=-1, dtype=jnp.int32) + 1
    top, ids = jax.lax.top_k(logprobs, max_logprobs)
    return SampleOutput(tokens, chosen[:, 0], rank, ids.astype(jnp.int32), top)


def _restrict(
    logits: Float[Array, "R V"],
    state: SamplingState,
    slots: Int[Array, " R"],
    positions: Int[Array, " R"],
    flags: Int[Array, " R"],
) -> Float[Array, "R V"]:
    """Allowed tokens, min_tokens, logit bias and bad words, for the rows that use them."""
    R, V = logits.shape
    row = jnp.arange(R, dtype=jnp.int32)[:, None]

    def take(array: Array) -> Array:
        return array.at[slots].get(mode="promise_in_bounds")

    def uses(flag: int) -> Bool[Array, " R"]:
        return flags & flag != 0

    def block(x: Float[Array, "R V"], ids: Int[Array, "R n"], blocked: Bool[Array, "R n"]) -> Float[Array, "R V"]:
        return x.at[row, jnp.where(blocked, ids, V)].set(_MINUS_INF, mode="drop")

    def apply_mask(x: Float[Array, "R V"]) -> Float[Array, "R V"]:
        words = take(state.mask)
        bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]
        allowed = (bits & jnp.uint32(1)).reshape(R, -1)[:, :V] != 0
        return jnp.where(allowed | ~uses(USES_MASK)[:, None], x, _MINUS_INF)

    def apply_bias(x: Float[Array, "R V"]) -> Float[Array, "R V"]:
        ids = jnp.where(uses(USES_BIAS)[:, None], take(state.bias_ids), V)
        return x.at[row, ids].add(take(state.bias_values), mode="drop")

    def apply_bad_words(x: Float[Array, "R V"]) -> Float[Array, "R V"]:
        words, recent = take(state.bad_words), take(state.recent)
        before = words[:, :, :-1]
        matches = jnp.all((before == -1) | (before == recent[:, None, :]), axis=-1)
        last = words[:, :, -1]
        return block(x, last, matches & (last >= 0) & uses(USES_BAD_WORDS)[:, None])

    x = logits
    for flag, apply in ((USES_MASK, apply_mask), (USES_BIAS, apply_bias), (USES_BAD_WORDS, apply_bad_words)):
        x = jax.lax.cond(jnp.any(uses(flag)), apply, lambda x: x, x)
    stops = take(state.stop_ids)
    early = positions < take(state.stop_from)
    return block(x, stops, (stops >= 0) & early[:, None])


def _penalise(logits: Float[Array, "R V"], counts: Int[Array, "R V"], rows: _Rows) -> Float[Array, "R V"]:
    """Repetition over prompt and output; frequency and presence over the output."""
    presence, frequency, repetition = (rows.column(i) for i in (3, 4, 5))
    used = (rows.flags & USES_COUNTS != 0)[:, None]
    output = counts & (IN_PROMPT - 1)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    x = jnp.where(counts > 0, repeated, logits)
    x = x - frequency * output.astype(jnp.float32) - jnp.where(output > 0, presence, 0.0)
    return jnp.where(used, x, logits)


def _draw(logits: Float[Array, "R V"], rows: _Rows, positions: Int[Array, " R"]) -> Int[Array, " R"]:
    """Temperature, truncation and noise; rows of temperature 0 take the most likely token."""
    temperature, top_p, min_p = (rows.column(i) for i in range(3))
    is_greedy = temperature == 0.0
    # Differences to a finite maximum overflow downwards only, and lose no precision far from zero.
    x = jnp.minimum(logits, _MOST)
    x = (x - jnp.max(x, axis=-1, keepdims=True)) / jnp.where(is_greedy, 1.0, temperature)
    # min_p 0 gives log 0 = -inf: no threshold.
    x = jnp.where(x >= jnp.log(min_p), x, _MINUS_INF)
    x = jax.lax.cond(jnp.any(rows.top_k > 0), lambda x: _keep_top_k(x, rows.top_k), lambda x: x, x)
    x = jax.lax.cond(jnp.any(top_p < 1.0), lambda x: _keep_top_p(x, top_p), lambda x: x, x)
    noisy = x + _gumbel(rows.seed, positions, logits.shape[1])
    return jnp.argmax(jnp.where(is_greedy, logits, noisy), axis=-1).astype(jnp.int32)


def _ordered(x: Float[Array, "R V"]) -> UInt[Array, "R V"]:
    """Unsigned integers in the order of the floats."""
    x = jnp.where(x == 0, 0.0, x)  # -0.0 equals 0.0
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    negative = bits >> jnp.uint32(31) == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(0x80000000))


def _largest_threshold(keys: UInt[Array, "R V"], weight: Array, wanted: Array) -> UInt[Array, "R 1"]:
    """The largest t, bit by bit, such that the weight of the keys >= t reaches `wanted`."""

    def body(i: Array, threshold: UInt[Array, "R 1"]) -> UInt[Array, "R 1"]:
        candidate = threshold | (jnp.uint32(0x80000000) >> i.astype(jnp.uint32))
        reached = jnp.sum(jnp.where(keys >= candidate, weight, jnp.zeros((), weight.dtype)), axis=-1, keepdims=True)
        return jnp.where(reached >= wanted, candidate, threshold)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros((keys.shape[0], 1), jnp.uint32))


def _keep_top_k(x: Float[Array, "R V"], top_k: Int[Array, " R"]) -> Float[Array, "R V"]:
    """Keep the k largest; tokens equal to the k-th stay, too."""
    keys = _ordered(x)
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, x.shape[1]), x.shape[1])[:, None]
    threshold = _largest_threshold(keys, jnp.ones((1, 1), jnp.int32), wanted)
    return jnp.where(keys >= threshold, x, _MINUS_INF)


def _keep_top_p(x: Float[Array, "R V"], top_p: Float[Array, "R 1"]) -> Float[Array, "R V"]:
    """Keep the smallest set of the most likely tokens whose mass, among those left, reaches top_p.

    The most likely tokens have x = 0.
    """
    keys = _ordered(x)
    weight = jnp.exp(x)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    threshold = _largest_threshold(keys, weight, top_p * total)
    # The most likely token stays whatever rounding says; top_p = 1 keeps all.
    threshold = jnp.minimum(threshold, jnp.max(keys, axis=-1, keepdims=True))
    return jnp.where((keys >= threshold) | (top_p >= 1.0), x, _MINUS_INF)


def _mix(x: UInt[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """The finaliser of MurmurHash3 (Appleby): a bijection of 32 bits in which each bit moves all others."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))


def _gumbel(seed: UInt[Array, "R 2"], positions: Int[Array, " R"], vocab_size: int) -> Float[Array, "R V"]:
    """Standard Gumbel noise by counter: argmax(logits + noise) draws from softmax(logits)."""
    golden = jnp.uint32(0x9E3779B9)
    position = positions.astype(jnp.uint32)
    first = _mix(seed[:, 0] ^ _mix(position + golden))
    second = _mix(seed[:, 1] + _mix(first ^ (position * golden)))
    first = _mix(first + second)
    ids = jnp.arange(vocab_size, dtype=jnp.uint32)[None, :]
    bits = _mix(_mix(ids * golden + first[:, None]) ^ second[:, None])
    return gumbel_of_bits(bits)


def gumbel_of_bits(bits: UInt[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Standard Gumbel noise of uniform bits; always finite, or it could undo that a token is allowed."""
    # u in (0, 1), with all 32 bits kept near 0, where the winners are: -log(1 - u) is exponential.
    u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-u))


def _note(
    state: SamplingState, slots: Int[Array, " R"], flags: Int[Array, " R"], tokens: Int[Array, " R"]
) -> SamplingState:
    """Add the tokens to the histories of the slots that keep one; the others write to the trash slot."""
    trash = state.counts.shape[0] - 1
    kept = jnp.where(flags & (USES_COUNTS | USES_BAD_WORDS) != 0, slots, trash)
    if kept.shape[0] == 1:
        # A scatter of one update is rewritten into a slice update that copies the whole array.
        kept, tokens = jnp.pad(kept, (0, 1), constant_values=trash), jnp.pad(tokens, (0, 1))
    counts = state.counts.at[kept, tokens].add(1, mode="promise_in_bounds")
    recent = jnp.concatenate([state.recent[kept][:, 1:], tokens[:, None]], axis=1)
    return SamplingState(
        **{
            **{name: getattr(state, name) for name in state.__dataclass_fields__},
            "counts": counts,
            "recent": state.recent.at[kept].set(recent, mode="promise_in_bounds"),
        }
    )
