"""Engines around tiny random models."""

import time
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
import torch
import transformers
from jaxllm.sharding import make_mesh

import converters
from jaxllm.config import EngineConfig
from jaxllm.engine.assemble import assemble_engine
from jaxllm.engine.engine import Engine
from jaxllm.engine.protocol import EngineRequest
from jaxllm.sampling_params import SamplingParams

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "torch_dtype": "float32",
}


@pytest.fixture(scope="session")
def make_engine(tmp_path_factory) -> Callable[..., Engine]:
    """make_engine(hf_config=LLAMA, **EngineConfig fields): float32, eager unless told otherwise."""

    folders: dict[str, Path] = {}

    def folder_of(hf_config: dict) -> Path:
        """A checkpoint of random weights, large enough that attention and sampling have something to do."""
        kind = hf_config["model_type"]
        if kind not in folders:
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf_config))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            folders[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folders[kind])
        return folders[kind]

    def make(hf_config: dict = LLAMA, **overrides) -> Engine:
        values = {
            "max_model_len": 512,
            "page_size": 16,
            "max_num_seqs": 40,
            "max_num_batched_tokens": 512,
            "kv_cache_bytes": 16 << 20,
            "dtype": "float32",
            "enforce_eager": True,
            "enable_prefix_caching": False,
        }
        config = EngineConfig(**(values | overrides))
        mesh = make_mesh(config.tensor_parallel_size, jax.devices())
        source = converters.resolve_model(str(folder_of(hf_config)))
        facts = converters.describe_model(source.hf_config, tensor_parallel_size=config.tensor_parallel_size)
        loaded = converters.load_model(source, facts, dtype="float32", mesh=mesh)
        return assemble_engine(
            loaded.model,
            config,
            kv_layers=facts.kv_layers,
            vocab_size=facts.vocab_size,
            hidden_size=facts.hidden_size,
            mesh=mesh,
            platform="cpu",
            model_facts=facts.config,
        )

    return make


@pytest.fixture(scope="session")
def generate() -> Callable[..., list[list[int]]]:
    """generate(engine, prompts, sampling): the tokens of each prompt's first sequence."""

    def run(engine: Engine, prompts: list[list[int]], sampling: SamplingParams | list[SamplingParams]):
        params = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(
                EngineRequest(
                    request_id=str(i),
                    prompt_tokens=prompt,
                    sampling=one,
                    arrival_time=time.time(),
                    eos_token_ids=[],
                )
            )
        outputs: list[list[int]] = [[] for _ in prompts]
        while engine.has_work():
            for delta in engine.step():
                if delta.index == 0:
                    outputs[int(delta.request_id)] += delta.tokens
            engine.scheduler.check()
        assert engine.stats().pages_in_use == 0
        return outputs

    return run


@pytest.fixture(scope="session")
def hf_configs() -> dict[str, dict]:
    return {"llama": LLAMA, "gemma": GEMMA}
