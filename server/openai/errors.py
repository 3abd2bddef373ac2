"""One table from what went wrong to the error body and status that OpenAI's clients understand."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from jaxllm.errors import EngineDeadError, RequestError

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """An answer other than 200.

    Args:
        status: HTTP status, also the body's `code`.
        message: for people.
        type: OpenAI's word for the kind of error.
        param: the request field at fault.
    """

    def __init__(self, status: int, message: str, type: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        return {"error": error}

    def response(self, headers: dict[str, str] | None = None) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), self.status, headers)


def malformed(message: str, param: str | None = None) -> ApiError:
    """The body as such is wrong: not JSON, a missing field, a field of the wrong type."""
    return ApiError(400, message, "Bad Request", param)


def unsupported(field: str, why: str = "is not supported by this server") -> ApiError:
    """A field we know and cannot serve: refused rather than ignored."""
    return ApiError(400, f"{field} {why}", "BadRequestError", field)


def unknown_model(name: str) -> ApiError:
    """No such model is served here."""
    return ApiError(404, f"The model `{name}` does not exist.", "NotFoundError", "model")


def from_validation_error(error: ValidationError) -> ApiError:
    """pydantic's complaint; `param` is the path to the first field at fault, as `body.messages.0.role`."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    # Of a field that may be one of several types, the complaint of the type that came closest.
    field = errors[0]["loc"][:1]
    first = max(
        (e for e in errors if e["loc"][:1] == field), key=lambda e: (len(e["loc"]), not e["type"].endswith("_type"))
    )
    path = [str(part) for part in first["loc"]]
    param = ".".join(["body", *path]) if path else None
    where = f"{'.'.join(path)}: " if path else ""
    return malformed(f"{where}{first['msg'].removeprefix('Value error, ')}", param)


def to_api_error(error: Exception) -> ApiError:
    """Whatever was raised while serving a request, as an answer."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return from_validation_error(error)
        case RequestError():
            return ApiError(400, error.message, "BadRequestError", error.param)
        case EngineDeadError():
            return ApiError(503, f"The engine cannot serve requests: {error}", "ServiceUnavailableError")
        case ClientDisconnect():
            return ApiError(499, "The client closed the connection", "ClientClosedRequestError")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), _HTTP_TYPES.get(error.status_code, "Bad Request"))
        case _:
            logger.error("request failed", exc_info=error)
            return ApiError(500, "Internal server error", "InternalServerError")


_HTTP_TYPES = {404: "NotFoundError", 405: "MethodNotAllowedError", 413: "PayloadTooLargeError"}


def install_handlers(app: FastAPI) -> None:
    """Answer every failure of `app` in OpenAI's shape."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        headers = error.headers if isinstance(error, HTTPException) else None
        return to_api_error(error).response(dict(headers) if headers else None)

    for kind in (ApiError, RequestError, EngineDeadError, ValidationError, ClientDisconnect, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
