"""Engines around tiny random models."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers

import converters
from jaxllm.config import EngineConfig
from jaxllm.engine.assemble import assemble_engine, set_up_engine
from jaxllm.engine.engine import Engine
from jaxllm.engine.protocol import EngineRequest
from jaxllm.engine.scheduler import Scheduler
from jaxllm.llm import LLM
from jaxllm.sampling_params import SamplingParams
from jaxllm.sharding import make_mesh
from jaxllm.text.byte_tokenizer import ByteTokenizer

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "torch_dtype": "float32",
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[dict], Path]:
    """checkpoint(hf_config): a folder of random weights, large enough that attention has something to do.

    Embeddings that are tied to the head stay small: else the model would repeat its input for ever.
    """
    folders: dict[str, Path] = {}

    def folder_of(hf_config: dict) -> Path:
        kind = hf_config["model_type"]
        if kind not in folders:
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf_config))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "embed" not in name or not model.config.tie_word_embeddings:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            folders[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folders[kind])
        return folders[kind]

    return folder_of


@pytest.fixture(scope="session")
def make_engine(checkpoint) -> Callable[..., Engine]:
    """make_engine(hf_config=LLAMA, **EngineConfig fields): float32, eager unless told otherwise.

    `grid` (fields of BucketGrid) replaces the sizes that are compiled: few of them make a test fast.
    """

    def make(hf_config: dict = LLAMA, grid: dict[str, Any] | None = None, **overrides) -> Engine:
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
        source = converters.resolve_model(str(checkpoint(hf_config)))
        facts = converters.describe_model(source.hf_config, tensor_parallel_size=config.tensor_parallel_size)
        loaded = converters.load_model(source, facts, dtype="float32", mesh=mesh)
        setup = set_up_engine(config, kv_layers=facts.kv_layers, mesh=mesh, platform="cpu", model_facts=facts.config)
        engine = assemble_engine(loaded.model, setup, vocab_size=facts.vocab_size, hidden_size=facts.hidden_size)
        if grid is not None:
            engine.runner.programs.grid = replace(engine.runner.programs.grid, **grid)
        return engine

    return make


@pytest.fixture(scope="session")
def with_policy() -> Callable[..., Engine]:
    """with_policy(engine, ...): another engine on the same runner, whose programs it shares, with a scheduler
    of its own. The engines may be used in turn, not at once.

    num_pages: at most so many usable pages in each group. swap: use the runner's host pages.
    async_scheduling: as EngineConfig. The rest are fields of Scheduler.
    """

    def make(
        engine: Engine, *, num_pages: int | None = None, swap: bool = False, async_scheduling: bool = True, **fields
    ) -> Engine:
        old, config = engine.scheduler, engine.config
        groups = old.allocator.groups
        if num_pages is not None:
            groups = [replace(group, num_pages=min(group.num_pages, num_pages + 1)) for group in groups]
        values = {
            "page_size": config.page_size,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_model_len": config.max_model_len,
            "enable_prefix_caching": config.enable_prefix_caching,
            "num_swap_pages": [pool.num_usable for pool in old.allocator.host_pools] if swap else None,
            "max_prefill_rows": old.max_prefill_rows,
        }
        scheduler = Scheduler(groups, **(values | fields))
        config = replace(config, async_scheduling=async_scheduling)
        return Engine(engine.runner, scheduler, config, engine.model_info)

    return make


@pytest.fixture(scope="session")
def tiny_engine(make_engine) -> Engine:
    """A llama of 8 rows, 64 tokens a step, 256 tokens a sequence, with host pages; its programs are shared."""
    grid = {"decode_rows": (1, 8), "mixed_decode_rows": (0, 8), "prefill_blocks": (4, 12), "num_steps": (1, 4)}
    return make_engine(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, swap_bytes=1 << 20, grid=grid)


@pytest.fixture
def make_llm(tiny_engine, with_policy) -> Iterator[Callable[..., LLM]]:
    """make_llm(**policy): an LLM around the tiny engine (see with_policy) with a tokenizer of bytes.

    After the test nothing may run or hold a page.
    """
    engines = []

    def make(**policy) -> LLM:
        engines.append(with_policy(tiny_engine, **policy))
        return LLM.from_engine(engines[-1], ByteTokenizer())

    yield make
    for engine in engines:
        assert not engine.has_work() and not engine._device_params
        engine.scheduler.check()
        stats = engine.stats()
        assert (stats.pages_in_use, stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0, 0)
        assert stats.kv_cache_usage == stats.swap_usage == 0.0


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
def reference_logits(checkpoint) -> Callable[[list[int]], np.ndarray]:
    """reference_logits(tokens): float32 logits [len(tokens), vocab] of the llama in transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(LLAMA), dtype=torch.float32).eval()

    def logits(tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].numpy()

    return logits


@pytest.fixture(scope="session")
def hf_configs() -> dict[str, dict]:
    return {"llama": LLAMA, "gemma": GEMMA}
