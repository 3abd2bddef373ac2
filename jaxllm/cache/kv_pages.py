"""The KV pool on the device: one array per layer, pages of layers with equal window in one group."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.batch import KVLayer


def group_windows(layers: Sequence[KVLayer]) -> tuple[int | None, ...]:
    """The windows of the page groups, full attention first, then by size."""
    return tuple(sorted({layer.window for layer in layers}, key=lambda window: (window is not None, window or 0)))


def page_bytes(layers: Sequence[KVLayer], window: int | None, page_size: int, dtype: str) -> int:
    """Bytes of one page id of a group: it is a page in each of the group's layers."""
    item = jnp.dtype(dtype).itemsize
    return sum(2 * layer.num_kv_heads * layer.head_dim * page_size * item for layer in layers if layer.window == window)


def group_sizes(
    layers: Sequence[KVLayer],
    *,
    page_size: int,
    dtype: str,
    kv_cache_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_pages: int | None = None,
) -> tuple[int, ...]:
    """Pages of each group, in the order of `group_windows`, trash page included.

    A window group needs no more than what all rows can hold at once (window + a prefill chunk each);
    what it does not need goes to the full-attention group. `num_pages` overrides the largest group.

    Raises:
        ValueError: when the memory does not hold one page of each group.
    """
    windows = group_windows(layers)
    cost = [page_bytes(layers, window, page_size, dtype) for window in windows]
    longest = -(-max_model_len // page_size)
    # What one row may hold of each group, and what all rows together may hold.
    most = []
    for window in windows:
        if window is None:
            most.append(longest * max_num_seqs)
        else:
            per_row = min(longest, -(-window // page_size) + 2)
            most.append(per_row * max_num_seqs + -(-max_num_batched_tokens // page_size) + 1)
    if num_pages is not None:
        return tuple(
            num_pages + 1 if window is None or len(windows) == 1 else min(num_pages, limit) + 1
            for window, limit in zip(windows, most, strict=True)
        )
    # Give every group pages for equal numbers of tokens until the window groups have enough.
    left, sizes = kv_cache_bytes, [0] * len(windows)
    for i in sorted(range(len(windows)), key=lambda i: most[i]):
        open_cost = sum(cost[j] for j in range(len(windows)) if sizes[j] == 0)
        sizes[i] = min(most[i] + 1, left // open_cost)
        left -= sizes[i] * cost[i]
    if min(sizes) < 2:
        raise ValueError(
            f"the KV cache has {kv_cache_bytes:,} bytes; two pages of {page_size} tokens in each of "
            f"{len(windows)} page groups take {2 * sum(cost):,}"
        )
    return tuple(sizes)


def pages_sharding(mesh: Mesh) -> NamedSharding:
    """KV heads over the axis "tensor"."""
    return NamedSharding(mesh, P(None, None, "tensor", None, None))


def allocate_pages(
    layers: Sequence[KVLayer], sizes: Sequence[int], *, page_size: int, dtype: str, mesh: Mesh
) -> list[jax.Array]:
    """One zeroed array [pages, 2, K, page_size, H] per layer, made where it will live."""
    windows = group_windows(layers)
    sharding = pages_sharding(mesh)
    pages = []
    for layer in layers:
        count = sizes[windows.index(layer.window)]
        shape = (count, 2, layer.num_kv_heads, page_size, layer.head_dim)
        pages.append(jnp.zeros(shape, jnp.dtype(dtype), device=sharding))
    return pages


class HostPages:
    """Host copies of pages, the target of swapping: per layer an array like the device's."""

    def __init__(self, layers: Sequence[KVLayer], sizes: Sequence[int], *, page_size: int, dtype: str):
        windows = group_windows(layers)
        self.groups = [windows.index(layer.window) for layer in layers]
        self.arrays = [
            np.zeros((sizes[group], 2, layer.num_kv_heads, page_size, layer.head_dim), jnp.dtype(dtype))
            for layer, group in zip(layers, self.groups, strict=True)
        ]

    def store(self, layer: int, host_pages: Sequence[int], values: np.ndarray) -> None:
        self.arrays[layer][list(host_pages)] = values

    def load(self, layer: int, host_pages: Sequence[int]) -> np.ndarray:
        return self.arrays[layer][list(host_pages)]
