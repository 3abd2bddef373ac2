"""GPT-2: pre-norm decoder with learned positions and a plain MLP.

https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf

T tokens of the step, R rows, D embed, V vocab.
"""

from dataclasses import dataclass

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.batch import KVLayer, StepBatch
from jaxllm.layers import MLP, Attention, Embedding, LayerNorm, Pages, PositionEmbedding


@dataclass(frozen=True)
class GPT2Config:
    """Numbers of a checkpoint."""

    vocab_size: int
    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_positions: int
    norm_eps: float
    activation: str
    tie_embeddings: bool = True

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads


class DecoderLayer(nnx.Module):
    def __init__(self, config: GPT2Config):
        head_dim = config.embed_dim // config.num_heads
        self.attention_norm = LayerNorm(config.embed_dim, config.norm_eps)
        self.attention = Attention(
            config.embed_dim, config.num_heads, config.num_heads, head_dim, qkv_bias=True, out_bias=True
        )
        self.mlp_norm = LayerNorm(config.embed_dim, config.norm_eps)
        self.mlp = MLP(config.embed_dim, config.mlp_dim, config.activation)

    def __call__(self, x: Float[Array, "T D"], pages: Pages, batch: StepBatch) -> tuple[Float[Array, "T D"], Pages]:
        with jax.named_scope("attention"):
            attended, pages = self.attention(self.attention_norm(x), pages, batch, None)
            x = x + attended
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x)), pages


class GPT2(nnx.Module):
    def __init__(self, config: GPT2Config):
        self.embedding = Embedding(config.vocab_size, config.embed_dim)
        self.positions = PositionEmbedding(config.num_positions, config.embed_dim)
        self.layers = nnx.List([DecoderLayer(config) for _ in range(config.num_layers)])
        self.final_norm = LayerNorm(config.embed_dim, config.norm_eps)
        self.head = None if config.tie_embeddings else Embedding(config.vocab_size, config.embed_dim)

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(layer.attention.kv_layer for layer in self.layers)

    def __call__(self, batch: StepBatch, kv_pages: list[Pages]) -> tuple[Float[Array, "T D"], list[Pages]]:
        x = self.embedding(batch.tokens) + self.positions(batch.positions)
        new_pages = []
        for layer, pages in zip(self.layers, kv_pages, strict=True):
            x, pages = layer(x, pages, batch)
            new_pages.append(pages)
        return self.final_norm(x), new_pages

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        with jax.named_scope("head"):
            return (self.embedding if self.head is None else self.head).logits(hidden)
