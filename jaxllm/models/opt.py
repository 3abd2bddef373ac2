"""OPT: decoder with learned positions; norms before the sublayers, or after them (350m).

https://arxiv.org/abs/2205.01068

T tokens of the step, R rows, D embed, E word embedding, V vocab.
"""

from dataclasses import dataclass

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.batch import KVLayer, StepBatch
from jaxllm.layers import MLP, Attention, Embedding, LayerNorm, Linear, Pages, PositionEmbedding

# Positions 0 and 1 of the table were meant for padding.
POSITION_OFFSET = 2
NORM_EPS = 1e-5


@dataclass(frozen=True)
class OPTConfig:
    """Numbers of a checkpoint. `word_dim` is the width of the token embeddings."""

    vocab_size: int
    num_layers: int
    embed_dim: int
    word_dim: int
    mlp_dim: int
    num_heads: int
    num_positions: int
    activation: str
    norm_first: bool
    final_norm: bool
    bias: bool = True
    tie_embeddings: bool = True

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads


class DecoderLayer(nnx.Module):
    def __init__(self, config: OPTConfig):
        head_dim = config.embed_dim // config.num_heads
        self.norm_first = config.norm_first
        self.attention_norm = LayerNorm(config.embed_dim, NORM_EPS)
        self.attention = Attention(
            config.embed_dim,
            config.num_heads,
            config.num_heads,
            head_dim,
            qkv_bias=config.bias,
            out_bias=config.bias,
        )
        self.mlp_norm = LayerNorm(config.embed_dim, NORM_EPS)
        self.mlp = MLP(config.embed_dim, config.mlp_dim, config.activation, bias=config.bias)

    def __call__(self, x: Float[Array, "T D"], pages: Pages, batch: StepBatch) -> tuple[Float[Array, "T D"], Pages]:
        with jax.named_scope("attention"):
            inputs = self.attention_norm(x) if self.norm_first else x
            attended, pages = self.attention(inputs, pages, batch, None)
            x = x + attended if self.norm_first else self.attention_norm(x + attended)
        with jax.named_scope("mlp"):
            if self.norm_first:
                return x + self.mlp(self.mlp_norm(x)), pages
            return self.mlp_norm(x + self.mlp(x)), pages


class OPT(nnx.Module):
    def __init__(self, config: OPTConfig):
        self.embedding = Embedding(config.vocab_size, config.word_dim)
        self.positions = PositionEmbedding(config.num_positions, config.embed_dim, offset=POSITION_OFFSET)
        projected = config.word_dim != config.embed_dim
        D, E = (config.embed_dim,), (config.word_dim,)
        self.project_in = Linear(E, D, (None,), ("embed",)) if projected else None
        self.project_out = Linear(D, E, ("embed",), (None,)) if projected else None
        self.layers = nnx.List([DecoderLayer(config) for _ in range(config.num_layers)])
        self.final_norm = LayerNorm(config.embed_dim, NORM_EPS) if config.final_norm else None
        self.head = None if config.tie_embeddings else Embedding(config.vocab_size, config.word_dim)

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(layer.attention.kv_layer for layer in self.layers)

    def __call__(self, batch: StepBatch, kv_pages: list[Pages]) -> tuple[Float[Array, "T E"], list[Pages]]:
        x = self.embedding(batch.tokens)
        if self.project_in is not None:
            x = self.project_in(x)
        x = x + self.positions(batch.positions)
        new_pages = []
        for layer, pages in zip(self.layers, kv_pages, strict=True):
            x, pages = layer(x, pages, batch)
            new_pages.append(pages)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x if self.project_out is None else self.project_out(x), new_pages

    def logits(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        with jax.named_scope("head"):
            return (self.embedding if self.head is None else self.head).logits(hidden)
