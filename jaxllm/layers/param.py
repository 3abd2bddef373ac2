"""Parameters: a shape and the logical name of each axis. The one place that knows Flax's metadata."""

import jax.numpy as jnp
from flax import nnx

Axes = tuple[str | None, ...]


def param(shape: tuple[int, ...], axes: Axes) -> nnx.Param:
    """A parameter to be filled by a converter: models are built abstractly (`nnx.eval_shape`).

    Args:
        shape: of the array.
        axes: logical names ("vocab", "embed", "kv_heads", "heads", "head_dim", "mlp" or None), from
            which `jaxllm.sharding` decides where the parts live.
    """
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} has {len(shape)} axes, the names {axes} have {len(axes)}")
    return nnx.Param(jnp.zeros(shape, jnp.float32), logical_axes=axes)


def logical_axes(variable: nnx.Variable) -> Axes:
    """The names given to `param`."""
    return variable.get_metadata("logical_axes")
