"""Runner: owns what lives on the device (weights, pages, request state) and the compiled programs."""

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from jaxllm.engine.executables import ExecutableStore, program_name
from jaxllm.engine.layout import StepLayout, step_layout
from jaxllm.engine.programs import HISTORY_CHUNK, PAGE_BATCH, PROMPT_BLOCK, UPDATE_BATCH, SmallPrograms
from jaxllm.engine.step import RequestState, StepResult, build_step
from jaxllm.engine.step_plan import StepPlan
from jaxllm.engine.weights import flatten_model
from jaxllm.sampling.state import FULL, GREEDY, PARAM_WORDS, SamplingLimits, init_state

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
# XLA's compiler recurses deeply: the default stack of a thread is too small for large graphs.
COMPILE_STACK_BYTES = 64 << 20
_stack_lock = threading.Lock()


@dataclass(frozen=True)
class PlatformProfile:
    """What differs between platforms in how a step is cut and compiled.

    Attributes:
        block_tokens: tokens of a prefill block.
        static_tokens: programs whose page tables hold at most this many tokens attend over the whole
            width; the wider ones loop up to the longest row (see `AttentionPlan.dynamic_length`).
        stack_weights: see `flatten_model`.
        max_prefill_rows: rows that may prefill in one step.
        warm_runs: executions of each program before serving (GPUs load kernels and build their
            command buffers on the first ones).
        compile_threads: programs compiled at once before serving.
        background_threads: programs compiled at once beside serving.
    """

    block_tokens: int
    static_tokens: int
    stack_weights: bool
    max_prefill_rows: int
    warm_runs: int
    compile_threads: int
    background_threads: int


PROFILES = {
    "cpu": PlatformProfile(16, 0, False, 8, 0, 2, 1),
    "gpu": PlatformProfile(64, 2048, True, 16, 2, 8, 4),
    "tpu": PlatformProfile(64, 0, True, 16, 1, 8, 4),
}


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
        self.grid = grid
        self._mesh = mesh
        self._store = store
        self._replicated = NamedSharding(mesh, P())
        self._weights, self._rebuild = flatten_model(model, stack=self.profile.stack_weights)
        windows = group_windows(kv_layers)
        self._num_groups = len(windows)
        self._plan = AttentionPlan(
            attention, mesh, windows, config.page_size, self.profile.block_tokens, dynamic_length=True
        )
        self._pages = pages
        self._pages_sharding = pages_sharding(mesh)
        self.limits = SamplingLimits(
            max_num_seqs=config.max_num_seqs, vocab_size=vocab_size, max_logprobs=config.max_logprobs
        )
        self._width = -(-config.max_model_len // config.page_size)
        self._state = jax.device_put(self._initial_state(), self._replicated)
        self.host_pages = HostPages(kv_layers, swap_sizes, page_size=config.page_size, dtype=config.dtype)
        self._layouts: dict[Bucket, StepLayout] = {}
        self._compiled: dict[Bucket, Any] = {}
        self._compile_lock = threading.Lock()
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
        self.num_launches = 0
        self.num_compiles = 0
        self.num_loaded = 0
        self.num_late_compiles = 0
        self._stop = threading.Event()
        self._background: threading.Thread | None = None
        # A thread inside the compiler when the interpreter ends would abort the process.
        atexit.register(_shut_down, weakref.ref(self))

    def _initial_state(self) -> RequestState:
        slots = self.config.max_num_seqs + 1
        return RequestState(
            last_token=jnp.zeros((slots,), jnp.int32),
            page_table=jnp.zeros((self._num_groups, slots, self._width), jnp.int32),
            sampling=init_state(self.limits),
        )

    # Compilation.

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile the buckets without which some step could not run; the finer ones in the background.

        The smallest ones are loaded, too, if they are kept: they make the first request fast.
        """
        first = self.grid.first()
        needed = [b for b in self.grid.start_order() if b in first or self._store.holds(program_name(b))]
        self._compile_many(needed, progress)
        self._warm_run(needed)
        self._background = threading.Thread(target=self._compile_rest, name="compile", daemon=True)
        self._background.start()

    def wait_for_background(self) -> None:
        """Block until every bucket of the grid is compiled."""
        if self._background is not None:
            self._background.join()

    def _compile_rest(self) -> None:
        try:
            self._compile_finer()
        except Exception:  # serving goes on in the larger buckets
            logger.exception("compiling in the background stopped")

    def _compile_finer(self) -> None:
        for name in self._small.names(swap=self.config.swap_bytes > 0):
            if self._stop.is_set():
                return
            compiled = self._small.compile(name, self._store)
            with self._compile_lock:
                self.num_compiles += compiled
        # A lone request gains most from the smallest.
        order = dict.fromkeys([*self.grid.smallest(), *reversed(self.grid.buckets())])
        rest = iter([bucket for bucket in order if bucket not in self._compiled])

        def work() -> None:
            for bucket in rest:
                if self._stop.is_set():
                    return
                self._add(bucket, self._compile(bucket))

        with _compile_pool(self.profile.background_threads) as pool:
            for future in [pool.submit(work) for _ in range(self.profile.background_threads)]:
                future.result()

    def _compile_many(self, buckets: Sequence[Bucket], progress: Progress | None) -> None:
        with _compile_pool(self.profile.compile_threads) as pool:
            futures = {pool.submit(self._compile, bucket): bucket for bucket in buckets}
            for done, future in enumerate(as_completed(futures), 1):
                self._add(futures[future], future.result())
                if progress is not None:
                    progress(f"compiling {futures[future]}", done, len(futures))

    def _add(self, bucket: Bucket, compiled: Any) -> None:
        with self._compile_lock:
            self._layouts[bucket] = self._layout(bucket)
            self._compiled = {**self._compiled, bucket: compiled}  # replaced whole: readers take no lock

    def _layout(self, bucket: Bucket) -> StepLayout:
        return step_layout(
            bucket,
            block_tokens=self.profile.block_tokens,
            page_size=self.config.page_size,
            num_groups=self._num_groups,
            param_words=PARAM_WORDS,
        )

    def _compile(self, bucket: Bucket) -> Any:
        loaded = self._store.load(program_name(bucket))
        if loaded is not None:
            with self._compile_lock:
                self.num_loaded += 1
            return loaded
        layout = self._layout(bucket)
        dynamic = bucket.pages * self.config.page_size > self.profile.static_tokens
        plan = replace(self._plan, dynamic_length=dynamic)
        step = build_step(self._rebuild, bucket, layout, plan, self.limits.max_logprobs)
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            (self._weights, self._pages, self._state),
        )
        vector = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=self._replicated)
        outputs = (self._replicated, [self._pages_sharding] * len(self._pages), self._replicated)
        with self._compile_lock:  # tracing holds the interpreter anyway; only XLA's part runs in parallel
            lowered = jax.jit(step, donate_argnums=(1, 2), out_shardings=outputs).lower(*arguments, vector)
        compiled = lowered.compile()
        with self._compile_lock:
            self.num_compiles += 1
        self._store.save(program_name(bucket), compiled)
        return compiled

    def _warm_run(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            for _ in range(self.profile.warm_runs):
                vector = padding_vector(
                    self._layouts[bucket], trash_slot=self._trash_slot, trash_index=self._trash_index
                )
                result = self._execute(bucket, vector)
                jax.block_until_ready(result.tokens)

    def _choose(self, need: Bucket) -> Bucket:
        """The cheapest compiled bucket that fits; compiled on the spot when there is none."""
        cost = lambda bucket: bucket.cost(self.profile.block_tokens)  # noqa: E731
        ready = [bucket for bucket in self._compiled if bucket.fits(need)]
        if ready:
            return min(ready, key=cost)
        fitting = [bucket for bucket in self.grid.buckets() if bucket.fits(need)]
        if not fitting:
            raise AssertionError(f"no bucket of the grid fits {need}")
        bucket = min(fitting, key=cost)
        if not self.config.enforce_eager:
            logger.warning("compiling %s while serving", bucket)
            self.num_late_compiles += 1
        self._add(bucket, self._compile(bucket))
        return bucket

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
        bucket = self._choose(need)
        layout = self._layouts[bucket]
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
        result, self._pages, self._state = self._compiled[bucket](self._weights, self._pages, self._state, vector)
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
        """Stop compiling in the background and let go of the device memory."""
        self._stop.set()
        if self._background is not None:
            self._background.join(timeout=60)
        self._compiled = {}


@contextmanager
def _compile_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads with stacks for the compiler; the size is a setting of the process, read as they start."""
    with ThreadPoolExecutor(threads) as pool:
        with _stack_lock:
            old = threading.stack_size(COMPILE_STACK_BYTES)
            started = threading.Barrier(threads + 1)  # an idle thread would be used again instead of a new one
            for _ in range(threads):
                pool.submit(started.wait)
            started.wait()
            threading.stack_size(old)
        yield pool


def _shut_down(reference: "weakref.ref[Runner]") -> None:
    runner = reference()
    if runner is not None:
        runner.shutdown()


def sampler_modes_for(platform: str) -> tuple[int, ...]:
    """The sampler branches that are compiled apart where the branch is not chosen on the device."""
    return () if platform == "cpu" else (GREEDY, FULL)
