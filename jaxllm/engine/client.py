"""How the front end talks to an engine: one protocol, two transports.

`InProcessClient` runs the engine on a thread of this process, `ProcessClient` in a process of its
own. Both live on one asyncio loop; no other thread may touch them.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from jaxllm.engine.base_client import BaseEngineClient
from jaxllm.engine.engine_loop import EngineLoop, SteppingEngine
from jaxllm.engine.messages import Command, Event, Shutdown
from jaxllm.engine.process_client import ProcessClient as ProcessClient
from jaxllm.engine.process_client import ProcessOptions as ProcessOptions
from jaxllm.engine.protocol import EngineRequest, EngineStats, ModelInfo, RequestDelta
from jaxllm.engine.request_streams import RequestStream
from jaxllm.errors import EngineDeadError

logger = logging.getLogger(__name__)

__all__ = ["EngineClient", "InProcessClient", "ProcessClient", "ProcessOptions"]


class EngineClient(Protocol):
    """What the front end may ask of an engine."""

    @property
    def model_info(self) -> ModelInfo:
        """Facts needed to validate a request before it is sent."""
        ...

    @property
    def is_healthy(self) -> bool:
        """False once the engine is dead, hangs or has been shut down."""
        ...

    @property
    def latest_stats(self) -> EngineStats:
        """The last snapshot the engine pushed (at most 0.2 s old while it works)."""
        ...

    async def submit(self, request: EngineRequest) -> RequestStream:
        """Send a request; returns once the engine has taken it. The caller closes the stream.

        Raises:
            RequestError: the engine refused the request.
            EngineDeadError: the engine is dead or hangs.
        """
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[RequestDelta]:
        """`submit` and iterate; ends when all sequences have, closing it early aborts them."""
        ...

    def abort_sequence(self, request_id: str, index: int) -> None:
        """End one sequence (a stop string matched): the stream expects nothing more of it."""
        ...

    def subscribe_stats(self, listener: Callable[[EngineStats], None]) -> None:
        """Call `listener` with every snapshot the engine pushes."""
        ...

    async def stats(self) -> EngineStats:
        """The last snapshot."""
        ...

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is dead or hangs."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False if the engine could not (pages in use)."""
        ...

    async def shutdown(self) -> None:
        """Stop the engine; running requests get EngineDeadError. May be called twice."""
        ...


class InProcessClient(BaseEngineClient):
    """The engine on a thread of this process. Make it on the asyncio loop that will use it.

    Args:
        engine: owned by the client from here on.
        step_timeout: a step that runs longer than this many seconds counts as hung.
    """

    def __init__(self, engine: SteppingEngine, *, step_timeout: float = 300.0):
        super().__init__()
        self.model_info = engine.model_info
        self._step_timeout = step_timeout
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._engine_loop = EngineLoop(engine, self._receive, self._emit)
        self._thread = threading.Thread(target=self._engine_loop.run, name="jaxllm-engine", daemon=True)
        self._thread.start()
        self._watcher = self._loop.call_soon(self._watch)

    async def shutdown(self) -> None:
        """Stop the engine after its current step and wait for its thread."""
        self._fail(EngineDeadError("the engine was shut down"))
        self._watcher.cancel()
        self._commands.put(Shutdown())
        await asyncio.to_thread(self._thread.join)

    def _watch(self) -> None:
        seconds = self._engine_loop.step_seconds
        if seconds > self._step_timeout:
            self._fail(EngineDeadError(f"the engine hangs: a step has been running for {seconds:.0f} seconds"))
        if self._dead is None:
            self._watcher = self._loop.call_later(min(1.0, self._step_timeout), self._watch)

    def _send(self, command: Command) -> None:
        self._commands.put(command)

    def _receive(self, wait: bool) -> list[Command]:
        commands = [self._commands.get()] if wait else []
        # Bounded by what is there now, so that a flood of requests cannot keep the engine from stepping.
        for _ in range(self._commands.qsize()):
            commands.append(self._commands.get_nowait())
        return commands

    def _emit(self, event: Event) -> None:
        try:
            self._loop.call_soon_threadsafe(self._handle, event)
        except RuntimeError:
            # The loop was closed under a running engine: nobody is left to listen.
            logger.debug("dropped %s: the event loop is closed", type(event).__name__)
