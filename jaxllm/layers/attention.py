"""Self-attention over the paged KV cache, shared by all families."""

from flax import nnx
from jaxtyping import Array, Float

from jaxllm.batch import KVLayer, StepBatch
from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import Tables, rotate
from jaxllm.ops import paged_attention

Pages = Float[Array, "pages 2 K page_size H"]


class Attention(nnx.Module):
    """Grouped-query attention; query, key and value of a KV head are one group of the fused product.

    Args:
        embed_dim, num_heads, num_kv_heads, head_dim: sizes; each KV head serves N / K query heads.
        qkv_bias, out_bias: biases of the projections.
        qk_norm_eps: if set, queries and keys are normalised per head (Qwen 3, Gemma 3).
        norm_offset: see `RMSNorm`.
        window: sliding window, in tokens.
        scale: of the scores; None is head_dim ** -0.5.
        soft_cap: of the scores.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        norm_offset: float = 0.0,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ):
        group = num_heads // num_kv_heads
        self.qkv = Linear(
            (embed_dim,),
            (num_kv_heads, group + 2, head_dim),
            ("embed",),
            ("kv_heads", None, "head_dim"),
            bias=qkv_bias,
        )
        self.out = Linear((num_heads, head_dim), (embed_dim,), ("heads", "head_dim"), ("embed",), bias=out_bias)
        normed = qk_norm_eps is not None
        self.q_norm = RMSNorm(head_dim, qk_norm_eps, axis="head_dim", offset=norm_offset) if normed else None
        self.k_norm = RMSNorm(head_dim, qk_norm_eps, axis="head_dim", offset=norm_offset) if normed else None
        self.kv_layer = KVLayer(num_kv_heads, head_dim, window)
        self.scale = head_dim**-0.5 if scale is None else scale
        self.soft_cap = soft_cap

    def __call__(
        self, x: Float[Array, "T D"], pages: Pages, batch: StepBatch, rope: Tables | None
    ) -> tuple[Float[Array, "T D"], Pages]:
        qkv = self.qkv(x)
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        q = q.reshape(x.shape[0], -1, q.shape[-1])
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        attended, pages = paged_attention(
            q, k, v, pages, batch, layer=self.kv_layer, scale=self.scale, soft_cap=self.soft_cap
        )
        return self.out(attended), pages
