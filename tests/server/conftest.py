"""An application over the fake engine and the byte tokenizer, and clients for it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.engine.client import EngineClient, InProcessClient
from jaxllm.testing import ByteTokenizer, FakeEngine
from jaxllm.text.chat_template import ChatTemplate
from jaxllm.text.input_processor import InputProcessor
from server.app import create_app
from server.settings import ServerSettings

MODEL = "fake"


@dataclass
class Served:
    """One application and what is behind it."""

    http: httpx.AsyncClient
    engine: FakeEngine
    client: EngineClient
    app: Any

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **options)

    async def completion(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": "Hello"} | body)

    async def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}]
        return await self.post("/v1/chat/completions", {"model": MODEL, "messages": messages} | body)

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.http.get("/metrics")).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        found = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"no sample {name} {labels}"
        return sum(found)

    @staticmethod
    def events(response: httpx.Response) -> list[dict[str, Any]]:
        """The JSON events of a streamed answer, which must end as it should."""
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
        assert data[-1] == "[DONE]"
        return [json.loads(line) for line in data[:-1]]

    @staticmethod
    async def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)


Serve = Callable[..., Served]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Makes applications; what they hold is shut down after the test."""
    made: list[Served] = []

    def make(
        settings: dict[str, Any] | None = None, generation_config: dict[str, Any] | None = None, **fake: Any
    ) -> Served:
        engine = FakeEngine(**fake)
        client = InProcessClient(engine)
        tokenizer = ByteTokenizer()
        inputs = InputProcessor(tokenizer, engine.model_info, generation_config=generation_config)
        values: dict[str, Any] = {"served_model_names": (MODEL, "alias")} | (settings or {})
        app = create_app(client, inputs, ChatTemplate(tokenizer), ServerSettings(**values))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        http = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)
        served = Served(http, engine, client, app)
        made.append(served)
        return served

    yield make
    for served in made:
        await served.http.aclose()
        await served.client.shutdown()
        served.app.state.server.executor.shutdown()
