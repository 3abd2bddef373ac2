"""Normalisation, computed in float32 and returned in the input's type."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.layers.param import param


class RMSNorm(nnx.Module):
    """x / rms(x) * (weight + offset) (Zhang and Sennrich 2019); Gemma's weights have offset 1."""

    def __init__(self, dim: int, eps: float, *, axis: str = "embed", offset: float = 0.0):
        self.weight = param((dim,), (axis,))
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        if self.offset:
            return (x32 * scale * (weight.astype(jnp.float32) + self.offset)).astype(x.dtype)
        return (x32 * scale).astype(x.dtype) * weight


class LayerNorm(nnx.Module):
    """(x - mean) / std * weight + bias (Ba et al. 2016)."""

    def __init__(self, dim: int, eps: float):
        self.weight = param((dim,), ("embed",))
        self.bias = param((dim,), ("embed",))
        self.eps = eps

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        weight, bias = (p[...].astype(jnp.float32)[None, :] for p in (self.weight, self.bias))
        return (centred * scale * weight + bias).astype(x.dtype)
