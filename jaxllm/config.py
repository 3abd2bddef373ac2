"""EngineConfig: every knob of the engine, once, validated once, never mutated."""

from dataclasses import dataclass, fields
from typing import Any, Self

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine's knobs, resolved: no "auto", no None where a number is needed.

    Attributes:
        max_model_len: longest prompt + output of one sequence, in tokens.
        page_size: tokens of one KV page (`--block-size`).
        max_num_seqs: rows that may run at once.
        max_num_batched_tokens: token budget of one step; bounds the prefill chunk.
        kv_cache_bytes: memory of the KV pool over all devices' shards, in bytes.
        num_pages: pages of the full-attention group (`--num-gpu-blocks-override`); None derives
            it from kv_cache_bytes.
        swap_bytes: host memory that preempted sequences are swapped to; 0 recomputes them.
        enable_prefix_caching: reuse pages of equal prompt prefixes.
        tensor_parallel_size: size of the mesh axis "tensor".
        dtype: of weights and activations.
        max_logprobs: the most `logprobs` a request may ask for; 0..20 without recompilation.
        num_decode_steps: decode steps in one launch when the queue is steady; 1 switches it off.
        enforce_eager: no warm-up, compile on first use, no command buffers.
        async_scheduling: dispatch step n+1 before the tokens of n are read.
        seed: seeds the requests that bring no seed of their own.
        cache_dir: where compiled programs are kept between starts; None keeps none.
        attention_backend: name of the attention implementation; None picks.
    """

    max_model_len: int
    page_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    kv_cache_bytes: int = 1 << 30
    num_pages: int | None = None
    swap_bytes: int = 0
    enable_prefix_caching: bool = True
    tensor_parallel_size: int = 1
    dtype: str = "bfloat16"
    max_logprobs: int = 20
    num_decode_steps: int = 1
    enforce_eager: bool = False
    async_scheduling: bool = True
    seed: int = 0
    cache_dir: str | None = None
    attention_backend: str | None = None

    def __post_init__(self):
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_bytes",
            "tensor_parallel_size",
            "num_decode_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence takes one token of every step"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.swap_bytes < 0:
            raise ValueError(f"swap_bytes must not be negative, got {self.swap_bytes}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from a dict; an unknown key is an error that lists the known ones."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown config keys {unknown}; known: {sorted(known)}")
        return cls(**values)
