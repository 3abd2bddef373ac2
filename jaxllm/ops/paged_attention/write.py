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
    if len(page) == 1:
        # XLA rewrites a scatter of one update as a slice update that it cannot do in place: the whole
        # pool would be copied. A second update, into the trash page, keeps it a scatter.
        page, offset, kv = jnp.pad(page, (0, 1)), jnp.pad(offset, (0, 1)), jnp.pad(kv, ((0, 1), *[(0, 0)] * 3))
    return pages.at[page, :, :, offset].set(kv, mode="promise_in_bounds")
