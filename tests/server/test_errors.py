"""Bad requests: status, type and param, in one shape, before any stream starts."""

import json

import pytest

from jaxllm.errors import RequestError

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def assert_error(response, status, param=None, type=None):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status and error["message"]
    assert error["param"] == param, error
    if type is not None:
        assert error["type"] == type, error


BAD_CHATS = [
    ({"temperature": "hot"}, "body.temperature", "Bad Request"),
    ({"max_tokens": "ten"}, "body.max_tokens", "Bad Request"),
    ({"seed": "abc"}, "body.seed", "Bad Request"),
    ({"seed": 2**63}, "body.seed", "Bad Request"),
    ({"messages": "hi"}, "body.messages", "Bad Request"),
    ({"messages": [{"content": "Hi"}]}, "body.messages.0.role", "Bad Request"),
    ({"messages": [{"role": "user", "content": None}]}, "body.messages.0.content", "Bad Request"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "body.stop.list[constrained-str]", "Bad Request"),
    ({"messages": []}, "messages", "BadRequestError"),
    ({"messages": [{"role": "user", "content": [PNG]}]}, "messages.0.content.0", "BadRequestError"),
    ({"messages": [{"role": "user", "content": [{"type": "banana"}]}]}, "messages.0.content.0", "BadRequestError"),
    ({"continue_final_message": True}, "continue_final_message", "BadRequestError"),
    ({"chat_template": "x"}, "chat_template", "BadRequestError"),
    ({"temperature": -1}, "temperature", "BadRequestError"),
    ({"top_p": 0}, "top_p", "BadRequestError"),
    ({"top_k": -2}, "top_k", "BadRequestError"),
    ({"min_p": 2}, "min_p", "BadRequestError"),
    ({"n": 0}, "n", "BadRequestError"),
    ({"n": 2, "temperature": 0}, "n", "BadRequestError"),
    ({"frequency_penalty": -3}, "frequency_penalty", "BadRequestError"),
    ({"repetition_penalty": 0}, "repetition_penalty", "BadRequestError"),
    ({"max_tokens": 0}, "max_tokens", "BadRequestError"),
    ({"max_tokens": 513}, "max_tokens", "BadRequestError"),
    ({"max_completion_tokens": 513}, "max_completion_tokens", "BadRequestError"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "BadRequestError"),
    ({"best_of": 2}, "best_of", "BadRequestError"),
    ({"logits_processors": ["x"]}, "logits_processors", "BadRequestError"),
    ({"bad_words": [f"word {i}" for i in range(60_000)]}, "bad_words", "BadRequestError"),
    ({"bad_words": ["x" * 10_000]}, "bad_words", "BadRequestError"),
    ({"allowed_token_ids": [65], "bad_words": ["A"]}, "bad_words", "BadRequestError"),
    ({"priority": 2**63}, "body.priority", "Bad Request"),
    ({"max_tokens": 5, "min_tokens": 20}, "min_tokens", "BadRequestError"),
    ({"top_logprobs": 2}, "top_logprobs", "BadRequestError"),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "BadRequestError"),
    ({"logprobs": True, "top_logprobs": 100}, "top_logprobs", "BadRequestError"),
    ({"prompt_logprobs": -2}, "prompt_logprobs", "BadRequestError"),
    ({"logit_bias": {"abc": 1}}, "logit_bias", "BadRequestError"),
    ({"logit_bias": {"999999": 1}}, "logit_bias", "BadRequestError"),
    ({"allowed_token_ids": [999999]}, "allowed_token_ids", "BadRequestError"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "BadRequestError"),
    ({"bad_words": [""]}, "bad_words", "BadRequestError"),
    ({"stop": ""}, "stop", "BadRequestError"),
    ({"cache_salt": ""}, "cache_salt", "BadRequestError"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "BadRequestError"),
    # Known, and not served here.
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "BadRequestError"),
    ({"tools": []}, "tools", "BadRequestError"),
    ({"tool_choice": "auto"}, "tool_choice", "BadRequestError"),
    ({"response_format": {"type": "json_object"}}, "response_format", "BadRequestError"),
    ({"response_format": {"type": "yaml"}}, "body.response_format.type", "Bad Request"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "BadRequestError"),
    ({"guided_choice": ["a"]}, "guided_choice", "BadRequestError"),
    ({"use_beam_search": True}, "use_beam_search", "BadRequestError"),
    ({"length_penalty": 2.0}, "length_penalty", "BadRequestError"),
    ({"modalities": ["audio"]}, "modalities", "BadRequestError"),
    ({"thinking_token_budget": 5}, "thinking_token_budget", "BadRequestError"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "BadRequestError"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body, param, type", BAD_CHATS, ids=[json.dumps(b)[:60] for b, _, _ in BAD_CHATS])
async def test_bad_chat(serve, body, param, type, stream):
    served = serve()
    response = await served.chat(**{"max_tokens": 8, "stream": stream} | body)
    if param.startswith("body.stop"):
        param = response.json()["error"]["param"]
        assert param.startswith("body.stop")
    assert_error(response, 400, param, type)
    assert not served.engine.requests


BAD_COMPLETIONS = [
    ({"prompt": ""}, "prompt", "BadRequestError"),
    ({"prompt": None}, "prompt", "BadRequestError"),
    ({"prompt": []}, "prompt", "BadRequestError"),
    ({"prompt": ["a", ""]}, "prompt", "BadRequestError"),
    ({"prompt": [9999999]}, "prompt_token_ids", "BadRequestError"),
    ({"max_tokens": 0}, "max_tokens", "BadRequestError"),
    ({"max_tokens": -1}, "max_tokens", "BadRequestError"),
    ({"logprobs": -1}, "logprobs", "BadRequestError"),
    ({"logprobs": 100}, "logprobs", "BadRequestError"),
    ({"suffix": "abc"}, "suffix", "BadRequestError"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds", "BadRequestError"),
    ({"truncate_prompt_tokens": 9999}, "truncate_prompt_tokens", "BadRequestError"),
    ({"best_of": 1, "n": 2}, "best_of", "BadRequestError"),
    ({"prompt": [65] * 513}, "input_tokens", "BadRequestError"),
    ({"prompt": [65] * 512}, "max_tokens", "BadRequestError"),
    ({"prompt": "x" * 600}, "input_tokens", "BadRequestError"),
    ({"prompt": "x" * 600_000}, "input_tokens", "BadRequestError"),
]


@pytest.mark.parametrize("body, param, type", BAD_COMPLETIONS, ids=[json.dumps(b)[:40] for b, _, _ in BAD_COMPLETIONS])
async def test_bad_completion(serve, body, param, type):
    served = serve()
    assert_error(await served.completion(**body), 400, param, type)
    assert not served.engine.requests


@pytest.mark.parametrize("prompt", [[-1, 5], ["a", 1], [1.5], [True], [[]], 5, {"a": 1}])
async def test_prompt_of_no_known_form(serve, prompt):
    response = await serve().completion(prompt=prompt)
    param = response.json()["error"]["param"]
    assert param.startswith("body.prompt")
    assert_error(response, 400, param, "Bad Request")


async def test_missing_fields(serve):
    served = serve()
    assert_error(await served.post(CHAT, {}), 400, "body.messages", "Bad Request")
    assert_error(await served.post(COMPLETION, {}), 400, "prompt", "BadRequestError")


async def test_fields_that_exclude_each_other(serve):
    served = serve()
    assert_error(await served.completion(stream_options={"include_usage": True}), 400, "stream_options")
    assert_error(await served.completion(stream=True, prompt_logprobs=1), 400, "prompt_logprobs")
    response = await served.completion(stream=True, stream_options={"include_usage": "maybe"})
    assert_error(response, 400, "body.stream_options.include_usage", "Bad Request")


async def test_unknown_model(serve):
    served = serve()
    assert_error(await served.chat(model="nope"), 404, "model", "NotFoundError")
    assert_error(await served.completion(model="nope", stream=True), 404, "model", "NotFoundError")
    assert_error(await served.http.get("/v1/models/nope"), 404, "model", "NotFoundError")


async def test_unknown_fields_and_neutral_values_are_accepted(serve):
    body = {
        "max_tokens": 1,
        "nobody_knows_this": 1,
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "use_beam_search": False,
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "length_penalty": 1.0,
        "metadata": {"a": "b"},
    }
    response = await serve().chat(**body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "body", [b'{"model": ', b"", b"[1]", b'"x"', b'{"prompt": "\\ud83d"}', b'{"prompt": "\xff"}', b'{"a":1} x']
)
async def test_body_that_is_not_a_json_object(serve, body):
    """A lone surrogate once gave a 500, which clients retry."""
    headers = {"content-type": "application/json"}
    response = await serve().http.post(COMPLETION, content=body, headers=headers)
    assert_error(response, 400, None, "Bad Request")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
async def test_numbers_that_are_not_finite(serve, field, value):
    headers = {"content-type": "application/json"}
    body = f'{{"prompt": "x", "{field}": {value}}}'
    assert (await serve().http.post(COMPLETION, content=body, headers=headers)).status_code == 400


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_wrong_content_type(serve, content_type):
    body = json.dumps({"prompt": "x"})
    response = await serve().http.post(COMPLETION, content=body, headers={"content-type": content_type})
    assert_error(response, 400, None, "Bad Request")
    assert "application/json" in response.json()["error"]["message"]


async def test_charset_is_allowed(serve):
    headers = {"content-type": "application/json; charset=utf-8"}
    response = await serve().http.post(COMPLETION, content=b'{"prompt": "x", "max_tokens": 1}', headers=headers)
    assert response.status_code == 200


async def test_body_over_the_limit(serve):
    served = serve({"max_body_bytes": 1000})
    assert_error(await served.completion(prompt="x" * 2000), 413)

    async def chunks():
        for _ in range(20):
            yield b" " * 100

    headers = {"content-type": "application/json"}
    assert_error(await served.http.post(COMPLETION, content=chunks(), headers=headers), 413)


async def test_unknown_route_and_method(serve):
    served = serve()
    assert_error(await served.http.get("/nope"), 404, None, "NotFoundError")
    response = await served.http.get(CHAT)
    assert_error(response, 405)
    assert response.headers["allow"] == "POST"
    assert_error(await served.http.put(COMPLETION, json={}), 405)


async def test_refusal_by_the_engine_comes_before_the_stream(serve, monkeypatch):
    served = serve()

    def refuse(request):
        raise RequestError("no room", "prompt")

    monkeypatch.setattr(served.engine, "add_request", refuse)
    assert_error(await served.completion(stream=True), 400, "prompt", "BadRequestError")
    assert_error(await served.completion(prompt=["a", "b"]), 400, "prompt", "BadRequestError")
    assert (await served.http.get("/load")).json() == {"server_load": 0}


async def test_refusal_of_one_prompt_stops_the_others(serve, monkeypatch):
    served = serve(step_seconds=0.005)
    add = served.engine.add_request

    def refuse_b(request):
        if request.prompt_tokens == [98]:
            raise RequestError("not b", "prompt")
        add(request)

    monkeypatch.setattr(served.engine, "add_request", refuse_b)
    assert_error(await served.completion(prompt=["a", "b", "c"], max_tokens=400), 400, "prompt")
    await served.eventually(lambda: len(served.engine.aborted) == 2)
    await served.eventually(lambda: not served.engine.has_work())


async def test_engine_that_dies(serve):
    served = serve(fail_at_step=3)
    assert (await served.http.get("/health")).status_code == 200
    response = await served.completion(max_tokens=50, prompt=["a", "b"])
    assert_error(response, 500, None, "InternalServerError")
    assert "told to fail" in response.json()["error"]["message"]
    assert (await served.http.get("/health")).status_code == 503
    assert (await served.http.get("/ping")).status_code == 503
    assert_error(await served.completion(), 503, None, "ServiceUnavailableError")
    assert_error(await served.chat(stream=True), 503)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_engine_that_dies_during_a_stream(serve, path):
    served = serve(fail_at_step=3)
    body = {"messages": HI, "prompt": "x", "max_tokens": 50, "stream": True}
    *_, last_chunk, error = served.events(await served.post(path, body))
    assert last_chunk["choices"]
    assert error["error"]["code"] == 500 and "told to fail" in error["error"]["message"]


async def test_bug_in_a_route_is_a_500_without_details(serve, monkeypatch, caplog):
    served = serve()

    def broken(**values):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(served.app.state.server.input_processor, "sampling_params", broken)
    response = await served.chat()
    assert_error(response, 500, None, "InternalServerError")
    assert "secret" not in response.text
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop": ["a", "b", "c", "d", "e"]}, ["stop", "at most 4 items"]),
        ({"stop": [1]}, ["stop", "0", "valid string"]),
        ({"prompt": [-1]}, ["prompt", "0", "greater than or equal to 0"]),
        ({"prompt": [[]]}, ["prompt", "at least 1 item"]),
    ],
    ids=str,
)
async def test_of_several_types_the_nearest_complains(serve, fields, words):
    response = await serve().completion(**fields)
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and all(word in message for word in words), message
