"""Weights as the step takes them: few flat arrays, from which the model is rebuilt while tracing."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

_LAYER = re.compile(r"(\['layers'\])\[(\d+)\]")


def flatten_model(model: nnx.Module, *, stack: bool) -> tuple[list[jax.Array], Callable[[Any], nnx.Module]]:
    """The model's arrays, and the function that makes the model of such a list.

    Args:
        model: with its arrays in place.
        stack: join the arrays of a kind over the layers. A launch costs host time per argument, and
            GPUs read static slices of a joined array without copying them; CPUs would copy.

    Returns:
        (weights, rebuild): `rebuild(weights)` is called while tracing, never per step.
    """
    graph, state = nnx.split(model)
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    arrays: list[Any] = [leaf for _, leaf in paths]
    if not stack:
        return arrays, lambda weights: nnx.merge(graph, jax.tree.unflatten(treedef, weights))

    kinds: dict[tuple, list[int]] = {}
    for position, (path, _) in enumerate(paths):
        kind = _LAYER.sub(r"\1[]", jax.tree_util.keystr(path))
        kinds.setdefault((kind, arrays[position].shape, arrays[position].dtype), []).append(position)
    groups = list(kinds.values())
    count = len(paths)
    del state, paths  # what the closure below must not keep alive
    weights = []
    for group in groups:
        parts = [arrays[i] for i in group]
        for i in group:
            arrays[i] = None  # let go of the parts as we join them
        weights.append(parts[0] if len(parts) == 1 else _stack(parts))

    def rebuild(stacked: Any) -> nnx.Module:
        leaves: list[Any] = [None] * count
        for group, array in zip(groups, stacked, strict=True):
            for index, position in enumerate(group):
                leaves[position] = array if len(group) == 1 else array[index]
        return nnx.merge(graph, jax.tree.unflatten(treedef, leaves))

    return weights, rebuild


def _stack(parts: list[jax.Array]) -> jax.Array:
    sharding = parts[0].sharding
    spec = jax.sharding.PartitionSpec(None, *sharding.spec)  # type: ignore[attr-defined]
    target = jax.sharding.NamedSharding(sharding.mesh, spec)  # type: ignore[attr-defined]
    return jax.jit(lambda *arrays: jnp.stack(arrays), out_shardings=target)(*parts)
