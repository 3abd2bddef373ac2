"""Checkpoints of the Llama family: Llama, Mistral, Phi-3, Qwen 2, Qwen 3."""

from dataclasses import replace

from converters.checkpoint import Checkpoint, SplitCheckpoint
from converters.families.family import Family, HFConfig, head_dim_of, required, rope_of, windows_of
from converters.rules import Rule
from jaxllm.models.llama import LlamaConfig

_LAYER, _OURS = "model.layers.{i}.", "layers.{i}."
# Within a KV head's group the query heads come first, then its key, then its value.
_QUERIES, _KEY, _VALUE = slice(0, -2), -2, -1


def qkv_rules(source: str, target: str, names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")) -> list[Rule]:
    """Three projections into the fused one, weights and biases."""
    q, k, v = names
    return [
        Rule(f"{source}{q}.weight", f"{target}.weight", "(K G H) D -> K G H D", (1, _QUERIES)),
        Rule(f"{source}{k}.weight", f"{target}.weight", "(K H) D -> K H D", (1, _KEY)),
        Rule(f"{source}{v}.weight", f"{target}.weight", "(K H) D -> K H D", (1, _VALUE)),
        Rule(f"{source}{q}.bias", f"{target}.bias", "(K G H) -> K G H", (1, _QUERIES)),
        Rule(f"{source}{k}.bias", f"{target}.bias", "(K H) -> K H", (1, _KEY)),
        Rule(f"{source}{v}.bias", f"{target}.bias", "(K H) -> K H", (1, _VALUE)),
    ]


def gated_mlp_rules(source: str, target: str) -> list[Rule]:
    """gate, up and down, weights and biases."""
    return [
        Rule(f"{source}gate_proj.weight", f"{target}.gate_up.weight", "F D -> F D", (0, 0)),
        Rule(f"{source}up_proj.weight", f"{target}.gate_up.weight", "F D -> F D", (0, 1)),
        Rule(f"{source}down_proj.weight", f"{target}.down.weight", "D F -> D F"),
        Rule(f"{source}gate_proj.bias", f"{target}.gate_up.bias", "F -> F", (0, 0)),
        Rule(f"{source}up_proj.bias", f"{target}.gate_up.bias", "F -> F", (0, 1)),
        Rule(f"{source}down_proj.bias", f"{target}.down.bias", "D -> D"),
    ]


RULES = [
    Rule("model.embed_tokens.weight", "embedding.weight", "V D -> V D"),
    Rule("lm_head.weight", "head.weight", "V D -> V D"),
    Rule("model.norm.weight", "final_norm.weight", "D -> D"),
    Rule(_LAYER + "input_layernorm.weight", _OURS + "attention_norm.weight", "D -> D"),
    Rule(_LAYER + "post_attention_layernorm.weight", _OURS + "mlp_norm.weight", "D -> D"),
    *qkv_rules(_LAYER + "self_attn.", _OURS + "attention.qkv"),
    Rule(_LAYER + "self_attn.q_norm.weight", _OURS + "attention.q_norm.weight", "H -> H"),
    Rule(_LAYER + "self_attn.k_norm.weight", _OURS + "attention.k_norm.weight", "H -> H"),
    Rule(_LAYER + "self_attn.o_proj.weight", _OURS + "attention.out.weight", "D (N H) -> D N H"),
    Rule(_LAYER + "self_attn.o_proj.bias", _OURS + "attention.out.bias", "D -> D"),
    *gated_mlp_rules(_LAYER + "mlp.", _OURS + "mlp"),
]
# Buffers that older checkpoints saved, and heads that a tied checkpoint saved twice.
IGNORED = (r".*\.rotary_emb\.inv_freq", r".*\.attn\.masked_bias")


def _llama(hf_config: HFConfig, max_model_len: int | None) -> LlamaConfig:
    layers = required(hf_config, "num_hidden_layers")
    heads = required(hf_config, "num_attention_heads")
    head_dim = head_dim_of(hf_config)
    return LlamaConfig(
        vocab_size=required(hf_config, "vocab_size"),
        embed_dim=required(hf_config, "hidden_size"),
        mlp_dim=required(hf_config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=hf_config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        windows=(None,) * layers,
        rope=rope_of(hf_config, head_dim, max_model_len),
        norm_eps=hf_config.get("rms_norm_eps") or 1e-6,
        activation=hf_config.get("hidden_act") or "silu",
        tie_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
        qkv_bias=bool(hf_config.get("attention_bias", False)),
        out_bias=bool(hf_config.get("attention_bias", False)),
        mlp_bias=bool(hf_config.get("mlp_bias", False)),
    )


def _mistral(hf_config: HFConfig, max_model_len: int | None) -> LlamaConfig:
    config = _llama(hf_config, max_model_len)
    layers = len(config.windows)
    return replace(config, windows=windows_of(hf_config, layers, default=[True] * layers))


def _qwen2(hf_config: HFConfig, max_model_len: int | None) -> LlamaConfig:
    config = _llama(hf_config, max_model_len)
    layers = len(config.windows)
    windows: tuple[int | None, ...] = (None,) * layers
    if hf_config.get("use_sliding_window"):
        first = hf_config.get("max_window_layers", 0)
        windows = windows_of(hf_config, layers, default=[i >= first for i in range(layers)])
    tied = bool(hf_config.get("tie_word_embeddings", False))
    return replace(config, windows=windows, qkv_bias=True, out_bias=False, tie_embeddings=tied)


def _qwen3(hf_config: HFConfig, max_model_len: int | None) -> LlamaConfig:
    biased = bool(hf_config.get("attention_bias", False))
    return replace(_qwen2(hf_config, max_model_len), qkv_bias=biased, out_bias=biased, qk_norm=True)


def _phi3(hf_config: HFConfig, max_model_len: int | None) -> LlamaConfig:
    config = _mistral(hf_config, max_model_len)
    partial = hf_config.get("partial_rotary_factor")
    parameters = hf_config.get("rope_parameters") or {}
    partial = partial or parameters.get("partial_rotary_factor") or 1.0
    return replace(config, rope=rope_of(hf_config, int(config.head_dim * partial), max_model_len))


def _split_phi3(checkpoint: Checkpoint, hf_config: HFConfig) -> Checkpoint:
    """Phi-3 saves q, k, v as one tensor, and gate and up as one."""
    config = _llama(hf_config, None)
    q, kv = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    parts = {}
    for name in checkpoint.names():
        if name.endswith("self_attn.qkv_proj.weight"):
            parts[name] = (0, {"q": q, "k": kv, "v": kv})
        elif name.endswith("mlp.gate_up_proj.weight"):
            parts[name] = (0, {"gate": config.mlp_dim, "up": config.mlp_dim})
    return SplitCheckpoint(checkpoint, parts)


_PHI3_RULES = [
    Rule(
        _LAYER + "self_attn.qkv_proj.weight[q]", _OURS + "attention.qkv.weight", "(K G H) D -> K G H D", (1, _QUERIES)
    ),
    Rule(_LAYER + "self_attn.qkv_proj.weight[k]", _OURS + "attention.qkv.weight", "(K H) D -> K H D", (1, _KEY)),
    Rule(_LAYER + "self_attn.qkv_proj.weight[v]", _OURS + "attention.qkv.weight", "(K H) D -> K H D", (1, _VALUE)),
    Rule(_LAYER + "mlp.gate_up_proj.weight[gate]", _OURS + "mlp.gate_up.weight", "F D -> F D", (0, 0)),
    Rule(_LAYER + "mlp.gate_up_proj.weight[up]", _OURS + "mlp.gate_up.weight", "F D -> F D", (0, 1)),
    *[rule for rule in RULES if not rule.target.endswith(("qkv.weight", "gate_up.weight"))],
]

LLAMA = Family(_llama, RULES, IGNORED)
MISTRAL = Family(_mistral, RULES, IGNORED)
QWEN2 = Family(_qwen2, RULES, IGNORED)
QWEN3 = Family(_qwen3, RULES, IGNORED)
PHI3 = Family(_phi3, _PHI3_RULES, IGNORED, _split_phi3)
