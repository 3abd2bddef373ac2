"""Counts HTTP requests and times them, under the names of the usual FastAPI instrumentation."""

import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class MeasureHttp:
    """Measures every request until its answer has been sent.

    Args:
        app: what is measured.
        registry: where the metrics go.
    """

    def __init__(self, app: ASGIApp, registry: CollectorRegistry):
        self._app = app
        self._count = Counter(
            "http_requests",
            "Requests by handler, method and status.",
            ("handler", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Seconds until the answer was sent.",
            ("handler", "method"),
            buckets=_BUCKETS,
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on and measure."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        status = "5xx"

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = f"{message['status'] // 100}xx"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            # The route's template, not the path: callers must not be able to make up label values.
            handler = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if handler != "none" else "any"
            self._count.labels(handler, method, status).inc()
            self._seconds.labels(handler, method).observe(time.monotonic() - start)
