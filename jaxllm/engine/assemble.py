"""From a model with its weights in place to an engine: pool sizes, scheduler, runner, warm-up."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxllm.batch import KVLayer
from jaxllm.cache.kv_pages import allocate_pages, group_sizes, group_windows, page_bytes
from jaxllm.cache.page_pool import PageGroup
from jaxllm.config import EngineConfig
from jaxllm.engine.buckets import BucketGrid, grid_for, max_prefill_blocks
from jaxllm.engine.engine import Engine
from jaxllm.engine.executables import ExecutableStore, fingerprint, program_name
from jaxllm.engine.profiles import PROFILES, sampler_modes_for
from jaxllm.engine.protocol import ModelInfo
from jaxllm.engine.runner import Runner
from jaxllm.engine.scheduler import Scheduler
from jaxllm.engine.step_programs import Progress
from jaxllm.ops.implementations import choose_attention

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSetup:
    """What is decided of an engine before its weights are read; see `set_up_engine`.

    Attributes:
        attention: the implementation.
        sizes, swap_sizes: pages of each group, on the device and on the host.
        grid: the programs.
        store: where they are kept.
        pages: the KV pool on its way, where it is made beside the loading of the weights.
    """

    config: EngineConfig
    kv_layers: tuple[KVLayer, ...]
    mesh: Mesh
    platform: str
    attention: str
    sizes: tuple[int, ...]
    swap_sizes: tuple[int, ...]
    grid: BucketGrid
    store: ExecutableStore
    pages: "Future[list[jax.Array]] | None"


def set_up_engine(
    config: EngineConfig, *, kv_layers: Sequence[KVLayer], mesh: Mesh, platform: str, model_facts: object
) -> EngineSetup:
    """Choose the sizes of an engine, and begin with what needs no weights: kept programs and, on a CPU, pages.

    Args:
        config: validated.
        kv_layers: what each attention layer stores.
        mesh: where the arrays will be.
        platform: "cpu", "gpu" or "tpu".
        model_facts: whatever the compiled programs depend on besides `config` (the model's own
            configuration); its repr enters the key of the kept programs.

    Raises:
        ValueError: the KV memory is too small for a single page, an unknown attention backend.
    """
    profile = PROFILES[platform]
    attention, reason = choose_attention(config.attention_backend)
    logger.info("attention: %s (%s)", attention, reason)
    windows = group_windows(kv_layers)
    sizes = group_sizes(
        kv_layers,
        page_size=config.page_size,
        dtype=config.dtype,
        kv_cache_bytes=config.kv_cache_bytes,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_pages=config.num_pages,
    )
    for window, size in zip(windows, sizes, strict=True):
        logger.info("KV pages, %s: %d of %d tokens", _group_name(window), size - 1, config.page_size)
    grid = grid_for(
        platform,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_pages=-(-config.max_model_len // config.page_size),
        max_prefill_rows=profile.max_prefill_rows,
        block_tokens=profile.block_tokens,
        num_decode_steps=config.num_decode_steps,
        sampler_modes=sampler_modes_for(platform),
        narrow_pages=-(-profile.static_tokens // config.page_size),
    )
    folder = None
    if config.cache_dir is not None:
        folder = Path(config.cache_dir) / fingerprint(config, model_facts, sizes, attention)
    store = ExecutableStore(folder)
    if not config.enforce_eager:
        store.prefetch(program_name(bucket) for bucket in grid.start_order())
    pages = None
    if platform == "cpu":
        # The first touch of gigabytes takes seconds. On other devices the weights come first: loading
        # them needs room for a while.
        pool = ThreadPoolExecutor(1, thread_name_prefix="pages")
        pages = pool.submit(_allocate, config, kv_layers, sizes, mesh)
        pool.shutdown(wait=False)
    return EngineSetup(
        config,
        tuple(kv_layers),
        mesh,
        platform,
        attention,
        sizes,
        _swap_sizes(kv_layers, sizes, config),
        grid,
        store,
        pages,
    )


def assemble_engine(
    model: nnx.Module,
    setup: EngineSetup,
    *,
    vocab_size: int,
    hidden_size: int,
    progress: Progress | None = None,
) -> Engine:
    """Build an engine around a model.

    Args:
        model: with its arrays in place; the engine takes them over, so let go of it.
        setup: of `set_up_engine`; serves one engine.
        vocab_size: size of the logits.
        hidden_size: size of the final hidden state.
        progress: told of each compiled program.
    """
    config, profile, sizes = setup.config, PROFILES[setup.platform], setup.sizes
    windows = group_windows(setup.kv_layers)
    scheduler = Scheduler(
        [PageGroup(_group_name(window), window, size) for window, size in zip(windows, sizes, strict=True)],
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        num_decode_steps=config.num_decode_steps,
        num_swap_pages=[max(0, size - 1) for size in setup.swap_sizes],
        max_prefill_rows=profile.max_prefill_rows,
        block_tokens=profile.block_tokens,
        max_prefill_blocks=max_prefill_blocks(
            config.max_num_batched_tokens, profile.block_tokens, profile.max_prefill_rows
        ),
    )
    pages = setup.pages.result() if setup.pages is not None else _allocate(config, setup.kv_layers, sizes, setup.mesh)
    runner = Runner(
        model,
        config,
        pages,
        kv_layers=setup.kv_layers,
        swap_sizes=setup.swap_sizes,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        mesh=setup.mesh,
        platform=setup.platform,
        attention=setup.attention,
        grid=setup.grid,
        store=setup.store,
    )
    info = ModelInfo(
        vocab_size=vocab_size,
        max_model_len=config.max_model_len,
        max_logprobs=config.max_logprobs,
        max_num_seqs=config.max_num_seqs,
        kv_capacity_tokens=scheduler.capacity_tokens(),
        page_size=config.page_size,
    )
    if not config.enforce_eager:
        runner.warm_up(progress)
    return Engine(runner, scheduler, config, info)


def _allocate(config: EngineConfig, kv_layers: Sequence[KVLayer], sizes: Sequence[int], mesh: Mesh) -> list[jax.Array]:
    return allocate_pages(kv_layers, sizes, page_size=config.page_size, dtype=config.dtype, mesh=mesh)


def _group_name(window: int | None) -> str:
    return "full attention" if window is None else f"sliding window {window}"


def _swap_sizes(kv_layers: Sequence[KVLayer], sizes: Sequence[int], config: EngineConfig) -> tuple[int, ...]:
    """Host pages of each group, in the proportion of the device's."""
    windows = group_windows(kv_layers)
    cost = [page_bytes(kv_layers, window, config.page_size, config.dtype) for window in windows]
    total = sum(size * c for size, c in zip(sizes, cost, strict=True))
    return tuple(int(size * config.swap_bytes / total) if config.swap_bytes else 0 for size in sizes)
