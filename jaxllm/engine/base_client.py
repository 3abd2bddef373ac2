"""The part of an engine client that does not depend on the transport."""

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable

from jaxllm.engine.messages import (
    AbortRequest,
    AddRequest,
    Admission,
    CallReply,
    Command,
    EngineFailed,
    Event,
    Heartbeat,
    Ready,
    ResetPrefixCache,
    StartFailed,
    StepOutputs,
)
from jaxllm.engine.protocol import EngineRequest, EngineStats, ModelInfo, RequestDelta
from jaxllm.engine.request_streams import RequestStream, RequestStreams
from jaxllm.errors import EngineDeadError

logger = logging.getLogger(__name__)


class BaseEngineClient(ABC):
    """Bookkeeping of requests, calls and statistics; a transport adds `_send` and `shutdown`."""

    model_info: ModelInfo

    def __init__(self) -> None:
        self._streams = RequestStreams(lambda request_id: self._send(AbortRequest(request_id)))
        self._calls: dict[int, asyncio.Future[bool]] = {}
        self._call_ids = itertools.count()
        self._stats = EngineStats()
        self._stats_listeners: list[Callable[[EngineStats], None]] = []
        self._dead: EngineDeadError | None = None

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Pass a command to the engine without waiting."""

    @abstractmethod
    async def shutdown(self) -> None:
        """Stop the engine; running requests get EngineDeadError. May be called twice."""

    @property
    def is_healthy(self) -> bool:
        """False once the engine is dead, hangs or has been shut down."""
        return self._dead is None

    @property
    def latest_stats(self) -> EngineStats:
        """The last snapshot the engine pushed."""
        return self._stats

    async def stats(self) -> EngineStats:
        """The last snapshot the engine pushed."""
        return self._stats

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is dead or hangs."""
        if self._dead is not None:
            raise self._death()

    async def submit(self, request: EngineRequest) -> RequestStream:
        """Send a request; returns once the engine has taken it. The caller closes the stream.

        Raises:
            RequestError: the engine refused the request.
            EngineDeadError: the engine is dead or hangs.
        """
        await self.check_health()
        stream = self._streams.open(request)
        try:
            self._send(AddRequest(request))
            await stream.wait_admitted()
        except BaseException:
            stream.close()
            raise
        return stream

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestDelta]:
        """`submit` and iterate; ends when all sequences have, closing it early aborts them."""
        stream = await self.submit(request)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.close()

    def abort_sequence(self, request_id: str, index: int) -> None:
        """End one sequence (a stop string matched): the stream expects nothing more of it."""
        self._streams.finish_sequence(request_id, index)
        if self._dead is None:
            self._send(AbortRequest(request_id, index))

    def subscribe_stats(self, listener: Callable[[EngineStats], None]) -> None:
        """Call `listener` with every snapshot the engine pushes."""
        self._stats_listeners.append(listener)

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False if the engine could not (pages in use)."""
        await self.check_health()
        call_id = next(self._call_ids)
        reply = asyncio.get_running_loop().create_future()
        self._calls[call_id] = reply
        try:
            self._send(ResetPrefixCache(call_id))
            return await reply
        finally:
            self._calls.pop(call_id, None)

    def _handle(self, event: Event) -> None:
        """Act on one event of the engine."""
        match event:
            case StepOutputs(deltas, stats):
                self._streams.deliver(deltas)
                if stats is not None:
                    self._publish(stats)
            case Admission():
                self._streams.settle(event)
            case CallReply(call_id, result):
                reply = self._calls.get(call_id)
                if reply is not None and not reply.done():
                    reply.set_result(result)
            case EngineFailed(message, traceback):
                logger.error("the engine failed: %s\n%s", message, traceback)
                self._fail(EngineDeadError(f"the engine failed: {message}"))
            case Ready() | StartFailed() | Heartbeat():
                pass  # they tell of a process, and only the client that has one reads them

    def _publish(self, stats: EngineStats) -> None:
        self._stats = stats
        for listener in self._stats_listeners:
            listener(stats)

    def _fail(self, error: EngineDeadError) -> None:
        """The engine is gone: nothing waits for it any more. The first reason is kept."""
        if self._dead is not None:
            return
        self._dead = error
        self._streams.fail_all(self._death)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(self._death())

    def _death(self) -> EngineDeadError:
        # A new object each time: one shared by many requests would collect all their tracebacks.
        return EngineDeadError(str(self._dead))
