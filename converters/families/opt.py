"""Checkpoints of OPT."""

from converters.checkpoint import Checkpoint, RenamedCheckpoint
from converters.families.family import Family, HFConfig, required
from converters.families.llama import qkv_rules
from converters.rules import Rule
from jaxllm.errors import CheckpointError
from jaxllm.models.opt import OPTConfig

_TOP, _LAYER, _OURS = "model.decoder.", "model.decoder.layers.{i}.", "layers.{i}."


def _weight_and_bias(source: str, target: str, weight: str, bias: str) -> list[Rule]:
    return [Rule(source + ".weight", target + ".weight", weight), Rule(source + ".bias", target + ".bias", bias)]


RULES = [
    Rule(_TOP + "embed_tokens.weight", "embedding.weight", "V E -> V E"),
    Rule(_TOP + "embed_positions.weight", "positions.weight", "P D -> P D"),
    Rule(_TOP + "project_in.weight", "project_in.weight", "D E -> D E"),
    Rule(_TOP + "project_out.weight", "project_out.weight", "E D -> E D"),
    Rule("lm_head.weight", "head.weight", "V E -> V E"),
    *_weight_and_bias(_TOP + "final_layer_norm", "final_norm", "D -> D", "D -> D"),
    *_weight_and_bias(_LAYER + "self_attn_layer_norm", _OURS + "attention_norm", "D -> D", "D -> D"),
    *_weight_and_bias(_LAYER + "final_layer_norm", _OURS + "mlp_norm", "D -> D", "D -> D"),
    *qkv_rules(_LAYER + "self_attn.", _OURS + "attention.qkv"),
    *_weight_and_bias(_LAYER + "self_attn.out_proj", _OURS + "attention.out", "D (N H) -> D N H", "D -> D"),
    *_weight_and_bias(_LAYER + "fc1", _OURS + "mlp.up", "F D -> F D", "F -> F"),
    *_weight_and_bias(_LAYER + "fc2", _OURS + "mlp.down", "D F -> D F", "D -> D"),
]


def _opt(hf_config: HFConfig, max_model_len: int | None) -> OPTConfig:
    if hf_config.get("layer_norm_elementwise_affine", True) is False:
        raise CheckpointError("OPT with layer_norm_elementwise_affine = false is not supported")
    width = required(hf_config, "hidden_size")
    norm_first = bool(hf_config.get("do_layer_norm_before", True))
    return OPTConfig(
        vocab_size=required(hf_config, "vocab_size"),
        num_layers=required(hf_config, "num_hidden_layers"),
        embed_dim=width,
        word_dim=hf_config.get("word_embed_proj_dim") or width,
        mlp_dim=required(hf_config, "ffn_dim"),
        num_heads=required(hf_config, "num_attention_heads"),
        num_positions=required(hf_config, "max_position_embeddings"),
        activation=hf_config.get("activation_function") or "relu",
        norm_first=norm_first,
        final_norm=norm_first and not hf_config.get("_remove_final_layer_norm", False),
        bias=bool(hf_config.get("enable_bias", True)),
        tie_embeddings=bool(hf_config.get("tie_word_embeddings", True)),
    )


def _prepare(checkpoint: Checkpoint, hf_config: HFConfig) -> Checkpoint:
    # The base model's own files lack the outer name.
    if "decoder.embed_tokens.weight" in checkpoint.names():
        return RenamedCheckpoint(checkpoint, "model.")
    return checkpoint


OPT = Family(_opt, RULES, (), _prepare)
