"""The same token ids however the work is cut: chunks, cache, preemption, shards, neighbours.

The engines of a family share one runner, and so its compiled programs; what differs is the scheduler.
"""

import numpy as np
import pytest

from jaxllm.sampling_params import SamplingParams

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(0, 272, size).tolist() for size in (1, 5, 16, 17, 33, 64, 100, 129, 180, 200)]
OTHERS = [RNG.integers(0, 272, size).tolist() for size in RNG.integers(1, 150, 32)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
# Few programs: each takes seconds to compile. The default sizes are tested with test_features.
GRID = {"decode_rows": (1, 40), "mixed_decode_rows": (40,), "prefill_blocks": (2, 40), "num_steps": (1, 2, 8)}
SHARDED_GRID = {"decode_rows": (40,), "mixed_decode_rows": (40,), "prefill_blocks": (40,)}


@pytest.fixture(scope="module", params=["llama", "gemma"])
def hf_config(request, hf_configs):
    return hf_configs[request.param]


@pytest.fixture(scope="module")
def base(make_engine, hf_config):
    return make_engine(hf_config, grid=GRID, swap_bytes=4 << 20)


@pytest.fixture(scope="module")
def expected(base, with_policy, generate):
    """Each prompt alone, whole, without cache and without overlap."""
    engine = with_policy(base, async_scheduling=False)
    return [generate(engine, [prompt], GREEDY)[0] for prompt in PROMPTS]


def test_outputs_are_worth_comparing(expected):
    assert len(set(map(tuple, expected))) == len(PROMPTS)
    assert sum(len(set(output)) > 4 for output in expected) > len(PROMPTS) // 2, expected


@pytest.mark.parametrize("budget", [40, 64, 512])
def test_chunk_sizes(base, with_policy, generate, expected, budget):
    engine = with_policy(base, max_num_batched_tokens=budget)
    assert generate(engine, PROMPTS, GREEDY) == expected


def test_prompt_in_chunks_of_sixteen(base, with_policy, generate, expected):
    engine = with_policy(base, max_num_batched_tokens=16, max_num_seqs=1)
    assert generate(engine, PROMPTS, GREEDY) == expected


def test_prefix_cache_cold_and_warm(base, with_policy, generate, expected):
    engine = with_policy(base, enable_prefix_caching=True)
    assert generate(engine, PROMPTS, GREEDY) == expected
    assert engine.stats().prefix_cache_hits == 0
    assert generate(engine, PROMPTS, GREEDY) == expected
    assert engine.stats().prefix_cache_hits > 0
    assert engine.reset_prefix_cache()
    assert generate(engine, PROMPTS, GREEDY) == expected


@pytest.mark.parametrize("swap", [False, True])
def test_small_pool_preempts(base, with_policy, generate, expected, swap):
    engine = with_policy(base, num_pages=24, swap=swap)
    swapped_in = 0
    schedule = engine.scheduler.schedule

    def count_swaps():
        nonlocal swapped_in
        plan = schedule()
        swapped_in += 0 if plan is None else len(plan.swap_ins)
        return plan

    engine.scheduler.schedule = count_swaps
    assert generate(engine, PROMPTS, GREEDY) == expected
    assert engine.stats().num_preemptions > 0
    assert (swapped_in > 0) == swap


@pytest.mark.parametrize("tensor_parallel_size", [2, 4])
def test_tensor_shards(make_engine, generate, hf_config, expected, tensor_parallel_size):
    engine = make_engine(hf_config, grid=SHARDED_GRID, tensor_parallel_size=tensor_parallel_size)
    assert generate(engine, PROMPTS, GREEDY) == expected


@pytest.mark.parametrize("num_decode_steps", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_several_steps_in_one_launch(base, with_policy, generate, expected, num_decode_steps):
    engine = with_policy(base, num_decode_steps=num_decode_steps)
    launches = base.runner.num_launches
    assert generate(engine, PROMPTS, GREEDY) == expected
    stats = engine.stats()
    assert stats.num_launches - launches < stats.num_steps


def test_among_neighbours(base, with_policy, generate, expected):
    engine = with_policy(base)
    got = generate(engine, PROMPTS[3:4] + OTHERS + PROMPTS[6:7], GREEDY)
    assert [got[0], got[-1]] == [expected[3], expected[6]]


def test_seeded_sampling_alone_and_among_neighbours(base, with_policy, generate):
    engine = with_policy(base)
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True)
    free = SamplingParams(temperature=1.5, max_tokens=24, ignore_eos=True)
    alone = generate(engine, PROMPTS[4:5], seeded)[0]
    among = generate(engine, OTHERS + PROMPTS[4:5], [free] * 32 + [seeded])[-1]
    assert among == alone
    assert generate(engine, PROMPTS[4:5], free)[0] != generate(engine, PROMPTS[4:5], free)[0]
