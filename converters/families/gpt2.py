"""Checkpoints of GPT-2, whose matrices are saved transposed and whose q, k, v are one."""

from converters.checkpoint import Checkpoint, RenamedCheckpoint, SplitCheckpoint
from converters.families.family import Family, HFConfig, required
from converters.rules import Rule
from jaxllm.errors import CheckpointError
from jaxllm.models.gpt2 import GPT2Config

_LAYER, _OURS = "transformer.h.{i}.", "layers.{i}."
_ATTENTION = _LAYER + "attn.c_attn."
RULES = [
    Rule("transformer.wte.weight", "embedding.weight", "V D -> V D"),
    Rule("transformer.wpe.weight", "positions.weight", "P D -> P D"),
    Rule("lm_head.weight", "head.weight", "V D -> V D"),
    Rule("transformer.ln_f.weight", "final_norm.weight", "D -> D"),
    Rule("transformer.ln_f.bias", "final_norm.bias", "D -> D"),
    Rule(_LAYER + "ln_1.weight", _OURS + "attention_norm.weight", "D -> D"),
    Rule(_LAYER + "ln_1.bias", _OURS + "attention_norm.bias", "D -> D"),
    Rule(_LAYER + "ln_2.weight", _OURS + "mlp_norm.weight", "D -> D"),
    Rule(_LAYER + "ln_2.bias", _OURS + "mlp_norm.bias", "D -> D"),
    *[
        rule
        for index, part in enumerate("qkv")
        for rule in (
            Rule(f"{_ATTENTION}weight[{part}]", _OURS + "attention.qkv.weight", "D (K H) -> K H D", (1, index)),
            Rule(f"{_ATTENTION}bias[{part}]", _OURS + "attention.qkv.bias", "(K H) -> K H", (1, index)),
        )
    ],
    Rule(_LAYER + "attn.c_proj.weight", _OURS + "attention.out.weight", "(N H) D -> D N H"),
    Rule(_LAYER + "attn.c_proj.bias", _OURS + "attention.out.bias", "D -> D"),
    Rule(_LAYER + "mlp.c_fc.weight", _OURS + "mlp.up.weight", "D F -> F D"),
    Rule(_LAYER + "mlp.c_fc.bias", _OURS + "mlp.up.bias", "F -> F"),
    Rule(_LAYER + "mlp.c_proj.weight", _OURS + "mlp.down.weight", "F D -> D F"),
    Rule(_LAYER + "mlp.c_proj.bias", _OURS + "mlp.down.bias", "D -> D"),
]


def _gpt2(hf_config: HFConfig, max_model_len: int | None) -> GPT2Config:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if hf_config.get(name):
            raise CheckpointError(f"GPT-2 with {name} is not supported")
    if hf_config.get("scale_attn_weights", True) is False:
        raise CheckpointError("GPT-2 with scale_attn_weights = false is not supported")
    width = required(hf_config, "n_embd")
    return GPT2Config(
        vocab_size=required(hf_config, "vocab_size"),
        num_layers=required(hf_config, "n_layer"),
        embed_dim=width,
        mlp_dim=hf_config.get("n_inner") or 4 * width,
        num_heads=required(hf_config, "n_head"),
        num_positions=required(hf_config, "n_positions"),
        norm_eps=hf_config.get("layer_norm_epsilon") or 1e-5,
        activation=hf_config.get("activation_function") or "gelu_new",
        tie_embeddings=bool(hf_config.get("tie_word_embeddings", True)),
    )


def _prepare(checkpoint: Checkpoint, hf_config: HFConfig) -> Checkpoint:
    if "wte.weight" in checkpoint.names():
        checkpoint = RenamedCheckpoint(checkpoint, "transformer.")
    size = required(hf_config, "n_embd")
    sizes = {part: size for part in "qkv"}
    parts = {
        name: (1 if name.endswith("weight") else 0, sizes)
        for name in checkpoint.names()
        if name.endswith((".attn.c_attn.weight", ".attn.c_attn.bias"))
    }
    return SplitCheckpoint(checkpoint, parts)


GPT2 = Family(_gpt2, RULES, (r".*\.attn\.bias", r".*\.attn\.masked_bias"), _prepare)
