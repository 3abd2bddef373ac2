"""Checkpoints of Gemma 2 and Gemma 3 (text)."""

from converters.families.family import Family, HFConfig, head_dim_of, required, rope_scaling_of, windows_of
from converters.families.llama import gated_mlp_rules, qkv_rules
from converters.rules import Rule
from jaxllm.layers import Rope, make_rope
from jaxllm.models.gemma import GemmaConfig

_LAYER, _OURS = "model.layers.{i}.", "layers.{i}."
RULES = [
    Rule("model.embed_tokens.weight", "embedding.weight", "V D -> V D"),
    Rule("lm_head.weight", "head.weight", "V D -> V D"),
    Rule("model.norm.weight", "final_norm.weight", "D -> D"),
    Rule(_LAYER + "input_layernorm.weight", _OURS + "attention_norm.weight", "D -> D"),
    Rule(_LAYER + "post_attention_layernorm.weight", _OURS + "attention_out_norm.weight", "D -> D"),
    Rule(_LAYER + "pre_feedforward_layernorm.weight", _OURS + "mlp_norm.weight", "D -> D"),
    Rule(_LAYER + "post_feedforward_layernorm.weight", _OURS + "mlp_out_norm.weight", "D -> D"),
    *qkv_rules(_LAYER + "self_attn.", _OURS + "attention.qkv"),
    Rule(_LAYER + "self_attn.q_norm.weight", _OURS + "attention.q_norm.weight", "H -> H"),
    Rule(_LAYER + "self_attn.k_norm.weight", _OURS + "attention.k_norm.weight", "H -> H"),
    Rule(_LAYER + "self_attn.o_proj.weight", _OURS + "attention.out.weight", "D (N H) -> D N H"),
    Rule(_LAYER + "self_attn.o_proj.bias", _OURS + "attention.out.bias", "D -> D"),
    *gated_mlp_rules(_LAYER + "mlp.", _OURS + "mlp"),
]
_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_THETA = 10000.0


def _config(hf_config: HFConfig, slides: list[bool], rope: Rope, local_rope: Rope, *, qk_norm: bool) -> GemmaConfig:
    head_dim = hf_config.get("head_dim") or head_dim_of(hf_config)
    heads = required(hf_config, "num_attention_heads")
    biased = bool(hf_config.get("attention_bias", False))
    return GemmaConfig(
        vocab_size=required(hf_config, "vocab_size"),
        embed_dim=required(hf_config, "hidden_size"),
        mlp_dim=required(hf_config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=hf_config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        windows=windows_of(hf_config, len(slides), default=slides),
        rope=rope,
        local_rope=local_rope,
        norm_eps=hf_config.get("rms_norm_eps") or 1e-6,
        activation=hf_config.get("hidden_activation") or hf_config.get("hidden_act") or "gelu_pytorch_tanh",
        scale=float(hf_config.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        attention_soft_cap=hf_config.get("attn_logit_softcapping"),
        final_soft_cap=hf_config.get("final_logit_softcapping"),
        qk_norm=qk_norm,
        qkv_bias=biased,
        out_bias=biased,
        tie_embeddings=bool(hf_config.get("tie_word_embeddings", True)),
    )


def _gemma2(hf_config: HFConfig, max_model_len: int | None) -> GemmaConfig:
    layers = required(hf_config, "num_hidden_layers")
    theta, scaling = rope_scaling_of(hf_config)
    rope = make_rope(
        head_dim_of(hf_config),
        theta,
        scaling,
        max_position_embeddings=required(hf_config, "max_position_embeddings"),
        max_model_len=max_model_len,
    )
    return _config(hf_config, [i % 2 == 0 for i in range(layers)], rope, rope, qk_norm=False)


def _gemma3(hf_config: HFConfig, max_model_len: int | None) -> GemmaConfig:
    layers = required(hf_config, "num_hidden_layers")
    head_dim = head_dim_of(hf_config)
    pattern = hf_config.get("sliding_window_pattern") or hf_config.get("_sliding_window_pattern") or _GEMMA3_PATTERN
    maximum = required(hf_config, "max_position_embeddings")
    theta, scaling = rope_scaling_of(hf_config, "full_attention")
    rope = make_rope(head_dim, theta, scaling, max_position_embeddings=maximum, max_model_len=max_model_len)
    local_theta = hf_config.get("rope_local_base_freq") or _GEMMA3_LOCAL_THETA
    if "sliding_attention" in (hf_config.get("rope_parameters") or {}):
        local_theta, _ = rope_scaling_of(hf_config, "sliding_attention")
    local = make_rope(head_dim, local_theta, None, max_position_embeddings=maximum)
    return _config(hf_config, [(i + 1) % pattern != 0 for i in range(layers)], rope, local, qk_norm=True)


GEMMA2 = Family(_gemma2, RULES, (r".*\.rotary_emb\.inv_freq",))
GEMMA3 = Family(_gemma3, RULES, (r".*\.rotary_emb.*\.inv_freq",))
