"""The door: what passes, what is cut, what is refused and under which name."""

from typing import Any

import numpy as np
import pytest

from jaxllm.errors import RequestError
from jaxllm.generation_config import default_sampling_params, token_ids_of
from jaxllm.sampling_params import SamplingParams
from jaxllm.testing import ByteTokenizer, FakeEngine
from jaxllm.text.input_processor import InputProcessor
from jaxllm.text.tokenizer import Tokenizer

LIMIT = 100


def make(**engine: Any) -> InputProcessor:
    return InputProcessor(ByteTokenizer(), FakeEngine(max_model_len=LIMIT, **engine).model_info)


def refusal(inputs: InputProcessor, prompt: Any, strict: bool = True, **sampling: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        inputs.prepare(prompt, SamplingParams(**sampling), strict=strict)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ({"prompt_token_ids": []}, "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        (b"abc", "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt_embeds": []}, "prompt"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ([-1, 5], "prompt_token_ids"),
        ([9999999], "prompt_token_ids"),
        ([1, "a"], "prompt_token_ids"),
        ([True], "prompt_token_ids"),
        ("\ud83d", "prompt"),
    ],
    ids=repr,
)
def test_bad_prompts(prompt: Any, param: str):
    assert refusal(make(), prompt).param == param


def test_out_of_vocabulary_says_so():
    assert "vocab" in refusal(make(), [320]).message
    assert make().prepare([319]).engine_request.prompt_tokens == [319]


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logit_bias": {320: 1}}, "logit_bias"),
        ({"logit_bias": {-1: 1}}, "logit_bias"),
        ({"allowed_token_ids": [1, 320]}, "allowed_token_ids"),
        ({"max_tokens": LIMIT + 1}, "max_tokens"),
        ({"truncate_prompt_tokens": LIMIT + 1}, "truncate_prompt_tokens"),
    ],
    ids=str,
)
def test_bad_sampling(sampling: dict[str, Any], param: str):
    assert refusal(make(), "abc", **sampling).param == param


def test_the_context_limit():
    inputs = make()
    too_long = refusal(inputs, [1] * (LIMIT + 1))
    assert too_long.param == "input_tokens"
    assert too_long.message.startswith("This model's maximum context length is 100 tokens.")
    assert refusal(inputs, [1] * LIMIT).param == "max_tokens"
    last = inputs.prepare([1] * (LIMIT - 1), SamplingParams(max_tokens=8, min_tokens=4))
    assert last.engine_request.sampling.max_tokens == 1
    assert last.engine_request.sampling.min_tokens == 1


@pytest.mark.parametrize(("asked", "given"), [(None, 97), (8, 8), (97, 97), (100, 97)])
def test_max_tokens_is_cut_to_the_context(asked: int | None, given: int):
    prepared = make().prepare("abc", SamplingParams(max_tokens=asked), strict=True)
    assert prepared.engine_request.sampling.max_tokens == given
    assert prepared.sampling.max_tokens == asked


def test_python_callers_may_ask_for_more_than_the_context():
    prepared = make().prepare("abc", SamplingParams(max_tokens=5000))
    assert prepared.engine_request.sampling.max_tokens == 97


def test_a_request_that_never_fits_the_cache_is_refused():
    """It used to wait for ever: within the context, above the whole KV cache."""
    inputs = make(kv_capacity_tokens=50)
    assert refusal(inputs, [1] * 50).param == "input_tokens"
    assert refusal(inputs, [1] * 40, max_tokens=11).param == "max_tokens"
    assert inputs.prepare([1] * 40, SamplingParams(max_tokens=10)).engine_request.sampling.max_tokens == 10
    assert inputs.prepare([1] * 40, SamplingParams(max_tokens=None)).engine_request.sampling.max_tokens == 10


def test_truncation_keeps_the_end():
    inputs = make()
    for prompt in ("The capital", list(b"The capital")):
        request = inputs.prepare(prompt, SamplingParams(truncate_prompt_tokens=3)).engine_request
        assert bytes(request.prompt_tokens) == b"tal"
    fitting = inputs.prepare("a" * 300, SamplingParams(truncate_prompt_tokens=-1, max_tokens=30))
    assert len(fitting.engine_request.prompt_tokens) == LIMIT - 30


def test_a_huge_text_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch):
    inputs = make()
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("tokenised"))
    assert refusal(inputs, "x" * 1_000_000).param == "input_tokens"


def test_best_of_becomes_n_with_logprobs_to_rank_by():
    prepared = make().prepare("a", SamplingParams(n=2, best_of=5))
    engine = prepared.engine_request.sampling
    assert (engine.n, engine.best_of, engine.logprobs) == (5, None, 0)
    assert (prepared.sampling.n, prepared.sampling.logprobs) == (2, None)
    greedy = make().prepare("a", SamplingParams(best_of=5, temperature=0)).engine_request.sampling
    assert (greedy.n, greedy.logprobs) == (1, None)


def test_stop_ids_beyond_the_vocabulary_are_not_sent():
    request = make().prepare("a", SamplingParams(stop_token_ids=[5, 5000])).engine_request
    assert request.sampling.stop_token_ids == [5]


def test_bad_words_with_and_without_a_space():
    request = make().prepare("a", SamplingParams(bad_words=["hi"])).engine_request
    assert request.bad_word_tokens == [list(b"hi"), list(b" hi")]


def test_request_fields():
    inputs = make()
    request = inputs.prepare(
        {"prompt": "a", "cache_salt": "mine"}, request_id="r", priority=3, arrival_time=5.0
    ).engine_request
    assert (request.request_id, request.priority, request.arrival_time) == ("r", 3, 5.0)
    assert request.cache_salt == "mine"
    assert inputs.prepare("a").engine_request.request_id != inputs.prepare("a").engine_request.request_id


def test_defaults_from_the_generation_config():
    config = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "max_new_tokens": 7, "eos_token_id": 9}
    assert default_sampling_params(config) == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 7}
    info = FakeEngine().model_info
    inputs = InputProcessor(ByteTokenizer(), info, generation_config=config, eos_token_ids=[9, 10, 99999])
    assert inputs.eos_token_ids == [256, 9, 10]
    assert inputs.sampling_params() == SamplingParams(temperature=0.6, top_p=0.9, max_tokens=7)
    assert inputs.sampling_params(temperature=1.0, top_p=None, max_tokens=None) == SamplingParams(
        temperature=1.0, top_p=0.9, max_tokens=None
    )
    assert make().sampling_params() == SamplingParams()


def test_numpy_token_ids():
    prompt: Any = np.array([1, 2, 3])
    tokens = make().prepare(prompt).engine_request.prompt_tokens
    assert tokens == [1, 2, 3] and {type(token) for token in tokens} == {int}


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"allowed_token_ids": [65], "bad_words": ["A"]}, "bad_words"),
        ({"allowed_token_ids": [65, 66], "bad_words": ["A", "xB"]}, "bad_words"),
        ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2}, "allowed_token_ids"),
        ({"bad_words": [f"w{i}" for i in range(2000)]}, "bad_words"),
        ({"bad_words": ["w" * 300]}, "bad_words"),
    ],
)
def test_constraints_that_leave_nothing(sampling: dict[str, Any], param: str):
    assert refusal(make(), "a", **sampling).param == param


def test_constraints_that_leave_something():
    assert make().prepare("a", SamplingParams(allowed_token_ids=[65, 66], bad_words=["A"]))
    assert make().prepare("a", SamplingParams(allowed_token_ids=[7, 8], stop_token_ids=[7], min_tokens=2))


@pytest.mark.parametrize("value", ["x", [1, "x"], True, 1.5])
def test_eos_ids_of_a_configuration(value: Any):
    assert token_ids_of(None) == [] and token_ids_of(3) == [3] and token_ids_of([3, 4]) == [3, 4]
    with pytest.raises(ValueError, match="eos_token_id must be"):
        token_ids_of(value)
