"""Tiny transformers models, written as llama.cpp converts them, come back with their weights and logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import MODEL_ARCH_NAMES

from converters.gguf import GGUFCheckpoint
from converters.gguf_config import generation_config_from_gguf, hf_config_from_gguf
from jaxllm.errors import CheckpointError

VOCAB, LAYERS, CONTEXT = 48, 7, 256
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
)
LLAMA3: dict[str, Any] = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
LONG = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    long_factor=[1.5, 2.0, 3.0, 4.0],
    short_factor=[1.0, 1.1, 1.2, 1.3],
)
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}


def rope(theta: float = 10000.0) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("llama", lambda: transformers.LlamaConfig(**SIZES, rope_parameters=rope(1e5))),
    "llama3": (
        "llama",
        lambda: transformers.LlamaConfig(**SIZES, head_dim=16, rope_parameters=LLAMA3, tie_word_embeddings=True),
    ),
    "llama_bias": (
        "llama",
        lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_parameters=rope()),
    ),
    "qwen2": ("qwen2", lambda: transformers.Qwen2Config(**SIZES, rope_parameters=rope(1e6))),
    "qwen3": ("qwen3", lambda: transformers.Qwen3Config(**SIZES, head_dim=16, rope_parameters=rope(1e6))),
    "gemma2": (
        "gemma2",
        lambda: transformers.Gemma2Config(
            **SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=8, rope_parameters=rope()
        ),
    ),
    "gemma3": (
        "gemma3",
        lambda: transformers.Gemma3TextConfig(
            **SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=8, rope_parameters=GEMMA3_ROPE
        ),
    ),
    "phi3": (
        "phi3",
        lambda: transformers.Phi3Config(**SIZES, pad_token_id=0, sliding_window=8, rope_parameters=rope()),
    ),
    "phi3_long": (
        "phi3",
        lambda: transformers.Phi3Config(
            **SIZES, pad_token_id=0, original_max_position_embeddings=64, rope_parameters=LONG
        ),
    ),
    "gpt2": (
        "gpt2",
        lambda: transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=CONTEXT),
    ),
}


def halves_in_turns(weight: np.ndarray, heads: int) -> np.ndarray:
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, -1)
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)


def converted(architecture: str, config: Any, name: str, weight: np.ndarray) -> np.ndarray:
    """What llama.cpp's converters do to a weight."""
    if architecture == "llama" and ".q_proj" in name:
        return halves_in_turns(weight, config.num_attention_heads)
    if architecture == "llama" and ".k_proj" in name:
        return halves_in_turns(weight, config.num_key_value_heads)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return weight + 1
    if architecture == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return weight.T
    return weight


def write_metadata(out: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    out.add_context_length(CONTEXT)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_head_count(config.num_attention_heads)
    if architecture == "gpt2":
        out.add_feed_forward_length(4 * config.hidden_size)
        out.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
    out.add_rope_freq_base(parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if architecture in ("llama", "phi3"):
        out.add_rope_dimension_count(head_dim)
    if architecture not in ("llama", "qwen2", "phi3") or "head_dim" in config.to_diff_dict():
        out.add_key_length(head_dim)
        out.add_value_length(head_dim)
    if parameters["rope_type"] == "linear":
        out.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        out.add_rope_scaling_factor(parameters["factor"])
    if parameters["rope_type"] == "llama3":
        out.add_tensor("rope_freqs.weight", llama3_table(head_dim))
    if parameters["rope_type"] == "longrope":
        out.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for length in ("long", "short"):
            table = np.array(parameters[f"{length}_factor"], np.float32)
            out.add_tensor(f"rope_factors_{length}.weight", table)
    if architecture in ("gemma2", "gemma3", "phi3") and config.sliding_window:
        out.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        out.add_attn_logit_softcapping(config.attn_logit_softcapping)
        out.add_final_logit_softcapping(config.final_logit_softcapping)


def llama3_table(head_dim: int) -> np.ndarray:
    """The factor each frequency is divided by: transformers' plain frequencies over its scaled ones."""
    plain = 1.0 / LLAMA3["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    config = transformers.LlamaConfig(head_dim=head_dim, max_position_embeddings=CONTEXT, rope_parameters=LLAMA3)
    scaled = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq.numpy()
    return (plain / scaled).astype(np.float32)


def write_model(path: Path, architecture: str, config: Any) -> Any:
    """A model with random weights, norms included, and its GGUF file; names come from the `gguf` package."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    out = gguf.GGUFWriter(path, architecture)
    write_metadata(out, architecture, config)
    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name, name
        weight = np.ascontiguousarray(converted(architecture, config, name, tensor.numpy()))
        out.add_tensor(gguf_name, weight)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return model


@pytest.mark.parametrize("family", MODELS)
def test_weights_and_logits_survive(tmp_path, family):
    architecture, make_config = MODELS[family]
    path = tmp_path / "m.gguf"
    model = write_model(path, architecture, make_config())
    checkpoint = GGUFCheckpoint(path)
    expected = {
        name: tensor.numpy()
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and model.config.tie_word_embeddings)
    }
    assert checkpoint.names() == set(expected)
    for name, weight in expected.items():
        assert checkpoint.shape(name) == weight.shape
        np.testing.assert_allclose(checkpoint.read(name), weight, atol=1e-6, err_msg=name)

    hf_config = hf_config_from_gguf(checkpoint)
    assert hf_config["architectures"] == [type(model).__name__]
    rebuilt = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**hf_config | {"torch_dtype": "float32"})
    ).eval()
    rebuilt.load_state_dict(model.state_dict())
    tokens = torch.arange(100).reshape(1, 100) % VOCAB
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


def config_of(path: Path, architecture: str = "llama", /, **values: Any) -> dict[str, Any]:
    """The config of a file with the needed metadata, `values` on top (None takes a key away)."""
    keys: dict[str, Any] = {
        "context_length": CONTEXT,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
    } | values
    out = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        full = f"{architecture}.{key}"
        if isinstance(value, str):
            out.add_string(full, value)
        elif isinstance(value, float):
            out.add_float32(full, value)
        elif isinstance(value, list):
            out.add_array(full, value)
        elif value is not None:
            out.add_uint32(full, value)
    out.add_tensor("token_embd.weight", np.zeros((VOCAB, 32), np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return hf_config_from_gguf(GGUFCheckpoint(path))


def test_floats_are_the_decimals_they_were_written_as(tmp_path):
    config = config_of(tmp_path / "m.gguf")
    assert (config["rms_norm_eps"], config["rope_theta"], config["vocab_size"]) == (1e-5, 10000.0, VOCAB)
    assert config["tie_word_embeddings"] is True


def test_missing_metadata_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no llama\.block_count in its metadata"):
        config_of(tmp_path / "m.gguf", block_count=None)
    with pytest.raises(CheckpointError, match=r"has no llama\.attention\.head_count in its metadata"):
        config_of(tmp_path / "m.gguf", **{"attention.head_count": None})


def test_numbers_per_layer(tmp_path):
    assert config_of(tmp_path / "m.gguf", feed_forward_length=[48, 48])["intermediate_size"] == 48
    with pytest.raises(CheckpointError, match="differs between layers"):
        config_of(tmp_path / "m.gguf", feed_forward_length=[48, 64])
    with pytest.raises(CheckpointError, match=r"attention\.head_count must be a positive integer, got 0"):
        config_of(tmp_path / "m.gguf", **{"attention.head_count": 0})


def test_yarn_and_unknown_rope_scaling(tmp_path):
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    scaling = config_of(tmp_path / "m.gguf", **keys)["rope_scaling"]
    assert scaling["rope_type"] == "yarn"
    assert (scaling["factor"], scaling["original_max_position_embeddings"]) == (4.0, 64)
    with pytest.raises(CheckpointError, match="rope scaling 'spiral' is not supported"):
        config_of(tmp_path / "m.gguf", **{"rope.scaling.type": "spiral"})


def test_wide_query_scale_of_the_largest_gemma(tmp_path):
    config = config_of(tmp_path / "m.gguf", "gemma3", block_count=62, **{"attention.key_length": 16})
    assert config["query_pre_attn_scalar"] == 8
    assert set(config["layer_types"]) == {"full_attention"}


def test_mixtral_is_a_llama_with_experts(tmp_path):
    config = config_of(tmp_path / "m.gguf", expert_count=8, expert_used_count=2)
    assert (config["architectures"], config["num_local_experts"]) == (["MixtralForCausalLM"], 8)
    assert config["num_experts_per_tok"] == 2


def test_generation_config_names_every_end_of_turn(tmp_path):
    out = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    out.add_token_list(["<eos>", "<end_of_turn>", "<|im_end|>", "x", "<|eot_id|>"])
    out.add_token_types([3, 3, 1, 1, 3])
    out.add_eos_token_id(0)
    out.add_bos_token_id(0)
    out.add_eot_token_id(4)
    out.add_float32("general.sampling.temp", 0.5)
    out.add_int32("general.sampling.top_k", 20)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    config = generation_config_from_gguf(GGUFCheckpoint(tmp_path / "m.gguf"))
    assert config == {"bos_token_id": 0, "eos_token_id": [0, 4, 1], "temperature": 0.5, "top_k": 20}
