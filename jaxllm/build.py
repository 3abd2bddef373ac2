"""From a user's arguments to a running engine: the composition root of Python API and server.

The only module below the server that sees both the converters and the engine.
"""

import functools
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

import converters
from jaxllm.batch import KVLayer
from jaxllm.engine.assemble import assemble_engine, set_up_engine
from jaxllm.engine.engine import Engine
from jaxllm.engine_args import EngineArgs, ModelNeeds, resolve
from jaxllm.sharding import make_mesh
from jaxllm.text_side import TextSide, build_text_side, find_model

if TYPE_CHECKING:
    from jaxllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(what, done, in all)."""

_PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


@dataclass(frozen=True)
class BuiltEngine:
    """An engine with the text side of its model."""

    engine: Engine
    text: TextSide

    @property
    def tokenizer(self) -> "Tokenizer | None":
        return self.text.tokenizer

    @property
    def generation_config(self) -> dict[str, Any]:
        return self.text.generation_config

    @property
    def eos_token_ids(self) -> list[int]:
        return self.text.eos_token_ids


def build_engine(args: EngineArgs, progress: Progress | None = None) -> BuiltEngine:
    """Load the model, choose the configuration, compile, and hand over a ready engine.

    Raises:
        CheckpointError: the model cannot be loaded.
        ValueError: arguments that do not fit the model or the machine.
    """
    source = find_model(args)
    # The tokenizer takes seconds to import and load: beside the weights.
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(build_text_side, args, source)
        engine = build_core(args, source, progress)
        try:
            return BuiltEngine(engine, text.result())
        except BaseException:
            engine.shutdown()
            raise


def _stated_dtype(source: converters.ModelSource) -> str | None:
    """The checkpoint's; a GGUF file has one for each tensor."""
    if source.kind == "gguf":
        return None
    return source.hf_config.get("dtype") or source.hf_config.get("torch_dtype")


def build_core(
    args: EngineArgs, source: converters.ModelSource | None = None, progress: Progress | None = None
) -> Engine:
    """The engine alone, as the engine process runs it."""
    start = time.monotonic()
    source = source or find_model(args)
    # The allocator of a GPU takes its share of the memory when the device is first touched.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{args.gpu_memory_utilization:.3f}")
    devices = jax.devices()
    platform = _PLATFORMS.get(devices[0].platform, "cpu")
    mesh = make_mesh(args.tensor_parallel_size, devices)
    # The first look decides the context length, which some rope scalings depend on.
    facts = converters.describe_model(source.hf_config, tensor_parallel_size=args.tensor_parallel_size)
    resolved = resolve(
        args,
        platform=platform,
        needs=ModelNeeds(
            max_position_embeddings=facts.max_position_embeddings,
            checkpoint_dtype=_stated_dtype(source),
            kv_values_per_token=kv_values(facts.kv_layers),
            weight_count=facts.num_params,
        ),
        device_bytes=device_bytes(devices[0], args.gpu_memory_utilization),
        cache_dir=str(default_cache_dir()),
    )
    # No step can name more tokens than there are.
    config = replace(resolved.config, max_logprobs=min(resolved.config.max_logprobs, facts.vocab_size))
    count = f"{facts.num_params / 1e6:.0f} M" if facts.num_params >= 1e7 else f"{facts.num_params:,}"
    kind = " (GGUF, dequantised on loading)" if source.kind == "gguf" else ""
    logger.info("model: %s, %s, %s weights%s", source.name, facts.architecture, count, kind)
    logger.info("devices: %d x %s", mesh.size, devices[0].device_kind)
    for reason in resolved.reasons:
        logger.info("%s", reason)
    facts = converters.describe_model(
        source.hf_config, tensor_parallel_size=args.tensor_parallel_size, max_model_len=config.max_model_len
    )
    setup = set_up_engine(config, kv_layers=facts.kv_layers, mesh=mesh, platform=platform, model_facts=facts.config)
    loaded = converters.load_model(
        source,
        facts,
        dtype=config.dtype,
        mesh=mesh,
        load_format=args.load_format,
        seed=args.seed,
        progress=progress,
    )
    logger.info("weights in place after %.1f s", time.monotonic() - start)
    engine = assemble_engine(
        loaded.model, setup, vocab_size=facts.vocab_size, hidden_size=facts.hidden_size, progress=progress
    )
    logger.info(
        "ready after %.1f s: %d programs compiled, %d loaded",
        time.monotonic() - start,
        engine.runner.programs.num_compiles,
        engine.runner.programs.num_loaded,
    )
    return engine


def engine_builder(args: EngineArgs, progress: Progress | None = None) -> Callable[[], Engine]:
    """A picklable function that builds the engine in another process."""
    return functools.partial(build_core, args, None, progress)


def kv_values(layers: tuple[KVLayer, ...]) -> int:
    """Values that one token adds to the KV cache."""
    return sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers)


def device_bytes(
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
    utilization: float,
) -> int | None:
    """Memory of a device, as far as its runtime tells; None where it does not.

    On a GPU the runtime reports the allocator's share, which is `utilization` of the whole.
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"] / (utilization if _PLATFORMS.get(device.platform) == "gpu" else 1))


def default_cache_dir() -> Path:
    """Where compiled programs are kept unless told otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxllm" / "compiled"
