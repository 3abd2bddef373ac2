"""jaxllm: LLM inference and serving, compiled by XLA, on NVIDIA GPUs, TPUs and CPUs.

`LLM` and `SamplingParams` are the Python API; they are imported on first use, so that
`import jaxllm` stays light.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "jaxllm.llm",
    "SamplingParams": "jaxllm.sampling_params",
    "RequestOutput": "jaxllm.outputs",
    "CompletionOutput": "jaxllm.outputs",
    "EngineConfig": "jaxllm.config",
}
__all__ = ["LLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from jaxllm.config import EngineConfig as EngineConfig
    from jaxllm.llm import LLM as LLM
    from jaxllm.outputs import CompletionOutput as CompletionOutput
    from jaxllm.outputs import RequestOutput as RequestOutput
    from jaxllm.sampling_params import SamplingParams as SamplingParams


def __getattr__(name: str) -> Any:
    # The one place of lazy imports: PEP 562, so that host-only users never pay for jax.
    if name in _EXPORTS:
        import importlib

        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'jaxllm' has no attribute {name!r}; it has {sorted(_EXPORTS)}")
