"""ASGI middleware: who may come in, and the request id on the way out."""

import hashlib
import hmac
from collections.abc import Iterable

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.openai.http import MAX_REQUEST_ID_LENGTH, REQUEST_ID_HEADER, new_request_id

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/docs", "/openapi.json"})
"""Paths without a key. Everything else, known or not, needs one."""


class RequireApiKey:
    """Answers 401 unless the request carries one of the keys as a bearer token."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], root_path: str = ""):
        self._app = app
        self._root_path = root_path.rstrip("/")
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass."""
        if scope["type"] == "http" and not self._may_pass(scope):
            headers = {"WWW-Authenticate": "Bearer"}
            await JSONResponse({"error": "Unauthorized"}, 401, headers)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(self._root_path)
        if path in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = _digest(token)
        # Every key is compared, over digests of one length: the time taken tells nothing about any key.
        matches = [hmac.compare_digest(digest, own) for own in self._digests]
        return scheme.lower() == "bearer" and any(matches)


class EchoRequestId:
    """Sends X-Request-Id back, cut to a bounded length; makes one up if `always`."""

    def __init__(self, app: ASGIApp, always: bool = False):
        self._app = app
        self._always = always

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, with the header on the answer."""
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "") if scope["type"] == "http" else ""
        if not given and self._always and scope["type"] == "http":
            given = new_request_id()
            # The route reads the header, so the answer's id and the header agree.
            scope["headers"] = [*scope["headers"], (REQUEST_ID_HEADER.lower().encode(), given.encode())]
        if not given:
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(raw=message["headers"])[REQUEST_ID_HEADER] = given[:MAX_REQUEST_ID_LENGTH]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
