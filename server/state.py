"""What the routes of one application share; made by `create_app`, found through the request."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fastapi import Request

from jaxllm.engine.client import EngineClient
from jaxllm.text.chat_template import ChatTemplate
from jaxllm.text.input_processor import InputProcessor
from server.metrics import ServerMetrics
from server.settings import ServerSettings


@dataclass
class ServerState:
    """Attributes:
    client: the engine.
    input_processor: prompts to engine requests; its tokenizer makes the text.
    chat_template: None for a model that cannot chat.
    settings: of the application.
    metrics: of the application.
    executor: renders templates and tokenises, away from the event loop.
    fingerprint: `system_fingerprint` of every answer.
    created: when the application was made, seconds since the epoch.
    num_requests: generating requests in flight.
    """

    client: EngineClient
    input_processor: InputProcessor
    chat_template: ChatTemplate | None
    settings: ServerSettings
    metrics: ServerMetrics
    executor: ThreadPoolExecutor
    fingerprint: str
    created: int
    num_requests: int = 0


def state_of(request: Request) -> ServerState:
    """The state of the application that serves `request`."""
    return request.app.state.server
