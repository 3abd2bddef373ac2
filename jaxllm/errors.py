"""Errors that reach a caller: what was wrong, the value seen, what is allowed."""


class RequestError(ValueError):
    """A request that cannot be served as asked; HTTP maps it to a 400 that names `param`.

    Args:
        message: what was wrong, the value seen and what is allowed, in one sentence.
        param: the request field at fault, as the caller spelled it, or None.
    """

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param


class CheckpointError(ValueError):
    """A model folder or file that cannot be loaded: names the file and what is missing in it."""


class EngineDeadError(RuntimeError):
    """The engine stopped or hangs: running requests get this, new ones are refused with a 503."""
