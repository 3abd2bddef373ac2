"""Paged attention in plain XLA, for serving where no kernel exists: CPUs and other back ends.

Queries are grouped in blocks that share a row (decode: one token; prefill: `block_tokens`), and each
block walks its row's pages in chunks with the online softmax of FlashAttention (Dao et al. 2022):
memory is one chunk of keys per block, and short rows never gather the whole page table.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.batch import AttentionPlan, StepBatch
from jaxllm.ops.paged_attention.write import write_kv

# Keys per chunk: on a CPU a chunk of all blocks should stay in cache; elsewhere fewer, larger steps.
CHUNK_TOKENS_DYNAMIC = 128
CHUNK_TOKENS_STATIC = 1024


def paged_attention_xla(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pages: Float[Array, "pages 2 K page_size H"],
    batch: StepBatch,
    *,
    window: int | None,
    scale: float,
    soft_cap: float | None,
) -> tuple[Float[Array, "T N H"], Float[Array, "pages 2 K page_size H"]]:
    """See `paged_attention`."""
    table = batch.page_table(window)
    pages = write_kv(k, v, pages, batch, table)
    T, N, H = q.shape
    K = k.shape[1]
    queries = (q * jnp.asarray(scale, q.dtype)).reshape(T, K, N // K, H)

    def attend(start: int, size: int, block_tokens: int, rows):
        part = slice(start, start + size)
        blocks = size // block_tokens
        out = _attend_blocks(
            queries[part].reshape(blocks, block_tokens, K, N // K, H),
            batch.positions[part].reshape(blocks, block_tokens),
            table[rows],
            pages,
            batch.plan,
            window=window,
            soft_cap=soft_cap,
        )
        return out.reshape(size, N, H)

    D = batch.num_decode_rows
    parts = []
    if D:
        parts.append(attend(0, D, 1, batch.rows[:D]))
    if T > D:
        parts.append(attend(D, T - D, batch.plan.block_tokens, batch.block_rows))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0], pages


def _attend_blocks(
    q: Float[Array, "B Q K G H"],
    positions: Int[Array, "B Q"],
    table: Int[Array, "B P"],
    pages: Float[Array, "pages 2 K page_size H"],
    plan: AttentionPlan,
    *,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "B Q K G H"]:
    """Attend blocks of queries, each over the pages of its table row; scores and sums in float32."""
    B, Q, K, G, H = q.shape
    size = plan.page_size
    P = table.shape[1]
    span = P if window is None else min(P, -(-(window + Q) // size) + 1)
    chunk_tokens = CHUNK_TOKENS_DYNAMIC if plan.dynamic_length else CHUNK_TOKENS_STATIC
    chunk = min(span, max(1, chunk_tokens // size))
    last = jnp.max(positions, axis=1)
    first_page = jnp.zeros_like(last)
    if window is not None:
        first_page = jnp.maximum(jnp.min(positions, axis=1) - (window - 1), 0) // size
    trips = jnp.max(last // size - first_page) // chunk + 1 if plan.dynamic_length else -(-span // chunk)

    query = jnp.moveaxis(q, 1, 3).reshape(B, K, G * Q, H)
    position = jnp.broadcast_to(positions[:, None, :], (B, G, Q)).reshape(B, G * Q)
    flat_pages = pages.reshape(-1, size, H)  # keys of head h of page i at 2K i + h, values K further
    heads = jnp.arange(K, dtype=jnp.int32)[None, :, None]

    def body(i, carry):
        running_max, total, out = carry
        page_index = first_page[:, None] + i * chunk + jnp.arange(chunk, dtype=jnp.int32)[None, :]
        page = jnp.take_along_axis(table, jnp.minimum(page_index, P - 1), axis=1, mode="promise_in_bounds")
        index = page[:, None, :] * (2 * K) + heads
        key = flat_pages.at[index].get(mode="promise_in_bounds").reshape(B, K, chunk * size, H)
        value = flat_pages.at[index + K].get(mode="promise_in_bounds").reshape(B, K, chunk * size, H)

        key_position = page_index[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)[None, None, :]
        key_position = key_position.reshape(B, 1, chunk * size)
        visible = key_position <= position[:, :, None]
        if window is not None:
            visible &= key_position > position[:, :, None] - window
        scores = jnp.einsum("bkmh,bksh->bkms", query, key, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible[:, None], scores, -jnp.inf)
        # Pages that nobody owns may hold anything, NaN too: mask the values as well as the scores.
        owned = key_position <= last[:, None, None]
        value = jnp.where(owned[:, :, :, None], value, jnp.zeros((), value.dtype))

        new_max = jnp.maximum(running_max, jnp.max(scores, axis=-1))
        # A chunk wholly outside a query's window leaves its maximum at -inf; exp must not see inf - inf.
        shift = jnp.where(new_max == -jnp.inf, 0.0, new_max)
        weights = jnp.exp(scores - shift[..., None])
        correction = jnp.exp(running_max - shift)
        total = total * correction + jnp.sum(weights, axis=-1)
        weights = weights.astype(value.dtype)
        update = jnp.einsum("bkms,bksh->bkmh", weights, value, preferred_element_type=jnp.float32)
        return new_max, total, out * correction[..., None] + update

    shape = (B, K, G * Q)
    start = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, H), jnp.float32),
    )
    if plan.dynamic_length:
        _, total, out = jax.lax.fori_loop(0, trips, body, start)
    else:
        # Unrolled: a loop is a host round trip per turn on a GPU, and keeps the step out of a command buffer.
        carry = start
        for i in range(trips):
            carry = body(i, carry)
        _, total, out = carry
    out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return jnp.moveaxis(out.reshape(B, K, G, Q, H), 3, 1).astype(q.dtype)
