"""SamplingParams: rules, normalising, transport."""

from typing import Any

import msgspec
import numpy as np
import pytest

from jaxllm.errors import RequestError
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": 20000}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.0}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": "a", "detokenize": False}, "stop"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 20, "max_tokens": 5}, "min_tokens"),
    ({"logprobs": -2}, "logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {1: "x"}}, "logit_bias"),
    ({"logit_bias": {1: float("nan")}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [True]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
]


@pytest.mark.parametrize(("values", "param"), BAD, ids=str)
def test_bad_values_name_their_field(values: dict[str, Any], param: str):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert caught.value.param == param
    assert param in caught.value.message


def test_normalised():
    bias: Any = {"7": 500, 8: -1}
    params = SamplingParams(stop="x", seed=-1, top_k=-1, stop_token_ids=[3, 3, 4], logprobs=True, logit_bias=bias)
    assert params.stop == params.stop_strings == ["x"]
    assert (params.seed, params.top_k, params.stop_token_ids, params.logprobs) == (None, 0, [3, 4], 1)
    assert params.logit_bias == {7: 100.0, 8: -1.0}
    assert SamplingParams(logprobs=False).logprobs is None
    assert SamplingParams().stop == []


def test_greedy_switches_the_filters_off():
    params = SamplingParams(temperature=1e-6, top_p=0.5, top_k=3, min_p=0.1)
    assert params.is_greedy
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)
    assert SamplingParams(temperature=0.001).temperature == 0.01


def test_number_of_sequences():
    assert SamplingParams(n=2).num_sequences == 2
    assert SamplingParams(n=2, best_of=5).num_sequences == 5
    # All greedy sequences are the same one.
    assert SamplingParams(best_of=5, temperature=0).num_sequences == 1


def test_unknown_names_are_type_errors():
    with pytest.raises(TypeError):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"temprature.*known.*temperature"):
        SamplingParams.from_optional(temprature=1)
    with pytest.raises(TypeError):
        SamplingParams.from_optional(guided_json={})


def test_from_optional_takes_none_as_not_given():
    assert SamplingParams.from_optional(temperature=None, stop=None, n=None) == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional().max_tokens == 16


def test_clone_shares_nothing_and_validates():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0})
    copy = params.clone(n=2)
    assert (copy.n, copy.stop, copy.logit_bias) == (2, ["a"], {1: 2.0})
    assert copy.stop is not params.stop
    assert copy.logit_bias is not params.logit_bias
    with pytest.raises(RequestError):
        params.clone(n=0)


def test_msgpack_round_trip():
    params = SamplingParams(
        n=2, stop=["a"], seed=5, logit_bias={1: 2.0}, bad_words=["x"], output_kind=RequestOutputKind.DELTA
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5), ("stop_token_ids", 5), ("allowed_token_ids", 5), ("bad_words", "abc"), ("bad_words", {"a": 1}),
        ("logit_bias", [1]), ("logit_bias", {1.7: 1}), ("logit_bias", {1: "x"}), ("temperature", 10**400),
        ("temperature", "hot"), ("output_kind", "x"), ("include_stop_str_in_output", "no"), ("ignore_eos", 1),
        ("n", 1.5), ("seed", "x"),
    ],
)  # fmt: skip
def test_wrong_types_are_named(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_numpy_values_become_plain():
    given: dict[str, Any] = {
        "seed": np.int64(5),
        "temperature": np.float32(0.5),
        "stop_token_ids": np.array([1, 2]),
        "logit_bias": {np.int64(3): 1},
    }
    params = SamplingParams(**given)
    assert (params.seed, params.temperature, params.stop_token_ids, params.logit_bias) == (5, 0.5, [1, 2], {3: 1.0})
    assert type(params.seed) is int and type(params.temperature) is float
