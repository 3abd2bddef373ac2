"""Checkpoints into models: where they come from, what is in them, and how they are placed on devices."""

from typing import TYPE_CHECKING, Any

from converters.source import ModelSource, resolve_model

if TYPE_CHECKING:
    from converters.loading import LoadedModel as LoadedModel
    from converters.loading import ModelFacts as ModelFacts
    from converters.loading import describe_model as describe_model
    from converters.loading import load_dummy as load_dummy
    from converters.loading import load_model as load_model
    from converters.loading import max_positions as max_positions

__all__ = [
    "LoadedModel",
    "ModelFacts",
    "ModelSource",
    "describe_model",
    "load_dummy",
    "load_model",
    "max_positions",
    "resolve_model",
]


def __getattr__(name: str) -> Any:
    # Lazy (PEP 562): a front end finds models without importing jax.
    if name in __all__:
        from converters import loading

        return getattr(loading, name)
    raise AttributeError(f"module 'converters' has no attribute {name!r}; it has {__all__}")
