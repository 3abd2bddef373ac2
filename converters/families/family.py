"""What a family states, and the pieces that several share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from converters.checkpoint import Checkpoint
from converters.rules import Rule
from jaxllm.errors import CheckpointError
from jaxllm.layers import Rope, make_rope

HFConfig = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    Attributes:
        config: (hf_config, max_model_len) -> the model's configuration.
        rules: which tensors fill which parameters; rules of parameters that a checkpoint's model does
            not have (a bias, an untied head) are passed over.
        ignored: patterns of tensors that carry nothing (buffers).
        prepare: gives tensors the names and parts that the rules know.
    """

    config: Callable[[HFConfig, int | None], Any]
    rules: Sequence[Rule]
    ignored: Sequence[str] = ()
    prepare: Callable[[Checkpoint, HFConfig], Checkpoint] = field(default=lambda checkpoint, _: checkpoint)


def required(hf_config: HFConfig, name: str) -> int:
    """A size or number that the configuration must have."""
    value = hf_config.get(name)
    if value is None:
        raise CheckpointError(f"config.json has no {name!r}; it has {', '.join(sorted(hf_config))}")
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {name} must be an integer of at least 1, not {value!r}")
    return value


def head_dim_of(hf_config: HFConfig) -> int:
    """Size of a head: stated, or the width over the heads."""
    stated = hf_config.get("head_dim")
    return stated or required(hf_config, "hidden_size") // required(hf_config, "num_attention_heads")


def rope_scaling_of(hf_config: HFConfig, kind: str | None = None) -> tuple[float, dict | None]:
    """Base and scaling, in either spelling: `rope_parameters` (newer) or `rope_theta` and `rope_scaling`.

    `kind` names a layer type where the configuration keeps one set of parameters for each.
    """
    parameters = hf_config.get("rope_parameters")
    if parameters and kind is not None and kind in parameters:
        parameters = parameters[kind]
    if parameters and not all(isinstance(value, dict) for value in parameters.values()):
        theta = parameters.get("rope_theta") or hf_config.get("rope_theta") or 10000.0
        return float(theta), parameters
    return float(hf_config.get("rope_theta") or 10000.0), hf_config.get("rope_scaling")


def rope_of(hf_config: HFConfig, dim: int, max_model_len: int | None) -> Rope:
    """The rotary embedding of a model with one kind of it."""
    theta, scaling = rope_scaling_of(hf_config)
    original = hf_config.get("original_max_position_embeddings")
    if scaling and original and not scaling.get("original_max_position_embeddings"):
        scaling = {**scaling, "original_max_position_embeddings": original}
    return make_rope(
        dim,
        theta,
        scaling,
        max_position_embeddings=required(hf_config, "max_position_embeddings"),
        max_model_len=max_model_len,
    )


def windows_of(hf_config: HFConfig, num_layers: int, *, default: Sequence[bool]) -> tuple[int | None, ...]:
    """Each layer's window: `layer_types` decides which layers slide, else `default`."""
    window = hf_config.get("sliding_window")
    if window is None:
        return (None,) * num_layers
    types = hf_config.get("layer_types")
    slides = [kind == "sliding_attention" for kind in types] if types else list(default)
    if len(slides) != num_layers:
        raise CheckpointError(f"layer_types has {len(slides)} entries for {num_layers} layers")
    # A window that no sequence outgrows is full attention, and shares its pages.
    is_full = window >= hf_config.get("max_position_embeddings", window + 1)
    return tuple(window if slide and not is_full else None for slide in slides)
