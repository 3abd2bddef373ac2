"""What front end and engine loop say to each other: commands one way, events the other.

In process the structs are passed as they are; between processes they travel as msgpack. Nothing
is ever unpickled, so a local user who reaches the socket can at worst send a request.
"""

import msgspec

from jaxllm.engine.protocol import EngineRequest, EngineStats, ModelInfo, RequestDelta


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Start a request; answered by `Admission`."""

    request: EngineRequest


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """Stop one sequence of a request, or all of them; not answered."""

    request_id: str
    index: int | None = None


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Forget the cached prefixes; answered by `CallReply`."""

    call_id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop after the current step."""


Command = AddRequest | AbortRequest | ResetPrefixCache | Shutdown


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is built and warm."""

    model_info: ModelInfo


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """Building the engine raised; the process exits after this."""

    message: str
    traceback: str


class Rejection(msgspec.Struct, frozen=True):
    """A request the engine refused, with the fields of its RequestError."""

    request_id: str
    message: str
    param: str | None


class Admission(msgspec.Struct, frozen=True, tag="admission"):
    """What became of the requests that arrived before a step: taken or refused."""

    accepted: list[str]
    rejected: list[Rejection]


class StepOutputs(msgspec.Struct, frozen=True, tag="step"):
    """Everything one step produced, in one message; statistics when they are due."""

    deltas: list[RequestDelta]
    stats: EngineStats | None = None


class CallReply(msgspec.Struct, frozen=True, tag="reply"):
    """The result of a command that has one."""

    call_id: int
    result: bool


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The process lives; its current step has taken `step_seconds` so far (0 when idle)."""

    step_seconds: float


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The loop ended by an exception: no request can be served any more."""

    message: str
    traceback: str


Event = Ready | StartFailed | Admission | StepOutputs | CallReply | Heartbeat | EngineFailed

encoder = msgspec.msgpack.Encoder()
command_decoder = msgspec.msgpack.Decoder(Command)
event_decoder = msgspec.msgpack.Decoder(Event)
