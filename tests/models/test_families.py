"""Every family against transformers (torch, float32): tiny random checkpoints through our converters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import converters
from jaxllm.batch import AttentionPlan, StepBatch
from jaxllm.cache.kv_pages import allocate_pages, group_windows
from jaxllm.sharding import make_mesh

SMALL = dict(vocab_size=137, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=96)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1000.0, factor=2.0, original_max_position_embeddings=48)
LONG = dict(rope_type="longrope", rope_theta=1000.0, short_factor=[1.0 + i / 9 for i in range(6)],
            long_factor=[2.0 + i / 3 for i in range(6)], original_max_position_embeddings=64)  # fmt: skip
GEMMA = SMALL | dict(head_dim=16, query_pre_attn_scalar=12, sliding_window=13, num_hidden_layers=4)

FAMILIES = {
    "llama": ("Llama", SMALL),
    "llama_tied_biased": ("Llama", SMALL | dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "llama3_rope": ("Llama", SMALL | dict(rope_parameters=LLAMA3)),
    "llama_linear": ("Llama", SMALL | dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0))),
    "llama_yarn": ("Llama", SMALL | dict(rope_parameters=YARN)),
    "llama_mha_odd_head": ("Llama", SMALL | dict(num_key_value_heads=4, head_dim=10)),
    "mistral_window": ("Mistral", SMALL | dict(sliding_window=11)),
    "mistral_full": ("Mistral", SMALL | dict(sliding_window=None)),
    "qwen2": ("Qwen2", SMALL),
    "qwen2_window": ("Qwen2", SMALL | dict(use_sliding_window=True, sliding_window=9, max_window_layers=1)),
    "qwen3": ("Qwen3", SMALL | dict(head_dim=16)),
    "phi3": ("Phi3", SMALL | dict(sliding_window=15, pad_token_id=0)),
    "phi3_longrope_short": (
        "Phi3",
        SMALL | dict(rope_parameters=LONG, original_max_position_embeddings=64, pad_token_id=0),
    ),
    "gemma2": ("Gemma2", GEMMA | dict(attn_logit_softcapping=5.0, final_logit_softcapping=3.0)),
    "gemma3": ("Gemma3", GEMMA),
    "gpt2": ("GPT2", dict(vocab_size=137, n_embd=48, n_layer=3, n_head=4, n_positions=96)),
    "opt": ("OPT", SMALL | dict(ffn_dim=80, word_embed_proj_dim=48)),
    "opt_350m": ("OPT", SMALL | dict(ffn_dim=80, word_embed_proj_dim=24, do_layer_norm_before=False)),
}


def hf_model(family: str):
    """The transformers model, with weights large enough that a mistake shows."""
    kind, values = FAMILIES[family]
    config_class = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
    model_class = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    torch.manual_seed(0)
    model = model_class(config_class(**values, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    model = hf_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def load(folder, tensor_parallel_size: int = 1, max_model_len: int = 48):
    source = converters.resolve_model(str(folder))
    facts = converters.describe_model(
        source.hf_config, tensor_parallel_size=tensor_parallel_size, max_model_len=max_model_len
    )
    mesh = make_mesh(tensor_parallel_size)
    return converters.load_model(source, facts, dtype="float32", mesh=mesh), mesh


@jax.jit
def forward(model, batch, pages):
    hidden, pages = model(batch, pages)
    return model.logits(hidden), pages


def logits_of(loaded, mesh, tokens: list[int], chunks: list[int], block_tokens: int = 8) -> np.ndarray:
    """Logits of every position, computed chunk by chunk (a chunk of 1 as a decode row)."""
    facts, page_size = loaded.facts, 4
    windows = group_windows(facts.kv_layers)
    width = -(-len(tokens) // page_size)
    pages = allocate_pages(facts.kv_layers, [width + 1] * len(windows), page_size=page_size, dtype="float32", mesh=mesh)
    plan = AttentionPlan("xla", mesh, windows, page_size, block_tokens, dynamic_length=True)
    table = jnp.asarray(np.stack([np.arange(1, width + 1), np.zeros(width)]).astype(np.int32))
    found, start = [], 0
    for size in chunks:
        padded = size if size == 1 else -(-size // block_tokens) * block_tokens
        offsets = np.minimum(np.arange(padded), size - 1)
        batch = StepBatch(
            tokens=jnp.asarray(np.asarray(tokens, np.int32)[start + offsets]),
            positions=jnp.asarray((start + offsets).astype(np.int32)),
            rows=jnp.asarray(np.where(np.arange(padded) < size, 0, 1).astype(np.int32)),
            kv_lengths=jnp.asarray([start + size], dtype=jnp.int32),
            block_rows=jnp.zeros((0 if size == 1 else padded // block_tokens,), jnp.int32),
            page_tables=(table,) * len(windows),
            plan=plan,
        )
        logits, pages = forward(loaded.model, batch, pages)
        found.append(np.asarray(logits)[:size])
        start += size
    return np.concatenate(found)


def assert_close(actual: np.ndarray, expected: np.ndarray):
    assert np.abs(expected).max() > 0.1, "logits that are all near zero prove nothing"
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error < 1e-4, f"relative error {error:.2e}"


TOKENS = np.random.default_rng(3).integers(0, 137, 40).tolist()


def expected_logits(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def test_logits_equal_transformers(checkpoint):
    model, folder = checkpoint
    loaded, mesh = load(folder)
    assert_close(logits_of(loaded, mesh, TOKENS, [40]), expected_logits(model))


def test_chunks_and_decode_equal_one_prefill(checkpoint):
    model, folder = checkpoint
    loaded, mesh = load(folder)
    assert_close(logits_of(loaded, mesh, TOKENS, [17, 16, 3, 1, 1, 1, 1]), expected_logits(model))


@pytest.mark.parametrize("tensor_parallel_size", [2, 4])
def test_shards_equal_one_device(checkpoint, tensor_parallel_size):
    model, folder = checkpoint
    loaded, mesh = load(folder, tensor_parallel_size)
    assert_close(logits_of(loaded, mesh, TOKENS, [33, 6, 1]), expected_logits(model))


def test_long_factors_beyond_the_original_context(tmp_path):
    model = hf_model("phi3_longrope_short")
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(3).integers(0, 137, 80).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    loaded, mesh = load(tmp_path, max_model_len=96)
    assert_close(logits_of(loaded, mesh, tokens, [80]), expected)
