"""The same token ids however the work is cut: chunks, cache, preemption, shards, neighbours."""

import numpy as np
import pytest

from jaxllm.sampling_params import SamplingParams

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(0, 131, size).tolist() for size in (1, 5, 16, 17, 33, 64, 100, 129, 180, 200)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "gemma"])
def hf_config(request):
    from_conftest = request.getfixturevalue("hf_configs")
    return from_conftest[request.param]


@pytest.fixture(scope="module")
def expected(make_engine, generate, hf_config):
    """Each prompt alone, whole, without cache and without overlap."""
    engine = make_engine(hf_config, async_scheduling=False)
    return [generate(engine, [prompt], GREEDY)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("budget", [40, 64, 512])
def test_chunk_sizes(make_engine, generate, hf_config, expected, budget):
    engine = make_engine(hf_config, max_num_batched_tokens=budget)
    assert generate(engine, PROMPTS, GREEDY) == expected


def test_prompt_in_chunks_of_sixteen(make_engine, generate, hf_config, expected):
    engine = make_engine(hf_config, max_num_batched_tokens=16, max_num_seqs=1)
    assert generate(engine, PROMPTS, GREEDY) == expected


def test_prefix_cache_cold_and_warm(make_engine, generate, hf_config, expected):
    engine = make_engine(hf_config, enable_prefix_caching=True)
    assert generate(engine, PROMPTS, GREEDY) == expected
    assert engine.stats().prefix_cache_hits == 0
    assert generate(engine, PROMPTS, GREEDY) == expected
    assert engine.stats().prefix_cache_hits > 0
    assert engine.reset_prefix_cache()
    assert generate(engine, PROMPTS, GREEDY) == expected


@pytest.mark.parametrize("swap_bytes", [0, 4 << 20])
def test_small_pool_preempts(make_engine, generate, hf_config, expected, swap_bytes):
    engine = make_engine(hf_config, num_pages=24, swap_bytes=swap_bytes)
    assert generate(engine, PROMPTS, GREEDY) == expected
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("tensor_parallel_size", [2, 4])
def test_tensor_shards(make_engine, generate, hf_config, expected, tensor_parallel_size):
    engine = make_engine(hf_config, tensor_parallel_size=tensor_parallel_size)
    assert generate(engine, PROMPTS, GREEDY) == expected


@pytest.mark.parametrize("num_decode_steps", [2, 8])
def test_several_steps_in_one_launch(make_engine, generate, hf_config, expected, num_decode_steps):
    engine = make_engine(hf_config, num_decode_steps=num_decode_steps)
    assert generate(engine, PROMPTS, GREEDY) == expected
    stats = engine.stats()
    assert stats.num_launches < stats.num_steps


def test_among_neighbours(make_engine, generate, hf_config, expected):
    engine = make_engine(hf_config)
    others = [RNG.integers(0, 131, size).tolist() for size in RNG.integers(1, 150, 32)]
    got = generate(engine, PROMPTS[3:4] + others + PROMPTS[6:7], GREEDY)
    assert [got[0], got[-1]] == [expected[3], expected[6]]


def test_seeded_sampling_alone_and_among_neighbours(make_engine, generate):
    engine = make_engine()
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True)
    free = SamplingParams(temperature=1.5, max_tokens=24, ignore_eos=True)
    alone = generate(engine, PROMPTS[4:5], seeded)[0]
    others = [RNG.integers(0, 131, size).tolist() for size in RNG.integers(1, 150, 32)]
    among = generate(engine, others + PROMPTS[4:5], [free] * 32 + [seeded])[-1]
    assert among == alone
    assert generate(engine, PROMPTS[4:5], free)[0] != generate(engine, PROMPTS[4:5], free)[0]
