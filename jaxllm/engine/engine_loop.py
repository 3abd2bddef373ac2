"""The engine's main loop: take commands, step, send what the step produced. Transport agnostic."""

import copy
import logging
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from jaxllm.engine.messages import (
    AbortRequest,
    AddRequest,
    Admission,
    CallReply,
    Command,
    EngineFailed,
    Event,
    Rejection,
    ResetPrefixCache,
    Shutdown,
    StepOutputs,
)
from jaxllm.engine.protocol import EngineRequest, EngineStats, ModelInfo, RequestDelta
from jaxllm.errors import RequestError

logger = logging.getLogger(__name__)

STATS_INTERVAL_SECONDS = 0.2


class SteppingEngine(Protocol):
    """What the loop needs of an engine (`jaxllm.engine.engine.Engine` or a fake one in tests)."""

    @property
    def model_info(self) -> ModelInfo: ...

    def add_request(self, request: EngineRequest) -> None: ...

    def abort(self, request_id: str, index: int | None = None) -> None: ...

    def step(self) -> list[RequestDelta]: ...

    def has_work(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def reset_prefix_cache(self) -> bool: ...

    def shutdown(self) -> None: ...


class EngineLoop:
    """Runs an engine on the calling thread until a `Shutdown` command or an exception.

    Args:
        engine: stepped by this loop only; shut down when the loop ends.
        receive: returns the commands that have arrived. Called with True when there is nothing to
            compute: it then waits for at least one command.
        send: hands one event to the front end.
        stats_interval: statistics ride with the outputs at most this often, in seconds, and
            once more whenever the engine runs out of work.
    """

    def __init__(
        self,
        engine: SteppingEngine,
        receive: Callable[[bool], list[Command]],
        send: Callable[[Event], None],
        stats_interval: float = STATS_INTERVAL_SECONDS,
    ):
        self._engine = engine
        self._receive = receive
        self._send = send
        self._stats_interval = stats_interval
        self._stats_time = -stats_interval
        self._stats_stale = False
        self._stopping = False
        self._step_start: float | None = None

    @property
    def step_seconds(self) -> float:
        """How long the current step has been running; 0.0 between steps. Any thread may ask."""
        start = self._step_start
        return 0.0 if start is None else time.monotonic() - start

    def run(self) -> bool:
        """Loop until told to stop; an exception is sent as `EngineFailed`. True after a clean stop."""
        try:
            while not self._stopping:
                self._iterate()
            return True
        except BaseException as error:
            logger.exception("the engine failed")
            self._send(EngineFailed(f"{type(error).__name__}: {error}", traceback.format_exc()))
            return False
        finally:
            self._step_start = None
            self._engine.shutdown()

    def _iterate(self) -> None:
        self._apply(self._receive(not self._engine.has_work()))
        if self._engine.has_work() and not self._stopping:
            self._step_start = time.monotonic()
            deltas = self._engine.step()
            self._step_start = None
            self._stats_stale = True
            stats = self._stats_if_due()
            if deltas or stats is not None:
                self._send(StepOutputs(deltas, stats))
        elif self._stats_stale:
            self._send(StepOutputs([], self._stats_if_due()))

    def _stats_if_due(self) -> EngineStats | None:
        now = time.monotonic()
        if self._engine.has_work() and now - self._stats_time < self._stats_interval:
            return None
        self._stats_time = now
        self._stats_stale = False
        # A copy: in process the front end keeps it while the engine counts on.
        return copy.copy(self._engine.stats())

    def _apply(self, commands: list[Command]) -> None:
        accepted: list[str] = []
        rejected: list[Rejection] = []
        for command in commands:
            match command:
                case AddRequest(request):
                    try:
                        self._engine.add_request(request)
                        accepted.append(request.request_id)
                    except RequestError as error:
                        rejected.append(Rejection(request.request_id, error.message, error.param))
                case AbortRequest(request_id, index):
                    self._engine.abort(request_id, index)
                    self._stats_stale = True
                case ResetPrefixCache(call_id):
                    self._send(CallReply(call_id, self._engine.reset_prefix_cache()))
                    self._stats_stale = True
                case Shutdown():
                    self._stopping = True
        if accepted or rejected:
            self._send(Admission(accepted, rejected))
