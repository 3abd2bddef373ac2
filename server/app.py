"""create_app: the whole HTTP application from its parts. No state outside of it."""

import hashlib
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.middleware.cors import CORSMiddleware

import jaxllm
from jaxllm.engine.client import EngineClient
from jaxllm.text.chat_template import ChatTemplate
from jaxllm.text.input_processor import InputProcessor
from server import operations
from server.http_metrics import MeasureHttp
from server.metrics import ServerMetrics
from server.middleware import EchoRequestId, RequireApiKey
from server.openai import chat, completions, errors, models
from server.openai.schemas import ChatCompletionRequest, CompletionRequest
from server.settings import ServerSettings
from server.state import ServerState

_BODIES = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatCompletionRequest}


def create_app(
    client: EngineClient,
    input_processor: InputProcessor,
    chat_template: ChatTemplate | None,
    settings: ServerSettings,
) -> FastAPI:
    """The application.

    Args:
        client: the engine; stays the caller's, who shuts it down after the server.
        input_processor: of the engine's model.
        chat_template: None for a model that cannot chat.
        settings: everything else.
    """
    executor = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="jaxllm-tokenize")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        executor.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="jaxllm", version=jaxllm.__version__, root_path=settings.root_path, redoc_url=None, lifespan=lifespan
    )
    app.state.server = ServerState(
        client=client,
        input_processor=input_processor,
        chat_template=chat_template,
        settings=settings,
        metrics=ServerMetrics(client, settings.model_name, settings.show_legacy_metrics),
        executor=executor,
        fingerprint=_fingerprint(client, settings),
        created=int(time.time()),
    )
    for router in (operations.router, models.router, completions.router, chat.router):
        app.include_router(router)
    errors.install_handlers(app)
    _add_middleware(app, settings, app.state.server.metrics)
    _describe_bodies(app)
    return app


def _add_middleware(app: FastAPI, settings: ServerSettings, metrics: ServerMetrics) -> None:
    """The last one added is the first one a request meets."""
    app.add_middleware(MeasureHttp, registry=metrics.registry)
    if settings.api_keys:
        app.add_middleware(RequireApiKey, keys=settings.api_keys, root_path=settings.root_path)
    app.add_middleware(EchoRequestId, always=settings.enable_request_id_headers)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.cors.allowed_origins,
        allow_methods=settings.cors.allowed_methods,
        allow_headers=settings.cors.allowed_headers,
        allow_credentials=settings.cors.allow_credentials,
        expose_headers=("X-Request-Id",),
    )


def _fingerprint(client: EngineClient, settings: ServerSettings) -> str:
    """Changes when the answers to the same request may: another version, model or limits."""
    facts = f"{jaxllm.__version__} {settings.model_path or settings.model_name} {client.model_info}"
    return f"jaxllm-{jaxllm.__version__}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"


def _describe_bodies(app: FastAPI) -> None:
    """Routes read their bodies themselves, so /openapi.json is told what they look like."""
    make_schema = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = make_schema()
            pairs: list[tuple[type[BaseModel], JsonSchemaMode]] = [(body, "validation") for body in _BODIES.values()]
            references, definitions = models_json_schema(pairs, ref_template="#/components/schemas/{model}")
            schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            for path, body in _BODIES.items():
                content = {"application/json": {"schema": references[(body, "validation")]}}
                schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        return app.openapi_schema or {}

    app.openapi = openapi
