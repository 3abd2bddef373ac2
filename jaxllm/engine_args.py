"""EngineArgs: what a user may say about the engine, under vLLM's names; and how it becomes a configuration.

`resolve` turns "auto" and None into numbers, with the reason for each choice, for the start-up log.
"""

import json
import re
from dataclasses import dataclass, fields
from typing import Any, Self, get_args, get_origin, get_type_hints

import psutil

from jaxllm.config import DTYPES, EngineConfig

GIB = 1 << 30

DTYPE_ALIASES = {"half": "float16", "float": "float32"}
LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")
TOKENIZER_MODES = ("auto", "slow", "hf")

_UNITS = {"k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30}


def parse_size(text: str) -> int:
    """An integer as people write it: 4096, "4k" (4000), "4K" (4096), "25.6k".

    Raises:
        ValueError: anything else; decimals go with the small letters only.
    """
    match = re.fullmatch(r"(\d+)(\.\d+)?([kKmMgG]?)", text.strip())
    if match is None or (match[2] and not (match[3] and match[3].islower())):
        raise ValueError(f"{text!r} is no size; write 4096, 4k (4000), 4K (4096) or 25.6k")
    return round(float(match[1] + (match[2] or "")) * _UNITS.get(match[3], 1))


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """The engine's arguments. None and "auto" leave the choice to the engine.

    Attributes:
        model: a folder, a GGUF file, or a name on the hub.
        tokenizer: where the tokenizer is, if not with the model.
        tokenizer_mode: "auto", "slow" or "hf".
        skip_tokenizer_init: take and give token ids only.
        trust_remote_code: run code that comes with a model's tokenizer.
        revision, tokenizer_revision: branch, tag or commit on the hub.
        download_dir: where downloads are kept, if not in the hub library's cache.
        hf_token: for gated models.
        load_format: "auto", "safetensors", "pt", "gguf" or "dummy" (random weights).
        dtype: "auto", "bfloat16", "float16" ("half") or "float32" ("float").
        max_model_len: longest prompt and output together; "auto" or -1 takes what fits in memory.
        block_size: tokens of a KV page.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens computed in one step.
        enable_prefix_caching: reuse the KV of equal prompt prefixes.
        gpu_memory_utilization: share of the device memory that weights and KV may take.
        kv_cache_memory_bytes: memory of the KV pool, instead of what is left over.
        num_gpu_blocks_override: pages of the KV pool, instead of what its memory holds.
        swap_space: GiB of host memory for preempted sequences; 0 recomputes them.
        tensor_parallel_size: devices that share each layer.
        seed: of requests without one, and of dummy weights.
        enforce_eager: compile on first use instead of before serving.
        max_logprobs: most log-probabilities a request may ask for.
        generation_config: "auto" (the model's defaults), "vllm" (neutral ones), or a folder.
        override_generation_config: single values on top.
        disable_log_stats: no statistics in outputs and log.
        attention_backend: implementation of attention, by name.
        chat_template: a file or the template itself, instead of the tokenizer's own.
        num_decode_steps: decode steps per launch while the queue is steady.
        async_scheduling: plan the next step before the last one's tokens are read.
        compile_cache_dir: where compiled programs are kept; "" keeps none.
    """

    model: str
    tokenizer: str | None = None
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    hf_token: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    max_model_len: int | str | None = None
    block_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    swap_space: float = 0.0
    tensor_parallel_size: int = 1
    seed: int = 0
    enforce_eager: bool = False
    max_logprobs: int = 20
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    disable_log_stats: bool = False
    attention_backend: str | None = None
    chat_template: str | None = None
    num_decode_steps: int | None = None
    async_scheduling: bool = True
    compile_cache_dir: str | None = None

    def __post_init__(self):
        self._check_types()
        for name, known in (
            ("load_format", LOAD_FORMATS),
            ("tokenizer_mode", TOKENIZER_MODES),
            ("dtype", ("auto", *DTYPES, *DTYPE_ALIASES)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in 0 .. 2**63 - 1, got {self.seed}")
        if self.block_size is not None and (self.block_size < 1 or self.block_size & (self.block_size - 1)):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        if isinstance(self.max_model_len, int) and self.max_model_len < 1 and self.max_model_len != -1:
            raise ValueError(f"max_model_len must be at least 1, 'auto' or -1, got {self.max_model_len}")
        if self.swap_space < 0:
            raise ValueError(f"swap_space must not be negative, got {self.swap_space}")
        if self.max_logprobs < 0:
            raise ValueError(
                f"max_logprobs must not be negative, got {self.max_logprobs}: the most log-probabilities of a token "
                "are compiled into the step, the whole vocabulary is not supported"
            )
        for name in (
            *("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override"),
            *("num_decode_steps", "kv_cache_memory_bytes"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def _check_types(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value, kinds = getattr(self, name), get_args(hint) or (hint,)
            plain = tuple(get_origin(kind) or kind for kind in kinds)
            fits = isinstance(value, (*plain, int) if float in plain else plain)
            if not fits or (isinstance(value, bool) and bool not in plain):
                names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in plain)
                raise ValueError(f"{name} must be {names}, got {value!r}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from a dict; an unknown key is an error that lists the known ones."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown engine arguments {unknown}; known: {', '.join(sorted(known))}")
        return cls(**values)


@dataclass(frozen=True)
class ModelNeeds:
    """What resolving needs to know of a model.

    Attributes:
        max_position_embeddings: longest context of the checkpoint.
        checkpoint_dtype: as its configuration states it, or None.
        kv_bytes_per_token: KV of one token in one byte per value, over all layers.
        weight_count: number of weights.
    """

    max_position_embeddings: int
    checkpoint_dtype: str | None
    kv_values_per_token: int
    weight_count: int


@dataclass(frozen=True)
class Resolved:
    """The configuration, and why each choice was made: "name: value (reason)"."""

    config: EngineConfig
    reasons: tuple[str, ...]


_DEFAULTS = {
    # platform: (page size, rows, tokens of a step)
    "cpu": (16, 64, 512),
    "gpu": (64, 256, 8192),
    "tpu": (64, 128, 2048),
}
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Activations, logits, the compiler's temporaries and the runtime's own share of a device.
_RESERVE_BYTES = {"cpu": 0, "gpu": 3 * GIB, "tpu": 1 * GIB}
_CPU_KV_BYTES = 4 * GIB


def resolve_dtype(args: EngineArgs, platform: str, checkpoint_dtype: str | None) -> tuple[str, str]:
    """The dtype of weights and KV, and the reason."""
    if args.dtype != "auto":
        return DTYPE_ALIASES.get(args.dtype, args.dtype), "asked for"
    if platform == "cpu":
        return "float32", "fastest on a CPU" + (
            f"; the checkpoint states {checkpoint_dtype}" if checkpoint_dtype else ""
        )
    if checkpoint_dtype in ("float16", "half"):
        return "float16", "the checkpoint's"
    if checkpoint_dtype in ("float32", "float", None):
        return "bfloat16", f"the checkpoint states {checkpoint_dtype}" if checkpoint_dtype else "the default"
    return "bfloat16", "the checkpoint's"


def resolve(
    args: EngineArgs, *, platform: str, needs: ModelNeeds, device_bytes: int | None, cache_dir: str | None
) -> Resolved:
    """Choose everything that was left open.

    Args:
        args: the user's.
        platform: "cpu", "gpu" or "tpu".
        needs: of the model.
        device_bytes: memory of one device; None where it is unknown.
        cache_dir: default place of the compile cache.

    Raises:
        ValueError: a context longer than the checkpoint's, or one that the memory does not hold; the
            message says what would fit.
    """
    reasons = []

    def choose(name: str, value: Any, reason: str) -> Any:
        reasons.append(f"{name}: {value} ({reason})")
        return value

    page, rows, budget = _DEFAULTS[platform]
    dtype = choose("dtype", *resolve_dtype(args, platform, needs.checkpoint_dtype))
    kv_token_bytes = needs.kv_values_per_token * _ITEM_BYTES[dtype]
    page_size = args.block_size or page
    max_num_seqs = args.max_num_seqs or rows
    kv_bytes, kv_reason = _kv_bytes(args, platform, needs, dtype, device_bytes, kv_token_bytes)
    if args.num_gpu_blocks_override is not None:
        kv_bytes = args.num_gpu_blocks_override * page_size * kv_token_bytes
        kv_reason = "asked for as pages"
    max_model_len = choose("max_model_len", *_max_model_len(args, needs, kv_bytes, kv_token_bytes, page_size))
    if kv_reason.startswith("CPU") and args.kv_cache_memory_bytes is None:
        # More than all rows can fill would only be touched by the prefix cache.
        kv_bytes = min(kv_bytes, max_num_seqs * (max_model_len + page_size) * kv_token_bytes)
    choose("KV memory", _size_text(kv_bytes), kv_reason)
    max_num_batched_tokens = args.max_num_batched_tokens or max(budget, max_num_seqs)
    # Several steps in one launch pay where the launch itself is dear.
    steps = args.num_decode_steps or (4 if platform == "tpu" else 1)
    config = EngineConfig(
        max_model_len=max_model_len,
        page_size=page_size,
        max_num_seqs=choose(
            "max_num_seqs", max_num_seqs, "asked for" if args.max_num_seqs else f"default on {platform}"
        ),
        max_num_batched_tokens=choose(
            "max_num_batched_tokens",
            max_num_batched_tokens,
            "asked for" if args.max_num_batched_tokens else f"default on {platform}",
        ),
        kv_cache_bytes=max(1, kv_bytes),
        num_pages=args.num_gpu_blocks_override,
        swap_bytes=int(args.swap_space * GIB),
        enable_prefix_caching=args.enable_prefix_caching,
        tensor_parallel_size=args.tensor_parallel_size,
        dtype=dtype,
        max_logprobs=args.max_logprobs,
        num_decode_steps=steps,
        enforce_eager=args.enforce_eager,
        async_scheduling=args.async_scheduling,
        seed=args.seed,
        cache_dir=(cache_dir if args.compile_cache_dir is None else args.compile_cache_dir) or None,
        attention_backend=args.attention_backend,
    )
    return Resolved(config, tuple(reasons))


def _kv_bytes(
    args: EngineArgs,
    platform: str,
    needs: ModelNeeds,
    dtype: str,
    device_bytes: int | None,
    kv_token_bytes: int,
) -> tuple[int, str]:
    if args.kv_cache_memory_bytes is not None:
        return args.kv_cache_memory_bytes, "asked for"
    if platform == "cpu" or device_bytes is None:
        free = psutil.virtual_memory().available
        return min(_CPU_KV_BYTES, free // 4), "CPU: at most 4 GiB or a quarter of the free memory"
    shards = args.tensor_parallel_size
    weights = needs.weight_count * _ITEM_BYTES[dtype] // shards
    usable = int(device_bytes * args.gpu_memory_utilization) - weights - _RESERVE_BYTES[platform]
    reason = (
        f"{args.gpu_memory_utilization:g} of {device_bytes / GIB:.1f} GiB, less {weights / GIB:.1f} GiB of weights "
        f"and {_RESERVE_BYTES[platform] / GIB:.0f} GiB to work in"
    )
    if usable < kv_token_bytes:
        raise ValueError(
            f"no memory is left for the KV cache: {reason}. Raise gpu_memory_utilization, use more devices "
            "(tensor_parallel_size) or a smaller model"
        )
    return usable * shards, reason


def _size_text(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 4 else f"{size / (1 << 20):.1f} MiB"


def _max_model_len(
    args: EngineArgs, needs: ModelNeeds, kv_bytes: int, kv_token_bytes: int, page_size: int
) -> tuple[int, str]:
    derived = needs.max_position_embeddings
    fitting = max(0, kv_bytes // kv_token_bytes - page_size) // page_size * page_size
    asked = args.max_model_len
    if isinstance(asked, str):
        asked = -1 if asked == "auto" else parse_size(asked)
    if asked == -1:
        if fitting < page_size:
            raise ValueError(f"the KV cache of {kv_bytes:,} bytes does not hold one page of {page_size} tokens")
        return min(derived, fitting), "what the model and the KV memory allow"
    if asked is None:
        asked, reason = derived, "the model's"
    else:
        reason = "asked for"
    if asked < 1:
        raise ValueError(f"max_model_len must be at least 1, 'auto' or -1, got {args.max_model_len}")
    if asked > derived:
        raise ValueError(
            f"max_model_len {asked} is more than the {derived} positions that the model was made for; at most "
            f"{derived} would work"
        )
    if fitting < asked:
        would_fit = f"max_model_len {fitting} would fit ('auto' takes it)"
        raise ValueError(
            f"a sequence of max_model_len {asked} tokens needs {_size_text(asked * kv_token_bytes)} of KV cache; "
            f"{_size_text(kv_bytes)} are available. "
            + (would_fit if fitting >= page_size else f"That is not even a page of {page_size} tokens and a spare one")
        )
    return asked, reason


def parse_json_object(text: str) -> dict[str, Any]:
    """A JSON object given on a command line.

    Raises:
        ValueError: it is none.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is JSON, but no object")
    return value
