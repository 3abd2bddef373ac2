"""Every sampling parameter end to end, on a tiny llama: LLM -> engine -> device, against transformers.

What a greedy request generated is replayed: for each of its tokens the logits of transformers are shaped
in numpy as the parameters say, and the token must be the best. That holds however the work was cut.
"""

import numpy as np
import pytest

from jaxllm.llm import LLM
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.byte_tokenizer import ByteTokenizer

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, 256, size).tolist() for size in (1, 40, 7, 33, 24, 50, 17, 64)]
PROMPT = PROMPTS[1]
EOS = ByteTokenizer.EOS
LETTERS = list(range(ord("a"), ord("z") + 1))
TOKENIZER = ByteTokenizer()

POLICIES = {
    "plain": {},
    "one at a time": {"max_num_seqs": 1, "async_scheduling": False},
    "chunks": {"max_num_batched_tokens": 16},
    "warm cache": {"enable_prefix_caching": True},
    "preempted": {"num_pages": 12},
    "swapped": {"num_pages": 12, "swap": True},
    "preempted, with a cache": {"num_pages": 12, "enable_prefix_caching": True},
    "several steps": {"num_decode_steps": 4},
}


@pytest.fixture
def llm(make_llm):
    return make_llm()


def greedy(**values) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True} | values)


def sampled(**values) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 20, "ignore_eos": True} | values)


def run(llm: LLM, prompts, sampling):
    return llm.generate(prompts, sampling, use_tqdm=False)


def tokens(llm: LLM, sampling: SamplingParams, prompt=PROMPT) -> list[int]:
    return run(llm, prompt, sampling)[0].outputs[0].token_ids


def shaped(logits: np.ndarray, prompt: list[int], output: list[int], sampling: SamplingParams) -> np.ndarray:
    """One position's logits as a greedy request compares them."""
    x = logits.astype(np.float64)
    if sampling.allowed_token_ids is not None:
        x[[t for t in range(len(x)) if t not in sampling.allowed_token_ids]] = -np.inf
    for token, bias in (sampling.logit_bias or {}).items():
        x[token] += bias
    for word in TOKENIZER.bad_word_token_ids(sampling.bad_words):
        if word[:-1] == output[len(output) - len(word) + 1 :] or len(word) == 1:
            x[word[-1]] = -np.inf
    if len(output) < sampling.min_tokens:
        x[[EOS, *sampling.stop_token_ids]] = -np.inf
    for token in {*prompt, *output}:
        x[token] = x[token] / sampling.repetition_penalty if x[token] > 0 else x[token] * sampling.repetition_penalty
    for token in set(output):
        x[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    return x


def check_replay(reference_logits, prompt: list[int], output: list[int], sampling: SamplingParams) -> None:
    logits = reference_logits([*prompt, *output[:-1]])[len(prompt) - 1 :]
    for i, token in enumerate(output):
        x = shaped(logits[i], prompt, output[:i], sampling)
        assert x[token] >= x.max() - 1e-3, f"token {i} is {token}, the best is {x.argmax()}"


GREEDY_FEATURES = {
    "greedy": greedy(),
    "repetition": greedy(repetition_penalty=1.8),
    "presence": greedy(presence_penalty=2.0),
    "frequency": greedy(frequency_penalty=1.5),
    "rewarded repetition": greedy(frequency_penalty=-1.0, repetition_penalty=0.8),
    "all penalties": greedy(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, max_tokens=30),
    "bias": greedy(logit_bias={65: 7.0, 66: -3.0, 270: 6.5}),
    "allowed": greedy(allowed_token_ids=LETTERS),
    "allowed and penalised": greedy(allowed_token_ids=LETTERS, repetition_penalty=1.5),
    "bad words": greedy(allowed_token_ids=LETTERS[:3], bad_words=["a", "bb", "bcb"]),
    "min_tokens": greedy(logit_bias={EOS: 30.0, 97: 25.0}, stop_token_ids=[97], min_tokens=6, ignore_eos=False),
}


@pytest.mark.parametrize("name", GREEDY_FEATURES)
def test_greedy_feature_alone(llm, reference_logits, name):
    sampling = GREEDY_FEATURES[name]
    output = tokens(llm, sampling)
    check_replay(reference_logits, PROMPT, output, sampling)
    if name != "greedy":
        assert output != tokens(llm, greedy(max_tokens=sampling.max_tokens)), "the parameters change nothing"


@pytest.fixture
def seeded_alone(make_llm):
    """Outputs of seeded requests, each alone."""
    llm = make_llm()
    return [tokens(llm, sampled(seed=i, temperature=0.8, top_k=40), prompt) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("policy", POLICIES)
def test_all_features_at_once(make_llm, reference_logits, seeded_alone, policy):
    """One batch of everything, greedy and sampled rows mixed, however it is scheduled."""
    llm = make_llm(**POLICIES[policy])
    features = list(GREEDY_FEATURES.values())
    prompts = [*PROMPTS, *(PROMPTS[i % len(PROMPTS)] for i in range(len(features)))]
    params = [sampled(seed=i, temperature=0.8, top_k=40) for i in range(len(PROMPTS))] + features
    for _ in range(2 if policy == "warm cache" else 1):
        outputs = [output.outputs[0].token_ids for output in run(llm, prompts, params)]
        assert outputs[: len(PROMPTS)] == seeded_alone
        for prompt, output, sampling in zip(prompts[len(PROMPTS) :], outputs[len(PROMPTS) :], features, strict=True):
            check_replay(reference_logits, prompt, output, sampling)
    stats = llm.get_metrics()
    assert (stats.num_preemptions > 0) == ("num_pages" in POLICIES[policy])
    if policy == "warm cache":
        assert stats.prefix_cache_hits > 0


# Log-probabilities.


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def check_position(entry, token: int, count: int, logits: np.ndarray) -> None:
    """A position's dict: the token itself, then the `count` best, with values and ranks of transformers."""
    expected = log_softmax(logits)
    best = np.argsort(-expected)[:count].tolist()
    assert list(entry) == list(dict.fromkeys([token, *best]))
    for id_, value in entry.items():
        assert value.logprob == pytest.approx(expected[id_], abs=2e-4)
        assert value.rank == (expected > expected[id_]).sum() + 1
    assert entry[token].decoded_token is not None


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize("policy", ["plain", "several steps"])
@pytest.mark.parametrize(
    "sampling", [greedy(), sampled(seed=5), greedy(repetition_penalty=1.5)], ids=["greedy", "sampled", "penalised"]
)
def test_logprobs_are_those_of_the_raw_logits(make_llm, reference_logits, count, policy, sampling):
    output = run(make_llm(**POLICIES[policy]), PROMPT, sampling.clone(logprobs=count))[0].outputs[0]
    logits = reference_logits([*PROMPT, *output.token_ids])[len(PROMPT) - 1 :]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    for i, token in enumerate(output.token_ids):
        check_position(output.logprobs[i], token, count, logits[i])
    chosen = sum(entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True))
    assert output.cumulative_logprob == pytest.approx(chosen)


@pytest.mark.parametrize("policy", ["plain", "chunks", "warm cache", "preempted", "swapped"])
def test_prompt_logprobs(make_llm, reference_logits, policy):
    llm = make_llm(**POLICIES[policy])
    plain = run(llm, PROMPTS, greedy())
    outputs = run(llm, PROMPTS, greedy(prompt_logprobs=3))
    for prompt, output, before in zip(PROMPTS, outputs, plain, strict=True):
        assert output.outputs[0].token_ids == before.outputs[0].token_ids
        assert before.prompt_logprobs is None
        assert output.num_cached_tokens == 0, "a prompt that is scored must be computed"
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
        logits = reference_logits(prompt)
        for i in range(1, len(prompt)):
            check_position(output.prompt_logprobs[i], prompt[i], 3, logits[i - 1])
    if policy == "warm cache":
        assert any(output.num_cached_tokens for output in run(llm, PROMPTS, greedy()))


def test_prompt_and_output_logprobs_with_several_sequences(llm, reference_logits):
    output = run(llm, PROMPT, sampled(n=3, seed=1, prompt_logprobs=0, logprobs=2))[0]
    logits = reference_logits(PROMPT)
    assert output.prompt_logprobs is not None
    for i in range(1, len(PROMPT)):
        check_position(output.prompt_logprobs[i], PROMPT[i], 0, logits[i - 1])
    for one in output.outputs:
        assert one.logprobs is not None
        check_position(one.logprobs[0], one.token_ids[0], 2, logits[-1])


def test_logprobs_not_asked_for_are_none(llm):
    output = run(llm, [PROMPT, PROMPT], [greedy(), greedy(logprobs=1)])[0]
    assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None
    assert output.prompt_logprobs is None
