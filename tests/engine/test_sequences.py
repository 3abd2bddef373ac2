"""What ends a sequence, several sequences of a prompt, seeds, and what a request reports. A tiny llama."""

import time

import numpy as np
import pytest

from jaxllm.llm import LLM
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.byte_tokenizer import ByteTokenizer

RNG = np.random.default_rng(4)
PROMPT = RNG.integers(0, 256, 40).tolist()
OTHERS = [RNG.integers(0, 256, size).tolist() for size in (20, 30, 9, 60, 33)]
EOS = ByteTokenizer.EOS
LETTERS = list(range(ord("a"), ord("z") + 1))


@pytest.fixture(params=[1, 4], ids=["single steps", "four steps"])
def llm(make_llm, request) -> LLM:
    return make_llm(num_decode_steps=request.param)


def one(llm: LLM, sampling: SamplingParams, prompt=PROMPT):
    return llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0]


def many(llm: LLM, sampling: SamplingParams, prompt=PROMPT) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompt, sampling, use_tqdm=False)[0].outputs]


def letters(**values) -> SamplingParams:
    """Greedy text of letters, different from position to position."""
    fields = {"temperature": 0.0, "max_tokens": 24, "allowed_token_ids": LETTERS, "repetition_penalty": 1.3}
    return SamplingParams(**(fields | values))


def sampled(**values) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "max_tokens": 12, "ignore_eos": True} | values))


# Stopping.


def test_max_tokens_is_exact(llm):
    whole = one(llm, letters())
    assert whole.finish_reason == "length" and len(whole.token_ids) == 24
    for count in (1, 2, 7):
        output = one(llm, letters(max_tokens=count))
        assert output.token_ids == whole.token_ids[:count]
        assert (output.finish_reason, output.stop_reason) == ("length", None)
        assert output.text == bytes(output.token_ids).decode()


def test_stop_token_ends_the_sequence_and_is_hidden(llm):
    whole = one(llm, letters()).token_ids
    stop = next(token for i, token in enumerate(whole) if i > 4 and token not in whole[:i])
    length = whole.index(stop) + 1
    output = one(llm, letters(stop_token_ids=[stop, 300]))
    assert output.token_ids == whole[:length]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == bytes(whole[: length - 1]).decode()
    shown = one(llm, letters(stop_token_ids=[stop], include_stop_str_in_output=True))
    assert shown.text == bytes(whole[:length]).decode()


def test_eos_ends_unless_ignored(llm):
    sampling = SamplingParams(temperature=0.0, max_tokens=6, logit_bias={EOS: 100.0})
    output = one(llm, sampling)
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([EOS], "stop", None)
    assert output.text == ""
    ignored = one(llm, sampling.clone(ignore_eos=True))
    assert (ignored.token_ids, ignored.finish_reason) == ([EOS] * 6, "length")


def test_min_tokens_holds_back_eos_and_stop_tokens(llm):
    bias = {EOS: 90.0, ord("z"): 80.0}
    sampling = letters(logit_bias=bias, allowed_token_ids=[*LETTERS, EOS], stop_token_ids=[ord("z")], min_tokens=5)
    output = one(llm, sampling)
    assert len(output.token_ids) == 6 and output.token_ids[-1] == EOS
    assert not {EOS, ord("z")} & set(output.token_ids[:5])
    output = one(llm, sampling.clone(logit_bias={EOS: -90.0, ord("z"): 80.0}))
    assert len(output.token_ids) == 6 and output.stop_reason == ord("z")


def test_stop_string_cuts_the_text_and_aborts_the_sequence(llm):
    whole = one(llm, letters())
    stop = whole.text[9:12]
    end = whole.text.index(stop)
    output = one(llm, letters(stop=["never there", stop]))
    assert (output.text, output.finish_reason, output.stop_reason) == (whole.text[:end], "stop", stop)
    assert output.token_ids == whole.token_ids[: end + 3]
    shown = one(llm, letters(stop=stop, include_stop_str_in_output=True))
    assert shown.text == whole.text[: end + 3]
    late = one(llm, letters(stop=whole.text[2:4], min_tokens=10))
    assert len(late.token_ids) >= 10


def test_stop_string_of_one_sequence_leaves_its_siblings_running(llm):
    sampling = sampled(n=3, seed=2, allowed_token_ids=LETTERS, max_tokens=20)
    whole = many(llm, sampling)
    stop = bytes(whole[1][4:7]).decode()
    assert not any(stop.encode() in bytes(tokens) for tokens in (whole[0], whole[2]))
    outputs = llm.generate(PROMPT, sampling.clone(stop=stop), use_tqdm=False)[0].outputs
    assert [output.finish_reason for output in outputs] == ["length", "stop", "length"]
    assert outputs[1].token_ids == whole[1][:7]
    assert [outputs[0].token_ids, outputs[2].token_ids] == [whole[0], whole[2]]


# Several sequences, and seeds.


def test_sequences_of_a_seeded_request_are_those_of_the_following_seeds(llm):
    together = many(llm, sampled(n=4, seed=50))
    assert len(set(map(tuple, together))) == 4
    assert together == [many(llm, sampled(seed=50 + i))[0] for i in range(4)]
    assert many(llm, sampled(n=4, seed=50)) == together
    assert many(llm, sampled(n=4, seed=51))[:3] == together[1:]


@pytest.mark.parametrize("seed", [0, 2**63 - 1, -(2**63)])
def test_any_seed_of_64_bits(make_llm, seed):
    llm = make_llm()
    assert many(llm, sampled(n=2, seed=seed)) == many(llm, sampled(n=2, seed=seed))


def test_unseeded_sequences_differ(llm):
    outputs = [*many(llm, sampled(n=4)), *many(llm, sampled(n=4))]
    assert len(set(map(tuple, outputs))) == 8


@pytest.mark.parametrize(
    "policy",
    [
        {"enable_prefix_caching": True},
        {"max_num_batched_tokens": 8},
        {"num_pages": 12},
        {"num_pages": 12, "swap": True},
    ],
    ids=["cache", "small chunks", "preempted", "swapped"],
)
def test_siblings_are_the_same_however_they_run(make_llm, policy):
    sampling = sampled(n=6, seed=9, max_tokens=30)
    expected = many(make_llm(), sampling)
    llm = make_llm(**policy)
    assert many(llm, sampling) == expected
    assert many(llm, sampling) == expected
    if "num_pages" in policy:
        assert llm.get_metrics().num_preemptions > 0


@pytest.mark.parametrize("truncation", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_narrowest_truncation_is_greedy(llm, truncation):
    assert one(llm, sampled(**truncation)).token_ids == one(llm, sampled(temperature=0.0)).token_ids


def test_best_of_returns_the_most_likely_sequences(llm):
    everything = llm.generate(PROMPT, sampled(n=6, seed=3, logprobs=0), use_tqdm=False)[0].outputs
    ranked = sorted(everything, key=lambda output: -output.cumulative_logprob)
    best = llm.generate(PROMPT, sampled(n=2, best_of=6, seed=3, logprobs=0), use_tqdm=False)[0].outputs
    assert [output.token_ids for output in best] == [output.token_ids for output in ranked[:2]]
    assert [output.cumulative_logprob for output in best] == [output.cumulative_logprob for output in ranked[:2]]
    assert [output.index for output in best] == [0, 1]
    plain = llm.generate(PROMPT, sampled(n=2, best_of=6, seed=3), use_tqdm=False)[0].outputs
    assert [output.token_ids for output in plain] == [output.token_ids for output in ranked[:2]]
    assert all(output.logprobs is None and output.cumulative_logprob is None for output in plain)


# What a request reports.


def test_times_of_a_request(llm):
    start, monotonic = time.time(), time.monotonic()
    outputs = llm.generate([PROMPT, *OTHERS], sampled(n=2), use_tqdm=False)
    for output in outputs:
        metrics = output.metrics
        assert start <= metrics.arrival_time <= time.time()
        assert metrics.num_generation_tokens == 24
        times = [metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts]
        order = [monotonic, *times, time.monotonic()]
        assert order == sorted(order)
        assert metrics.first_token_ts < metrics.last_token_ts
        assert 0 < metrics.first_token_latency < time.time() - start


def test_cached_tokens_are_counted_in_whole_pages(make_llm):
    llm = make_llm(enable_prefix_caching=True)

    def cached(prompt) -> int:
        return llm.generate(prompt, sampled(max_tokens=1), use_tqdm=False)[0].num_cached_tokens

    assert cached(PROMPT) == 0
    assert cached(PROMPT) == 32
    assert cached([*PROMPT[:20], *OTHERS[0]]) == 16
    assert cached(PROMPT[:32]) == 16, "the last token has to be computed"
    assert cached(PROMPT[:33]) == 32
    assert cached({"prompt_token_ids": PROMPT, "cache_salt": "mine"}) == 0
    assert cached({"prompt_token_ids": PROMPT, "cache_salt": "mine"}) == 32
    assert cached([1, *PROMPT]) == 0
    stats = llm.get_metrics()
    assert stats.prefix_cache_hits == 32 + 16 + 16 + 32 + 32
    assert stats.prefix_cache_queries == 40 + 40 + 40 + 32 + 33 + 40 + 40 + 41
    assert llm.reset_prefix_cache()
    assert cached(PROMPT) == 0


def test_siblings_compute_their_prompt_once(make_llm):
    llm = make_llm(enable_prefix_caching=True)
    llm.generate(PROMPT, sampled(n=5), use_tqdm=False)
    assert llm.get_metrics().prefix_cache_hits == 4 * 32


def test_output_pages_are_found_by_the_next_turn(make_llm):
    llm = make_llm(enable_prefix_caching=True)
    output = one(llm, sampled(seed=1, max_tokens=30))
    turn = [*PROMPT, *output.token_ids, 7, 8, 9]
    # The last token was never computed: 69 of 70 positions, four whole pages.
    assert llm.generate(turn, sampled(), use_tqdm=False)[0].num_cached_tokens == 64


def test_counters_of_the_engine(llm):
    before = llm.get_metrics()
    llm.generate([PROMPT, *OTHERS], sampled(), use_tqdm=False)
    stats = llm.get_metrics()
    assert stats.prompt_tokens - before.prompt_tokens == len(PROMPT) + sum(map(len, OTHERS))
    assert stats.generation_tokens - before.generation_tokens == 6 * 12
    assert stats.num_preemptions == stats.num_unexpected_compiles == 0
