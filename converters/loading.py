"""From a model's files to a model on its devices: shard by shard, nothing copied whole."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from converters.checkpoint import Checkpoint, SafetensorsCheckpoint, TorchCheckpoint
from converters.families import family_of
from converters.gguf import GGUFCheckpoint
from converters.rules import BoundRule, bind_rules, check_rules
from converters.source import ModelSource
from jaxllm.batch import KVLayer
from jaxllm.errors import CheckpointError
from jaxllm.layers.embedding import padded_vocab
from jaxllm.layers.param import logical_axes
from jaxllm.models import model_class
from jaxllm.sharding import sharding_of

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(what, bytes done, bytes in all)."""


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before its weights are read.

    Attributes:
        architecture: as the checkpoint names it.
        config: of the model.
        abstract: the model without arrays.
        kv_layers: what each attention layer stores.
        num_params: number of weights, padding included.
        vocab_size: size of the logits.
        hidden_size: width of what `model.logits` takes.
        max_position_embeddings: longest context of the checkpoint, rope scaling included.
    """

    architecture: str
    config: Any
    abstract: nnx.Module
    kv_layers: tuple[KVLayer, ...]
    num_params: int
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int


@dataclass(frozen=True)
class LoadedModel:
    """A model with its arrays in place."""

    model: nnx.Module
    facts: ModelFacts


def describe_model(hf_config: dict, *, tensor_parallel_size: int = 1, max_model_len: int | None = None) -> ModelFacts:
    """Build the model abstractly from its configuration.

    Raises:
        CheckpointError: an unknown architecture, a quantised checkpoint, a value that is not supported.
    """
    quantization = hf_config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise CheckpointError(
            f"the checkpoint is quantised ({method}); safetensors checkpoints must be unquantised for now. "
            "The unquantised original or a GGUF file of the model would work"
        )
    architecture, family = family_of(hf_config)
    try:
        config = family.config(hf_config, max_model_len)
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"config.json of {architecture}: {error}") from None
    config = shard_heads(config, tensor_parallel_size)
    build = partial(model_class(architecture), config)
    try:
        abstract: Any = nnx.eval_shape(build)
    except ValueError as error:
        raise CheckpointError(f"{architecture} cannot be built from this config.json: {error}") from None
    params = [leaf for leaf in jax.tree.leaves(nnx.state(abstract, nnx.Param))]
    return ModelFacts(
        architecture=architecture,
        config=config,
        abstract=abstract,
        kv_layers=tuple(abstract.kv_layers),
        num_params=sum(prod(leaf.shape) for leaf in params),
        vocab_size=config.vocab_size,
        hidden_size=getattr(config, "word_dim", config.embed_dim),
        max_position_embeddings=max_positions(hf_config),
    )


def shard_heads(config: Any, tensor_parallel_size: int) -> Any:
    """The configuration for this many shards: KV heads are repeated when there are fewer than shards.

    Raises:
        CheckpointError: heads or widths that the shards do not divide.
    """
    if tensor_parallel_size == 1:
        return config
    for name, value in (
        ("attention heads", config.num_heads),
        ("MLP width", config.mlp_dim),
        ("vocabulary (padded)", padded_vocab(config.vocab_size)),
    ):
        if value % tensor_parallel_size:
            raise CheckpointError(f"tensor_parallel_size {tensor_parallel_size} does not divide the {name} ({value})")
    heads = config.num_kv_heads
    if heads % tensor_parallel_size == 0:
        return config
    if tensor_parallel_size % heads == 0 and "num_kv_heads" in config.__dataclass_fields__:
        return replace(config, num_kv_heads=tensor_parallel_size)
    raise CheckpointError(
        f"tensor_parallel_size {tensor_parallel_size} neither divides the KV heads ({heads}) nor is a multiple of them"
    )


def max_positions(hf_config: dict) -> int:
    """The longest context: the stated positions, stretched by the rope scalings that stretch."""
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"):
        if hf_config.get(name):
            longest = int(hf_config[name])
            break
    else:
        raise CheckpointError("config.json states no max_position_embeddings; give max_model_len's bound there")
    if str(hf_config.get("model_type")).startswith("gemma3"):
        return longest  # stated as stretched
    scaling = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("linear", "dynamic", "yarn") and scaling.get("factor"):
        if kind == "yarn" and scaling.get("original_max_position_embeddings"):
            longest = int(scaling["original_max_position_embeddings"])
        return int(longest * scaling["factor"])
    return longest


def open_checkpoint(source: ModelSource, load_format: str) -> Checkpoint:
    """Open the model's files; headers are checked, data stay where they are."""
    if source.kind == "gguf":
        return GGUFCheckpoint(source.path)
    folder = source.path
    if load_format == "pt":
        return TorchCheckpoint(folder)
    if load_format == "safetensors" or any(folder.glob("*.safetensors*")):
        return SafetensorsCheckpoint(folder)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        return TorchCheckpoint(folder)
    held = ", ".join(sorted(path.name for path in folder.iterdir())[:12])
    raise CheckpointError(f"{folder} holds no weights (*.safetensors, *.bin, *.pt); it holds {held}")


def load_model(
    source: ModelSource,
    facts: ModelFacts,
    *,
    dtype: str,
    mesh: Mesh,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> LoadedModel:
    """Fill the model from its files, each shard read and placed by itself.

    Args:
        source: where the files are.
        facts: of `describe_model`, for this mesh.
        dtype: of the weights.
        mesh: where they go.
        load_format: "auto", "safetensors", "pt", "gguf" or "dummy" (random weights, no files read).
        seed: of the random weights.
        progress: told after each parameter.

    Raises:
        CheckpointError: files that are missing, cut short or do not fit the model. Nothing has been
            placed on a device by then.
    """
    if load_format == "dummy":
        return load_dummy(facts, dtype=dtype, mesh=mesh, seed=seed)
    _, family = family_of(source.hf_config)
    checkpoint = family.prepare(open_checkpoint(source, load_format), source.hf_config)
    ignored = [*family.ignored]
    if getattr(facts.abstract, "head", None) is None:
        ignored.append(r"lm_head\.weight")  # a tied checkpoint may have saved its table twice
    graph, state = nnx.split(facts.abstract)
    variables = dict(nnx.to_flat_state(state))
    shapes = {_name(path): variable.shape for path, variable in variables.items()}
    original = family.config(source.hf_config, None)
    stored = {"K": original.num_kv_heads, "V": original.vocab_size}
    rules = check_rules(bind_rules(family.rules, len(facts.kv_layers)), shapes, checkpoint, ignored, stored)

    target = jnp.dtype(dtype)
    total = sum(prod(shape) for shape in shapes.values()) * target.itemsize
    done = 0
    for path, variable in variables.items():
        name = _name(path)
        array = _place(checkpoint, rules[name], variable, target, mesh)
        variables[path] = variable.replace(array)
        done += array.nbytes
        if progress is not None:
            progress("loading weights", done, total)
    model = nnx.merge(graph, nnx.from_flat_state(list(variables.items())))
    return LoadedModel(model, facts)


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path)


def _place(
    checkpoint: Checkpoint, rules: list[BoundRule], variable: nnx.Variable, dtype: np.dtype, mesh: Mesh
) -> jax.Array:
    """One parameter, made of the slices that each device needs; equal slices are read once."""
    shape = variable.shape
    kept: dict[tuple, np.ndarray] = {}

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "every device of the mesh holds a part"
        ranges = tuple(range(*part.indices(size)) for part, size in zip(index, shape, strict=True))
        if ranges not in kept:
            out = np.empty([len(part) for part in ranges], dtype)
            for rule in rules:
                rule.fill(checkpoint, shape, index, out)
            kept[ranges] = out
        return kept[ranges]

    return jax.make_array_from_callback(shape, sharding_of(logical_axes(variable), mesh), read)


def load_dummy(facts: ModelFacts, *, dtype: str, mesh: Mesh, seed: int = 0, scale: float = 0.02) -> LoadedModel:
    """Random weights, made on the devices: vectors around 1, matrices around 0 with this deviation."""
    graph, state = nnx.split(facts.abstract)
    variables = dict(nnx.to_flat_state(state))
    target = jnp.dtype(dtype)
    programs: dict[tuple, Any] = {}
    for number, (path, variable) in enumerate(sorted(variables.items(), key=lambda item: _name(item[0]))):
        sharding = sharding_of(logical_axes(variable), mesh)
        key = (variable.shape, sharding)
        if key not in programs:
            programs[key] = jax.jit(partial(_random, variable.shape, target, scale), out_shardings=sharding)
        variables[path] = variable.replace(programs[key](np.uint32((seed * 100_003 + number) % 2**32)))
    model = nnx.merge(graph, nnx.from_flat_state(list(variables.items())))
    return LoadedModel(model, facts)


def _random(shape: tuple[int, ...], dtype: np.dtype, scale: float, seed: jax.Array) -> jax.Array:
    # A counter-based draw is the same however the array is cut into shards.
    key = jax.random.wrap_key_data(jnp.stack([seed, jnp.zeros_like(seed)]), impl="threefry2x32")
    values = jax.random.normal(key, shape, jnp.float32) * scale
    return (values + 1.0 if len(shape) == 1 else values).astype(dtype)
