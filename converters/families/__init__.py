"""The families: how a checkpoint's configuration and tensors become one of our models."""

from converters.families import gemma, gpt2, llama, opt
from converters.families.family import Family
from jaxllm.errors import CheckpointError

FAMILIES: dict[str, Family] = {
    "Gemma2ForCausalLM": gemma.GEMMA2,
    "Gemma3ForCausalLM": gemma.GEMMA3,
    "Gemma3TextModel": gemma.GEMMA3,
    "GPT2LMHeadModel": gpt2.GPT2,
    "LlamaForCausalLM": llama.LLAMA,
    "LLaMAForCausalLM": llama.LLAMA,
    "MistralForCausalLM": llama.MISTRAL,
    "OPTForCausalLM": opt.OPT,
    "Phi3ForCausalLM": llama.PHI3,
    "Qwen2ForCausalLM": llama.QWEN2,
    "Qwen3ForCausalLM": llama.QWEN3,
}


def family_of(hf_config: dict) -> tuple[str, Family]:
    """The architecture that a configuration names, and its family.

    Raises:
        CheckpointError: no architecture, or none that is known; the message lists the known.
    """
    architectures = hf_config.get("architectures") or []
    for architecture in architectures:
        if architecture in FAMILIES:
            return architecture, FAMILIES[architecture]
    named = ", ".join(architectures) if architectures else "none (config.json has no 'architectures')"
    raise CheckpointError(f"unknown model architecture: {named}; known: {', '.join(sorted(FAMILIES))}")
