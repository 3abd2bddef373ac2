"""Flags of the engine: every field of EngineArgs, for `jaxllm serve` and `jaxllm bench`."""

import argparse
from dataclasses import MISSING, fields
from typing import Any

from jaxllm.config import DTYPES
from jaxllm.engine_args import DTYPE_ALIASES, LOAD_FORMATS, TOKENIZER_MODES, EngineArgs, parse_size
from server.cli_server import json_object

_DEFAULTS = {field.name: field.default for field in fields(EngineArgs)}


def size(text: str) -> int:
    """argparse's type for whole numbers with a unit."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def length(text: str) -> int | str:
    """argparse's type for a context length: a size, or what fits."""
    return text if text == "auto" else -1 if text == "-1" else size(text)


_METAVARS = {str: "NAME", int: "N", float: "X", size: "N", length: "N", json_object: "JSON"}

# Title -> field of EngineArgs -> type (a tuple: choices), help, short flags.
_GROUPS: dict[str, dict[str, tuple[Any, ...]]] = {
    "model": {
        "model": (str, "the same as MODEL"),
        "tokenizer": (str, "where the tokenizer is, if not with the model"),
        "tokenizer_mode": (TOKENIZER_MODES, "which implementation of tokenizers"),
        "skip_tokenizer_init": (bool, "take and give token ids only"),
        "trust_remote_code": (bool, "run code that comes with the tokenizer"),
        "revision": (str, "branch, tag or commit on the hub"),
        "tokenizer_revision": (str, "the same for the tokenizer"),
        "download_dir": (str, "where downloads are kept, if not in the hub library's cache"),
        "hf_token": (str, "for gated models"),
        "load_format": (LOAD_FORMATS, "format of the weights; dummy makes random ones"),
        "dtype": (("auto", *DTYPES, *DTYPE_ALIASES), "of weights and KV cache"),
        "max_model_len": (length, "longest prompt and output together; auto or -1: what fits (the model's)"),
        "generation_config": (str, "sampling defaults: auto (the model's), vllm (neutral), or a folder"),
        "override_generation_config": (json_object, "single sampling defaults on top"),
        "chat_template": (str, "a file or the template itself, instead of the tokenizer's"),
    },
    "memory": {
        "gpu_memory_utilization": (float, "share of the device memory for weights and KV cache"),
        "kv_cache_memory_bytes": (size, "size of the KV cache, instead of what is left"),
        "num_gpu_blocks_override": (size, "pages of the KV cache, instead of what its memory holds"),
        "block_size": (int, "tokens of a page of the KV cache (by platform)"),
        "swap_space": (float, "GiB of host memory for preempted sequences; 0 recomputes them"),
        "enable_prefix_caching": (bool, "reuse the KV of equal prompt prefixes"),
    },
    "scheduling": {
        "max_num_seqs": (size, "sequences that run at once (by platform)"),
        "max_num_batched_tokens": (size, "tokens of one step (by platform)"),
        "num_decode_steps": (int, "decode steps per launch while the queue is steady (by platform)"),
        "async_scheduling": (bool, "plan a step before the last one's tokens are read"),
    },
    "devices and compilation": {
        "tensor_parallel_size": (int, "devices that share each layer", "-tp"),
        "attention_backend": (str, "implementation of attention, by name (by platform)"),
        "enforce_eager": (bool, "compile on first use instead of before serving"),
        "compile_cache_dir": (str, "where compiled programs are kept; '' keeps none (the user's cache)"),
    },
    "other": {
        "seed": (int, "of dummy weights and of requests without one"),
        "max_logprobs": (int, "most log-probabilities a request may ask for"),
        "disable_log_stats": (bool, "no statistics in the log"),
    },
}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and one flag for every field of EngineArgs.

    Flags that are not given leave no trace in the namespace: EngineArgs knows the defaults.
    """
    parser.add_argument("model_tag", metavar="MODEL", nargs="?", help="folder, .gguf file or hub name (org/name)")
    for title, flags in _GROUPS.items():
        group = parser.add_argument_group(title)
        for field, (kind, text, *short) in flags.items():
            default = _DEFAULTS[field]
            if default not in (None, MISSING, False):
                text += f" ({'on' if default is True else default})"
            options: dict[str, Any] = {"dest": field, "default": argparse.SUPPRESS, "help": text}
            if kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            elif isinstance(kind, tuple):
                options |= {"choices": kind, "type": str.lower}
            else:
                options |= {"type": kind, "metavar": _METAVARS[kind]}
            group.add_argument("--" + field.replace("_", "-"), *short, **options)


def engine_args(options: argparse.Namespace) -> EngineArgs:
    """The engine's arguments of a parsed command line; the model is empty if none was named.

    Raises:
        ValueError: values that cannot be.
    """
    given: dict[str, Any] = {name: value for name, value in vars(options).items() if name in _DEFAULTS}
    given["model"] = options.model_tag or given.get("model") or ""
    return EngineArgs(**given)
