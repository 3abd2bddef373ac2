"""Paged attention: write the step's keys and values into their pages, then attend over the pages.

pages[page_table[r, p // S], :, :, p % S] = k, v        for each token of row r at position p
out[t] = softmax(soft_cap(scale * q[t] @ K.T) + causal/window mask) @ V       over its row's pages
"""

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxllm.batch import KVLayer, StepBatch
from jaxllm.ops.implementations import attention_implementation

Pages = Float[Array, "pages 2 K page_size H"]


def paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    pages: Pages,
    batch: StepBatch,
    *,
    layer: KVLayer,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "T N H"], Pages]:
    """Causal attention of the step's tokens over their sequences' pages, one layer.

    Args:
        q: queries; head n reads KV head n // (N / K).
        k, v: keys and values of the step's tokens, written before attending.
        pages: the layer's pool; pages[i, 0] holds keys, pages[i, 1] values.
        batch: the step; its plan names the implementation.
        layer: the layer's window decides mask and page table.
        scale: factor on the scores.
        soft_cap: if set, scores become soft_cap * tanh(scores / soft_cap) before the mask.

    Returns:
        The attended values (rows of padding are unspecified but finite) and the updated pages.
    """
    plan = batch.plan
    implementation = attention_implementation(plan.implementation)

    def local(q, k, v, pages, batch):
        return implementation(q, k, v, pages, batch, window=layer.window, scale=scale, soft_cap=soft_cap)

    if plan.mesh.size == 1:
        return local(q, k, v, pages, batch)
    heads, pool = P(None, "tensor", None), P(None, None, "tensor", None, None)
    return jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(heads, heads, heads, pool, P()),
        out_specs=(heads, pool),
        check_vma=False,
    )(q, k, v, pages, batch)
