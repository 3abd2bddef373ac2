"""Checkpoints into models: where they come from, what is in them, and how they are placed on devices."""

from converters.loading import (
    LoadedModel,
    ModelFacts,
    describe_model,
    load_dummy,
    load_model,
    max_positions,
)
from converters.source import ModelSource, resolve_model

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
