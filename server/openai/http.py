"""Reading requests and answering clients that may leave at any moment."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from server.openai.errors import ApiError, malformed
from server.state import state_of

MAX_REQUEST_ID_LENGTH = 256
REQUEST_ID_HEADER = "X-Request-Id"


async def read_body[Body: BaseModel](request: Request, schema: type[Body]) -> Body:
    """The request's JSON body, validated.

    Raises:
        ApiError: not JSON, or larger than the server takes.
        ValidationError: JSON of another shape.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise malformed(f"Content-Type must be application/json, got {content_type or 'none'!r}")
    limit = state_of(request).settings.max_body_bytes
    too_large = ApiError(413, f"The request body is larger than {limit} bytes", "PayloadTooLargeError")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    # From bytes to the validated object in one pass; invalid UTF-8 and lone surrogates are not JSON.
    return schema.model_validate_json(bytes(body))


def new_request_id() -> str:
    """An id nobody else has."""
    return secrets.token_hex(16)


def public_id(request: Request, prefix: str, given: str | None) -> str:
    """The id of the answer: the caller's (header first, then body) or a new one."""
    own = request.headers.get(REQUEST_ID_HEADER) or given or new_request_id()
    return f"{prefix}-{own[:MAX_REQUEST_ID_LENGTH]}"


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has gone. Call it after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_unless_gone[T](request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it when the client leaves first.

    Raises:
        ClientDisconnect: the client left; nobody will read an answer.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        await _cancel(working, leaving)


def json_response(content: Any) -> Response:
    """`content` as JSON; msgspec encodes about ten times as fast as json."""
    return Response(msgspec.json.encode(content), media_type="application/json")


class EventStream(Response):
    """Server-sent events from a generator that is closed, whatever ends the answer.

    Args:
        events: whole events, framed. A client that leaves cancels it where it waits.
        on_end: called when the answer has ended, even if `events` was never started (a generator's own
            `finally` would then not run).
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], on_end: Callable[[], None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client leaves."""
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError:
            pass  # how some servers report that the client has gone
        finally:
            try:
                await _cancel(sending, leaving)
                await self._events.aclose()
            finally:
                self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
