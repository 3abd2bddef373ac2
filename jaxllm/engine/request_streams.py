"""Routes the engine's deltas to the requests that wait for them. Lives on one asyncio loop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from jaxllm.engine.messages import Admission
from jaxllm.engine.protocol import EngineRequest, RequestDelta
from jaxllm.errors import RequestError


class RequestStream:
    """The deltas of one request, in order, until all its sequences have finished.

    `async for` over it, and always `close()` it: closing early aborts what still runs.
    """

    def __init__(self, request: EngineRequest, on_close: Callable[["RequestStream"], None]):
        self.request_id = request.request_id
        self._unfinished = set(range(request.sampling.n))
        self._deltas: deque[RequestDelta] = deque()
        self._error: Exception | None = None
        self._admitted = False
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_close = on_close

    @property
    def is_finished(self) -> bool:
        """Every sequence has ended (its last delta may still wait to be read)."""
        return not self._unfinished

    async def wait_admitted(self) -> None:
        """Return once the engine has taken the request.

        Raises:
            RequestError: the engine refused it.
            EngineDeadError: the engine died first.
        """
        while not self._admitted:
            if self._error is not None:
                raise self._error
            await self._wait()

    def __aiter__(self) -> AsyncIterator[RequestDelta]:
        return self

    async def __anext__(self) -> RequestDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._closed or not self._unfinished:
                raise StopAsyncIteration
            await self._wait()
        return self._deltas.popleft()

    def close(self) -> None:
        """Stop listening; sequences that have not finished are aborted."""
        if not self._closed:
            self._closed = True
            self._on_close(self)
            self._wake()

    def push(self, delta: RequestDelta) -> None:
        """Queue a delta; one for a sequence that has already ended is dropped."""
        if delta.index not in self._unfinished:
            return
        self._admitted = True
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self._unfinished.discard(delta.index)
        self._wake()

    def finish_sequence(self, index: int) -> None:
        """Expect nothing more of one sequence (the front end has ended it)."""
        self._unfinished.discard(index)
        self._wake()

    def admit(self) -> None:
        """The engine has taken the request."""
        self._admitted = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """Let the reader see `error` after the deltas that are already queued."""
        if self._unfinished and self._error is None:
            self._error = error
            self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RequestStreams:
    """All open streams of one engine.

    Args:
        abort: called with the id of a request that was closed before it had finished.
    """

    def __init__(self, abort: Callable[[str], None]):
        self._abort = abort
        self._streams: dict[str, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request: EngineRequest) -> RequestStream:
        """A new stream; the id must not be in use (the front end makes ids unique)."""
        if request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is already running", "request_id")
        stream = RequestStream(request, self._close)
        self._streams[request.request_id] = stream
        return stream

    def deliver(self, deltas: Iterable[RequestDelta]) -> None:
        """Hand each delta to its stream; those of closed streams are dropped."""
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.push(delta)

    def settle(self, admission: Admission) -> None:
        """Pass on which requests the engine took and which it refused."""
        for request_id in admission.accepted:
            if request_id in self._streams:
                self._streams[request_id].admit()
        for rejection in admission.rejected:
            stream = self._streams.pop(rejection.request_id, None)
            if stream is not None:
                stream.fail(RequestError(rejection.message, rejection.param))

    def finish_sequence(self, request_id: str, index: int) -> None:
        """Expect nothing more of one sequence."""
        if request_id in self._streams:
            self._streams[request_id].finish_sequence(index)

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """End every stream with an error of its own (a shared one would collect tracebacks)."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(make_error())

    def _close(self, stream: RequestStream) -> None:
        # A stream that was refused, or whose engine died, is no longer listed: nothing to abort.
        if self._streams.pop(stream.request_id, None) is not None and not stream.is_finished:
            self._abort(stream.request_id)
