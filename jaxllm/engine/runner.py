"""Runner: owns what lives on the device (weights, pages, request state) and the compiled programs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.batch import AttentionPlan, KVLayer
from jaxllm.cache.kv_pages import HostPages, group_windows, pages_sharding
from jaxllm.config import EngineConfig
from jaxllm.engine.batch_builder import bucket_need, build_vector, padding_vector
from jaxllm.engine.buckets import Bucket, BucketGrid
from jaxllm.engine.executables import ExecutableStore
from jaxllm.engine.layout import step_layout
from jaxllm.engine.profiles import PROFILES
from jaxllm.engine.small_programs import HISTORY_CHUNK, PAGE_BATCH, PROMPT_BLOCK, UPDATE_BATCH, SmallPrograms
from jaxllm.engine.step import RequestState, StepResult, build_step
from jaxllm.engine.step_plan import StepPlan
from jaxllm.engine.step_programs import Progress, StepPrograms
from jaxllm.engine.weights import flatten_model
from jaxllm.sampling.state import FULL, PARAM_WORDS, SamplingLimits, init_state


@dataclass
class Launch:
    """A dispatched step: its plan and its results, still on their way."""

    plan: StepPlan
    bucket: Bucket
    block_tokens: int
    result: StepResult

    def tokens(self) -> np.ndarray:
        """[steps, R]: waits for the device."""
        return np.asarray(self.result.tokens)

    def row_index(self, position: int) -> int:
        """Index in R of the plan's row: decode rows first, then prefill rows after the padding."""
        decode = len(self.plan.decode_rows)
        return position if position < decode else self.bucket.decode_rows + position - decode

    def first_hidden(self, position: int) -> int:
        """Index in T of the first token of the plan's prefill row."""
        blocks = sum(-(-row.num_tokens // self.block_tokens) for row in self.plan.prefill_rows[:position])
        return self.bucket.decode_rows + blocks * self.block_tokens


class Runner:
    """Compiles the step for each bucket and dispatches plans.

    Not thread-safe but for the background compilation: one thread calls `dispatch`.
    """

    def __init__(
        self,
        model: nnx.Module,
        config: EngineConfig,
        pages: list[jax.Array],
        *,
        kv_layers: Sequence[KVLayer],
        swap_sizes: Sequence[int],
        vocab_size: int,
        hidden_size: int,
        mesh: Mesh,
        platform: str,
        attention: str,
        grid: BucketGrid,
        store: ExecutableStore,
    ):
        self.config = config
        self.profile = PROFILES[platform]
        self._mesh = mesh
        self._store = store
        self._replicated = NamedSharding(mesh, P())
        self._weights, self._rebuild = flatten_model(model, stack=self.profile.stack_weights)
        windows = group_windows(kv_layers)
        self._num_groups = len(windows)
        self._pages = pages
        self.limits = SamplingLimits(
            max_num_seqs=config.max_num_seqs, vocab_size=vocab_size, max_logprobs=config.max_logprobs
        )
        self._width = -(-config.max_model_len // config.page_size)
        self._state = jax.device_put(self._initial_state(), self._replicated)
        self.host_pages = HostPages(kv_layers, swap_sizes, page_size=config.page_size, dtype=config.dtype)
        self._layout = cache(
            partial(
                step_layout,
                block_tokens=self.profile.block_tokens,
                page_size=config.page_size,
                num_groups=self._num_groups,
                param_words=PARAM_WORDS,
            )
        )
        self._small = SmallPrograms(
            self._rebuild,
            self._weights,
            self._pages,
            self.host_pages.groups,
            self._state,
            self.limits,
            hidden_size=hidden_size,
            hidden_dtype=jnp.dtype(config.dtype),
            mesh=mesh,
        )
        self.programs = StepPrograms(
            grid,
            store,
            self._lowering(
                AttentionPlan(
                    attention, mesh, windows, config.page_size, self.profile.block_tokens, dynamic_length=True
                )
            ),
            threads=self.profile.compile_threads,
            background_threads=self.profile.background_threads,
            on_demand=config.enforce_eager,
        )
        self.num_launches = 0

    def _initial_state(self) -> RequestState:
        slots = self.config.max_num_seqs + 1
        return RequestState(
            last_token=jnp.zeros((slots,), jnp.int32),
            page_table=jnp.zeros((self._num_groups, slots, self._width), jnp.int32),
            sampling=init_state(self.limits),
        )

    # Compilation.

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile the buckets without which some step could not run; the finer ones in the background."""
        self._warm_run(self.programs.compile_first(progress))
        names = self._small.names(swap=self.config.swap_bytes > 0)
        self.programs.compile_rest([partial(self._small.compile, name, self._store) for name in names])

    def _lowering(self, plan: AttentionPlan) -> Callable[[Bucket], jax.stages.Lowered]:
        """What traces the step of a bucket; it holds shapes, no arrays."""
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            (self._weights, self._pages, self._state),
        )
        outputs = (self._replicated, [pages_sharding(self._mesh)] * len(self._pages), self._replicated)
        rebuild, layout_of, replicated = self._rebuild, self._layout, self._replicated
        static_pages = self.profile.static_tokens // self.config.page_size
        max_logprobs = self.limits.max_logprobs

        def lower(bucket: Bucket) -> jax.stages.Lowered:
            layout = layout_of(bucket)
            step = build_step(
                rebuild, bucket, layout, replace(plan, dynamic_length=bucket.pages > static_pages), max_logprobs
            )
            vector = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=replicated)
            return jax.jit(step, donate_argnums=(1, 2), out_shardings=outputs).lower(*arguments, vector)

        return lower

    def _warm_run(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            for _ in range(self.profile.warm_runs):
                vector = padding_vector(
                    self._layout(bucket), trash_slot=self._trash_slot, trash_index=self._trash_index
                )
                result = self._execute(bucket, vector)
                jax.block_until_ready(result.tokens)

    # Dispatch.

    @property
    def _trash_slot(self) -> int:
        return self.config.max_num_seqs

    @property
    def _trash_index(self) -> int:
        return self._trash_slot * self._width

    def dispatch(self, plan: StepPlan, params: Sequence[tuple[int, np.ndarray]], sampler_mode: int) -> Launch:
        """Send a step to the device; returns at once.

        Args:
            plan: the step.
            params: (slot, packed sampling parameters) of the plan's new sequences.
            sampler_mode: the sampler branch that serves every row.
        """
        self._swap(plan)
        need = bucket_need(
            plan,
            block_tokens=self.profile.block_tokens,
            page_size=self.config.page_size,
            sampler_mode=sampler_mode,
        )
        bucket = self.programs.choose(need, self.profile.block_tokens)
        layout = self._layout(bucket)
        slots = self.config.max_num_seqs + 1
        updates = [
            ((group * slots + slot) * self._width + index, page) for group, slot, index, page in plan.page_updates
        ]
        room = layout.pieces["page_updates"][1][0]
        while len(updates) > room:
            self._state = self._small.update_pages(self._state, updates[:UPDATE_BATCH], self._trash_index)
            self.num_launches += 1
            updates = updates[UPDATE_BATCH:]
        vector = build_vector(
            plan,
            layout,
            block_tokens=self.profile.block_tokens,
            trash_slot=self._trash_slot,
            trash_index=self._trash_index,
            sampler_mode=sampler_mode,
            page_updates=updates,
            params=params,
        )
        result = self._execute(bucket, vector)
        result.tokens.copy_to_host_async()
        if sampler_mode == FULL:
            for array in (result.chosen, result.top_ids, result.top_logprobs):
                array.copy_to_host_async()
        return Launch(plan, bucket, self.profile.block_tokens, result)

    def _execute(self, bucket: Bucket, vector: np.ndarray) -> StepResult:
        result, self._pages, self._state = self.programs[bucket](self._weights, self._pages, self._state, vector)
        self.num_launches += 1
        return result

    def set_rare(self, slot: int, arguments: Any) -> None:
        """Send masks, biases and bad words of a slot (see `jaxllm.sampling.state`)."""
        self._state = self._small.set_rare(self._state, slot, arguments)
        self.num_launches += 1

    def set_history(self, slot: int, tokens: Sequence[int], prompt_length: int) -> None:
        """Send the tokens so far of a slot whose sampling depends on them."""
        for start in range(0, max(len(tokens), 1), HISTORY_CHUNK):
            chunk = tokens[start : start + HISTORY_CHUNK]
            self._state = self._small.init_history(self._state, slot, chunk, start, prompt_length)
            self.num_launches += 1

    def prompt_logprobs(self, hidden: np.ndarray, targets: Sequence[int]) -> list[tuple[np.ndarray, ...]]:
        """Log-probabilities of `targets`, each given the hidden state before it: pieces in order."""
        pieces = []
        for start in range(0, len(targets), PROMPT_BLOCK):
            end = min(start + PROMPT_BLOCK, len(targets))
            pieces.append(self._small.prompt_logprobs(self._weights, hidden[start:end], targets[start:end]))
            self.num_launches += 1
        return pieces

    def _swap(self, plan: StepPlan) -> None:
        """Copy pages to the host, then back: outs come before ins, both before the step."""
        for group in range(self._num_groups):
            layers = [i for i, g in enumerate(self.host_pages.groups) if g == group]
            outs = [(device, host) for g, device, host in plan.swap_outs if g == group]
            for start in range(0, len(outs), PAGE_BATCH):
                part = outs[start : start + PAGE_BATCH]
                copied = self._small.read_pages(group, self._pages, [device for device, _ in part])
                for layer, values in zip(layers, copied, strict=True):
                    self.host_pages.store(layer, [host for _, host in part], np.asarray(values)[: len(part)])
                self.num_launches += 1
        for group in range(self._num_groups):
            layers = [i for i, g in enumerate(self.host_pages.groups) if g == group]
            ins = [(device, host) for g, device, host in plan.swap_ins if g == group]
            for start in range(0, len(ins), PAGE_BATCH):
                part = ins[start : start + PAGE_BATCH]
                values = [self.host_pages.load(layer, [host for _, host in part]) for layer in layers]
                self._pages = self._small.write_pages(group, self._pages, [device for device, _ in part], values)
                self.num_launches += 1

    def shutdown(self) -> None:
        """Stop compiling in the background and let go of the programs."""
        self.programs.stop()
