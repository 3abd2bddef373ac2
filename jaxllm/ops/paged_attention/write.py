"""Writing keys and values into their pages, shared by the XLA implementations."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.batch import StepBatch


def write_kv(
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pages: Float[Array, "pages 2 K page_size H"],
    batch: StepBatch,
    page_table: Int[Array, "R1 P"],
) -> Float[Array, "pages 2 K page_size H"]:
    """Store each token's key and value at its position; padding lands in page 0."""
    size = batch.plan.page_size
    page = page_table.at[batch.rows, batch.positions // size].get(mode="promise_in_bounds")
    offset = batch.positions % size
    kv = jnp.stack([k, v], axis=1).astype(pages.dtype)
    return pages.at[page, :, :, offset].set(kv, mode="promise_in_bounds")
