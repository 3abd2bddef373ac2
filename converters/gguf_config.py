"""Hugging Face style `config.json` and `generation_config.json` made of a GGUF file's metadata."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from converters.gguf import GGUFCheckpoint
from converters.gguf_names import names_of
from jaxllm.errors import CheckpointError

_ARCHITECTURES = {  # GGUF architecture -> (Hugging Face class, model_type)
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma": ("GemmaForCausalLM", "gemma"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "gpt2": ("GPT2LMHeadModel", "gpt2"),
}
# The largest Gemma of each kind scales queries by embed_dim / heads instead of head_dim. GGUF does not say
# so; as in llama.cpp the number of layers tells.
_WIDE_QUERY_LAYERS = {"gemma2": 46, "gemma3": 62}
_GEMMA3_LOCAL_ROPE = 10000.0
_GEMMA3_PATTERN = 6
# Llama 3's own constants; converters bake them into `rope_freqs.weight` and keep only the table.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
# Control tokens that end a turn; files often name only one of them as EOS.
_END_OF_TURN = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
_CONTROL = 3
_SAMPLING_KEYS = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


@dataclass(frozen=True)
class _Reader:
    """Metadata look-ups of one file, by key without the architecture."""

    checkpoint: GGUFCheckpoint

    def get(self, key: str, default: Any = None) -> Any:
        return self.checkpoint.metadata.get(f"{self.checkpoint.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.checkpoint.path} has no {self.checkpoint.architecture}.{key} in its metadata")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A number of things that may be written once or per layer; layers that differ are not supported."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise CheckpointError(
                    f"{self.checkpoint.path}: {key} differs between layers ({value}), which is not supported"
                )
            value = value[0]
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.checkpoint.path}: {key} must be a positive integer, got {value!r}")
        return value


def hf_config_from_gguf(checkpoint: GGUFCheckpoint) -> dict[str, Any]:
    """The `config.json` of the model a GGUF file was made of, as far as the file tells.

    Raises:
        CheckpointError: unsupported architecture, missing metadata, or settings that have no equivalent.
    """
    architecture = checkpoint.architecture
    names_of(architecture)
    reader = _Reader(checkpoint)
    config = _gpt2_config(reader) if architecture == "gpt2" else _decoder_config(reader)
    if architecture in ("gemma", "gemma2", "gemma3"):
        config |= _gemma_config(reader, config)
    if architecture == "phi3":
        config |= _phi3_config(reader, config)
    num_experts = reader.get("expert_count", 0)
    name, model_type = _ARCHITECTURES[architecture]
    if num_experts:
        config |= _expert_config(reader, num_experts)
        if architecture == "llama":
            name, model_type = "MixtralForCausalLM", "mixtral"
    config |= {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": _vocab_size(checkpoint),
        "tie_word_embeddings": "output.weight" not in checkpoint.gguf_names(),
        "torch_dtype": "bfloat16",
    }
    for key, field in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        config[field] = checkpoint.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config


def generation_config_from_gguf(checkpoint: GGUFCheckpoint) -> dict[str, Any]:
    """The `generation_config.json` equivalent: every token that ends a turn, and stored sampling defaults."""
    metadata = checkpoint.metadata
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    types = metadata.get("tokenizer.ggml.token_type", [])
    known = set(_END_OF_TURN)
    ends += [i for i, (t, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL and t in known]
    config: dict[str, Any] = {}
    if (bos := metadata.get("tokenizer.ggml.bos_token_id")) is not None:
        config["bos_token_id"] = bos
    if unique := list(dict.fromkeys(i for i in ends if i is not None)):
        config["eos_token_id"] = unique
    for key, field in _SAMPLING_KEYS.items():
        value = metadata.get(f"general.sampling.{key}")
        if value is not None:
            config[field] = value
    return config


def _decoder_config(reader: _Reader) -> dict[str, Any]:
    """What all rotary decoders share."""
    embed_dim, num_heads = reader.count("embedding_length"), reader.count("attention.head_count")
    head_dim = reader.get("attention.key_length") or reader.get("rope.dimension_count") or embed_dim // num_heads
    if reader.checkpoint.architecture == "phi3":
        head_dim = embed_dim // num_heads
    if reader.get("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{reader.checkpoint.path}: key and value heads of different size are not supported")
    names = reader.checkpoint.gguf_names()
    config = {
        "hidden_size": embed_dim,
        "intermediate_size": reader.count("feed_forward_length"),
        "num_hidden_layers": reader.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": reader.count("context_length"),
        "rms_norm_eps": _decimal(reader.need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(reader.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(reader),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "attention_dropout": 0.0,
    }
    if reader.checkpoint.architecture in ("qwen2", "qwen3", "qwen3moe"):
        config |= {"use_sliding_window": False, "sliding_window": None}
    elif window := reader.get("attention.sliding_window"):
        config["sliding_window"] = window
    return config


def _gemma_config(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    architecture, num_layers = reader.checkpoint.architecture, config["num_hidden_layers"]
    gemma: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    if architecture == "gemma":
        return gemma
    wide = num_layers == _WIDE_QUERY_LAYERS[architecture]
    gemma["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    )
    if architecture == "gemma2":
        gemma["sliding_window"] = config.get("sliding_window", 4096)
        gemma["attn_logit_softcapping"] = reader.get("attn_logit_softcapping", 50.0)
        gemma["final_logit_softcapping"] = reader.get("final_logit_softcapping", 30.0)
        pattern = 2
    else:
        gemma["attn_logit_softcapping"] = None
        gemma["final_logit_softcapping"] = reader.get("final_logit_softcapping")
        gemma["rope_local_base_freq"] = _decimal(reader.get("rope.freq_base_swa", _GEMMA3_LOCAL_ROPE))
        gemma["rope_theta"] = _decimal(reader.get("rope.freq_base", 1e6))
        # Without a window in the file every layer sees everything.
        pattern = reader.get("attention.sliding_window_pattern", _GEMMA3_PATTERN)
        pattern = pattern if "sliding_window" in config else 1
        gemma["sliding_window_pattern"] = pattern
    gemma["layer_types"] = _layer_types(pattern, num_layers)
    return gemma


def _layer_types(pattern: int | list[Any], num_layers: int) -> list[str]:
    """Every `pattern`-th layer is full attention; a list says for each layer whether it slides."""
    slides = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(num_layers)]
    return ["sliding_attention" if s else "full_attention" for s in slides]


def _phi3_config(reader: _Reader, config: dict[str, Any]) -> dict[str, Any]:
    """LongRoPE tables and partial rotary factor."""
    names = reader.checkpoint.gguf_names()
    original = reader.get("rope.scaling.original_context_length", config["max_position_embeddings"])
    phi: dict[str, Any] = {"original_max_position_embeddings": original, "attention_bias": False}
    rotary = reader.get("rope.dimension_count", config["head_dim"])
    if rotary != config["head_dim"]:
        phi["partial_rotary_factor"] = rotary / config["head_dim"]
    if "rope_factors_long.weight" in names:
        phi["rope_scaling"] = {
            "type": "longrope",
            "rope_type": "longrope",
            "long_factor": reader.checkpoint.read_gguf("rope_factors_long.weight").tolist(),
            "short_factor": reader.checkpoint.read_gguf("rope_factors_short.weight").tolist(),
        }
    phi.setdefault("sliding_window", config.get("sliding_window") or None)
    return phi


def _gpt2_config(reader: _Reader) -> dict[str, Any]:
    return {
        "n_embd": reader.count("embedding_length"),
        "n_layer": reader.count("block_count"),
        "n_head": reader.count("attention.head_count"),
        "n_inner": reader.get("feed_forward_length"),
        "n_positions": reader.count("context_length"),
        "n_ctx": reader.count("context_length"),
        "layer_norm_epsilon": _decimal(reader.need("attention.layer_norm_epsilon")),
        "activation_function": "gelu_new",
    }


def _expert_config(reader: _Reader, num_experts: int) -> dict[str, Any]:
    return {
        "num_local_experts": num_experts,
        "num_experts": num_experts,
        "num_experts_per_tok": reader.need("expert_used_count"),
        "moe_intermediate_size": reader.get("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _rope_scaling(reader: _Reader) -> dict[str, Any] | None:
    """The `rope_scaling` entry: from metadata, or recovered from Llama 3's table of factors."""
    if "rope_freqs.weight" in reader.checkpoint.gguf_names():
        return _llama3_scaling(reader)
    kind = reader.get("rope.scaling.type", "none")
    factor = reader.get("rope.scaling.factor", reader.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0) or kind == "longrope":
        return None
    scaling = {"type": kind, "rope_type": kind, "factor": _decimal(factor)}
    if kind == "linear":
        return scaling
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = reader.need("rope.scaling.original_context_length")
        for key in ("beta_fast", "beta_slow"):
            if (value := reader.get(f"rope.scaling.yarn_{key}")) is not None:
                scaling[key] = _decimal(value)
        return scaling
    raise CheckpointError(
        f"{reader.checkpoint.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn, longrope"
    )


def _llama3_scaling(reader: _Reader) -> dict[str, Any] | None:
    """Llama 3's rope_scaling, by the one number its table hides: the factor of the lowest frequency."""
    table = reader.checkpoint.read_gguf("rope_freqs.weight").astype(np.float64)
    factor = float(table.max())
    if factor == 1.0 and table.min() == 1.0:
        return None
    frequencies = reader.get("rope.freq_base", 10000.0) ** (-np.arange(len(table)) / len(table))
    wavelengths = 2 * np.pi / frequencies
    smooth = (_LLAMA3_CONTEXT / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    smooth = np.clip(smooth, 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(table, expected, rtol=1e-3):
        raise CheckpointError(
            f"{reader.checkpoint.path}: rope_freqs.weight is not a Llama 3 table (factor {factor:g}, "
            "low 1, high 4, original context 8192), which is the only kind supported"
        )
    return {
        "rope_type": "llama3",
        "factor": _decimal(factor),
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _vocab_size(checkpoint: GGUFCheckpoint) -> int:
    """Rows of the embedding: the truth, where metadata may count tokens without padding."""
    name = "transformer.wte.weight" if checkpoint.architecture == "gpt2" else "model.embed_tokens.weight"
    return checkpoint.shape(name)[0]


def _decimal(value: float) -> float:
    """A float32 of the file as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
