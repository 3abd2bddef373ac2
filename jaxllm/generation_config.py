"""What a model's generation_config.json says: sampling defaults and the ids that end a text."""

from collections.abc import Mapping
from typing import Any

_DEFAULT_KEYS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
GENERATION_KEYS = (*_DEFAULT_KEYS, "max_new_tokens", "eos_token_id")
"""What is read of a generation_config.json."""


def token_ids_of(value: Any) -> list[int]:
    """An `eos_token_id` of a model's configuration: an id, a list of them, or None.

    Raises:
        ValueError: it is something else.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, not {value!r}")
    return ids


def default_sampling_params(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling defaults in a generation_config.json, under SamplingParams' names."""
    defaults = {k: generation_config[k] for k in _DEFAULT_KEYS if generation_config.get(k) is not None}
    if (max_tokens := generation_config.get("max_new_tokens")) is not None:
        defaults["max_tokens"] = max_tokens
    return defaults
