"""What differs between platforms in how steps are cut and compiled."""

from dataclasses import dataclass

from jaxllm.sampling.state import FULL, GREEDY


@dataclass(frozen=True)
class PlatformProfile:
    """What differs between platforms in how a step is cut and compiled.

    Attributes:
        block_tokens: tokens of a prefill block.
        static_tokens: programs whose page tables hold at most this many tokens attend over the whole
            width; the wider ones loop up to the longest row (see `AttentionPlan.dynamic_length`).
        stack_weights: see `flatten_model`.
        max_prefill_rows: rows that may prefill in one step.
        warm_runs: executions of each program before serving (GPUs load kernels and build their
            command buffers on the first ones).
        compile_threads: programs compiled at once before serving.
        background_threads: programs compiled at once beside serving.
    """

    block_tokens: int
    static_tokens: int
    stack_weights: bool
    max_prefill_rows: int
    warm_runs: int
    compile_threads: int
    background_threads: int


PROFILES = {
    "cpu": PlatformProfile(16, 0, False, 8, 0, 2, 1),
    "gpu": PlatformProfile(64, 2048, True, 16, 2, 8, 4),
    "tpu": PlatformProfile(64, 0, True, 16, 1, 8, 4),
}


def sampler_modes_for(platform: str) -> tuple[int, ...]:
    """The sampler branches that are compiled apart where the branch is not chosen on the device."""
    return () if platform == "cpu" else (GREEDY, FULL)
