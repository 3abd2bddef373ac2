"""Feed-forward layers."""

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.layers.linear import Linear

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_fast": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}


def activation(name: str) -> Callable[[Array], Array]:
    """The function of that name; unknown names are errors that list the known."""
    try:
        return _ACTIVATIONS[name]
    except KeyError:
        raise ValueError(f"unknown activation {name!r}; known: {', '.join(_ACTIVATIONS)}") from None


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one product (Shazeer 2020)."""

    def __init__(self, embed_dim: int, mlp_dim: int, activation_name: str, *, bias: bool = False):
        self.gate_up = Linear((embed_dim,), (2, mlp_dim), ("embed",), (None, "mlp"), bias=bias)
        self.down = Linear((mlp_dim,), (embed_dim,), ("mlp",), ("embed",), bias=bias)
        self.activation = activation(activation_name)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate_up = self.gate_up(x)
        return self.down(self.activation(gate_up[:, 0]) * gate_up[:, 1])


class MLP(nnx.Module):
    """down(activation(up(x))), with biases."""

    def __init__(self, embed_dim: int, mlp_dim: int, activation_name: str, *, bias: bool = True):
        self.up = Linear((embed_dim,), (mlp_dim,), ("embed",), ("mlp",), bias=bias)
        self.down = Linear((mlp_dim,), (embed_dim,), ("mlp",), ("embed",), bias=bias)
        self.activation = activation(activation_name)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(self.activation(self.up(x)))
