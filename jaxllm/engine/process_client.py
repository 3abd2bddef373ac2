"""ProcessClient: the engine in a process of its own, reached by ZeroMQ and msgpack."""

import asyncio
import logging
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import zmq
import zmq.asyncio

from jaxllm.engine.base_client import BaseEngineClient
from jaxllm.engine.core_process import EngineAddress, run_engine
from jaxllm.engine.engine_loop import SteppingEngine
from jaxllm.engine.messages import (
    Command,
    Event,
    Heartbeat,
    Ready,
    Shutdown,
    StartFailed,
    encoder,
    event_decoder,
)
from jaxllm.errors import EngineDeadError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """How patient the client is, in seconds.

    Attributes:
        heartbeat_interval: between two signs of life of the engine process.
        heartbeat_timeout: silence after which a started engine counts as hung.
        step_timeout: a step that takes longer counts as hung. With compilation on first use
            (`enforce_eager`) a step contains it, so this must leave room for one.
        start_timeout: for loading, warm-up and compilation; None waits as long as the process lives.
        shutdown_timeout: for the last step to end, before the process is killed.
    """

    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 30.0
    step_timeout: float = 300.0
    start_timeout: float | None = None
    shutdown_timeout: float = 10.0

    def __post_init__(self):
        for name in ("heartbeat_interval", "heartbeat_timeout", "step_timeout", "shutdown_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0 seconds, got {getattr(self, name)}")
        if self.heartbeat_timeout < 2 * self.heartbeat_interval:
            raise ValueError(
                f"heartbeat_timeout ({self.heartbeat_timeout}) must be at least twice "
                f"heartbeat_interval ({self.heartbeat_interval})"
            )


class ProcessClient(BaseEngineClient):
    """An engine process and the only thing that talks to it. Made by `start`."""

    def __init__(self, build: Callable[[], SteppingEngine], options: ProcessOptions):
        super().__init__()
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="jaxllm-"))
        address = EngineAddress(f"ipc://{self._folder / 'commands'}", f"ipc://{self._folder / 'events'}")
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        shadow = zmq.asyncio.Context.shadow(self._context)  # pyright: ignore[reportUnknownMemberType]
        self._events = shadow.socket(zmq.PULL)
        # Unbounded: the number of requests bounds both queues, and a full one would block a loop.
        self._commands.set_hwm(0)
        self._events.set_hwm(0)
        self._events.bind(address.events)
        # Connecting, unlike binding, makes a queue at once: no command is lost before the handshake.
        self._commands.connect(address.commands)
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_engine,
            args=(build, address, options.heartbeat_interval),
            name="jaxllm-engine",
            daemon=True,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._exited = asyncio.Event()
        self._pid: int | None = None
        self._heard = False
        self._closed = False

    @classmethod
    async def start(cls, build: Callable[[], SteppingEngine], options: ProcessOptions | None = None) -> Self:
        """Spawn the process and wait until its engine is ready.

        Args:
            build: makes the engine in the new process; picklable.
            options: time limits.

        Raises:
            EngineDeadError: the engine could not be built; the message holds the engine's own
                error and traceback.
        """
        client = cls(build, options or ProcessOptions())
        try:
            await client._start()
        except BaseException:
            await client.shutdown()
            raise
        return client

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None before it was spawned."""
        return self._pid

    async def shutdown(self) -> None:
        """Stop the engine process: politely first, by force after `shutdown_timeout`."""
        if self._closed:
            return
        self._closed = True
        self._fail(EngineDeadError("the engine was shut down"))
        if self._pid is not None:
            await self._stop_process()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._commands.close(linger=0)
        self._events.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _start(self) -> None:
        # Spawning pickles `build` and waits for the child to read it: not on the event loop.
        await asyncio.to_thread(self._process.start)
        self._pid = self._process.pid
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._on_exit)
        self._tasks.append(asyncio.create_task(self._read_events()))
        try:
            async with asyncio.timeout(self._options.start_timeout):
                await self._ready
        except TimeoutError:
            raise EngineDeadError(
                f"the engine was not ready within start_timeout = {self._options.start_timeout} seconds"
            ) from None
        self._tasks.append(asyncio.create_task(self._watch()))

    async def _stop_process(self) -> None:
        if not self._exited.is_set():
            self._send(Shutdown())
            # An engine that is still being built does not listen yet.
            is_listening = self._ready.done() and not self._ready.cancelled()
            try:
                async with asyncio.timeout(self._options.shutdown_timeout if is_listening else 0):
                    await self._exited.wait()
            except TimeoutError:
                if is_listening:
                    logger.warning("the engine did not stop in time and is killed")
                self._process.kill()
                await self._exited.wait()
        await asyncio.to_thread(self._process.join)
        self._process.close()

    def _send(self, command: Command) -> None:
        self._commands.send(encoder.encode(command), zmq.NOBLOCK)

    async def _read_events(self) -> None:
        try:
            while True:
                message = await self._events.recv()
                self._heard = True
                self._handle(event_decoder.decode(message))
        except Exception as error:
            # Nothing would ever arrive again, so nothing may wait.
            logger.exception("cannot read from the engine process")
            self._fail(EngineDeadError(f"the engine's events cannot be read: {error}"))

    def _handle(self, event: Event) -> None:
        match event:
            case Heartbeat(step_seconds):
                if step_seconds > self._options.step_timeout:
                    self._declare_hung(f"a step has been running for {step_seconds:.0f} seconds")
            case Ready(model_info):
                self.model_info = model_info
                if not self._ready.done():
                    self._ready.set_result(None)
            case StartFailed(message, traceback):
                self._fail_start(f"the engine could not start: {message}\n{traceback}")
            case _:
                super()._handle(event)

    def _fail_start(self, message: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(EngineDeadError(message))

    def _on_exit(self) -> None:
        """The engine process has ended, for whatever reason."""
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._exited.set()
        # Its last words may still be on their way: a startup error says more than an exit code.
        asyncio.get_running_loop().call_later(0.2, self._on_exit_settled)

    def _on_exit_settled(self) -> None:
        if self._closed:
            return
        message = f"the engine process ended with exit code {self._process.exitcode}"
        self._fail_start(f"{message} before it was ready")
        if self._dead is None:
            logger.error(message)
            self._fail(EngineDeadError(message))

    async def _watch(self) -> None:
        """Counts silent intervals rather than comparing clocks: a stall of this event loop then
        costs one interval, not a living engine."""
        silent_seconds = 0.0
        while self._dead is None:
            self._heard = False
            await asyncio.sleep(self._options.heartbeat_interval)
            silent_seconds = 0.0 if self._heard else silent_seconds + self._options.heartbeat_interval
            if silent_seconds >= self._options.heartbeat_timeout:
                self._declare_hung(f"no sign of life for {silent_seconds:.0f} seconds")

    def _declare_hung(self, reason: str) -> None:
        if self._dead is None:
            logger.error("the engine hangs: %s", reason)
            self._fail(EngineDeadError(f"the engine hangs: {reason}"))
