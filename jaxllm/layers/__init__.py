"""Layers shared by the models. They state shapes and logical axes; they know no mesh and no checkpoint."""

from jaxllm.layers.attention import Attention, Pages
from jaxllm.layers.embedding import Embedding, PositionEmbedding
from jaxllm.layers.linear import Linear
from jaxllm.layers.mlp import MLP, GatedMLP
from jaxllm.layers.norm import LayerNorm, RMSNorm
from jaxllm.layers.rope import Rope, make_rope

__all__ = [
    "MLP",
    "Attention",
    "Embedding",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "Pages",
    "PositionEmbedding",
    "RMSNorm",
    "Rope",
    "make_rope",
]
