"""The mesh, and which of its axes each logical axis of a parameter is cut along."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "expert", "tensor")


@dataclass(frozen=True)
class ShardingRules:
    """Logical axis -> mesh axis, or None for whole on every device."""

    vocab: str | None = "tensor"
    embed: str | None = None
    heads: str | None = "tensor"
    kv_heads: str | None = "tensor"
    head_dim: str | None = None
    mlp: str | None = "tensor"
    experts: str | None = "expert"

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The PartitionSpec of a parameter with these logical axes.

        Raises:
            ValueError: an unknown logical axis, or two axes on one mesh axis.
        """
        known = {field.name for field in fields(self)}
        unknown = [axis for axis in axes if axis is not None and axis not in known]
        if unknown:
            raise ValueError(f"unknown logical axes {unknown}; known: {sorted(known)}")
        mesh_axes = [None if axis is None else getattr(self, axis) for axis in axes]
        used = [axis for axis in mesh_axes if axis is not None]
        if len(used) != len(set(used)):
            raise ValueError(f"logical axes {tuple(axes)} map to {tuple(mesh_axes)}: a mesh axis occurs twice")
        return PartitionSpec(*mesh_axes)


RULES = ShardingRules()


def make_mesh(
    tensor_parallel_size: int,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
    """A mesh of the first `tensor_parallel_size` devices.

    Raises:
        ValueError: fewer devices than asked for.
    """
    devices = jax.devices() if devices is None else devices
    if tensor_parallel_size > len(devices):
        raise ValueError(
            f"tensor_parallel_size is {tensor_parallel_size}, but there are {len(devices)} devices: "
            f"{', '.join(str(device) for device in devices)}"
        )
    return Mesh(np.asarray(devices[:tensor_parallel_size]).reshape(1, 1, tensor_parallel_size), AXES)


def sharding_of(axes: Sequence[str | None], mesh: Mesh, rules: ShardingRules = RULES) -> NamedSharding:
    """Where a parameter with these logical axes lives."""
    return NamedSharding(mesh, rules.spec(axes))
