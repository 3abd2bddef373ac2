"""POST /v1/completions over the fake engine: prompts, parameters, echo, log-probabilities, streams."""

import asyncio

import pytest

from jaxllm.testing import ByteTokenizer


def text_of(events, index=0):
    return "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index)


def scripted(text, end=()):
    tokens = [*text.encode(), *end]
    return lambda request, index: tokens


async def test_answer(serve):
    answer = (await serve().completion(max_tokens=4)).json()
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["model"] == "fake"
    (choice,) = answer["choices"]
    assert len(choice["text"]) == 4
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    assert choice["logprobs"] is None
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 4, 9)


async def test_default_is_16_tokens_and_null_goes_to_the_context_end(serve):
    served = serve(max_model_len=40)
    assert (await served.completion()).json()["usage"]["completion_tokens"] == 16
    assert (await served.completion(max_tokens=None)).json()["usage"]["total_tokens"] == 40


async def test_max_tokens_beyond_the_context_is_cut(serve):
    answer = (await serve(max_model_len=40).completion(max_tokens=38)).json()
    assert answer["usage"]["total_tokens"] == 40
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_four_forms_of_prompt(serve):
    served = serve()
    text = (await served.completion(prompt="ab", max_tokens=3)).json()["choices"]
    assert (await served.completion(prompt=[97, 98], max_tokens=3)).json()["choices"] == text
    both = (await served.completion(prompt=["ab", "c"], max_tokens=3)).json()
    assert both["choices"][0]["text"] == text[0]["text"]
    assert both["usage"]["prompt_tokens"] == 3
    ids = (await served.completion(prompt=[[97, 98], [99]], max_tokens=3)).json()
    assert [c["text"] for c in ids["choices"]] == [c["text"] for c in both["choices"]]


async def test_index_runs_over_prompts_and_samples(serve):
    body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 3, "seed": 5}
    served = serve()
    whole = (await served.completion(**body)).json()
    assert [c["index"] for c in whole["choices"]] == list(range(6))
    assert whole["usage"]["prompt_tokens"] == 3 and whole["usage"]["completion_tokens"] == 18
    events = served.events(await served.completion(**body, stream=True))
    assert [text_of(events, i) for i in range(6)] == [c["text"] for c in whole["choices"]]
    finishes = [c["index"] for e in events for c in e["choices"] if c["finish_reason"]]
    assert sorted(finishes) == list(range(6))


async def test_best_of_returns_n(serve):
    served = serve()
    answer = (await served.completion(best_of=3, n=2, max_tokens=2)).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 6
    assert all(c["logprobs"] is None for c in answer["choices"])
    assert served.engine.requests[0].sampling.n == 3
    events = served.events(await served.completion(best_of=3, n=2, max_tokens=2, stream=True))
    assert [text_of(events, i) for i in range(2)] == [c["text"] for c in answer["choices"]]


async def test_parameters_reach_the_engine(serve):
    served = serve()
    response = await served.completion(
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=11,
        min_tokens=2,
        stop_token_ids=[300],
        ignore_eos=True,
        logit_bias={"5": 3.5},
        allowed_token_ids=[65, 66],
        bad_words=["no"],
        priority=4,
        cache_salt="pepper",
        user="someone",
    )
    assert response.status_code == 200
    (request,) = served.engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.2, 0.3, 1.1)
    assert (sampling.seed, sampling.min_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (11, 2, [300], True)
    assert sampling.logit_bias == {5: 3.5} and sampling.allowed_token_ids == [65, 66]
    assert [110, 111] in request.bad_word_tokens
    assert (request.priority, request.cache_salt) == (4, "pepper")
    assert request.eos_token_ids == [ByteTokenizer.EOS]


async def test_unset_parameters_come_from_the_model(serve):
    served = serve(generation_config={"temperature": 0.3, "top_k": 9})
    await served.completion(max_tokens=1)
    await served.completion(max_tokens=1, temperature=0.8)
    assert [(r.sampling.temperature, r.sampling.top_k) for r in served.engine.requests] == [(0.3, 9), (0.8, 9)]


async def test_truncate_and_return_token_ids(serve):
    served = serve()
    body = {"prompt": "abcdef", "truncate_prompt_tokens": 2, "return_token_ids": True, "max_tokens": 2}
    (choice,) = (await served.completion(**body)).json()["choices"]
    assert choice["prompt_token_ids"] == [101, 102]
    assert bytes(choice["token_ids"]).decode() == choice["text"]
    events = served.events(await served.completion(**body, stream=True))
    assert events[0]["choices"][0]["prompt_token_ids"] == [101, 102]
    assert [e["choices"][0]["token_ids"] for e in events] == [[t] for t in choice["token_ids"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_never_leaks(serve, stream):
    served = serve(script=scripted("one two three four"))
    response = await served.completion(max_tokens=30, stop=["three", "o th"], stream=stream)
    if stream:
        events = served.events(response)
        text, last = text_of(events), events[-1]["choices"][0]
    else:
        last = response.json()["choices"][0]
        text = last["text"]
    assert (text, last["finish_reason"], last["stop_reason"]) == ("one tw", "stop", "o th")
    await served.eventually(lambda: any(index == 0 for _, index in served.engine.aborted))


async def test_stop_string_is_kept_on_request(serve):
    served = serve(script=scripted("one two"))
    (choice,) = (await served.completion(stop="tw", include_stop_str_in_output=True)).json()["choices"]
    assert choice["text"] == "one tw"


async def test_stop_token_is_counted_and_hidden(serve):
    answer = (await serve().completion(logit_bias={"65": 100}, stop_token_ids=[65])).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", 65)
    assert answer["usage"]["completion_tokens"] == 1


async def test_special_tokens_are_shown_on_request(serve):
    body = {"logit_bias": {"256": 100}, "ignore_eos": True, "max_tokens": 2}
    assert (await serve().completion(**body)).json()["choices"][0]["text"] == ""
    shown = (await serve().completion(**body, skip_special_tokens=False)).json()
    assert shown["choices"][0]["text"] == "<|im_end|><|im_end|>"


async def test_characters_are_never_cut(serve):
    text = "h\u00e9llo \U0001f600 w\u00f6rld \u65e5\u672c"
    served = serve(script=scripted(text))
    whole = (await served.completion(max_tokens=60)).json()["choices"][0]["text"]
    response = await served.completion(max_tokens=60, stream=True)
    assert "\ufffd" not in response.text
    assert text_of(served.events(response)) == whole == text


@pytest.mark.parametrize("logprobs", [0, 2])
async def test_logprobs(serve, logprobs):
    served = serve()
    (choice,) = (await served.completion(max_tokens=3, logprobs=logprobs)).json()["choices"]
    block = choice["logprobs"]
    assert "".join(block["tokens"]) == choice["text"]
    assert block["text_offset"] == [0, 1, 2]
    assert all(value < 0 for value in block["token_logprobs"])
    assert all(len(top) == max(1, logprobs) for top in block["top_logprobs"])
    events = served.events(await served.completion(max_tokens=3, logprobs=logprobs, stream=True))
    blocks = [e["choices"][0]["logprobs"] for e in events]
    for key in block:
        assert [value for b in blocks for value in b[key]] == block[key]


async def test_tokens_as_ids(serve):
    (choice,) = (await serve().completion(max_tokens=1, logprobs=1, return_tokens_as_token_ids=True)).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{ord(choice['text'])}"]


async def test_minus_infinity_is_a_number(serve, monkeypatch):
    served = serve()
    make = served.engine._logprobs

    def with_infinity(token, count):
        entry = make(token, count)
        entry.logprobs[:] = [float("-inf")] * len(entry.logprobs)
        return entry

    monkeypatch.setattr(served.engine, "_logprobs", with_infinity)
    (choice,) = (await served.completion(max_tokens=1, logprobs=1, prompt_logprobs=0)).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]
    assert next(iter(choice["prompt_logprobs"][1].values()))["logprob"] == -9999.0


async def test_prompt_logprobs(serve):
    (choice,) = (await serve().completion(prompt="abc", max_tokens=1, prompt_logprobs=1)).json()["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == 2
    assert rest[0]["98"]["decoded_token"] == "b" and rest[0]["98"]["rank"] == 1


@pytest.mark.parametrize("prompt", ["Yes", [89, 101, 115]])
async def test_echo(serve, prompt):
    served = serve()
    plain = (await served.completion(prompt=prompt, max_tokens=2)).json()["choices"][0]["text"]
    (choice,) = (await served.completion(prompt=prompt, max_tokens=2, echo=True, logprobs=1)).json()["choices"]
    assert choice["text"] == "Yes" + plain
    block = choice["logprobs"]
    assert block["token_logprobs"][0] is None and block["top_logprobs"][0] is None
    assert "".join(block["tokens"]) == choice["text"] and block["text_offset"] == [0, 1, 2, 3, 4]
    assert choice["prompt_logprobs"] is None
    events = served.events(await served.completion(prompt=prompt, max_tokens=2, echo=True, logprobs=1, stream=True))
    assert text_of(events) == choice["text"]
    assert [t for e in events for t in e["choices"][0]["logprobs"]["tokens"]] == block["tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_output_scores_the_prompt(serve, stream):
    """The scoring request of lm-eval once crashed servers, and others count the hidden token."""
    served = serve()
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = await served.completion(
        prompt="Your answer: Yes", max_tokens=0, echo=True, logprobs=1, min_tokens=3, stream=stream, **options
    )
    if stream:
        chunk, final = served.events(response)
        choice, usage = chunk["choices"][0], final["usage"]
    else:
        choice, usage = response.json()["choices"][0], response.json()["usage"]
    assert (choice["text"], choice["finish_reason"]) == ("Your answer: Yes", "length")
    assert len(choice["logprobs"]["token_logprobs"]) == 16
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, 16)
    assert await served.metric("vllm:generation_tokens_total") == 0


async def test_stream_has_one_chunk_per_token_and_no_usage(serve):
    served = serve()
    events = served.events(await served.completion(max_tokens=3, stream=True))
    assert len(events) == 3 and len({e["id"] for e in events}) == 1
    assert [e["choices"][0]["finish_reason"] for e in events] == [None, None, "length"]
    assert not any("usage" in e for e in events)
    assert ["system_fingerprint" in e for e in events] == [False, False, True]


async def test_usage_in_streams(serve):
    served = serve()
    body = {"max_tokens": 3, "stream": True}
    events = served.events(await served.completion(**body, stream_options={"include_usage": True}))
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 3
    assert not any("usage" in e for e in events[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = served.events(await served.completion(**body, stream_options=options))
    assert [e["usage"]["completion_tokens"] for e in events] == [1, 2, 3, 3]


async def test_usage_can_be_forced_by_the_server(serve):
    served = serve({"enable_force_include_usage": True, "enable_prompt_tokens_details": True})
    events = served.events(await served.completion(max_tokens=1, stream=True))
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_tokens_that_come_together_stay_together(serve):
    served = serve(tokens_per_step=4)
    events = served.events(await served.completion(max_tokens=6, stream=True))
    assert [len(e["choices"][0]["text"]) for e in events] == [4, 2]


async def test_same_request_id_twice_at_once(serve):
    """Two live requests of one id once crashed the engine or mixed their streams."""
    served = serve(step_seconds=0.002)
    alone = (await served.completion(max_tokens=30, prompt="b")).json()["choices"][0]["text"]
    first, second = await asyncio.gather(
        served.completion(max_tokens=30, prompt="a", request_id="same"),
        served.post("/v1/completions", {"prompt": "b", "max_tokens": 30}, headers={"X-Request-Id": "same"}),
    )
    assert first.json()["id"] == second.json()["id"] == "cmpl-same"
    assert second.json()["choices"][0]["text"] == alone != first.json()["choices"][0]["text"]
    assert second.headers["x-request-id"] == "same" and "x-request-id" not in first.headers


async def test_request_id_is_cut(serve):
    response = await serve().completion(max_tokens=1, request_id="x" * 1000)
    assert len(response.json()["id"]) == len("cmpl-") + 256
    response = await serve({"enable_request_id_headers": True}).completion(max_tokens=1)
    assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"
