"""Small programs beside the step: rare changes of the request state, swapping, prompt scores.

Each has one fixed shape, so that warm-up compiles it once and no request ever waits for a compile.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.cache.kv_pages import pages_sharding
from jaxllm.engine.executables import ExecutableStore
from jaxllm.engine.step import RequestState, build_prompt_logprobs
from jaxllm.sampling import state as sampling_state
from jaxllm.sampling.state import HISTORY_CHUNK, SamplingLimits

UPDATE_BATCH = 1024
PAGE_BATCH = 16
PROMPT_BLOCK = 64

__all__ = ["HISTORY_CHUNK", "PAGE_BATCH", "PROMPT_BLOCK", "UPDATE_BATCH", "SmallPrograms"]


class SmallPrograms:
    """Compiles and calls the small programs; methods that take the state or pages donate them."""

    def __init__(
        self,
        rebuild_model: Callable[[Any], Any],
        weights: list[jax.Array],
        pages: list[jax.Array],
        groups: Sequence[int],
        state: RequestState,
        limits: SamplingLimits,
        hidden_size: int,
        hidden_dtype: Any,
        mesh: Mesh,
    ):
        self._limits = limits
        self._groups = groups
        self._replicated = NamedSharding(mesh, P())
        self._hidden_dtype = hidden_dtype
        abstract = lambda tree: jax.tree.map(  # noqa: E731
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
        )
        plain = lambda shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype, sharding=self._replicated)  # noqa: E731
        state_args, page_args = abstract(state), abstract(pages)
        rare = jax.tree.map(
            lambda x: plain(np.shape(x), np.asarray(x).dtype), sampling_state.empty_rare_arguments(limits)
        )
        replicated = self._replicated
        self._programs: dict[str, Any] = {}
        self._recipes: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "update-pages": (
                jax.jit(_update_pages, donate_argnums=0, out_shardings=replicated),
                (state_args, plain((UPDATE_BATCH, 2))),
            ),
            "set-rare": (
                jax.jit(_set_rare, donate_argnums=0, out_shardings=replicated),
                (state_args, plain(()), rare),
            ),
            "init-history": (
                jax.jit(_init_history, donate_argnums=0, out_shardings=replicated),
                (state_args, plain(()), plain((HISTORY_CHUNK,)), plain(()), plain(())),
            ),
            "prompt-logprobs": (
                jax.jit(build_prompt_logprobs(rebuild_model, limits.max_logprobs), out_shardings=replicated),
                (abstract(weights), plain((PROMPT_BLOCK, hidden_size), hidden_dtype), plain((PROMPT_BLOCK,))),
            ),
        }
        for group in sorted(set(groups)):
            members = [i for i, g in enumerate(groups) if g == group]
            arrays = [page_args[i] for i in members]
            values = [
                jax.ShapeDtypeStruct((PAGE_BATCH, *a.shape[1:]), a.dtype, sharding=pages_sharding(mesh)) for a in arrays
            ]
            sharded = [pages_sharding(mesh)] * len(members)
            self._recipes[f"read-pages-{group}"] = (
                jax.jit(_read_pages, out_shardings=sharded),
                (arrays, plain((PAGE_BATCH,))),
            )
            self._recipes[f"write-pages-{group}"] = (
                jax.jit(_write_pages, donate_argnums=0, out_shardings=sharded),
                (arrays, plain((PAGE_BATCH,)), values),
            )

    def names(self, *, swap: bool) -> list[str]:
        """The programs an engine needs, with or without swap space."""
        return [name for name in self._recipes if swap or "-pages-" not in name]

    def compile(self, name: str, store: ExecutableStore) -> bool:
        """Load or compile one program; True when it was compiled."""
        program = store.load(name)
        compiled = program is None
        if program is None:
            function, arguments = self._recipes[name]
            program = function.lower(*arguments).compile()
            store.save(name, program)
        self._programs[name] = program
        return compiled

    def _call(self, name: str, *arguments: Any) -> Any:
        if name not in self._programs:
            function, abstract = self._recipes[name]
            self._programs[name] = function.lower(*abstract).compile()
        return self._programs[name](*arguments)

    def update_pages(self, state: RequestState, updates: Sequence[tuple[int, int]], trash_index: int) -> RequestState:
        """Set entries of the flat page table; at most UPDATE_BATCH of them."""
        array = np.full((UPDATE_BATCH, 2), (trash_index, 0), np.int32)
        array[: len(updates)] = updates
        return self._call("update-pages", state, array)

    def set_rare(self, state: RequestState, slot: int, arguments: Any) -> RequestState:
        return self._call("set-rare", state, np.int32(slot), arguments)

    def init_history(
        self, state: RequestState, slot: int, tokens: Sequence[int], start: int, prompt_length: int
    ) -> RequestState:
        array = np.full((HISTORY_CHUNK,), -1, np.int32)
        array[: len(tokens)] = tokens
        return self._call("init-history", state, np.int32(slot), array, np.int32(start), np.int32(prompt_length))

    def prompt_logprobs(
        self, weights: list[jax.Array], hidden: np.ndarray, targets: Sequence[int]
    ) -> tuple[np.ndarray, ...]:
        """Arrays of len(targets): log-probability, rank, top ids, top log-probabilities."""
        count = len(targets)
        block = np.zeros((PROMPT_BLOCK, hidden.shape[1]), self._hidden_dtype)
        block[:count] = hidden[:count]
        ids = np.zeros((PROMPT_BLOCK,), np.int32)
        ids[:count] = targets
        return tuple(np.asarray(x)[:count] for x in self._call("prompt-logprobs", weights, block, ids))

    def read_pages(self, group: int, pages: list[jax.Array], ids: Sequence[int]) -> list[jax.Array]:
        """Copies of at most PAGE_BATCH pages of the group's layers."""
        members = [page for page, g in zip(pages, self._groups, strict=True) if g == group]
        return self._call(f"read-pages-{group}", members, _padded_ids(ids))

    def write_pages(
        self, group: int, pages: list[jax.Array], ids: Sequence[int], values: list[np.ndarray]
    ) -> list[jax.Array]:
        """All layers' pages, with at most PAGE_BATCH pages of the group's layers replaced."""
        members = [page for page, g in zip(pages, self._groups, strict=True) if g == group]
        padded = []
        for value in values:
            block = np.zeros((PAGE_BATCH, *value.shape[1:]), value.dtype)
            block[: len(value)] = value
            padded.append(block)
        written = iter(self._call(f"write-pages-{group}", members, _padded_ids(ids), padded))
        return [next(written) if g == group else page for page, g in zip(pages, self._groups, strict=True)]


def _padded_ids(ids: Sequence[int]) -> np.ndarray:
    array = np.zeros((PAGE_BATCH,), np.int32)  # padding reads and writes the trash page
    array[: len(ids)] = ids
    return array


def _update_pages(state: RequestState, updates: jax.Array) -> RequestState:
    flat = state.page_table.reshape(-1).at[updates[:, 0]].set(updates[:, 1], mode="promise_in_bounds")
    return replace(state, page_table=flat.reshape(state.page_table.shape))


def _set_rare(state: RequestState, slot: jax.Array, arguments: Any) -> RequestState:
    return replace(state, sampling=sampling_state.set_rare(state.sampling, slot, *arguments))


def _init_history(
    state: RequestState, slot: jax.Array, tokens: jax.Array, start: jax.Array, prompt_length: jax.Array
) -> RequestState:
    return replace(state, sampling=sampling_state.init_history(state.sampling, slot, tokens, start, prompt_length))


def _read_pages(pages: list[jax.Array], ids: jax.Array) -> list[jax.Array]:
    return [array.at[ids].get(mode="promise_in_bounds") for array in pages]


def _write_pages(pages: list[jax.Array], ids: jax.Array, values: list[jax.Array]) -> list[jax.Array]:
    return [array.at[ids].set(value, mode="promise_in_bounds") for array, value in zip(pages, values, strict=True)]
