"""The engine process: build the engine, report, run its loop until told to stop.

Two sockets lead to the front end. The main thread sends events over one; the heartbeat thread has
its own, so that a step that never returns cannot silence it. What the heartbeat says about the
running step is how the front end tells a hung engine from a busy one.
"""

import contextlib
import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing import connection, parent_process
from pathlib import Path

import msgspec
import zmq

from jaxllm.engine.engine_loop import EngineLoop, SteppingEngine
from jaxllm.engine.messages import (
    Command,
    Event,
    Heartbeat,
    Ready,
    StartFailed,
    command_decoder,
    encoder,
)

logger = logging.getLogger(__name__)

# How long an ending process tries to get its last words out.
_LINGER_MS = 2000


class EngineAddress(msgspec.Struct, frozen=True):
    """The ZeroMQ endpoints: commands to the engine (which binds it), events from it (the front end does)."""

    commands: str
    events: str


def run_engine(build: Callable[[], SteppingEngine], address: EngineAddress, heartbeat_interval: float = 1.0) -> None:
    """Entry point of the engine process, which it ends: with 0 after a clean stop, 1 after a failure.

    Args:
        build: makes the engine, warm and ready to step; picklable (a module-level function or a
            `functools.partial` of one), because the process is spawned.
        address: where to listen for commands and where the front end listens for events.
        heartbeat_interval: seconds between two signs of life.
    """
    # Ctrl-C reaches the whole process group; the front end decides how to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with zmq.Context() as context, context.socket(zmq.PUSH) as events:
        events.setsockopt(zmq.LINGER, _LINGER_MS)
        events.set_hwm(0)
        events.connect(address.events)
        heart = _Heart(context, address, heartbeat_interval)
        heart.start()
        try:
            clean = _build_and_run(build, address, context, events, heart)
        finally:
            heart.stop()
    # Nothing is left to do, and a thread may be in the compiler for a while yet.
    logging.shutdown()
    os._exit(0 if clean else 1)


def _build_and_run(
    build: Callable[[], SteppingEngine],
    address: EngineAddress,
    context: zmq.Context[zmq.Socket[bytes]],
    events: zmq.Socket[bytes],
    heart: "_Heart",
) -> bool:
    def send(event: Event) -> None:
        events.send(encoder.encode(event))

    try:
        engine = build()
    except BaseException as error:
        send(StartFailed(f"{type(error).__name__}: {error}", traceback.format_exc()))
        return False
    with context.socket(zmq.PULL) as commands:
        commands.setsockopt(zmq.LINGER, 0)
        commands.set_hwm(0)
        commands.bind(address.commands)
        loop = EngineLoop(engine, lambda wait: _receive(commands, wait), send)
        heart.loop = loop
        send(Ready(engine.model_info))
        return loop.run()


def _receive(commands: zmq.Socket[bytes], wait: bool) -> list[Command]:
    """The commands that have arrived; with `wait`, at least one."""
    received: list[Command] = []
    flags = 0 if wait else zmq.NOBLOCK
    # Bounded, so that a flood of requests cannot keep the engine from stepping.
    while len(received) < 1024:
        try:
            received.append(command_decoder.decode(commands.recv(flags)))
        except zmq.Again:
            break
        flags = zmq.NOBLOCK
    return received


class _Heart(threading.Thread):
    """Sends heartbeats, and ends this process when the parent has gone."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: EngineAddress, interval: float):
        super().__init__(name="jaxllm-heartbeat", daemon=True)
        self.loop: EngineLoop | None = None
        self._context = context
        self._address = address
        self._interval = interval
        self._wake_reader, self._wake_writer = connection.Pipe(duplex=False)

    def run(self) -> None:
        parent = parent_process()
        watched = [self._wake_reader] if parent is None else [self._wake_reader, parent.sentinel]
        with self._context.socket(zmq.PUSH) as events:
            events.setsockopt(zmq.LINGER, 0)
            events.connect(self._address.events)
            while True:
                seconds = self.loop.step_seconds if self.loop is not None else 0.0
                events.send(encoder.encode(Heartbeat(seconds)))
                ready = connection.wait(watched, timeout=self._interval)
                if self._wake_reader in ready:
                    return
                if ready:
                    # At once and without clean-up: the main thread may be stuck in a step, and a
                    # process nobody can reach must not keep the device.
                    logger.error("the front end has gone; the engine process ends")
                    self._remove_sockets()
                    os._exit(1)

    def _remove_sockets(self) -> None:
        """The files the front end can no longer remove, and their folder if nothing else is in it."""
        paths = [Path(endpoint.removeprefix("ipc://")) for endpoint in (self._address.commands, self._address.events)]
        with contextlib.suppress(OSError):
            for path in paths:
                path.unlink(missing_ok=True)
            paths[0].parent.rmdir()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._wake_writer.send(None)
        self.join()
        self._wake_writer.close()
        self._wake_reader.close()
