"""The reference of paged attention: each token gathers its row's whole page table. Slow and clear."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.batch import StepBatch
from jaxllm.ops.paged_attention.write import write_kv


def paged_attention_reference(
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
    """See `paged_attention`; float32 inside, T * P * page_size keys at once in memory."""
    table = batch.page_table(window)
    pages = write_kv(k, v, pages, batch, table)
    T, N, H = q.shape
    K = k.shape[1]

    kv = pages[table[batch.rows]].astype(jnp.float32)  # [T, P, 2, K, page_size, H]
    kv = jnp.moveaxis(kv, (2, 3), (0, 1)).reshape(2, K, T, -1, H)
    queries = q.astype(jnp.float32).reshape(T, K, N // K, H)
    scores = jnp.einsum("tkgh,ktsh->tkgs", queries, kv[0], precision=jax.lax.Precision.HIGHEST) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)

    key_positions = jnp.arange(kv.shape[3], dtype=jnp.int32)[None, :]
    positions = batch.positions[:, None]
    visible = key_positions <= positions
    if window is not None:
        visible &= key_positions > positions - window
    # Pages that nobody owns may hold anything, NaN too: mask the values as well as the scores.
    scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
    values = jnp.where(visible[None, :, :, None], kv[1], 0.0)
    out = jnp.einsum("tkgs,ktsh->tkgh", jax.nn.softmax(scores, axis=-1), values, precision=jax.lax.Precision.HIGHEST)
    return out.reshape(T, N, H).astype(q.dtype), pages
