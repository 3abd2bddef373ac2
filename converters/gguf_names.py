"""GGUF tensor names to Hugging Face names, and what was done to each tensor on its way into the file.

Sources: the `gguf` package's constants (names) and llama.cpp's converters (changes of content).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxllm.errors import CheckpointError

# Tables that carry numbers of the configuration, not weights; hf_config_from_gguf reads them.
CONFIG_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class TensorNames:
    """Names of one architecture; modules without their `.weight` / `.bias` ending.

    Attributes:
        top: modules outside the layers.
        layer: modules of layer i, both sides without the layer's prefix.
        experts: stacked expert tensors; the Hugging Face name has {e}, one tensor per expert.
        layer_prefix: of the Hugging Face names, with {i}.
        permuted: layer modules whose rows llama.cpp interleaves for its rotary embedding.
        transposed: layer modules that Hugging Face stores [in, out] (GPT-2's Conv1D).
        norm_shift: what the file's norm weights have more than Hugging Face's (Gemma: 1).
    """

    top: dict[str, str]
    layer: dict[str, str]
    experts: dict[str, str] = field(default_factory=dict)
    layer_prefix: str = "model.layers.{i}."
    permuted: frozenset[str] = frozenset()
    transposed: frozenset[str] = frozenset()
    norm_shift: float = 0.0


@dataclass(frozen=True)
class TensorOrigin:
    """How a Hugging Face tensor is made of a GGUF one.

    Attributes:
        name: of the GGUF tensor.
        permuted: None, "q" or "k": rows are interleaved per head and must be put back.
        transposed: the Hugging Face tensor is the transpose.
        shift: to be subtracted from every value.
        expert: index along the first axis, or None for the whole tensor.
    """

    name: str
    permuted: str | None = None
    transposed: bool = False
    shift: float = 0.0
    expert: int | None = None


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA_LAYER = _ATTENTION | _MLP | {"ffn_norm": "post_attention_layernorm"}
_GEMMA_LAYER = (
    _ATTENTION
    | _MLP
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_QWEN_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
}

TENSOR_NAMES: dict[str, TensorNames] = {
    "llama": TensorNames(
        _TOP,
        _LLAMA_LAYER | {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts=_MIXTRAL_EXPERTS,
        permuted=frozenset({"attn_q", "attn_k"}),
    ),
    "qwen2": TensorNames(_TOP, _LLAMA_LAYER),
    "qwen3": TensorNames(_TOP, _LLAMA_LAYER),
    "qwen3moe": TensorNames(_TOP, _LLAMA_LAYER | {"ffn_gate_inp": "mlp.gate"}, experts=_QWEN_EXPERTS),
    "gemma": TensorNames(_TOP, _LLAMA_LAYER, norm_shift=1.0),
    "gemma2": TensorNames(_TOP, _GEMMA_LAYER, norm_shift=1.0),
    "gemma3": TensorNames(_TOP, _GEMMA_LAYER, norm_shift=1.0),
    "phi3": TensorNames(
        _TOP,
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
    "gpt2": TensorNames(
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        layer_prefix="transformer.h.{i}.",
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
}


def names_of(architecture: str) -> TensorNames:
    """The names of an architecture; an unknown one is an error that lists the known."""
    if architecture not in TENSOR_NAMES:
        raise CheckpointError(
            f"GGUF architecture {architecture!r} is not supported; supported: {', '.join(sorted(TENSOR_NAMES))}"
        )
    return TENSOR_NAMES[architecture]


def map_tensors(architecture: str, gguf_names: Iterable[str], num_experts: int) -> dict[str, TensorOrigin]:
    """Hugging Face name -> where it comes from, for every weight of a file.

    Raises:
        CheckpointError: the file has tensors this architecture does not know; all are named.
    """
    names = names_of(architecture)
    mapped: dict[str, TensorOrigin] = {}
    unknown = []
    for gguf_name in gguf_names:
        if gguf_name in CONFIG_TENSORS:
            continue
        origins = _origins(names, gguf_name, num_experts)
        if not origins:
            unknown.append(gguf_name)
        mapped.update(origins)
    if unknown:
        shown = ", ".join(sorted(unknown)[:8])
        raise CheckpointError(
            f"{len(unknown)} tensors are unknown to GGUF architecture {architecture!r}: {shown}"
            + (", ..." if len(unknown) > 8 else "")
        )
    return mapped


def _origins(names: TensorNames, gguf_name: str, num_experts: int) -> dict[str, TensorOrigin]:
    """The Hugging Face tensors one GGUF tensor holds: none if unknown, several for stacked experts."""
    match = _LAYER.fullmatch(gguf_name)
    stem, _, ending = (match[2] if match else gguf_name).rpartition(".")
    shift = names.norm_shift if stem.endswith("norm") else 0.0
    if match is None:
        if stem not in names.top:
            return {}
        return {f"{names.top[stem]}.{ending}": TensorOrigin(gguf_name, shift=shift)}
    prefix = names.layer_prefix.format(i=match[1])
    if stem in names.experts:
        template = f"{prefix}{names.experts[stem]}.{ending}"
        return {template.format(e=e): TensorOrigin(gguf_name, expert=e) for e in range(num_experts)}
    if stem not in names.layer:
        return {}
    origin = TensorOrigin(
        gguf_name,
        permuted=stem.removeprefix("attn_") if stem in names.permuted else None,
        transposed=stem in names.transposed and ending == "weight",
        shift=shift,
    )
    return {f"{prefix}{names.layer[stem]}.{ending}": origin}
