"""The models, by the architecture name that a checkpoint's configuration states."""

import importlib

from flax import nnx

MODELS: dict[str, str] = {
    "Gemma2ForCausalLM": "jaxllm.models.gemma:Gemma",
    "Gemma3ForCausalLM": "jaxllm.models.gemma:Gemma",
    "Gemma3TextModel": "jaxllm.models.gemma:Gemma",
    "GPT2LMHeadModel": "jaxllm.models.gpt2:GPT2",
    "LlamaForCausalLM": "jaxllm.models.llama:Llama",
    "LLaMAForCausalLM": "jaxllm.models.llama:Llama",
    "MistralForCausalLM": "jaxllm.models.llama:Llama",
    "OPTForCausalLM": "jaxllm.models.opt:OPT",
    "Phi3ForCausalLM": "jaxllm.models.llama:Llama",
    "Qwen2ForCausalLM": "jaxllm.models.llama:Llama",
    "Qwen3ForCausalLM": "jaxllm.models.llama:Llama",
}


def model_class(architecture: str) -> type[nnx.Module]:
    """The class that serves an architecture, imported on first use.

    Raises:
        ValueError: an unknown architecture; the message lists the known ones.
    """
    if architecture not in MODELS:
        raise ValueError(f"unknown model architecture {architecture!r}; known: {', '.join(sorted(MODELS))}")
    module, name = MODELS[architecture].split(":")
    return getattr(importlib.import_module(module), name)
