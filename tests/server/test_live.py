"""A real server on a loopback port: the openai client, clients that leave, and many streams at once."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import uvicorn
from openai.types.chat import ChatCompletionMessageParam


@asynccontextmanager
async def listening(served) -> AsyncIterator[str]:
    """Serve the application on a free port; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        config = uvicorn.Config(served.app, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        free.listen(128)
        running = asyncio.create_task(server.serve(sockets=[free]))
        await served.eventually(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{free.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


async def test_openai_client(serve):
    served = serve({"api_keys": ("sk-x",)})
    async with listening(served) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-x") as client:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
        whole = await client.chat.completions.create(model="fake", messages=messages, max_tokens=8)
        text, usage = "", None
        async for chunk in await client.chat.completions.create(
            model="fake", messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}
        ):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage
        assert text == whole.choices[0].message.content and len(text) == 8
        assert usage is not None and usage.completion_tokens == 8
        completion = await client.completions.create(model="fake", prompt="Hello", max_tokens=3, logprobs=1)
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None and len(logprobs.tokens or []) == 3
        parts = [
            c.choices[0].text
            async for c in await client.completions.create(model="fake", prompt="Hello", max_tokens=3, stream=True)
        ]
        assert "".join(parts) == completion.choices[0].text
        assert [model.id async for model in client.models.list()] == ["fake", "alias"]
        assert (await client.models.retrieve("alias")).id == "alias"


async def test_openai_client_sees_errors(serve):
    async with listening(serve()) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        try:
            await client.completions.create(model="nope", prompt="x")
            raise AssertionError("an unknown model was served")
        except openai.NotFoundError as error:
            assert error.param == "model"
        try:
            await client.completions.create(model="fake", prompt="x", temperature=-1, stream=True)
            raise AssertionError("a bad temperature was served")
        except openai.BadRequestError as error:
            assert error.param == "temperature"


async def test_client_that_leaves_a_stream_aborts_it(serve):
    served = serve(step_seconds=0.01)
    async with listening(served) as url, httpx.AsyncClient(base_url=url) as http:
        body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 400, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                break
        await served.eventually(lambda: not served.engine.has_work())
        assert {index for _, index in served.engine.aborted} == {None}
        assert (await http.get("/load")).json() == {"server_load": 0}
        await served.eventually(lambda: served.client.latest_stats.num_running == 0)
        assert served.client.latest_stats.generation_tokens < 400
        assert await served.metric("vllm:request_success_total", finished_reason="abort") == 4


async def test_client_that_leaves_before_the_answer_aborts_it(serve):
    served = serve(step_seconds=0.01)
    async with listening(served) as url, httpx.AsyncClient(base_url=url) as http:
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 400}
            task = asyncio.create_task(http.post(path, json=body))
            await served.eventually(served.engine.has_work)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await served.eventually(lambda: not served.engine.has_work())


async def test_client_that_leaves_before_the_engine_has_looked(serve):
    """Leaving between submission and the first chunk is the moment when nobody has iterated yet."""
    served = serve(step_seconds=0.3)
    async with listening(served) as url, httpx.AsyncClient(base_url=url) as http:
        first = asyncio.create_task(served.completion(max_tokens=3))
        await served.eventually(served.engine.has_work)
        body = {"prompt": ["x", "y"], "max_tokens": 400, "stream": True}
        late = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(3)]
        for seconds, task in zip((0.02, 0.05, 0.25), late, strict=True):
            await asyncio.sleep(seconds)
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        assert (await first).status_code == 200
        await served.eventually(lambda: not served.engine.has_work())
        assert (await http.get("/load")).json() == {"server_load": 0}


async def test_many_streams_half_of_them_cut(serve):
    served = serve(step_seconds=0.002, max_num_seqs=64)

    async def read(http: httpx.AsyncClient, number: int) -> str:
        # Those that are cut could go on for longer than anybody takes to notice.
        body = {"prompt": f"prompt {number}", "max_tokens": 480 if number % 2 else 40, "stream": True}
        text = ""
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                if number % 2 and len(text) >= 5:
                    break
        return text

    limits = httpx.Limits(max_connections=64)
    async with listening(served) as url, httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as http:
        alone = await read(http, 0)
        texts = await asyncio.gather(*(read(http, number) for number in range(64)))
        assert texts[0] == alone
        assert all(len(text) == 40 for text in texts[::2])
        await served.eventually(lambda: not served.engine.has_work())
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/load")).json() == {"server_load": 0}
        assert await served.metric("vllm:request_success_total", finished_reason="abort") == 32
        assert await served.metric("vllm:request_success_total", finished_reason="length") == 33


async def test_long_prompt_does_not_stall_streams(serve):
    """Tokenising on the event loop once froze every stream for the length of the longest prompt."""
    served = serve(step_seconds=0.005, max_model_len=400_000, kv_capacity_tokens=400_000)
    gaps = []

    async def watch(http: httpx.AsyncClient) -> None:
        body = {"prompt": "x", "max_tokens": 300, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            last = None
            async for line in response.aiter_lines():
                now = asyncio.get_running_loop().time()
                if line and last is not None:
                    gaps.append(now - last)
                last = now

    async with listening(served) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        watching = asyncio.create_task(watch(http))
        await served.eventually(served.engine.has_work)
        response = await http.post("/v1/completions", json={"prompt": "word " * 60_000, "max_tokens": 1})
        assert response.status_code == 200
        await watching
    assert max(gaps) < 0.5
