"""POST /v1/chat/completions over the fake engine."""

import pytest

HI = [{"role": "user", "content": "Hi"}]


def content_of(events, index=0):
    return "".join(c["delta"].get("content") or "" for e in events for c in e["choices"] if c["index"] == index)


async def test_answer(serve):
    answer = (await serve().chat(max_tokens=4)).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant" and len(choice["message"]["content"]) == 4
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("length", None, None)
    assert not choice["message"].get("tool_calls")
    assert answer["usage"]["completion_tokens"] == 4
    assert {"service_tier", "prompt_logprobs", "system_fingerprint"} <= answer.keys()


async def test_runs_to_the_context_end_by_default(serve):
    answer = (await serve(max_model_len=64).chat()).json()
    assert answer["usage"]["total_tokens"] == 64


async def test_model_default_of_max_tokens_holds(serve):
    answer = (await serve(generation_config={"max_new_tokens": 7}).chat()).json()
    assert answer["usage"]["completion_tokens"] == 7


async def test_max_completion_tokens_wins(serve):
    answer = (await serve().chat(max_tokens=5, max_completion_tokens=2)).json()
    assert answer["usage"]["completion_tokens"] == 2


async def test_model_is_optional_and_may_be_an_alias(serve):
    served = serve()
    assert (await served.post("/v1/chat/completions", {"messages": HI, "max_tokens": 1})).json()["model"] == "fake"
    assert (await served.chat(model="alias", max_tokens=1)).json()["model"] == "alias"


async def test_template_options(serve):
    served = serve()

    async def prompt_text(**body):
        response = await served.chat(max_tokens=1, return_prompt_text=True, **body)
        assert response.status_code == 200, response.text
        return response.json()["prompt_text"]

    assert await prompt_text() == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert await prompt_text(add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"
    opened = [*HI, {"role": "assistant", "content": "The colour is"}]
    text = await prompt_text(messages=opened, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith("assistant\nThe colour is")
    developer = [{"role": "developer", "content": "Be brief"}, *HI]
    assert (await prompt_text(messages=developer)).startswith("<|im_start|>system\nBe brief")
    assert "wizard" in await prompt_text(messages=[{"role": "wizard", "content": "Hi"}])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "a\nb" in await prompt_text(messages=[{"role": "user", "content": parts}])


async def test_special_tokens_are_not_added_on_top_of_the_template(serve):
    served = serve()
    answer = (await served.chat(max_tokens=1, return_token_ids=True)).json()
    assert answer["prompt_token_ids"] == served.engine.requests[0].prompt_tokens
    assert answer["prompt_token_ids"][0] == 257 and answer["prompt_token_ids"].count(257) == 2


async def test_content_may_be_left_out(serve):
    assert (await serve().chat(messages=[{"role": "user"}], max_tokens=1)).status_code == 200
    messages = [*HI, {"role": "assistant", "content": None}, *HI]
    assert (await serve().chat(messages=messages, max_tokens=1)).status_code == 200


async def test_template_of_the_request_needs_trust(serve):
    template = "{{ messages[0]['content'] }}!"
    assert (await serve().chat(chat_template=template, max_tokens=1)).status_code == 400
    served = serve({"trust_request_chat_template": True})
    answer = (await served.chat(chat_template=template, max_tokens=1, return_prompt_text=True)).json()
    assert answer["prompt_text"] == "Hi!"


async def test_role_of_the_answer(serve):
    served = serve({"response_role": "robot"})
    assert (await served.chat(max_tokens=1)).json()["choices"][0]["message"]["role"] == "robot"
    answer = (await served.chat(max_tokens=1, add_generation_prompt=False)).json()
    assert answer["choices"][0]["message"]["role"] == "user"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_repeats_what_is_continued(serve, stream):
    served = serve()
    messages = [*HI, {"role": "assistant", "content": "It is "}]
    body = {"continue_final_message": True, "add_generation_prompt": False, "messages": messages, "max_tokens": 2}
    plain = (await served.chat(**body)).json()["choices"][0]["message"]["content"]
    response = await served.chat(**body, echo=True, stream=stream)
    text = content_of(served.events(response)) if stream else response.json()["choices"][0]["message"]["content"]
    assert text == "It is " + plain


async def test_logprobs(serve):
    served = serve()
    body = {"max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    (choice,) = (await served.chat(**body)).json()["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)
    events = served.events(await served.chat(**body, stream=True))
    assert [e["choices"][0]["logprobs"]["content"][0] for e in events[1:]] == content
    (choice,) = (await served.chat(max_tokens=1, logprobs=True)).json()["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


async def test_bytes_of_half_a_character(serve):
    served = serve(script=lambda request, index: "\u00e9".encode())
    (choice,) = (await served.chat(max_tokens=2, logprobs=True)).json()["choices"]
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[0xC3], [0xA9]]


async def test_prompt_logprobs(serve):
    answer = (await serve().chat(max_tokens=1, prompt_logprobs=0)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None and all(len(p) == 1 for p in answer["prompt_logprobs"][1:])


async def test_stream(serve):
    served = serve()
    whole = (await served.chat(max_tokens=4)).json()["choices"][0]["message"]["content"]
    events = served.events(await served.chat(max_tokens=4, stream=True))
    assert len(events) == 5 and len({e["id"] for e in events}) == 1
    assert all(e["object"] == "chat.completion.chunk" for e in events)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in e["choices"][0]["delta"] for e in events[1:])
    assert content_of(events) == whole
    assert [e["choices"][0]["finish_reason"] for e in events] == [None] * 4 + ["length"]
    assert not any("usage" in e for e in events)


async def test_stream_of_several_choices(serve):
    served = serve()
    body = {"n": 3, "max_tokens": 5, "seed": 7}
    whole = (await served.chat(**body)).json()
    options = {"include_usage": True}
    events = served.events(await served.chat(**body, stream=True, stream_options=options))
    for index in range(3):
        mine = [c for e in events for c in e["choices"] if c["index"] == index]
        assert sum("role" in c["delta"] for c in mine) == 1 and "role" in mine[0]["delta"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        assert content_of(events, index) == whole["choices"][index]["message"]["content"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {k: v for k, v in whole["usage"].items() if v is not None}


async def test_stream_returns_token_ids(serve):
    served = serve()
    events = served.events(await served.chat(max_tokens=2, stream=True, return_token_ids=True))
    assert events[0]["prompt_token_ids"] == served.engine.requests[0].prompt_tokens
    assert all(len(e["choices"][0]["token_ids"]) == 1 for e in events[1:])


async def test_end_of_sequence_gives_no_text(serve):
    answer = (await serve().chat(max_tokens=8, logit_bias={"256": 100})).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)
    assert answer["usage"]["completion_tokens"] == 1


async def test_request_id_of_the_header(serve):
    response = await serve().chat(max_tokens=1, request_id="body")
    assert response.json()["id"] == "chatcmpl-body"
    served = serve()
    body = {"messages": HI, "max_tokens": 1, "request_id": "body"}
    response = await served.post("/v1/chat/completions", body, headers={"X-Request-Id": "hdr-77"})
    assert response.json()["id"] == "chatcmpl-hdr-77"
    assert response.headers["x-request-id"] == "hdr-77"


async def test_truthy_strings_are_coerced(serve):
    served = serve()
    assert served.events(await served.chat(max_tokens=1, stream="yes"))
