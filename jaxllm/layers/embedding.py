"""Token embeddings, which also serve as output heads."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.layers.param import param

VOCAB_MULTIPLE = 128


def padded_vocab(vocab_size: int) -> int:
    """Rows of the table: a multiple that any number of shards divides."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class Embedding(nnx.Module):
    """A table of `vocab_size` vectors (padded with zero rows)."""

    def __init__(self, vocab_size: int, embed_dim: int, *, bias: bool = False):
        self.vocab_size = vocab_size
        self.weight = param((padded_vocab(vocab_size), embed_dim), ("vocab", "embed"))
        self.bias = param((padded_vocab(vocab_size),), ("vocab",)) if bias else None

    def __call__(self, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
        # The host has checked the ids: out of bounds would be silent.
        return self.weight[...].at[tokens].get(mode="promise_in_bounds")

    def logits(self, x: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Products with every vector, in float32."""
        contract = (((1,), (1,)), ((), ()))
        logits = jax.lax.dot_general(x, self.weight[...], contract, preferred_element_type=jnp.float32)
        if self.bias is not None:
            logits = logits + self.bias[...].astype(jnp.float32)[None, :]
        return logits[:, : self.vocab_size]


class PositionEmbedding(nnx.Module):
    """Learned positions (GPT-2, OPT): position p reads row p + offset."""

    def __init__(self, num_positions: int, embed_dim: int, *, offset: int = 0):
        self.offset = offset
        self.weight = param((num_positions + offset, embed_dim), (None, "embed"))

    def __call__(self, positions: Int[Array, " T"]) -> Float[Array, "T D"]:
        return self.weight[...].at[positions + self.offset].get(mode="promise_in_bounds")
