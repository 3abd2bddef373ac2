"""GET /v1/models: what is served here."""

from typing import Any

from fastapi import APIRouter, Request

from server.openai.errors import unknown_model
from server.state import ServerState, state_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Every name a request may use."""
    state = state_of(request)
    return {"object": "list", "data": [_card(state, name) for name in state.settings.served_model_names]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """One of them."""
    state = state_of(request)
    if name not in state.settings.served_model_names:
        raise unknown_model(name)
    return _card(state, name)


def _card(state: ServerState, name: str) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{state.created:x}",
        "object": "model_permission",
        "created": state.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "jaxllm",
        "root": state.settings.model_path or name,
        "parent": None,
        "max_model_len": state.client.model_info.max_model_len,
        "permission": [permission],
    }
