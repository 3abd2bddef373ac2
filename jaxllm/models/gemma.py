"""Gemma 2 and 3 (text): norms before and after each sublayer, alternating sliding and full attention.

https://arxiv.org/abs/2408.00118 and https://arxiv.org/abs/2503.19786

T tokens of the step, R rows, D embed, N query heads, K KV heads, H head_dim, F mlp, V vocab.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.batch import KVLayer, StepBatch
from jaxllm.layers import Attention, Embedding, GatedMLP, Pages, RMSNorm, Rope
from jaxllm.layers.rope import Tables


@dataclass(frozen=True)
class GemmaConfig:
    """Numbers of a checkpoint. `windows` has the sliding window of each layer, None for full attention.

    Sliding layers rotate by `local_rope`, full ones by `rope` (the same in Gemma 2). `scale` is that of
    the attention scores.
    """

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    rope: Rope
    local_rope: Rope
    norm_eps: float
    activation: str
    scale: float
    attention_soft_cap: float | None
    final_soft_cap: float | None
    qk_norm: bool
    qkv_bias: bool = False
    out_bias: bool = False
    tie_embeddings: bool = True


class DecoderLayer(nnx.Module):
    def __init__(self, config: GemmaConfig, window: int | None):
        def norm() -> RMSNorm:
            return RMSNorm(config.embed_dim, config.norm_eps, offset=1.0)

        self.is_sliding = window is not None
        self.attention_norm = norm()
        self.attention = Attention(
            config.embed_dim,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            norm_offset=1.0,
            window=window,
            scale=config.scale,
            soft_cap=config.attention_soft_cap,
        )
        self.attention_out_norm = norm()
        self.mlp_norm = norm()
        self.mlp = GatedMLP(config.embed_dim, config.mlp_dim, config.activation)
        self.mlp_out_norm = norm()

    def __call__(
        self, x: Float[Array, "T D"], pages: Pages, batch: StepBatch, rope: Tables
    ) -> tuple[Float[Array, "T D"], Pages]:
        with jax.named_scope("attention"):
            attended, pages = self.attention(self.attention_norm(x), pages, batch, rope)
            x = x + self.attention_out_norm(attended)
        with jax.named_scope("mlp"):
            return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x))), pages


class Gemma(nnx.Module):
    def __init__(self, config: GemmaConfig):
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.embed_dim)
        self.layers = nnx.List([DecoderLayer(config, window) for window in config.windows])
        self.final_norm = RMSNorm(config.embed_dim, config.norm_eps, offset=1.0)
        self.head = None if config.tie_embeddings else Embedding(config.vocab_size, config.embed_dim)

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(layer.attention.kv_layer for layer in self.layers)

    def __call__(self, batch: StepBatch, kv_pages: list[Pages]) -> tuple[Float[Array, "T D"], list[Pages]]:
        x = self.embedding(batch.tokens)
        # The scale is rounded to the weights' type first, as the models were trained.
        x = x * jnp.asarray(self.config.embed_dim**0.5, x.dtype)
        full = self.config.rope.tables(batch.positions)
        local = self.config.local_rope.tables(batch.positions)
        new_pages = []
        for layer, pages in zip(self.layers, kv_pages, strict=True):
            x, pages = layer(x, pages, batch, local if layer.is_sliding else full)
            new_pages.append(pages)
        return self.final_norm(x), new_pages

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        with jax.named_scope("head"):
            logits = (self.embedding if self.head is None else self.head).logits(hidden)
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
