"""The Llama family: pre-norm decoder, grouped-query attention, rotary positions, gated MLP.

Serves Llama, Mistral, Phi-3, Qwen 2 (biases on q, k, v) and Qwen 3 (q and k normed per head), which
differ in numbers only. https://arxiv.org/abs/2302.13971

T tokens of the step, R rows, D embed, N query heads, K KV heads, H head_dim, F mlp, V vocab.
"""

from dataclasses import dataclass

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.batch import KVLayer, StepBatch
from jaxllm.layers import Attention, Embedding, GatedMLP, Pages, RMSNorm, Rope
from jaxllm.layers.rope import Tables


@dataclass(frozen=True)
class LlamaConfig:
    """Numbers of a checkpoint. `windows` has the sliding window of each layer, None for full attention."""

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    rope: Rope
    norm_eps: float
    activation: str = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class DecoderLayer(nnx.Module):
    def __init__(self, config: LlamaConfig, window: int | None):
        self.attention_norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.attention = Attention(
            config.embed_dim,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            window=window,
        )
        self.mlp_norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.mlp = GatedMLP(config.embed_dim, config.mlp_dim, config.activation, bias=config.mlp_bias)

    def __call__(
        self, x: Float[Array, "T D"], pages: Pages, batch: StepBatch, rope: Tables
    ) -> tuple[Float[Array, "T D"], Pages]:
        with jax.named_scope("attention"):
            attended, pages = self.attention(self.attention_norm(x), pages, batch, rope)
            x = x + attended
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x)), pages


class Llama(nnx.Module):
    def __init__(self, config: LlamaConfig):
        self.embedding = Embedding(config.vocab_size, config.embed_dim)
        self.layers = nnx.List([DecoderLayer(config, window) for window in config.windows])
        self.final_norm = RMSNorm(config.embed_dim, config.norm_eps)
        # Tied checkpoints carry no head: the embedding table serves as both.
        self.head = None if config.tie_embeddings else Embedding(config.vocab_size, config.embed_dim)
        self.rope = config.rope

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(layer.attention.kv_layer for layer in self.layers)

    def __call__(self, batch: StepBatch, kv_pages: list[Pages]) -> tuple[Float[Array, "T D"], list[Pages]]:
        x = self.embedding(batch.tokens)
        rope = self.rope.tables(batch.positions)
        new_pages = []
        for layer, pages in zip(self.layers, kv_pages, strict=True):
            x, pages = layer(x, pages, batch, rope)
            new_pages.append(pages)
        return self.final_norm(x), new_pages

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        with jax.named_scope("head"):
            return (self.embedding if self.head is None else self.head).logits(hidden)
