"""Routes for those who run the server: health, metrics, version, load."""

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import jaxllm
from server.state import state_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine serves, 503 once it is dead or hangs. No body."""
    return Response(status_code=200 if state_of(request).client.is_healthy else 503)


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """The same under the name that SageMaker asks for."""
    return await health(request)


@router.get("/version")
async def version() -> dict[str, str]:
    """Version of this server."""
    return {"version": jaxllm.__version__}


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Generating requests in flight."""
    return {"server_load": state_of(request).num_requests}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    text = generate_latest(state_of(request).metrics.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
