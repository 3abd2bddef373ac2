"""`jaxllm serve` in a process of its own on the small real model: streams that are cut, bad input, the end."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from converters.default_model import FILE_NAME, default_model_path

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    """The address of a running server; it must end with 0 after SIGTERM."""
    model = Path(os.environ.get("JAXLLM_TEST_MODELS") or default_model_path().parent) / FILE_NAME
    if not model.is_file():
        pytest.skip(f"{model} is not there; `python -m converters.default_model` fetches it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "server.cli", "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "2048", "--kv-cache-memory-bytes", "1G", "--served-model-name", "m"]
    command += ["--no-enable-prefix-caching"]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 180
        while process.poll() is None and time.monotonic() < end:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        else:
            process.kill()
            pytest.fail(log.read_text())
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()


def gauge(url: str, name: str) -> float:
    """A metric's value, summed over its labels."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{")]
    assert found, f"no metric {name}"
    return sum(found)


async def read(client: openai.AsyncOpenAI, number: int, cut_after: int | None = None) -> str:
    text, count = "", 0
    stream = await client.completions.create(
        model="m",
        prompt=f"Number {number} is",
        max_tokens=48,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        text += chunk.choices[0].text
        count += 1
        if count == cut_after:
            await stream.close()
            break
    return text


async def settled(url: str) -> None:
    """Wait until nothing runs, then look that nothing is held."""
    for _ in range(100):
        if gauge(url, "num_requests_running") + gauge(url, "num_requests_waiting") == 0:
            break
        await asyncio.sleep(0.1)
    assert gauge(url, "num_requests_running") == 0
    assert gauge(url, "num_requests_waiting") == 0
    assert gauge(url, "kv_cache_usage_perc") == 0


async def test_64_streams_half_of_them_cut(server):
    async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="x", timeout=300) as client:
        alone = [await read(client, number) for number in range(4)]
        cuts = [random.Random(0).choice([1, 2, 5, 11, 20]) if number % 2 else None for number in range(64)]
        texts = await asyncio.gather(*(read(client, number, cut) for number, cut in enumerate(cuts)))
        assert [texts[number] for number in (0, 2)] == [alone[0], alone[2]]
        for number in (1, 3):
            assert alone[number].startswith(texts[number])
        again = [await read(client, number) for number in (30, 62)]
        assert [texts[30], texts[62]] == again
    await settled(server)


async def test_bad_input_does_not_touch_a_stream(server):
    bad = [
        ({"model": "m", "prompt": "x " * 5000}, 400),
        ({"model": "nobody", "prompt": "x"}, 404),
        ({"model": "m", "prompt": {"a": 1}}, 400),
        ({"model": "m", "prompt": [10_000_000]}, 400),
        ({"model": "m", "prompt": "x", "n": 0}, 400),
        ({"model": "m", "prompt": "x", "temperature": -1}, 400),
        ({"model": "m", "prompt": "x", "max_tokens": "many"}, 400),
        ({"model": "m", "prompt": "x", "guided_regex": "a+"}, 400),
        (b"{broken", 400),
    ]
    async with (
        openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="x") as client,
        httpx.AsyncClient(base_url=server, timeout=60) as raw,
    ):
        alone = await read(client, 7)
        beside = asyncio.create_task(read(client, 7))
        for body, status in bad:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await raw.post("/v1/completions", headers={"Content-Type": "application/json"}, content=content)
            assert answer.status_code == status, (body, answer.text)
            assert answer.json()["error"]["message"] and answer.json()["error"]["code"] == status
        assert await beside == alone
    await settled(server)
